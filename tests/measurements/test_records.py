"""The record: written whole, read again, never mixed with another's."""

import dataclasses
import json
import os

import jax
import pytest

from benchmarks import tpu
from docs.pages import replace_section
from tests.conftest import ROOT
from vit_jax import UserError, measure
from vit_jax.measurements import (
    MachineRecord,
    Measurement,
    Section,
    format_off,
    format_row,
    hardware_page,
    make_key,
    open_record,
    read_record,
    write_record,
)
from vit_jax.measurements.workloads import IMAGES_PER_DEVICE, SCHEDULES, read_schedules
from vit_jax.planning import parse_topology

KEY = {"hardware": "2 cores of <X>", "mesh": {"data": 2}, "arguments": [], "vit_jax": "1", "source": "abc"}
KEY |= {"versions": {"jax": "0.10"}}
ROWS = (
    Measurement("square products", "GFLOP/s", 50.0, 1.0, 100.0, "published", advice="products"),
    Measurement(
        "S/16: step", "ms", 3.0, 0.1, 2.0, "its products, as measured", "bound", advice="step", note="7 images/s"
    ),
    Measurement("B/16: step", "ms", None, note="no time was left"),
    Measurement(
        "fused, the result",
        "relative",
        None,
        0.0,
        0.02,
        "tolerated",
        "limit",
        advice="kernel values",
        note="not a number",
    ),
)
RECORD = (
    MachineRecord("here", KEY)
    .with_section("products", Section(1.5, ROWS[:1]))
    .with_section("steps", Section(2.0, ROWS[1:]))
)


def test_a_record_is_read_as_it_was_written(tmp_path):
    path = str(tmp_path / "new" / "here.json")
    assert open_record("here", path, KEY) == MachineRecord("here", KEY, {})
    write_record(RECORD, path)
    assert open_record("here", path, KEY) == RECORD == read_record(path)
    assert RECORD.find("steps", "S/16: step") == ROWS[1] and RECORD.find("steps", "x") is RECORD.find("x", "x") is None


def test_a_record_of_other_devices_or_code_is_refused(tmp_path):
    path = tmp_path / "here.json"
    write_record(RECORD, str(path))
    with pytest.raises(UserError, match=r"here.json was measured with other values of mesh, source; choose another"):
        open_record("here", str(path), KEY | {"mesh": {"data": 4}, "source": "abd"})
    for damage in ("{", "[]", '{"name": "x"}', json.dumps(RECORD.to_json() | {"sections": {"a": {"rows": [1]}}})):
        path.write_text(damage)
        with pytest.raises(UserError, match=r"it is not a record of vit_jax.measure"):
            read_record(str(path))
    with pytest.raises(UserError, match=r"cannot read .*absent.json"):
        read_record(str(tmp_path / "absent.json"))


def test_the_key_names_devices_code_and_arguments():
    key = make_key(jax.devices(), 1, {"data": 8}, ["--models=a"])
    assert key["devices"] == 8 and key["device_kind"] == "cpu" and key["arguments"] == ["--models=a"]
    assert "jax" in key["versions"] and "8 emulated devices" in key["hardware"] and len(key["source"]) == 12


def test_what_is_off_is_named_with_the_flag_that_avoids_it():
    product, kernel = format_off(RECORD)
    assert product.startswith(
        "products: square products: 50 GFLOP/s instead of 100 GFLOP/s (published); another program"
    )
    assert kernel.startswith("steps: fused, the result: failed: not a number; --config.model.attention=tokens_first")
    better = MachineRecord("x", KEY).with_section("steps", Section(1, (dataclasses.replace(ROWS[0], measured=200.0),)))
    [line] = format_off(better)
    assert line.endswith("200 GFLOP/s instead of 100 GFLOP/s (published); the prediction is wrong; please report it.")
    assert format_row("products", ROWS[0]) == (
        "products: square products: 50 GFLOP/s ± 1 (published 100 GFLOP/s, ratio 0.5) [worse than predicted]"
    )
    assert format_row("steps", ROWS[2]) == "steps: B/16: step: not measured: no time was left"


def test_the_page_shows_every_row_and_what_is_left():
    text = hardware_page(RECORD)
    for row in ROWS:
        assert row.name in text and row.note in text
    assert "2 cores of &lt;X&gt;" in text and text.count("<tr class=off>") == 2 and "at least 2 ms" in text
    assert "Not measured yet: Memory of the devices, Collectives" in text and "<li>products: square products" in text
    assert "Nothing is off." in hardware_page(MachineRecord("x", KEY))


@pytest.mark.parametrize(("name", "devices", "sections"), [("cpu2", 2, 8), ("h200", 1, 7)])
def test_the_page_of_the_docs_shows_the_records(name, devices, sections):
    """UPDATE_GOLDEN=1 writes them anew."""
    record, page = read_record(str(ROOT / "results" / "hardware" / f"{name}.json")), ROOT / "docs" / "hardware.md"
    lines = [
        format_row(section, row)
        for section, measured in record.sections.items()
        for row in measured.rows
        if section != "collectives" and (row.unit != "relative" or section == "curve")
    ]
    text = "\n".join(["```", *lines, "", *format_off(record), "```"]) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        replace_section(page, name, text)
    assert f"<!-- {name} -->\n{text}<!-- /{name} -->" in page.read_text()
    assert record.key["devices"] == devices and list(record.sections) == list(measure.SECTIONS)[:sections]


def test_the_schedules_are_those_that_were_compiled():
    """UPDATE_GOLDEN=1 writes them anew."""
    lines = ["topology,model,images,cycles,exchange,estimated"]
    targets = {path.name.split("-")[2].replace("_", ":", 1) for path in tpu.KEPT.glob("vit_jax-*")}
    results = tpu.Results("none", None)
    for model, images in IMAGES_PER_DEVICE.items():
        for target in sorted(targets, key=lambda target: (target[:3], parse_topology(target).chips)):
            found = results[tpu.Row("vit_jax", model.removeprefix("ViT-"), target, images)]
            if found.schedule:
                executable, schedule = found.step.executable, found.schedule
                numbers = found.cycles, schedule.exchange_exposed, executable.cycles + executable.kernel_cycles
                lines.append(",".join(map(str, (target, model, images, *numbers))))
    text = "\n".join(lines) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        SCHEDULES.write_text(text)
    assert SCHEDULES.read_text() == text and len(read_schedules()) == 16
    assert str(SCHEDULES.relative_to(ROOT)) == "vit_jax/measurements/schedules.csv"
