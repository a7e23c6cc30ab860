"""Which processes trained a run: they add up over restarts, and a run that starts anew forgets others."""

import json
import re
from types import SimpleNamespace

import jax
import pytest

from tests.conftest import ROOT
from vit_jax import UserError
from vit_jax.machine import describe_hardware
from vit_jax.monitoring import History, history, read_history


def read(folder):
    return [(one["first"], one["last"]) for one in json.loads((folder / "history.json").read_text())]


def test_processes_add_up(tmp_path):
    first = History(tmp_path, 0, jax.devices())
    first.write(10)
    first.write(20)
    second = History(tmp_path, 10, jax.devices())  # the second save was damaged
    second.write(30)
    assert read(tmp_path) == [(0, 20), (10, 30)]
    History(tmp_path, 30, jax.devices()).write(30)  # complete: nothing was trained
    assert read(tmp_path) == [(0, 20), (10, 30)]
    History(tmp_path, 0, jax.devices()).write(0)
    assert read(tmp_path) == [(0, 0)]


@pytest.mark.parametrize("damaged", ["", "3", "{}", "[{}]", "[" * 100_000], ids=lambda damaged: damaged[:4])
def test_a_damaged_history_stops_no_training_but_is_not_recorded(tmp_path, damaged):
    (tmp_path / "history.json").write_text(damaged)
    with pytest.raises(UserError, match=r"cannot read history.json: it is not the history of a run"):
        read_history(damaged.encode(), "history.json")
    History(tmp_path, 10, jax.devices()).write(20)
    assert read(tmp_path) == [(10, 20)]


def test_a_disk_that_is_full_is_left_to_the_checkpoint(tmp_path):
    History(tmp_path / "absent", 0, jax.devices()).write(10)


def test_the_commit_is_that_of_a_checkout(monkeypatch, tmp_path):
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?", history.package_commit())
    monkeypatch.setattr(history, "PACKAGE", tmp_path / "site-packages" / "vit_jax")
    assert history.package_commit.__wrapped__() is None


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
