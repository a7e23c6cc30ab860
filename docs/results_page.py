"""Writes docs/results.md: the figures and tables of the paper with our numbers, then all recorded runs.

Examples:
  python -m docs.results_page --write=docs/results.md
  python -m docs.results_page --write=docs/results.md --pictures=docs/results

Each figure and table of the paper has the data that it needs, its commands, and what was run here. A table of the
studies of configs/studies/ has means over seeds, beside what the paper states. With --pictures, Figures 2, 3 and 5 of
the paper are drawn anew too.
"""

import argparse
import csv
import dataclasses
import functools
import re
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.paper_figures import FIGURES
from docs.paper_tables import LAYOUTS, format_paper_table, is_recorded
from vit_jax import cli
from vit_jax.analysis import plot
from vit_jax.experiments import RunRecord, format_runs, format_transfer, read_records
from vit_jax.monitoring import write_page
from vit_jax.text_tables import markdown_table

ITEMS = Path(__file__).with_name("paper_items.toml")
PLANS = Path(__file__).with_name("paper_plans.csv")
STUDIES = Path(__file__).with_name("studies.csv")  # what the paper states of the runs of a study
RECORDS = "../results"  # seen from the page
STUDY_COLUMNS = ("run", "ours, %", "metric", "steps", "runs", "paper")
PRICE = 1.2  # dollars for a chip-hour of a TPU v5e, assumed

PAGE_HEADER = """# Results

This page leads from each number of the paper to its command, with our number beside it. It also lists every run that
was recorded here. Nothing is typed by hand:

```bash
python -m vit_jax.record workdirs/digits
python -m docs.results_page --write=docs/results.md
```

The first adds to [results/](../results/) the record of a finished run, or of all runs in a folder: configuration,
metrics at the end, how long it took (with compiling and evaluations), on what hardware, and the commit.
`--evaluations=FILE` adds what `vit_jax.evaluate --json` printed of its last checkpoint. The second writes this page
from all records. Ours stands beside a number of the paper if every field that decides what is computed is as in the
recipe of the paper's run, but for the seed and for the learning rate, which is one of the paper's.

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

# Name in paper_items.toml -> (the data, where they are from, how they are prepared).
DATA: Mapping[str, tuple[str, str, str]] = {
    "jft": ("JFT-300M", "not public", "ArrayRecord files with the splits train and test ([data](data.md#pack))"),
    "imagenet21k": (
        "ImageNet-21k",
        "its archives; no prepared copy is public",
        "`python -m vit_jax.pack`: ArrayRecord files of one split, train ([data](data.md#pack))",
    ),
    "imagenet2012": (
        "ImageNet",
        "its archives, after registration",
        "`tfds build imagenet2012 --file_format=array_record --manual_dir=DOWNLOADS`, or as a folder "
        "([imagenet](imagenet.md))",
    ),
    "small": (
        "CIFAR-10, CIFAR-100, Pets, Flowers",
        "TFDS",
        "by the first run, or by the command that it prints ([data](data.md))",
    ),
    "vtab": (
        "the 16 data sets of VTAB's 19 tasks",
        "TFDS; Resisc45 and Diabetic Retinopathy by hand",
        "by the commands that `vit_jax.vtab` prints ([finetune](finetune.md#vtab-1k))",
    ),
    "real": ("ReaL's labels", "`real.json` of google-research/reassessed-imagenet", "none"),
    "objectnet": (
        "ObjectNet",
        "its authors",
        "unpacked, as a folder ([evaluation](evaluation.md#imagenets-other-test-sets))",
    ),
}


@dataclasses.dataclass(frozen=True)
class PaperItem:
    """A figure, a table or a section of the paper.

    Attributes:
        name: the name in the paper, such as Figure 5.
        title: what the item shows.
        data: the data that it needs, as names in `DATA`.
        recipes: the recipes of pre-training whose plans are shown.
        commands: the shell commands that reproduce the item.
        picture: the path of a picture of the item, relative to docs/; empty: there is none.
        note: a paragraph in Markdown; may be empty.
        table: the name of its table in `LAYOUTS`; empty: there is none.
        study: the name of the study whose recorded runs are shown; empty: there is none.
    """

    name: str
    title: str
    data: Sequence[str] = ()
    recipes: Sequence[str] = ()
    commands: Sequence[str] = ()
    picture: str = ""
    note: str = ""
    table: str = ""
    study: str = ""


@functools.cache
def read_items() -> tuple[PaperItem, ...]:
    """Returns the items of paper_items.toml, in the paper's order."""
    return tuple(PaperItem(**fields) for fields in tomllib.loads(ITEMS.read_text())["item"])


def read_plans() -> dict[str, dict[str, Any]]:
    """Returns recipe -> its row of paper_plans.csv, which `docs.paper_plans` writes: column -> text."""
    return {row["recipe"]: row for row in csv.DictReader(PLANS.read_text().splitlines())}


def format_page(records: Sequence[RunRecord]) -> str:
    """Returns the page in Markdown."""
    needs = ["### Data\n", format_data(), PRETRAINING, format_pretrainings()]
    paper = [PAPER, format_overview(records), *needs, format_items(records)]
    runs = ["## Runs\n", format_runs(without_studies(records), RECORDS)]
    return "\n".join([PAGE_HEADER, *paper, *runs, format_transfer(records, RECORDS)])


def format_data() -> str:
    """Returns a Markdown table of the data that the paper needs."""
    return markdown_table([("data", "from", "prepared"), *DATA.values()])


def format_overview(records: Sequence[RunRecord]) -> str:
    """Returns a Markdown table with a line for each item."""
    lines = [
        (f"[{item.name}](#{anchor(item)})", item.title, name_data(item), describe_ours(item, records))
        for item in read_items()
    ]
    return markdown_table([("in the paper", "what it shows", "data", "ours"), *lines])


def name_data(item: PaperItem) -> str:
    """Returns the names of the data that an item needs, joined by commas."""
    return ", ".join(DATA[name][0] for name in item.data)


def anchor(item: PaperItem) -> str:
    """Returns the anchor of an item's heading: the part after # in a link to it."""
    kept = "".join(letter for letter in heading(item).lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")


def heading(item: PaperItem) -> str:
    """Returns the heading of an item."""
    return f"{item.name}: {item.title}"


def describe_ours(item: PaperItem, records: Sequence[RunRecord]) -> str:
    """Returns what was run here for an item: names of study folders, "in part" for a table, or an empty text."""
    folders = study_tables(records, item.study)
    if folders:
        return ", ".join(title.rpartition(": ")[2] for title in folders)
    return "in part" if item.table and is_recorded(item.table, records) else ""


def format_items(records: Sequence[RunRecord]) -> str:
    """Returns a section for each item."""
    return "\n".join(format_item(item, records) for item in read_items())


def format_item(item: PaperItem, records: Sequence[RunRecord]) -> str:
    """Returns the section of an item in Markdown: note, data, plans, commands, picture, table, recorded runs."""
    small = ", ours in small" if item.picture.startswith("studies/") else ""
    table = f"Table {item.table}: {LAYOUTS[item.table].title}.\n\n" if item.table else ""
    parts = [
        f"### {heading(item)}\n",
        f"{item.note}\n" if item.note else "",
        f"Data: {name_data(item)}.\n" if item.data else "",
        format_plans(item.recipes) if item.recipes else "",
        "```bash\n" + "\n".join(item.commands) + "\n```\n" if item.commands else "",
        f"![{item.title}{small}]({item.picture})\n" if item.picture else "",
        table + format_paper_table(item.table, records) if item.table else "",
        *(f"#### {title}\n\n{markdown_table(lines)}" for title, lines in study_tables(records, item.study).items()),
    ]
    return "\n".join(filter(None, parts))


def format_plans(recipes: Sequence[str]) -> str:
    """Returns a sentence on what a pre-training with each recipe costs by its plan, and one on recipes without plan."""
    costs = {recipe: dollars(row) for recipe, row in read_plans().items() if recipe in recipes}
    planned = [f"{recipe} {costs[recipe]:,.0f}" for recipe in recipes if recipe in costs]
    others = [recipe for recipe in recipes if recipe not in costs]
    lines = [f"[One pre-training](#pre-training-by-plan) of each, dollars: {', '.join(planned)}."] if planned else []
    lines += [f"Not planned: {', '.join(others)}."] if others else []
    return " ".join(lines) + "\n"


def format_pretrainings() -> str:
    """Returns a Markdown table of all pre-trainings that were planned, in the order of the items."""
    lines = [("recipe", "slice", "chips", "steps", "hours", "chip-hours", "dollars", "by")]
    plans = read_plans()
    for recipe in dict.fromkeys(recipe for item in read_items() for recipe in item.recipes):
        if row := plans.get(recipe):
            numbers = f"{int(row['steps']):,}", f"{float(row['hours']):,.1f}", f"{float(row['chip_hours']):,.0f}"
            how = f"operations, from {row['like']}" if row["like"] else "compilation"
            lines.append((recipe, row["topology"], row["chips"], *numbers, f"{dollars(row):,.0f}", how))
    return markdown_table(lines)


def dollars(plan: Mapping[str, str]) -> float:
    """Returns the cost in dollars of the pre-training in a row of paper_plans.csv."""
    return PRICE * float(plan["chip_hours"])


def read_paper_rows() -> list[dict[str, str]]:
    """Returns the rows of studies.csv, each as column -> text. The first row of a study has its title and no run."""
    return list(csv.DictReader(STUDIES.read_text().splitlines()))


def without_studies(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the records that do not belong to a study."""
    studies = "|".join(dict.fromkeys(row["study"] for row in read_paper_rows()))
    return [record for record in records if not re.match(rf"(\w+_)?({studies})/", record.name)]


def study_tables(records: Sequence[RunRecord], study: str) -> dict[str, list[tuple[str, ...]]]:
    """Returns title -> lines of a table with the columns `STUDY_COLUMNS`, for each folder of recorded runs of a study.

    The name of a record tells its study. It consists of the sweep's folder, the run and the seed, such as
    `pooling/token/0.0003,seed=1`, or `masked_patches/scratch/all/seed=1` if only the seed was swept. The folder of a
    study on other data has a prefix, such as `cifar10_pooling`. The result is empty if the study has no records or does
    not exist.
    """
    rows = [row for row in read_paper_rows() if row["study"] == study]
    stated = {row["run"]: row["paper"] for row in rows}
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        name = re.sub(r"[,/]seed=\d+(?=,|$)", "", record.name)
        if rows and (match := re.fullmatch(rf"((?:\w+_)?{study})/(.+)", name)):
            groups.setdefault((match[1], match[2]), []).append(record)
    tables = {}
    for folder in dict.fromkeys(folder for folder, _ in groups):
        runs = {run: group for (of, run), group in groups.items() if of == folder}
        names = sorted(runs, key=natural_order)
        lines = [(name, *averages(runs[name]), stated.get(name, "")) for name in names]
        tables[f"{rows[0]['title']}: {folder}"] = [STUDY_COLUMNS, ("", "", "", "", "", stated.get("", "")), *lines]
    return tables


def averages(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Returns the columns of `STUDY_COLUMNS` between the first and the last, for runs that differ in the seed only.

    The metric is `checkpoint.best_metric`, as mean in percent with the standard deviation over several runs. If that is
    a metric of the evaluation `val`, it only chooses the step (early stopping), and the metric of `test` at that step
    is shown.
    """
    chooses = records[0].config["checkpoint"]["best_metric"]
    metric = re.sub(r"^val/", "test/", chooses)
    rows = [record.metrics if metric == chooses else record.stopped_by(chooses) for record in records]
    values = [100 * value for row in rows if (value := row.get(metric)) is not None]
    if not values:
        return "", metric, "", ""
    std = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{std}", metric, f"{records[0].steps:,}", str(len(values))


def natural_order(name: str) -> list[str | float]:
    """Returns a sort key with which numbers in names are ordered by value."""
    return [float(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", name))]


def draw(folder: Path, records: Sequence[RunRecord]) -> None:
    """Draws the figures of the paper that show accuracies, with those of the records."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        path = folder / f"{name}.svg"
        path.write_bytes(plot.encode_figure(figure(records), "svg"))
        print(path)


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the records [%(default)s]")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page; otherwise it is printed")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="where figure2.svg and others are drawn")
    args = parser.parse_args(argv[1:])
    records = list(read_records(args.results).values())
    page = format_page(records)
    print(write_page(str(args.write), page) if args.write else page)
    if args.pictures:
        draw(args.pictures, records)


if __name__ == "__main__":
    cli.run_command(main)
