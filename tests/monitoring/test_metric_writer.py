"""What a run writes while it goes on."""

import contextlib

import pytest

from vit_jax.monitoring import metric_writer
from vit_jax.monitoring.metric_writer import MetricWriter, duration


@pytest.mark.parametrize(("quiet", "told"), [(0.0, True), (1e6, False)])
def test_a_run_that_logs_rarely_says_how_far_it_is(tmp_path, monkeypatch, capsys, quiet, told):
    monkeypatch.setattr(metric_writer, "PROGRESS_NOTICE_SECONDS", quiet)
    with contextlib.closing(MetricWriter(tmp_path, 0, True, total=1000, batch=8, classes=10)) as log:
        log.write_progress(7, {"train/loss": 1.5, "norm/grads": 2.0})
    assert ("step 7/1000  loss 1.5\n" in (tmp_path / "train.log").read_text()) == told
    assert ("step 7/1000  loss 1.5\n" in capsys.readouterr().err) == told
    assert (tmp_path / "metrics.jsonl").read_text() == ""  # which is the same however slow the machine is


def test_a_line_of_metrics_is_no_silence(tmp_path, monkeypatch):
    with contextlib.closing(MetricWriter(tmp_path, 0, True, total=10, batch=8, classes=10)) as log:
        log.write_metrics(5, {"train/loss": 1.0})
        log.write_progress(6, {"train/loss": 2.0})
    assert (tmp_path / "train.log").read_text() == "step 5/10  loss 1\n"


def test_a_name_that_is_not_utf8_is_escaped(tmp_path):
    with contextlib.closing(MetricWriter(tmp_path, 0, True, total=10, batch=8, classes=10)) as log:
        log.write_text("0  caf\udce9, é")
    assert (tmp_path / "train.log").read_bytes() == "0  caf\\udce9, é\n".encode()


def test_durations_are_read_as_on_a_clock():
    assert [duration(seconds) for seconds in (59.4, 60, 3599, 3723)] == ["0:59", "1:00", "59:59", "1:02:03"]
