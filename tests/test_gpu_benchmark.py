"""The runs of `benchmarks.gpu`: their limits, what they keep, how they go on, and what they say is missing."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import gpu
from tests.conftest import ROOT


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """Yields a function that makes a part of a Python program; parts run in `tmp_path`."""
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(gpu, "find_missing", lambda: [])
    monkeypatch.setattr(gpu, "LEAST", 0.1)
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)  # which a run takes for Ctrl-C

    def make(name, program, seconds=60.0, needs=()):
        (tmp_path / f"{name}.py").write_text(program)
        return gpu.Part(name, name, [], [], seconds, needs)

    yield make
    signal.signal(signal.SIGTERM, before)


def run(parts, out, monkeypatch, minutes=1.0):
    monkeypatch.setattr(gpu, "part_tables", lambda cores: {"first": parts})
    code = gpu.main(["gpu", "first", "--rehearse", f"--out={out}", f"--minutes={minutes}"])
    return code, json.loads(next(out.glob("cpu-first-*.json")).read_text())["parts"]


def test_every_part_ends_in_time_and_is_kept(scripted, tmp_path, monkeypatch, capsys):
    stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('so far')\ntime.sleep(60)"
    parts = [scripted("quick", "print('hello')"), scripted("slow", stubborn, seconds=1.0)]
    parts += [scripted("broken", "raise ValueError('no')"), scripted("needy", "", needs=("no-such-package",))]
    began = time.monotonic()
    code, kept = run(parts, tmp_path / "out", monkeypatch)
    assert code == 1 and time.monotonic() - began < 20
    assert {name: part["ended"] for name, part in kept.items()} == {
        "quick": "done",
        "slow": "stopped after 4 s",  # a rehearsal has four times as long
        "broken": "failed",
    }
    assert kept["quick"]["output"] == ["hello"] and kept["slow"]["output"] == ["so far"]
    assert "ValueError: no" in kept["broken"]["output"]
    assert "left: needy: missing: no-such-package" in capsys.readouterr().out


def test_parts_for_which_no_time_is_left_are_named(scripted, tmp_path, monkeypatch, capsys):
    parts = [scripted("first", "import time; time.sleep(60)"), scripted("second", "print()")]
    code, kept = run(parts, tmp_path / "out", monkeypatch, minutes=1.0 / 60)
    assert code == 1 and [*kept] == ["first"]
    assert "left: second: no time was left" in capsys.readouterr().out


def test_the_same_command_goes_on_with_what_is_missing(scripted, tmp_path, monkeypatch, capsys):
    parts = [
        scripted("before", "print(1)"),
        scripted("after", f"import os, time; os.kill({os.getpid()}, 15); time.sleep(60)"),
    ]
    code, kept = run(parts, tmp_path / "out", monkeypatch)
    assert code == 130 and [*kept] == ["before"]
    assert "interrupted in after; the same command goes on with it" in capsys.readouterr().out
    (tmp_path / "after.py").write_text("print(2)")
    code, kept = run(parts, tmp_path / "out", monkeypatch)
    assert code == 0 and kept["after"]["output"] == ["2"]
    assert "before: already there, done" in capsys.readouterr().out


def test_a_record_is_of_one_machine_and_code(scripted, tmp_path, monkeypatch):
    parts = [scripted("only", "print(1)")]
    run(parts, tmp_path / "out", monkeypatch)
    (tmp_path / "vit_jax").mkdir()
    (tmp_path / "vit_jax" / "changed.py").write_text("1")
    run(parts, tmp_path / "out", monkeypatch)
    assert len([*(tmp_path / "out").iterdir()]) == 2


def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_version", lambda name: None if name in ("grain", "simplejpeg", "timm") else "1.0")
    monkeypatch.setattr(gpu, "install_wheels", lambda: None)
    assert gpu.main(["gpu", "first", f"--out={tmp_path}"]) == 2
    assert capsys.readouterr().out.startswith("missing: grain, simplejpeg; pip install -e . here, or carry the wheels")
    monkeypatch.setattr(gpu, "find_missing", lambda: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.main(["gpu", "first", f"--out={tmp_path}"]) == 2
    assert "nvidia-smi names no GPU here" in capsys.readouterr().out


def test_the_parts_fit_into_their_time_and_name_tests_that_exist():
    tables = gpu.part_tables(16)
    for name, minutes in gpu.MINUTES.items():
        first, *_ = tables[name]
        assert first.seconds < 60 * minutes / 2 + 15
        assert all(gpu.LEAST < part.seconds <= 130 for part in tables[name])
    for test in gpu.TESTS:
        path, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()


def test_the_page_shows_commands_that_exist_and_the_limits_of_their_parts():
    page = (ROOT / "docs" / "hardware.md").read_text()
    for words in re.findall(r"python -m benchmarks.gpu (\w+)", page):
        gpu.make_parser().parse_args(words.split())
    rows = [row for row in page.splitlines() if row.startswith(("| first |", "| second |"))]
    limits = [seconds for row in rows for seconds in map(int, re.findall(r"\d+(?=,| s \|)", row.rpartition(" | ")[2]))]
    assert limits == [part.seconds for parts in gpu.part_tables(16).values() for part in parts]


@pytest.mark.slow
def test_a_rehearsal(tmp_path):
    """The shapes are the smallest, and no other library stands beside."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "benchmarks.gpu", "second", "--rehearse", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    [record] = tmp_path.iterdir()
    parts = json.loads(record.read_text())["parts"]
    assert [*parts] == ["variants", "embedding", "loader"]
    assert [*parts["variants"]["result"]["images"].values()] == [2, 2]
    assert re.search("missing: torch\nmissing|missing: timm", done.stdout)
    assert len(parts["embedding"]["result"]["turn_seconds"]["vit_jax"]) == 2
    assert len(parts["loader"]["result"]) == 1


def test_the_tests_can_be_imported_where_the_packages_for_them_are_missing():
    """A GPU's image has no beartype, and `gpu.TESTS` are run there."""
    code = "import sys; sys.modules['beartype'] = None; import tests"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
