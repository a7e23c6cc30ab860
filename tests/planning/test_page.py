"""The page that `vit_jax.plan --html` writes, and the numbers that it draws."""

import dataclasses

import pytest

from tests.analysis.test_look import check_page
from tests.planning.builders import EXECUTABLE, make_compilation
from vit_jax import UserError, analysis, plan
from vit_jax.planning import plan_page, plan_table, time_estimate
from vit_jax.planning.records import Advice, EvaluationReport, Exchange, LargestBatch, Plan, StepSchedule


def make_plan(required=500, **fields):
    """A plan with both measures of time, where the program fits."""
    schedule = StepSchedule({"matmul": 600, "kernel": 100}, 60, 0, 0, 0, 2**30, 0, 0)
    collectives = {"all-reduce": Exchange(1, 2, 5e4)}
    executable = dataclasses.replace(
        EXECUTABLE, cycles=10**6, kernels=2, kernel_cycles=10**5, collectives=collectives, schedule=schedule
    )
    evaluation = EvaluationReport(64, 8, 900, None, 1.0, False)
    compilation = make_compilation(required, evaluation, executable, **fields)
    by_schedule = time_estimate.estimate_schedule(compilation)
    return Plan(
        compilation, time_estimate.estimate_step(compilation), by_schedule=by_schedule, command="python -m <all>"
    )


def test_the_parts_are_those_of_the_table():
    found = make_plan()
    assert plan_table.memory_parts(found.compilation) == {
        "train step": {"parameters": 200, "optimizer, average": 400, "activations, gradients": -100},
        "evaluation": {"parameters": 200, "optimizer, average": 400, "activations, gradients": 300},
    }
    cycles = plan_table.cycle_parts(found)  # of 16 images
    assert cycles["schedule"] == {"matmul": 37.5, "kernel": 6.25, "exchange": 3.75}
    step = found.estimate.compute_seconds + found.estimate.exchange_seconds
    assert sum(cycles["estimate"].values()) == pytest.approx(step * 1.5e9 / 16)
    shares = plan_table.utilisation(found)
    assert shares["memory"] == 0.9 and shares["exchange (time)"] == found.estimate.exchange_seconds / step
    assert plan_table.utilisation(make_plan(required=3000)) == {"memory": 3.0}
    prediction = plan_table.memory_parts(make_compilation(500, inference=True))
    assert prediction == {"prediction": {"parameters": 200, "activations, gradients": 300}}


def test_what_limits_is_said():
    found = make_plan()
    assert plan_table.limit(found).startswith("compute: 0.7 of the")
    slow = dataclasses.replace(found.estimate, exchange_seconds=1.0)
    assert plan_table.limit(dataclasses.replace(found, estimate=slow)) == "exchange: 1000.0 of the 1000.7 ms of a step"
    run = dataclasses.replace(found.estimate.run, input_cores=300.0)
    reading = dataclasses.replace(found, estimate=dataclasses.replace(found.estimate, run=run))
    assert plan_table.limit(reading) == "input: reading takes 300.0 cores of 224"
    assert plan_table.limit(make_plan(required=2 << 30, memory_bytes=1 << 30)) == "memory: 2.00 GiB needed of 1.00 GiB"
    assert plan_table.limit(Plan(make_compilation(1, target="cpu"))).startswith("unknown")


def test_the_page_stands_alone_and_shows_what_was_found(tmp_path):
    first = make_plan(required=3000)
    advised = dataclasses.replace(first, advice=Advice({"accum_steps": "2"}, make_plan(required=800)))
    largest = LargestBatch(make_plan(required=900, images_per_device=24), 32)
    other = dataclasses.replace(make_plan(required=700, target="v6e:2x4"), largest=largest)
    plan_page.write_page(tmp_path / "plan.html", [advised, other])
    found = check_page((tmp_path / "plan.html").read_text())
    assert len(found.all("img")) == 3 and len(found.all("source")) == 3
    columns = [attributes for attributes in found.all("th") if attributes.get("scope") == "col"]
    assert len(columns) == 4 and "v5e:2x4, data=8 with accum_steps=2" in found.text
    assert "the largest batch has 24 images a device; 32 do not fit." in found.text
    assert "python -m <all>" in found.text and "activations, gradients" in found.text


@pytest.fixture
def undrawn(monkeypatch):
    """Pages have empty pictures, which take no time."""
    monkeypatch.setattr(analysis.plot, "encode_themed", lambda draw, theme: b"<?xml version='1.0'?><svg/>")


def test_a_plan_without_times_has_a_page(undrawn, tmp_path):
    plan_page.write_page(tmp_path / "plan.html", [Plan(make_compilation(700, target="cpu", devices=8))])
    found = check_page((tmp_path / "plan.html").read_text())
    assert len(found.all("img")) == 2 and "does not estimate a time" in found.text


def test_the_command_line(undrawn, tmp_path, monkeypatch, capsys):
    compilation = make_plan(required=700).compilation
    monkeypatch.setattr(plan, "compile_in_subprocess", lambda request: compilation)
    words = ["plan", "--config=configs/vit_b16_jft.py", "--topology=v5e:2x4"]
    file = tmp_path / "new" / "plan.html"
    plan.main([*words, "--json", f"--html={file}"])
    assert capsys.readouterr().out.startswith("{") and "<h1>Plan of ViT-B/16</h1>" in file.read_text()
    with pytest.raises(UserError, match=r"cannot write .*: Not a directory"):
        plan.main([*words, f"--html={file}/below/plan.html"])
    single = [*words[:2], "--topology=v5e:1x1", "--inference", "--sizes=64", f"--html={file}"]
    with pytest.raises(UserError, match="--html does not show --sizes and --models"):
        plan.main(single)
