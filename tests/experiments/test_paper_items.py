"""The figures and tables of the paper on the page of results: all of them, in order, with what exists here."""

import re

from tests.conftest import ROOT
from vit_jax.experiments import paper_items, read_records
from vit_jax.experiments.paper_tables import LAYOUTS
from vit_jax.experiments.studies import read_paper_rows

ITEMS = paper_items.read_items()
PAGE = (ROOT / "docs" / "results.md").read_text()


def numbers(kind):
    return [int(item.name.split()[1]) for item in ITEMS if item.name.startswith(kind)]


def test_all_of_the_paper_is_there():
    assert numbers("Figure") == list(range(1, 15)) and numbers("Table") == list(range(1, 10))
    assert [item.table for item in ITEMS if item.table] == list(LAYOUTS)
    assert {item.study for item in ITEMS if item.study} == {row["study"] for row in read_paper_rows()}


def test_what_items_name_exists():
    for item in ITEMS:
        assert set(item.data) <= paper_items.DATA.keys()
        assert not item.picture or (ROOT / "docs" / item.picture).exists(), item.name
        for recipe in (*item.recipes, *re.findall(r"configs/([\w/]+)\.py", " ".join(item.commands))):
            assert (ROOT / "configs" / f"{recipe}.py").exists(), recipe
    assert {name for item in ITEMS for name in item.data} == paper_items.DATA.keys()
    assert paper_items.read_plans().keys() <= {recipe for item in ITEMS for recipe in item.recipes}


def test_the_overview_leads_to_every_section():
    targets = re.findall(r"^\| \[\w+ [\w.]+\]\(#([\w-]+)\)", PAGE, re.M)
    headings = re.findall(r"^### (.*)$", PAGE, re.M)
    assert targets == [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings if ":" in text]
    assert len(targets) == len(ITEMS)


def test_the_plan_of_a_pretraining_is_shown():
    shown = paper_items.format_plans(["absent", "vit_l16_jft"])
    row = paper_items.read_plans()["vit_l16_jft"]
    assert f"dollars: vit_l16_jft {1.2 * int(row['chip_hours']):,.0f}. Not planned: absent.\n" in shown
    assert f"| {int(row['chip_hours']):,} | {1.2 * int(row['chip_hours']):,.0f} | compilation |" in PAGE
    plan = (ROOT / "docs" / "plans.md").read_text()  # the page of plans has the same
    assert f"{row['hours']} hours, {int(row['chip_hours']):,} chip-hours" in plan
    assert int(row["chips"]) == 256 and f"run                   {int(row['steps']):,} steps" in plan


def test_ours_is_what_was_recorded():
    records = list(read_records(ROOT / "results").values())
    ours = {item.name: paper_items.describe_ours(item, records) for item in ITEMS}
    assert ours["Figure 9"] == "cifar10_pooling" and ours["Section 4.6"].startswith("cifar10_masked_patches, ")
    assert not any(paper_items.describe_ours(item, []) for item in ITEMS)
