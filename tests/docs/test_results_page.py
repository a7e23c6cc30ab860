"""The page of results: all figures and tables of the paper, in order, with what exists here; nothing typed by hand."""

import re

from docs import results_page
from docs.paper_tables import LAYOUTS
from docs.results_page import format_page, read_paper_rows
from tests.conftest import ROOT
from tests.experiments.test_results import RECORDS, write_run
from vit_jax.experiments import make_record

ITEMS = results_page.read_items()
PAGE = (ROOT / "docs" / "results.md").read_text()


def test_the_page_is_that_of_the_records():
    """`python -m docs.results_page --write=docs/results.md` writes it anew."""
    assert format_page(RECORDS) == PAGE


def numbers(kind):
    return [int(item.name.split()[1]) for item in ITEMS if item.name.startswith(kind)]


def test_all_of_the_paper_is_there():
    assert numbers("Figure") == list(range(1, 15)) and numbers("Table") == list(range(1, 10))
    assert [item.table for item in ITEMS if item.table] == list(LAYOUTS)
    assert {item.study for item in ITEMS if item.study} == {row["study"] for row in read_paper_rows()}


def test_what_items_name_exists():
    for item in ITEMS:
        assert set(item.data) <= results_page.DATA.keys()
        assert not item.picture or (ROOT / "docs" / item.picture).exists(), item.name
        for recipe in (*item.recipes, *re.findall(r"configs/([\w/]+)\.py", " ".join(item.commands))):
            assert (ROOT / "configs" / f"{recipe}.py").exists(), recipe
    assert {name for item in ITEMS for name in item.data} == results_page.DATA.keys()
    assert results_page.read_plans().keys() <= {recipe for item in ITEMS for recipe in item.recipes}


def test_the_overview_leads_to_every_section():
    targets = re.findall(r"^\| \[\w+ [\w.]+\]\(#([\w-]+)\)", PAGE, re.M)
    headings = re.findall(r"^### (.*)$", PAGE, re.M)
    assert targets == [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings if ":" in text]
    assert len(targets) == len(ITEMS)


def test_the_plan_of_a_pretraining_is_shown():
    shown = results_page.format_plans(["absent", "vit_l16_jft"])
    row = results_page.read_plans()["vit_l16_jft"]
    assert f"dollars: vit_l16_jft {1.2 * int(row['chip_hours']):,.0f}. Not planned: absent.\n" in shown
    assert f"| {int(row['chip_hours']):,} | {1.2 * int(row['chip_hours']):,.0f} | compilation |" in PAGE
    plan = (ROOT / "docs" / "plans.md").read_text()  # the page of plans has the same
    assert f"{row['hours']} hours, {int(row['chip_hours']):,} chip-hours" in plan
    assert int(row["chips"]) == 256 and f"run                   {int(row['steps']):,} steps" in plan


def test_ours_is_what_was_recorded():
    ours = {item.name: results_page.describe_ours(item, RECORDS) for item in ITEMS}
    assert ours["Figure 9"] == "cifar10_pooling" and ours["Section 4.6"].startswith("cifar10_masked_patches, ")
    assert not any(results_page.describe_ours(item, []) for item in ITEMS)


def test_the_command_writes_the_page_and_draws_the_pictures(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    words = ["results_page", f"--results={tmp_path}/results"]
    results_page.main(words)
    assert capsys.readouterr().out.startswith("# Results\n")
    results_page.main([*words, f"--write={tmp_path}/page.md", f"--pictures={tmp_path}/pictures"])
    drawn = [f"{tmp_path}/pictures/figure{number}.svg" for number in (2, 3, 5)]
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/page.md", *drawn]
    assert (tmp_path / "page.md").read_text() == format_page([])


def test_studies_stand_beside_the_paper(tmp_path):
    records = [
        make_record(str(write_run(tmp_path / f"{run[0]}{seed}", accuracy=value)), f"cifar10_pooling/{run},seed={seed}")
        for run in ("token/0.0008", "gap/0.0024")
        for seed, value in ((0, 0.5), (1, 0.7))
    ]
    records[0].config["checkpoint"]["best_metric"] = "val/accuracy"  # which stops it, and is not the result
    text = format_page([*records, make_record(str(write_run(tmp_path / "other")), "pooling_not")])
    table = text.partition("## Class token or mean (Figure 9): cifar10_pooling\n")[2]
    assert table.splitlines()[3:6] == [
        "| | | | | | 5-shot on ImageNet, B/16 on JFT; curves without numbers |",
        "| gap/0.0024 | 60.00 ± 14.14 | test/accuracy | 10 | 2 | |",
        "| token/0.0008 | 60.00 ± 14.14 | test/accuracy | 10 | 2 | the class token |",
    ]
