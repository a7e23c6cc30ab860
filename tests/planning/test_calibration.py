"""The band that stands beside a prediction: of published runs, on the same kind of chip where there are three."""

import pytest

from benchmarks import calibration as benchmark
from vit_jax.planning import plan_table, time_estimate
from vit_jax.planning.chips import CHIPS


@pytest.fixture
def measured(monkeypatch):
    """The ratios that are stated, here with four runs."""
    monkeypatch.setattr(time_estimate, "MEASURED", {"schedule": {"v4": (1.5,), "v5e": (1.2, 1.1, 1.3)}})


def test_a_kind_with_three_runs_has_its_own_band(measured):
    band = time_estimate.find_band("v5e", "schedule")
    assert (band.low, band.high, band.runs, band.kinds) == (1.1, 1.3, 3, ("v5e",))
    assert plan_table.format_band(band) == "1.10 to 1.30 in 3 runs on v5e"


def test_other_kinds_have_that_of_all(measured):
    for kind in ("v4", "v6e"):
        band = time_estimate.find_band(kind, "schedule")
        assert (band.low, band.high, band.runs, band.kinds) == (1.1, 1.5, 4, ("v4", "v5e"))


def test_below_three_runs_nothing_is_calibrated(measured, monkeypatch):
    assert time_estimate.find_band("v5e", "estimate") is None
    monkeypatch.setattr(time_estimate, "MEASURED", {"schedule": {"v5e": (1.2, 1.1)}})
    assert time_estimate.find_band("v5e", "schedule") is None
    assert plan_table.format_band(None) == "not calibrated"


def test_the_ratios_are_those_of_the_reports_that_are_kept():
    assert benchmark.ratios_by_chip(benchmark.read_comparisons("none")) == time_estimate.MEASURED


@pytest.mark.parametrize("kind", CHIPS)
def test_every_kind_is_calibrated(kind):
    for measure in ("estimate", "schedule"):
        assert time_estimate.find_band(kind, measure).runs >= time_estimate.MIN_RUNS
