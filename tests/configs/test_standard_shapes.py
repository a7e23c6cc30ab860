"""Cycles and memory of the standard shapes: kept in files, compiled again, and never worse unnoticed."""

import dataclasses
import importlib.util
import json

import pytest

from benchmarks import tpu, tpu_check
from tests.planning.builders import EXECUTABLE, make_compilation
from vit_jax.planning.records import StepSchedule, step_to_json


def report(cycles, peak_bytes, exposed=0):
    """What the compiler reports of a step with so many cycles, some of them exchange, and such a peak."""
    schedule = StepSchedule({"matmul": cycles - exposed}, exposed, 0, 0, 0, 0, 0, 0)
    step = make_compilation(peak_bytes, executable=dataclasses.replace(EXECUTABLE, schedule=schedule)).step
    return step_to_json(dataclasses.replace(step, versions={"libtpu": "0.0.42"})) | {"macs_per_image": 1}


@pytest.mark.parametrize(
    ("cycles", "exposed", "peak_bytes", "worse"),
    [
        (103_000, 0, 103, False),
        (103_001, 0, 100, True),
        (103_001, 10_000, 100, True),
        (100_000, 0, 104, True),
        (50_000, 0, 50, False),
    ],
)
def test_three_per_cent_more_is_worse(cycles, exposed, peak_bytes, worse):
    kept, found = (tpu_check.read_figures(each) for each in (report(100_000, 100), report(cycles, peak_bytes, exposed)))
    assert tpu_check.is_worse(kept, found) is worse


def test_a_step_that_no_longer_fits_is_worse():
    kept, refused = (
        tpu_check.read_figures(report(1, 1)),
        tpu_check.read_figures(step_to_json(make_compilation(2000).step)),
    )
    assert refused is None and tpu_check.is_worse(kept, None)
    assert not tpu_check.is_worse(None, kept) and not tpu_check.is_worse(None, None)


def test_the_command_compares_rows_with_what_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tpu, "KEPT", tmp_path)
    for row in tpu.CHECKED:
        tpu.report_path(row).write_text(json.dumps(report(100, 50)))
    found = {tpu.CHECKED[0]: report(200, 50), tpu.CHECKED[1]: report(90, 40)}
    monkeypatch.setattr(tpu, "compile_row", lambda row, checkout: found[row])
    assert tpu_check.main(["tpu_check"]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.endswith("100 -> 200 cycles (2.000), 50 -> 50 bytes (1.000), libtpu 0.0.42: worse")
    assert second.endswith("100 -> 90 cycles (0.900), 50 -> 40 bytes (0.800), libtpu 0.0.42")
    assert tpu_check.main(["tpu_check", f"--only={tpu.CHECKED[1].name}"]) == 0
    assert last == "2 steps compiled again." and capsys.readouterr().out.endswith("\n1 steps compiled again.\n")


def test_every_table_of_the_page_can_be_checked():
    rows = tpu.kept_rows()
    assert {*tpu.CHECKED} < {*rows} and {tpu.report_path(row) for row in rows} == {*tpu.KEPT.glob("*.json")}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu for this kind of machine")
def test_a_step_costs_no_more_than_is_kept(capsys):
    """One of two rows is tried, that with the kernel and with exchange; B/16 takes twice as long to compile."""
    assert not tpu_check.check(tpu.CHECKED[1:], None), capsys.readouterr().out
