"""The goodput to expect: the formulas against a simulation and published numbers, and what a plan says of them."""

import dataclasses
import random

import pytest

from tests.planning.builders import EXECUTABLE, make_compilation
from vit_jax import UserError, plan
from vit_jax.monitoring import Start
from vit_jax.planning import goodput, plan_table, planner, records
from vit_jax.planning.goodput import FAILURE_RATES, Faults, Restart
from vit_jax.planning.records import PlanRequest


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_best_interval_is_that_of_dalys_figures(hours, minutes):
    """Figures 3 to 5: saves of 5 minutes, and the interval that the model predicts."""
    found = goodput.daly_interval(5 * 60, hours * 3600) / 60
    assert found == pytest.approx(minutes, abs=0.5 if minutes > 10 else 0.05)


def test_youngs_is_its_first_order_and_neither_saves_more_rarely_than_failures_come():
    assert goodput.young_interval(2.0, 100.0) == 20
    assert goodput.daly_interval(1e-6, 1e6) == pytest.approx(goodput.young_interval(1e-6, 1e6), rel=1e-3)
    assert goodput.daly_interval(300.0, 100.0) == 100


def simulate(interval, save, restart, between, seed, segments=4000):
    """The share of useful time of a run that fails at random: while it trains, saves or restarts."""
    chance, clock, failure = random.Random(seed), 0.0, 0.0
    failure = chance.expovariate(1 / between)
    for _ in range(segments):
        end = clock + interval + save
        while end > failure:
            clock, failure = failure, failure + chance.expovariate(1 / between)
            while clock + restart > failure:
                clock, failure = failure, failure + chance.expovariate(1 / between)
            clock += restart
            end = clock + interval + save
        clock = end
    return segments * interval / clock


@pytest.mark.parametrize("between", [36000.0, 3600.0, 900.0])
@pytest.mark.parametrize("interval", [100.0, 900.0])
def test_a_simulation_has_the_expected_goodput(interval, between):
    expected = goodput.expected_goodput(interval, 20.0, 300.0, between)
    assert simulate(interval, 20.0, 300.0, between, seed=1) == pytest.approx(expected, rel=0.03)


def test_no_other_interval_is_better_than_the_best():
    for between in (400.0, 4000.0, 400_000.0):
        best = goodput.daly_interval(20.0, between)
        most, *others = (goodput.expected_goodput(best * by, 20.0, 300.0, between) for by in (1, 0.7, 0.9, 1.1, 1.4))
        assert all(other < most * 1.0005 for other in others), between
    assert goodput.expected_goodput(1.0, 1.0, 1e6, 1e3) == 0  # it never comes to a save


def test_published_rates():
    """419 interruptions in 54 days are one in three hours; 6.50 in 1,000 days of 2,048 hosts are one in 1.8 hours."""
    assert pytest.approx(goodput.time_between_failures(2048, FAILURE_RATES["Llama 3"]) / 3600) == 54 * 24 / 419
    assert goodput.time_between_failures(2048, FAILURE_RATES["RSC-1"]) / 3600 == pytest.approx(1.80, abs=0.01)
    assert sorted(FAILURE_RATES.values()) == list(FAILURE_RATES.values())


RESTART = Restart(save=8.0, detecting=60.0, starting=20.0, restoring=30.0, compiling=70.0)


def make_plan(**fields):
    """A plan of 256 hosts whose steps take a second."""
    executable = dataclasses.replace(EXECUTABLE, cycles=1_500_000_000)
    compilation = make_compilation(500, executable=executable, target="v5e:16x16", **fields)
    faults = Faults(restart=RESTART, restart_of="of a test")
    return planner.make_plan(PlanRequest(("--config=r.py",), "v5e:16x16"), lambda request: compilation, faults=faults)


def test_a_plan_says_how_often_to_save():
    plan = make_plan(mesh={"slice": 4, "data": 8, "fsdp": 1, "tensor": 1})
    found = plan.goodput
    assert found.hosts == 256 and found.failure_seconds / 3600 == pytest.approx(54 * 24 / 419 * 8)
    assert found.interval_seconds == 15 * 60  # sooner than 1,000 steps
    assert make_plan(save_steps=100).goodput.interval_seconds == pytest.approx(100)
    assert make_plan(save_minutes=0.0).goodput.interval_seconds == pytest.approx(1000)
    assert found.best_steps == round(goodput.daly_interval(8.0, found.failure_seconds))
    assert found.best_goodput > found.goodput
    rows = dict(plan_table.plan_rows(plan))
    assert rows["goodput, expected"] == f"{found.goodput:.1%}, saving every 15.0 minutes"
    assert rows["  failures"] == "one in 24.7 hours: 3.79 in 1,000 host-days (Llama 3), 256 host(s)"
    assert rows["  a save, a restart"] == "8 s, 3.0 minutes (of a test)"
    assert f"{found.best_steps:,} steps" in rows["  best save interval"]
    told = records.plan_to_json(plan)["goodput"]
    assert told["best_steps"] == found.best_steps and told["faults"]["restart"]["save"] == 8.0


def test_without_a_time_of_a_step_nothing_is_expected():
    found = planner.make_plan(PlanRequest((), "cpu"), lambda request: make_compilation(500, target="cpu"))
    assert found.goodput is None and "goodput" not in plan_table.render_plans([found])
    assert "goodput" not in records.plan_to_json(found)


def test_a_run_tells_what_its_restarts_cost():
    starts = [
        Start(0, 30, 1.7e9, {"starting": 99.0, "saving": 6.0, "step": 95.0}, saves=3),
        Start(20, 30, 1.7e9 + 240, {"starting": 20.0, "restoring": 30.0, "compiling": 70.0, "saving": 2.0}, saves=1),
        Start(
            20,
            90,
            1.7e9 + 422,
            {"starting": 22.0, "restoring": 30.0, "compiling": 70.0, "saving": 50.0},
            1,
            complete=True,
        ),
    ]
    found = goodput.measure_restart(starts, "workdirs/run")
    assert found == Restart(save=2.0, detecting=50.0, starting=21.0, restoring=30.0, compiling=70.0)
    assert found.seconds == 171
    for lacking in (starts[:1], [dataclasses.replace(start, saves=0) for start in starts]):
        with pytest.raises(UserError, match=r"saved nothing or was never resumed, .*; omit --measured"):
            goodput.measure_restart(lacking, "workdirs/run")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--topology=v5e:2x4", "--failures=0"], "--failures=0 must be a positive number"),
        (["--cpu", "--failures=2"], "need a training run on TPUs: add --topology, and omit --inference"),
        (["--topology=v5e:2x4", "--inference", "--measured=run"], "need a training run on TPUs: add --topology"),
        (["--topology=v5e:2x4", "--measured=absent"], "absent is not the folder of a run"),
    ],
)
def test_what_a_plan_cannot_assume(words, sentence):
    with pytest.raises(UserError, match=sentence):
        plan.main(["plan", "--config=configs/vit_b16_jft.py", *words])
