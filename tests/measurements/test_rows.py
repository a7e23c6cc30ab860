"""What is off, and which host is to blame."""

import math
import re

import pytest

from vit_jax.config import FIELDS
from vit_jax.measurements import Measurement, merge_hosts
from vit_jax.measurements.measurement import ADVICE


@pytest.mark.parametrize(
    ("unit", "kind", "measured", "verdict"),
    [
        ("ms", "near", 114.0, ""),
        ("ms", "near", 116.0, "worse"),
        ("ms", "near", 88.0, ""),
        ("ms", "near", 86.0, "better"),
        ("GB/s", "near", 86.0, "worse"),
        ("GB/s", "near", 116.0, "better"),
        ("ms", "limit", 1.0, ""),
        ("ms", "limit", 116.0, "worse"),
        ("images/s", "limit", 1e6, ""),
        ("images/s", "limit", 80.0, "worse"),
        ("ms", "bound", 1e6, ""),
        ("ms", "bound", 80.0, "better"),
        ("ms", "near", math.nan, "worse"),
    ],
)
def test_what_differs_by_more_than_15_percent_is_off(unit, kind, measured, verdict):
    row = Measurement("a", unit, measured, 0.0, 100.0, kind=kind)
    assert row.verdict == verdict and (math.isnan(measured) or row.ratio == measured / 100)


def test_what_the_spread_explains_is_not_off():
    assert Measurement("a", "ms", 130.0, 20.0, 100.0).verdict == ""
    assert Measurement("a", "relative", 0.021, 0.0, 0.02, kind="limit", margin=0.0).verdict == "worse"
    assert Measurement("a", "ms", 100.0).verdict == Measurement("a", "ms", None, note="no time was left").verdict == ""
    assert Measurement("a", "ms", None, advice="step", note="out of memory").verdict == "failed"


def test_the_worst_host_counts_and_is_named():
    def merged(unit, *values):
        [row] = merge_hosts([[Measurement("a", unit, value, note="here")] for value in values])
        return row

    assert merged("GB/s", 100.0, 99.0, 98.0) == Measurement("a", "GB/s", 98.0, note="here")
    slow = merged("GB/s", 100.0, 99.0, 50.0)
    assert slow.measured == 50 and slow.note == "host 2 is the slowest; the fastest, host 0: 100 GB/s; here"
    late = merged("ms", 100.0, 199.0, 98.0)
    assert late.measured == 199 and late.note.startswith("host 1 is the slowest; the fastest, host 2: 98 ms")
    failed = merged("ms", 100.0, None)
    assert failed.measured is None and failed.note == "host 1: here"
    assert merged("ms", None, None).note == "here"


def test_hosts_may_have_different_rows():
    one, two, failed = (
        Measurement("a", "ms", 1.0),
        Measurement("b", "ms", 2.0),
        Measurement("c", "ms", None, advice="kernel values", note="no"),
    )
    assert merge_hosts([[one, two], [one, failed]]) == [one, two, failed]


def test_the_flags_that_are_advised_exist():
    flags = {flag for text in ADVICE.values() for flag in re.findall(r"--config\.([\w.]*\w)", text)}
    assert len(flags) > 10 and flags <= FIELDS.keys()
