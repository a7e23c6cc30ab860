"""What the model card of a finished run says: its data, its recipe, its results and the command that gives them."""

import re
import shlex

from ml_collections import ConfigDict

from vit_jax import printable
from vit_jax.config import EVAL_KINDS, eval_fields, evaluation, get_config
from vit_jax.data.sources import source_label
from vit_jax.experiments.record_tables import format_time
from vit_jax.experiments.run_record import RunRecord
from vit_jax.monitoring import fields_as_text, format_value
from vit_jax.paper import read_paper_numbers
from vit_jax.text_tables import markdown_table

# Fields that the text states in other words, that name a place, or that do not decide what is learnt.
LEFT_OUT = re.compile(
    r"init_from|total_(steps|epochs)|batch|batch_eval|(log|eval|checkpoint)_every\w*|stall_limit|profile_steps|wandb|"
    r"report|use_measured_times|step_numbers|compiler_options|(evals|checkpoint|mesh)\..*|model\.(name|attention|mlp|remat|scan)|"
    r"data\.(source|split|data_dir|num_\w+|max_labels|workers|accept_change|max_bad)"
)
BUCKETS = re.compile(r"\b(gs|s3)://(?:[^/\s]+/)*")  # the folders of a path in a bucket
PAPER = """
Paper: what [arXiv 2010.11929](https://arxiv.org/abs/2010.11929) states for this model with the same pre-training data
after fine-tuning on these data, by its own protocol."""


def describe_run(record: RunRecord, name: str, changes: str = "") -> str:
    """Returns the sections of the model card of a run, as Markdown.

    Args:
        record: the record of the run.
        name: OWNER/NAME of the repository on the hub.
        changes: what was done to the weights after the run, such as `resampled to 32x32 pixels`; empty: nothing.
    """
    run = record.as_run(name)
    config, defaults = run.config, fields_as_text(get_config())
    images, classes = config.data.num_examples, config.data.num_classes
    counts = [
        f"{count:,} {what}"
        for count, what in ((images, "images"), (classes, "numbers" if config.task.kind == "regress" else "classes"))
        if count
    ]
    epochs = f" ({record.steps * config.batch / images:.3g} epochs)" if images else ""
    start = f"the weights `{without_bucket(config.init_from)}`" if config.init_from else "random weights"
    hardware, commits = " and ".join(record.distinct("hardware")), ", ".join(record.distinct("commit"))
    by = f"vit_jax {', '.join(record.distinct('vit_jax'))}" + (f" (commit {commits})" if commits else "")
    recipe = [
        f"{field} = {without_bucket(value)}"
        for field, value in run.fields.items()
        if value != defaults.get(field) and not LEFT_OUT.fullmatch(field)
    ]
    sections = [
        "## Training",
        f"Data: {', '.join([f'`{without_bucket(config.data.source)}`', f'split `{config.data.split}`', *counts])}.",
        f"{record.steps:,} steps of {config.batch:,} images{epochs}, from {start}, in {format_time(record.seconds)} "
        f"on {hardware}, compilation and evaluations included, by {by}.",
        "Of the fields that decide what is learnt, all others have their defaults in vit_jax:",
        "\n".join(["```", *recipe, "```"]),
        "## Results",
        describe_results(record, config),
    ]
    if changes:
        sections.append(f"These are results before the weights were {changes}; those of this repository differ.")
    requests = [shlex.quote(f"--evals={request_of(config, own, has_pipe=not changes)}") for own in config.evals]
    sections += [
        f"The same evaluation of {'these weights' if changes else 'the weights here'}:",
        f"```bash\npython -m vit_jax.evaluate hf-hub:{name} {' '.join(requests)}\n```",
    ]
    return "\n\n".join(sections)


def describe_results(record: RunRecord, config: ConfigDict) -> str:
    """Returns a Markdown table of the metrics of a run's evaluations, with the paper's numbers beside if there are."""
    rows = []
    for metric, value in record.metrics.items():
        name, _, kind = metric.partition("/")
        if name in config.evals and kind not in ("n", "n_train") and value is not None:
            images = record.metrics.get(f"{name}/n")
            paper = paper_numbers(config, name) if kind == "accuracy" else ""
            rows.append((metric, format_value(metric, value), f"{images:,.0f}" if images else "", paper))
    compared = any(row[-1] for row in rows)
    after = "after the last step" if config.stop_after is None else "at the best step"
    table = [("metric", after, "images", "paper"), *rows]
    return markdown_table([row if compared else row[:-1] for row in table]).rstrip() + (
        f"\n{PAPER}" if compared else ""
    )


def paper_numbers(config: ConfigDict, name: str) -> str:
    """Returns what the paper states beside the accuracy of an evaluation of a run, with the table; empty: nothing.

    It is nothing unless the run was fine-tuned from weights of the paper, and evaluated on the test images of its data.
    """
    own, trained = config.evals[name], config.data.source
    tested = ("val", "validation") if source_label(trained) == "imagenet2012" else ("test",)
    if EVAL_KINDS[own.kind].task != "classify" or (own.source or trained) != trained or own.split not in tested:
        return ""
    suffix = "_real" if own.get("labels") else ""
    datasets = {f"{one}{suffix}" for one in (trained, source_label(trained))}
    return ", ".join(
        f"{number} % (Table {number.table})"
        for number in read_paper_numbers()
        if number.model == config.model.name and number.dataset in datasets and number.is_of(config.init_from or "")
    )


def request_of(config: ConfigDict, name: str, has_pipe: bool) -> str:
    """Returns an evaluation of a run as `vit_jax.evaluate --evals` takes it for weights that are not a run.

    Without `has_pipe`, the images are prepared as the weights state.
    """
    own = config.evals[name]
    usual = evaluation(own.kind)
    given = {"source": own.source or config.data.source, "split": own.split}
    given |= {"preprocess": own.preprocess} if has_pipe else {}
    given |= {
        field: own[field]
        for field in eval_fields(own.kind)
        if field not in ("kind", "every", "preprocess", *given) and own[field] != usual[field]
    }
    texts = [
        f"{field}={','.join(map(str, value)) if isinstance(value, tuple) else without_bucket(value)}"
        for field, value in given.items()
    ]
    return f"{name}={own.kind}:{','.join(texts)}"


def without_bucket(value: object) -> str:
    """Returns a value as one line of text in which a path in a bucket is shortened to its last part.

    The place of data is not part of a result; absolute local paths are already shortened in a record.
    """
    return BUCKETS.sub("", printable(value))
