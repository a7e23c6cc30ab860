"""The figures and tables of the paper in its order: the data that each needs, its commands, and what was run here."""

import csv
import dataclasses
import functools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_jax.columns import markdown_table
from vit_jax.experiments.paper_tables import LAYOUTS, format_paper_table, is_recorded
from vit_jax.experiments.run_record import RunRecord
from vit_jax.experiments.studies import study_tables

ITEMS = Path(__file__).with_name("paper_items.toml")
PLANS = Path(__file__).with_name("paper_plans.csv")
PRICE = 1.2  # dollars for a chip-hour of a TPU v5e, assumed

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
