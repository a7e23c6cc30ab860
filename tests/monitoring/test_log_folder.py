"""What a full disk refuses of the logs, and a closed terminal: it costs no training."""

import contextlib
import os
import struct
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import jax
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from tests.conftest import ROOT
from tests.faults.table import fill
from vit_jax import UserError
from vit_jax.analysis import plot
from vit_jax.monitoring import Trace, log_folder, read_metrics
from vit_jax.monitoring.log_folder import LogFolder
from vit_jax.monitoring.metric_writer import MetricWriter
from vit_jax.monitoring.run_ledger import peak_bytes
from vit_jax.monitoring.wandb_run import WandbRun


def read_events(content):
    """The events of a file, whose checksums are right."""
    while content:
        [length] = struct.unpack("<Q", content[:8])
        event, content = content[12 : 12 + length], content[16 + length :]
        assert len(event) == length
        yield event_pb2.Event.FromString(event)


def test_what_a_full_disk_refuses_follows_whole_and_in_order(small_disk, caplog):
    logs, records = LogFolder(small_disk), [b"%03d" % number * 500 + b"\n" for number in range(40)]
    for number, record in enumerate(records):  # 60 kB: some fit, and one in part
        if number == 5:
            fill(small_disk / "other")
        logs.append("a", record)
    kept = (small_disk / "a").read_bytes()
    assert b"".join(records).startswith(kept) and 5 * 1501 <= len(kept) < 20 * 1501
    (small_disk / "other").unlink()
    logs.append("b", b"after\n")
    assert (small_disk / "a").read_bytes() == b"".join(records) and (small_disk / "b").read_bytes() == b"after\n"
    logs.close()
    refused, written = [record.getMessage() for record in caplog.records]
    assert refused.startswith(f"the logs in {small_disk} cannot be written (No space left on device); training goes on")
    assert written.endswith("can be written again; 0 of their records are lost")


def test_what_waits_is_bounded_and_what_is_lost_is_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(log_folder, "MOST_KEPT", 100)
    logs = LogFolder(tmp_path / "absent")
    for number in range(30):
        logs.append("a", b"%09d\n" % number)
    logs.close()
    assert caplog.messages[1:] == [f"30 records of the logs in {tmp_path / 'absent'} are lost"]
    (tmp_path / "absent").mkdir()
    logs.flush()
    assert (tmp_path / "absent" / "a").read_bytes() == b"".join(b"%09d\n" % number for number in range(20, 30))
    assert caplog.messages[-1].endswith("20 of their records are lost")


def test_metrics_and_events_are_whole_whenever_the_disk_is_full(small_disk):
    metrics = {f"norm/{number}": 1 / 3 for number in range(20)}
    with contextlib.closing(MetricWriter(small_disk, 0, True, total=100, batch=8, classes=10)) as log:
        for step in range(1, 31):
            log.write_metrics(step, metrics | {"train/loss": float("nan")})
            content = (small_disk / "metrics.jsonl").read_bytes()
            assert [row[0] for row in read_metrics(content, "metrics")] == list(range(1, content.count(b"\n") + 1))
            if step == 10:
                fill(small_disk / "other")
        assert content.count(b"\n") < 30
        (small_disk / "other").unlink()
        log.flush()
        [events] = small_disk.glob("events.out.tfevents.*")
        first, *rows = read_events(events.read_bytes())
    assert first.file_version == "brain.Event:2" and [row.step for row in rows] == list(range(1, 31))
    assert {value.tag for value in rows[-1].summary.value} == {*metrics, "train/loss"}
    assert len(read_metrics((small_disk / "metrics.jsonl").read_bytes(), "")) == 30
    assert (small_disk / "train.log").read_text().count("\n") == 30


def test_a_resumed_run_hides_later_steps_of_earlier_event_files(tmp_path):
    MetricWriter(tmp_path, 5, True, total=10, batch=8, classes=10).close()
    [path] = tmp_path.glob("events.out.tfevents.*")
    content = path.read_bytes()
    assert content[8:12] == struct.pack("<I", masked_crc32c(content[:8]))
    first, session = read_events(content)
    assert session.step == 6 and session.session_log.status == event_pb2.SessionLog.START and first.step == 0


WRITES = """
import contextlib, logging, pathlib, sys
from vit_jax.monitoring import MetricWriter
with contextlib.closing(MetricWriter(pathlib.Path(sys.argv[1]), 0, True, 10, 8, 10)) as log:
    for step in range(1, 11):
        logging.getLogger("vit_jax").warning("a warning of step %d", step)
        log.write_metrics(step, {"train/loss": 1.0})
print("done", flush=True)
"""


@pytest.mark.parametrize("where", ["pipe", pytest.param("disk", marks=pytest.mark.slow)])
def test_a_terminal_that_takes_nothing_is_left_alone(tmp_path, where):
    ends = os.pipe() if where == "pipe" else [os.open("/dev/null", os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)]
    os.close(ends[0])  # as `head` does
    code = f"{WRITES}from vit_jax.streams import flush_stderr\nflush_stderr()"
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, stderr=ends[1], check=False
    )
    os.close(ends[1])
    assert (ended.returncode, ended.stdout) == (0, b"done\n")
    assert len(read_metrics((tmp_path / "metrics.jsonl").read_bytes(), "")) == 10


def test_the_folder_of_an_earlier_log_is_no_library(tmp_path, monkeypatch):
    """Python takes a folder `wandb` in the current directory for a package, if the library is not installed."""
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(UserError, match=r"wandb is not installed: pip install -e '\.\[wandb\]'"):
        WandbRun("project", "workdir", tmp_path, {})


def test_what_a_library_refuses_beside_the_training_is_a_warning(tmp_path, monkeypatch, caplog):
    def fail(*args, **options):
        raise ValueError("Profile has already been started.")  # whatever a library raises

    run = SimpleNamespace(log=fail, finish=fail, define_metric=lambda *args, **options: None)
    errors = SimpleNamespace(Error=ValueError)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: run, errors=errors))
    wandb = WandbRun("project", "workdir", tmp_path, {})
    for step in (1, 2):
        wandb.write_metrics(step, {"train/loss": 1.0})
    wandb.close()
    words = "Profile has already been started"
    assert caplog.messages == [f"Weights & Biases does not take metrics ({words}); training goes on"]
    monkeypatch.setattr(jax.profiler, "start_trace", fail)
    trace = Trace(tmp_path, 0, 2)
    for step in range(1, 6):
        trace.before(step)
        trace.after(step, None)
    trace.close()
    assert caplog.messages[1:] == [f"profile_steps were not traced ({words}); training goes on"]

    def no_memory():
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: memory statistics")

    peak = getattr(peak_bytes, "__wrapped__", peak_bytes)  # unchecked, as this is no device
    assert peak([SimpleNamespace(memory_stats=no_memory)]) == 0


def test_a_profile_has_the_steps_that_were_asked_for(tmp_path, monkeypatch):
    """Not the first two after the start, in which the program is compiled."""
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: seen.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    trace = Trace(tmp_path, 10, 2)
    for step in range(11, 17):
        trace.before(step)
        seen.append(step)
        trace.after(step, None)
    assert seen == [11, 12, "start", 13, 14, "stop", 15, 16]


def test_a_full_disk_at_the_start_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match=r"cannot write the logs in .*absent: No such file or directory"):
        MetricWriter(tmp_path / "absent", 0, True, total=10, batch=8, classes=10)


def test_a_plot_that_cannot_be_drawn_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(plot, "DRAW_SECONDS", 0.0)
    with plot.Live() as live:
        monkeypatch.setattr(live.figure, "subplots", lambda *args, **options: 1 / 0)
        for step in (1, 2):
            live(step, {"train/loss": 1.0})
    assert caplog.messages == ["the metrics cannot be drawn: division by zero"]
