"""The first hour on a machine: whole, interrupted, on several hosts, and what a run makes of it."""

import json
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from launch.local import process_environments
from tests.conftest import ROOT
from tests.distributed.test_coordination import everywhere, make_groups
from tests.faults.hosts import single
from tests.measurements.helpers import TINY, make_bench
from vit_jax import UserError, cli, measure
from vit_jax.distributed import coordination
from vit_jax.measurements import MachineRecord, Measurement, read_record

SMALL = ["--models=ViT-mu/16", *TINY]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cli, "join_cluster", coordination.ProcessGroup)


def fake_sections(monkeypatch, **functions):
    monkeypatch.setattr(
        measure, "SECTIONS", {name: (function, 1 / len(functions)) for name, function in functions.items()}
    )


def products(bench):
    yield Measurement("square products", "GFLOP/s", 50.0, advice="products")


def run(tmp_path, *words):
    measure.main(["measure", f"--out={tmp_path}", *SMALL, *words])
    return read_record(str(tmp_path / "cpu-8.json"))


def test_an_interrupted_measurement_goes_on(monkeypatch, tmp_path, capsys):
    asked = []

    def interrupted(bench):
        asked.append(bench.product_flops)
        yield Measurement("step", "ms", 3.0, 0.0, 2.0, "schedule", advice="step")
        if len(asked) == 1:
            raise KeyboardInterrupt

    fake_sections(monkeypatch, products=products, steps=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert list(read_record(str(tmp_path / "cpu-8.json")).sections) == ["products"]
    assert "Not measured yet" in (tmp_path / "cpu-8.html").read_text()
    capsys.readouterr()
    record = run(tmp_path)
    printed = capsys.readouterr().out
    assert list(record.sections) == ["products", "steps"] and asked == [50e9, 50e9]
    assert (
        "products:" not in printed and "steps: step: 3 ms instead of 2 ms (schedule); --config.profile_steps" in printed
    )
    run(tmp_path)
    assert len(asked) == 2  # all is measured
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "cpu-8.json", "cpu-8.html"}
    with pytest.raises(UserError, match=r"measured with other values of arguments; choose another --name"):
        run(tmp_path, "--config.model.remat=full")


def test_each_part_has_its_share_of_what_is_left(monkeypatch):
    left = {}

    def section(name):
        def function(bench):
            left[name] = bench.deadline - time.monotonic()
            yield Measurement(name, "s", 1.0)

        return function

    monkeypatch.setattr(
        measure,
        "SECTIONS",
        {name: (section(name), share) for name, share in zip("abc", (0.5, 0.25, 0.25), strict=True)},
    )
    *_, record = measure.measure(make_bench(), MachineRecord("x", {}), 100.0, None)
    assert [round(left[name]) for name in "abc"] == [50, 50, 100] and list(record.sections) == list("abc")


def test_hosts_write_one_record_of_the_slowest(monkeypatch):
    def of_host(bench):
        yield Measurement("products", "GFLOP/s", [100.0, 99.0, 40.0][bench.coordinator.host])
        yield Measurement("agreed", "s", bench.agree([1.0, 2.0, 3.0][bench.coordinator.host]))

    fake_sections(monkeypatch, products=of_host)

    def host(group):
        *_, record = measure.measure(make_bench(coordinator=group), MachineRecord("x", {}), 10.0, None)
        return record.sections["products"].rows

    found = everywhere([lambda group=group: host(group) for group in make_groups(3)])
    assert found[0] == found[1] == found[2]
    assert [row.measured for row in found[0]] == [40.0, 1.0] and found[0][0].note.startswith("host 2 is the slowest")


def test_devices_that_fail_are_a_row(monkeypatch, tmp_path, capsys):
    def fails(bench):
        yield Measurement("first", "ms", 1.0)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    fake_sections(monkeypatch, products=products, memory=fails)
    record = run(tmp_path)
    assert [row.verdict for row in record.sections["memory"].rows] == ["", "failed"]
    assert "memory: the rest: failed: RESOURCE_EXHAUSTED: out of memory" in capsys.readouterr().out


def test_an_earlier_record_predicts_what_nothing_else_does(monkeypatch, tmp_path, capsys):
    fake_sections(monkeypatch, products=products)
    run(tmp_path)
    fake_sections(
        monkeypatch, products=lambda bench: iter([Measurement("square products", "GFLOP/s", 30.0, advice="products")])
    )
    measure.main(["measure", f"--out={tmp_path}", "--name=now", f"--against={tmp_path}/cpu-8.json", *SMALL])
    assert "30 GFLOP/s instead of 50 GFLOP/s (an earlier record)" in capsys.readouterr().out
    known = Measurement("a", "ms", 5.0, 0.0, 4.0, "schedule")
    assert measure.beside_earlier(known, Measurement("a", "ms", 3.0)) == known
    assert (
        measure.beside_earlier(Measurement("a", "ms", 5.0, 0.0, 4.0, kind="bound"), Measurement("a", "ms", 3.0)).verdict
        == "worse"
    )


def test_words_that_are_no_fields_are_answered():
    for words, answer in (
        (["--config.model.dept=3"], "did you mean 'model.depth'"),
        (["--config.model.depth=x"], "must be a whole number"),
        (["--config.model.name=ViT-S/16"], "name the models to measure with --models=ViT-S/16"),
        (["--minute=3"], "unexpected '--minute=3'; fields are written --config.KEY=VALUE."),
    ):
        with pytest.raises(UserError, match=re.escape(answer)):
            measure.read_config(words)
    config, given = measure.read_config(["--config.mesh.fsdp=4"])
    assert config.mesh.fsdp == 4 and given == {"mesh.fsdp"}
    with pytest.raises(UserError, match="ViT-Q"):
        measure.main(["measure", "--models=ViT-Q/16"])


def command(tmp_path, *words):
    return [sys.executable, "-m", "vit_jax.measure", f"--out={tmp_path}", "--name=here", *SMALL, *words]


def check_whole(record):
    assert list(record.sections) == list(measure.SECTIONS)
    rows = [row for section in record.sections.values() for row in section.rows]
    assert not [row for row in rows if row.verdict == "failed"]
    for what in (
        "square products",
        "all-reduce of 64 KiB",
        ": step",
        "the loader alone",
        "forward and backward",
        "saved",
    ):
        assert any(what in row.name and row.measured for row in rows), what
    curve = record.sections["curve"].rows[0]
    assert curve.verdict == "" and curve.measured < 1e-4


@pytest.mark.slow
def test_an_interruption_loses_one_part(tmp_path):
    line, environment = command(tmp_path, "--minutes=1.5"), single(2)
    process = subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for text in process.stdout:
        if text.startswith("collectives:"):
            process.send_signal(signal.SIGTERM)
            break
    process.stdout.read()
    record = read_record(str(tmp_path / "here.json"))
    assert process.wait(60) == 143 and list(record.sections) == ["products", "memory"]
    assert record.key["devices"] == 2 and record.key["hosts"] == 1


@pytest.mark.slow
@pytest.mark.flaky(reruns=1)  # on a busy machine the time may be too short for a step
def test_two_hosts_write_one_record(tmp_path):
    line = command(tmp_path, "--minutes=2", "--config.mesh.fsdp=2", "--config.mesh.data=1")
    processes = [
        subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for environment in process_environments(2, 1)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    record = read_record(str(tmp_path / "here.json"))
    check_whole(record)
    assert record.key["hosts"] == 2 and "over 2 devices of mesh.fsdp" in outputs[0]
    assert "products:" not in outputs[1] and "Wrote" not in outputs[1] and "Wrote" in outputs[0]
    assert "A curve beside" in (tmp_path / "here.html").read_text()
    for remembered in (tmp_path / "cache" / "measured").glob("*"):  # if the times were no noise
        assert json.loads(remembered.read_text())[0][4] == "heads_first"
