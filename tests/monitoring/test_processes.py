"""Which processes trained a run: they add up over restarts, and a run that starts anew forgets others."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import pytest

from tests.conftest import ROOT
from vit_jax import UserError
from vit_jax.machine import describe_hardware
from vit_jax.monitoring import PROCESS_FILES, Ledger, Processes, ProcessFile, Start, read_processes, run_ledger


def process(folder, start, total=100):
    return ProcessFile(folder, start, total, Ledger(), jax.devices())


def found(folder):
    """What a report reads."""
    texts = {name: (folder / name).read_bytes() for name in PROCESS_FILES if (folder / name).exists()}
    return read_processes(texts, str(folder))


def read(folder):
    return [(one["first"], one["last"]) for one in found(folder).saved]


def test_processes_add_up(tmp_path):
    first = process(tmp_path, 0)
    assert read(tmp_path) == [] and len(found(tmp_path).starts) == 1
    first.count_save(10)
    first.count_save(20)
    second = process(tmp_path, 10)  # the second save was damaged
    second.count_save(30)
    assert read(tmp_path) == [(0, 20), (10, 30)]
    second.complete()
    process(tmp_path, 30, total=30).note_state(30)  # complete: nothing was trained
    assert read(tmp_path) == [(0, 20), (10, 30)] and [one.saves for one in found(tmp_path).starts] == [2, 1]
    one, _ = found(tmp_path).saved
    assert one.keys() >= {"seconds", "hardware", "vit_jax", "commit", "jax", "python"}
    process(tmp_path, 0).note_state(0)
    assert read(tmp_path) == [(0, 0)]


def test_what_earlier_versions_wrote_is_read_and_goes_on(tmp_path):
    """They wrote one file by saves, and one by time, in which the second of three processes saved nothing."""
    common = {"hardware": "2 cores", "vit_jax": "0.1", "commit": None, "jax": "0.10.2", "python": "3.11"}
    history = [{"first": 0, "last": 20, "seconds": 5.0} | common]
    history += [{"first": 20, "last": 40, "seconds": 4.0} | common | {"teacher_macs": 7, "peak_bytes": 9}]
    ledger = [Start(0, 25, 1.8e9, {"step": 4.0}, 1), Start(20, 22, 1.8e9 + 9, {"step": 1.0})]
    ledger += [Start(20, 41, 1.8e9 + 20, {"step": 3.0}, 1)]
    (tmp_path / "history.json").write_text(json.dumps(history))
    (tmp_path / "ledger.json").write_text(json.dumps([dataclasses.asdict(one) for one in ledger]))
    assert found(tmp_path) == Processes(history, ledger)
    resumed = process(tmp_path, 40)
    assert resumed.reached == 41 and resumed.starts[:-1] == ledger
    resumed.count_save(60)
    assert found(tmp_path).saved[:-1] == history and found(tmp_path).starts[:-1] == ledger
    assert read(tmp_path) == [(0, 20), (20, 40), (40, 60)]
    process(tmp_path, 60)
    assert len(read(tmp_path)) == 3 and len(found(tmp_path).starts) == 5


def test_processes_before_a_start_at_step_0_saved_nothing_that_counts(tmp_path):
    killed = process(tmp_path, 0)
    killed.count_step(12, ())
    killed.count_save(12)  # which did not arrive
    assert process(tmp_path, 0).reached == 12
    assert read(tmp_path) == [] and [one.last for one in found(tmp_path).starts] == [12, 0]


@pytest.mark.parametrize("name", ["history.json", "processes.json"])
@pytest.mark.parametrize(
    "damaged", ["", "3", "{}", "[1]", '[{"saved": {}}]', '[{"saved": 1}]', "[" * 100_000], ids=lambda word: word[:16]
)
def test_a_damaged_file_stops_no_training_but_is_not_recorded(tmp_path, name, damaged):
    (tmp_path / name).write_text(damaged)
    with pytest.raises(UserError, match=rf"cannot read .*{name}: it does not list the processes of a run"):
        found(tmp_path)
    process(tmp_path, 10).count_save(20)
    assert read(tmp_path) == [(10, 20)]


def test_a_disk_that_is_full_is_left_to_the_checkpoint(tmp_path):
    process(tmp_path / "absent", 0).count_save(10)


def test_the_commit_is_that_of_a_checkout(monkeypatch, tmp_path):
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", run_ledger.package_commit())
    monkeypatch.setattr(run_ledger, "PACKAGE", tmp_path / "site-packages" / "vit_jax")
    assert run_ledger.package_commit.__wrapped__() is None


def test_hardware_in_words(tmp_path):
    def devices(platform, kind, count, hosts):
        return [SimpleNamespace(platform=platform, device_kind=kind, process_index=i % hosts) for i in range(count)]

    describe = describe_hardware.__wrapped__ if hasattr(describe_hardware, "__wrapped__") else describe_hardware
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: AMD EPYC 7B13\n\nprocessor : 1\nmodel name\t: AMD EPYC 7B13\n")
    assert describe(devices("tpu", "TPU v5 lite", 8, 2)) == "8 x TPU v5 lite, 2 hosts"
    assert re.fullmatch(r"(1 core|\d+ cores) of AMD EPYC 7B13", describe(devices("cpu", "cpu", 1, 1), cpuinfo))
    words = describe(devices("cpu", "cpu", 8, 2), tmp_path / "absent")
    assert re.fullmatch(r"(1 core|\d+ cores) of \w+, 8 emulated devices, 2 hosts", words)
