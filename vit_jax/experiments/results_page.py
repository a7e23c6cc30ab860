"""The page of results: the figures and tables of the paper with our numbers beside them, then all recorded runs."""

from collections.abc import Sequence

from vit_jax.columns import markdown_table
from vit_jax.experiments.paper_items import PRICE, format_data, format_items, format_overview, format_pretrainings
from vit_jax.experiments.run_record import RunRecord
from vit_jax.experiments.studies import without_studies
from vit_jax.experiments.transfer import HEADINGS, frozen_metrics, transfer_lines
from vit_jax.monitoring import is_percent_metric

PAGE_HEADER = """# Results

This page leads from each number of the paper to its command, with our number beside it. It also lists every run that
was recorded here. `python -m vit_jax.record` writes this page from [results/](../results/); nothing is typed by hand.

```bash
python -m vit_jax.record workdirs/digits
```

adds the record of a finished run, or of all runs in a folder: configuration, metrics at the end, how long it took (with
compiling and evaluations), on what hardware, and the commit. `--evaluations=FILE` adds what `vit_jax.evaluate --json`
printed of its last checkpoint. Ours stands beside a number of the paper if every field that decides what is computed is
as in the recipe of the paper's run, but for the seed and for the learning rate, which is one of the paper's.

What others have reached on ImageNet with recipes that are here: [imagenet.md](imagenet.md).
"""
PAPER = """## The paper

Every figure and table in the paper's order, with what it needs and the command that makes it; ours is empty where
nothing was run. The studies have small forms for two CPU cores ([studies](studies.md)).
"""
PRETRAINING = f"""### Pre-training by plan

What `vit_jax.plan` predicts ([how far to trust it](plans.md#how-far-to-trust-it)), an order of magnitude, at an assumed
{PRICE:.2f} dollars a chip-hour. By compilation: the step was compiled for the slice, as `python -m vit_jax.plan
--config=configs/RECIPE.py --topology=v5e:16x16 --price=PRICE` does. By operations: it was not, nor whether it fits was
asked; it is taken to execute as many operations a second as the other recipe. Where both are known, this gives 0.78
(vit_b16_imagenet21k) and 0.89 (vit_b32_imagenet2012) of the compiled time from the same model's recipe for JFT, which
has no dropout; between models it is worse: 1.08 for H/14 from L/16, 0.37 for B/32 from B/16, 3.05 for R50+B/16 from
R50x1. The paper states neither chips nor hours but for Table 2.
"""
TRANSFER = """## Frozen features beside fine-tuning

Test accuracy in percent on data other than the run's. 1- to 25-shot is the mean over draws of that many images of each
class; neighbours, probes and training use all training images.

"""


def format_page(records: Sequence[RunRecord]) -> str:
    """Returns the page in Markdown."""
    needs = ["### Data\n", format_data(), PRETRAINING, format_pretrainings()]
    paper = [PAPER, format_overview(records), *needs, format_items(records)]
    runs = ["## Runs\n", format_runs(without_studies(records))]
    transfer = TRANSFER + markdown_table([HEADINGS, *transfer_lines(records)])
    return "\n".join([PAGE_HEADER, *paper, *runs, transfer])


def format_runs(records: Sequence[RunRecord]) -> str:
    """Returns a Markdown table with a line for each run."""
    headings = ("run", "model", "data", "results", "steps", "time", "hardware", "version")
    lines = [
        (
            f"[{record.name}](../results/{record.name}.json)",
            record.config["model"]["name"],
            record.config["data"]["source"],
            "<br>".join(format_metrics(record)),
            f"{record.steps:,}",
            format_time(record.seconds),
            "<br>".join(record.distinct("hardware")),
            "<br>".join([*record.distinct("vit_jax"), *record.distinct("commit")]),
        )
        for record in records
    ]
    return markdown_table([headings, *lines])


def format_metrics(record: RunRecord) -> list[str]:
    """Returns a text for each accuracy of a run, such as "test/accuracy 98.20 %".

    Accuracies of frozen features are left out, and top-5 accuracies if the data has at most ten classes.
    """
    few = record.config["data"]["num_classes"] <= 10
    omitted = [*frozen_metrics(record), *(name for name in record.metrics if few and name.endswith("/top5"))]
    return [
        f"{name} {100 * value:.2f} %"
        for name, value in record.metrics.items()
        if value is not None and is_percent_metric(name) and not name.endswith("_std") and name not in omitted
    ]


def format_time(seconds: float) -> str:
    """Returns a duration as text, such as "5.3 min", in the largest unit (h, min, s) of which it has at least two."""
    units = {"h": 3600, "min": 60}
    unit, size = next(((unit, size) for unit, size in units.items() if seconds >= 2 * size), ("s", 1))
    return f"{seconds / size:.3g} {unit}" if size > 1 else f"{seconds:.0f} s"
