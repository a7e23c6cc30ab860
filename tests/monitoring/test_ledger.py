"""Where the time of a run goes: every second belongs to one category, over restarts too."""

import dataclasses
import json
import shlex
import subprocess
import sys
import threading
import time

import jax
import pytest

from tests.conftest import ROOT
from vit_jax.distributed import Supervisor
from vit_jax.monitoring import (
    Category,
    Ledger,
    ProcessFile,
    Start,
    goodput,
    ledger_lines,
    python_seconds,
    read_processes,
    run_ledger,
    total_seconds,
)

pytestmark = pytest.mark.flaky(reruns=1)  # these wait for a thread


class Clock:
    """A clock that passes when it is told to."""

    def __init__(self):
        self.seconds = 1000.0

    def __call__(self):
        return self.seconds

    def spend(self, seconds):
        self.seconds += seconds


class Results:
    """What a step returns, which is ready when the test says so."""

    def __init__(self):
        self.ready = threading.Event()

    def block_until_ready(self):
        assert self.ready.wait(10)
        return self


@pytest.fixture
def clock():
    return Clock()


def spent(ledger):
    return {category: seconds for category, seconds in ledger.seconds.items() if seconds}


def finish(ledger, results):
    """Has the devices finish a step; returns when the ledger knows."""
    finished, until = ledger._devices._finished, time.monotonic() + 10
    results.ready.set()
    while ledger._devices._finished == finished and time.monotonic() < until:
        time.sleep(0.001)


def test_each_second_belongs_to_one_category(clock):
    supervisor = Supervisor(clock=clock, age=7.0)
    clock.spend(1)
    with supervisor.phase("restoring", Category.RESTORING):
        clock.spend(2)
        supervisor.all_gather("sizes")  # other phases keep the category
        clock.spend(3)
    with supervisor.phase("evaluation", Category.EVALUATING):
        clock.spend(4)
        with supervisor.phase("saving", Category.SAVING):
            clock.spend(5)
        clock.spend(6)
    found = spent(supervisor.ledger)
    starting, evaluating = 7 + 1, 4 + 6
    assert found == {
        Category.STARTING: starting,
        Category.RESTORING: 5,
        Category.EVALUATING: evaluating,
        Category.SAVING: 5,
    }
    assert sum(found.values()) == clock() - 1000 + 7


def test_a_second_run_of_a_process_begins_anew(clock):
    supervisor = Supervisor(clock=clock, age=7.0)
    supervisor.begin_run(60.0)
    assert spent(supervisor.ledger) == {Category.STARTING: 7}
    clock.spend(5)
    supervisor.begin_run(60.0)
    clock.spend(1)
    assert spent(supervisor.ledger) == {Category.STARTING: 1}


def test_data_is_waited_for_only_while_the_devices_are_idle(clock):
    ledger, first, second = Ledger(clock=clock), Results(), Results()
    ledger.enter(Category.DATA)
    clock.spend(3)  # nothing was dispatched yet
    ledger.dispatch(first, Category.REDONE)
    clock.spend(1)
    ledger.enter(Category.DATA)
    clock.spend(10)  # hidden by the step
    ledger.dispatch(second, Category.STEP)
    finish(ledger, first)
    ledger.enter(Category.DATA)
    clock.spend(2)
    finish(ledger, second)
    clock.spend(4)
    ledger.enter(Category.STEP)
    ledger.close()
    assert spent(ledger) == {Category.DATA: 3 + 4, Category.REDONE: 1 + 10, Category.STEP: 2}


def test_results_that_fail_are_finished(clock):
    class Failing(Results):
        def block_until_ready(self):
            super().block_until_ready()
            raise RuntimeError("a device is lost")

    ledger, failing = Ledger(clock=clock), Failing()
    ledger.dispatch(failing, Category.STEP)
    finish(ledger, failing)
    assert ledger._devices.idle_seconds() == 0 and ledger._devices._finished[0] == 1
    ledger.close()


def test_the_time_of_a_start_contains_imports_but_not_what_the_shell_did_before():
    """A shell becomes its last command, so that the age of the process is that of the shell."""
    script = "import time; began = time.monotonic(); from vit_jax import PYTHON_STARTED; print(began - PYTHON_STARTED)"
    command = f"sleep 1; exec {shlex.quote(sys.executable)} -c {shlex.quote(script)}"
    told = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert abs(float(told)) < 0.8  # Python's own start takes some hundredths of a second
    age = python_seconds()
    time.sleep(0.05)
    assert 0.03 < python_seconds() - age < 5


NOW, HUGE = 1.8e9, "9" * 400  # seconds since 1970, and a number beyond floats


def start(folder, first, total=100, clock=time.monotonic, ledger=None):
    return ProcessFile(folder, first, total, ledger or Ledger(clock=clock), jax.devices(), clock=clock)


def read(text, name="processes.json"):
    return read_processes({name: text}, "run").starts


def row(first, last, began, complete=False, **seconds):
    return Start(first, last, began, {name.replace("_", " "): spent for name, spent in seconds.items()}, 1, complete)


def test_starts_add_up_and_steps_are_done_again(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(run_ledger, "INTERVAL", 10.0)
    killed = start(tmp_path, 0, clock=clock)
    for step in range(1, 38):
        clock.spend(1)
        assert killed.category(step) is (Category.COMPILING if step == 1 else Category.STEP)
        killed.count_step(step, ())
    written = read((tmp_path / "processes.json").read_bytes())
    assert [one.last for one in written] == [33]  # every eleven seconds
    resumed = start(tmp_path, 30, clock=clock)
    assert resumed.reached == 33
    categories = [resumed.category(step) for step in (31, 32, 33, 34)]
    assert categories == [Category.COMPILING, Category.REDONE, Category.REDONE, Category.STEP]
    resumed.count_save(50)
    resumed.complete()
    text = (tmp_path / "processes.json").read_bytes()
    assert [(one.first, one.last, one.saves, one.complete) for one in read(text)] == [
        (0, 33, 0, False),
        (30, 30, 1, True),
    ]
    start(tmp_path, 100, clock=clock).close()  # a complete run that is looked at again
    assert (tmp_path / "processes.json").read_bytes() == text


def test_what_lies_at_step_0_is_of_another_run_unless_it_made_steps(tmp_path, clock):
    start(tmp_path, 0, clock=clock)
    second = start(tmp_path, 0, clock=clock)
    second.count_step(1, ())
    second.write()
    assert len(read((tmp_path / "processes.json").read_bytes())) == 1
    assert start(tmp_path, 0, clock=clock).reached == 1
    assert len(read((tmp_path / "processes.json").read_bytes())) == 2


def test_a_run_of_an_earlier_version_that_is_complete_gets_no_file(tmp_path):
    start(tmp_path, 100).close()
    assert not (tmp_path / "processes.json").exists()


def test_the_sum_is_the_time_from_the_first_start_to_the_end_of_the_last():
    starts = [
        row(0, 30, NOW, starting=10, compiling=5, step=30),
        row(20, 40, NOW + 100, starting=10, restoring=2, step=8, steps_done_again=10),
        row(40, 60, NOW + 125, starting=5, step=20),  # the clock was set back
    ]
    total = total_seconds(starts)
    assert total[Category.IDLE] == 100 - 45 and total[Category.REDONE] == 10
    assert sum(total.values()) == 45 + 55 + 30 + 25
    assert goodput(total) == pytest.approx(58 / 155)
    assert goodput(total_seconds([])) == 0 and ledger_lines([]) == []
    unset = [row(0, 30, 12.0, step=30), *starts[1:]]  # the clock was not set before the second start
    assert total_seconds(unset)[Category.IDLE] == 0
    longer = [dataclasses.replace(starts[0], complete=True), *starts[1:]]  # trained further: not idle in between
    assert total_seconds(longer)[Category.IDLE] == 0
    lines = ledger_lines(starts)
    assert lines[0].startswith("Goodput: 37.4%") and lines[-1].split() == ["all", "155.0", "s", "3", "starts"]
    assert "since step 20" in ledger_lines(starts[1:])[-1]


@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "{}",
        "[1, null]",
        '[{"first": 0}]',
        '[{"first": 9, "last": 3, "began": 1.0, "seconds": {}}]',
        '[{"first": 0, "last": 3, "began": "x", "seconds": {}}]',
        '[{"first": 0, "last": 3, "began": 1.0, "seconds": {"nothing": 1.0}}]',
        '[{"first": 0, "last": 3, "began": 1.0, "seconds": {"step": -1.0}}]',
        '[{"first": 0, "last": 3, "began": NaN, "seconds": {}}]',
        '[{"first": 0, "last": 3, "began": 1.0, "seconds": [1]}]',
        f'[{{"first": 0, "last": 3, "began": 1.0, "seconds": {{"step": {HUGE}}}}}]',
        f'[{{"first": 0, "last": 3, "began": {HUGE}, "seconds": {{}}}}]',
        f'[{{"first": 0, "last": {HUGE}, "began": 1.0, "seconds": {{}}}}]',
        '[{"first": 0, "last": 3, "began": 1.0, "seconds": {}, "saves": "x"}]',
        "[" * 100_000,
    ],
    ids=lambda damaged: damaged[:60],
)
def test_damage_costs_the_damaged_rows_alone(tmp_path, damaged):
    assert read(damaged.encode(), "ledger.json") == []
    (tmp_path / "ledger.json").write_text(damaged)
    start(tmp_path, 10).write()
    assert len(read((tmp_path / "processes.json").read_bytes())) == 1
    sound = json.dumps(dataclasses.asdict(row(0, 5, 1.0, step=2)))
    assert len(read(f"[{sound}, {{}}, 1]".encode(), "ledger.json")) == 1


def test_a_disk_that_refuses_ends_no_run(tmp_path, monkeypatch):
    one = start(tmp_path / "absent", 0)
    monkeypatch.setattr(run_ledger, "INTERVAL", -1.0)
    one.count_step(1, ())
    one.close()
    assert one.starts[0].last == 1
