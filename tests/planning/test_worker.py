"""Plans of this machine, compiled in this process, and of an absent TPU slice, compiled in a process of its own."""

import dataclasses
import importlib.util
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.planning.builders import EXECUTABLE, make_compilation
from tests.test_program import build
from vit_jax import UserError, plan, tree
from vit_jax.config import evaluation, parse_command_line
from vit_jax.planning import client, plan_table, planner, records, targets, worker
from vit_jax.planning.records import EvaluationReport, Plan, PlanRequest
from vit_jax.planning.time_estimate import model_flops_per_image
from vit_jax.program import program_without_data

WORDS = [f"--config={ROOT}/configs/smoke.py", "--config.data.num_classes=10", "--config.data.num_examples=1438"]
WORDS += ["--config.task.mixup=0.0"]  # it takes half of the time to compile
FSDP = ["--config.mesh.data=1", "--config.mesh.fsdp=-1"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def compile_here(words, inference=False):
    """What is compiled, in words, and the compilation, by the CPU of this process."""
    *progress, compilation = worker.compile_request(PlanRequest(tuple(words), "cpu", inference))
    return progress, compilation


def expected_bytes(mesh):
    """Bytes of the parameters that a device holds, by the numbers of their elements; and how many moments there are."""
    config, _ = parse_command_line(["plan", *WORDS, f"--config.mesh.fsdp={mesh['fsdp']}"])
    program = build(config, devices=mesh["fsdp"])
    places = tree.flatten(program.state_shardings.params)
    params = {
        name: leaf.size // math.prod(mesh[axis] for axis in places[name].spec if axis)
        for name, leaf in tree.flatten(program.state.params).items()
    }
    moments = 2 if config.optim.name == "adamw" else 1
    return sum(params.values()) * 4, moments


def test_the_workload_is_that_of_the_run():
    """It saves before each evaluation, and SAM computes two gradients."""
    config, _ = parse_command_line(["plan", *WORDS])
    with config.unlocked():
        config.evals.often = evaluation(**{**config.evals.test, "every": 5})
        config.evals.test.every, config.eval_every, config.checkpoint_every = 70, 3, 100
    config.optim.sam_rho = 0.05
    config, program = program_without_data(config)
    workload = worker.describe_workload(config, program, PlanRequest(tuple(WORDS), "cpu"), 1000)
    assert workload.save_steps == 5
    assert model_flops_per_image(workload) == 2 * 6 * workload.macs_per_image
    taught = dataclasses.replace(workload, teacher_macs=7)
    assert model_flops_per_image(taught) == model_flops_per_image(workload) + 2 * 7
    assert model_flops_per_image(dataclasses.replace(workload, inference=True)) == 2 * workload.macs_per_image


def test_the_price_of_a_run_is_told_with_that_of_a_chip_hour():
    compilation = make_compilation(900, executable=dataclasses.replace(EXECUTABLE, cycles=10**9))
    request = PlanRequest(("--config=configs/smoke.py",), "v5e:2x4")
    made = planner.make_plan(request, lambda request: compilation, chip_hour_price=1.25)
    hours = made.estimate.run.chip_hours
    assert re.search(rf"^  price +{1.25 * hours:,.0f}, at 1.25 a chip-hour$", plan_table.render_plans([made]), re.M)


@pytest.mark.parametrize("price", ["-1", "nan", "inf"])
def test_a_price_is_a_number_above_0(price):
    with pytest.raises(UserError, match=f"--price={price} must be a positive number: the price of a chip-hour"):
        plan.main(["plan", *WORDS, "--topology=v5e:2x4", f"--price={price}"])


@pytest.mark.slow
def test_the_compiler_here_is_asked_once(cache, monkeypatch):
    progress, found = compile_here([*WORDS, *FSDP])
    assert progress == [
        "the train step of ViT-mu/4, 4 images per device, cpu, fsdp=8",
        "the evaluation step of ViT-mu/4, cpu, fsdp=8",
    ]
    workload, step, evaluation = found.workload, found.step, found.evaluation
    assert found.fits and not step.remembered
    assert workload.images_per_host == workload.batch == 8 * workload.images_per_device
    assert workload.waiting_bytes == workload.images_per_device * 16 * 16 * 3 * 7
    params, moments = expected_bytes(workload.mesh)
    assert workload.parameter_bytes == params and workload.devices == 8
    assert 0 < workload.state_bytes - params * (1 + moments) < 100  # and counters
    assert step.executable.peak_bytes > workload.state_bytes + step.executable.temp_bytes
    assert step.executable.collectives["all-gather"].bytes > 0 and step.executable.cycles is None
    assert (evaluation.batch, evaluation.images_per_device, evaluation.needed_bytes) == (120, 15, None)
    assert workload.state_bytes < evaluation.peak_bytes  # the optimizer's part stays there meanwhile
    _, again = compile_here([*WORDS, *FSDP])
    remembered = {"remembered": True}
    assert again == dataclasses.replace(
        found,
        step=dataclasses.replace(step, **remembered),
        evaluation=dataclasses.replace(evaluation, **remembered),
    )
    _, other = compile_here([*WORDS, *FSDP], inference=True)
    assert not other.step.remembered and len(list(cache.iterdir())) == 3
    assert other.step.executable.peak_bytes < step.executable.peak_bytes and other.evaluation is None
    monkeypatch.setattr(targets, "device_memory", lambda target, devices: 2 * step.executable.peak_bytes)
    _, large = compile_here([*WORDS, *FSDP, "--config.batch_eval=20000"])
    assert large.step.remembered and large.step.needed_bytes is None and not large.fits
    assert large.evaluation.needed_bytes > 2500 * 16 * 16 * 3 * 4 > large.workload.memory_bytes
    text = plan_table.render_plans([Plan(large)])
    assert re.search(r"^fits +no$", text, re.M)
    assert re.search(r"^needed, evaluation .* 2,500 images a chip$", text, re.M)
    assert re.search(r"^peak  ", text, re.M)


def test_what_is_too_large_for_this_machine_does_not_fit(monkeypatch):
    monkeypatch.setattr(targets, "device_memory", lambda target, devices: 1000)
    _, found = compile_here(WORDS, inference=True)
    assert not found.fits and found.step.needed_bytes == found.step.executable.peak_bytes > 1000


def test_a_damaged_report_in_the_cache_is_compiled_anew(cache):
    _, found = compile_here(WORDS, inference=True)
    [path] = cache.iterdir()
    path.write_text("{}")
    _, again = compile_here(WORDS, inference=True)
    assert again.step.executable == found.step.executable and not again.step.remembered


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu for this kind of machine")
def test_an_absent_slice(capsys):
    mesh = "--config.mesh.fsdp=8"  # cuts a dimension of the slice in two
    plan.main(
        ["plan", *WORDS, mesh, "--config.batch_eval=32", "--topology=v5e:4x4", "--price=2", "--json", "--schedule"]
    )
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["devices"] == 16 and found["device_kind"] == "TPU v5 lite"
    params, _ = expected_bytes(found["mesh"])
    assert found["parameter_bytes"] == params and found["memory_bytes"] == 15.75 * 2**30
    assert found["state_bytes"] < found["peak_bytes"] < found["memory_bytes"]
    assert found["evaluation"]["fits"] and found["evaluation"]["images_per_device"] == 2
    assert found["state_bytes"] < found["evaluation"]["peak_bytes"] < found["memory_bytes"]
    assert found["cycles"] > 0 and found["exchange_seconds"] > 0 and 0 < found["mfu"] < 1
    assert found["images_per_host"] == found["batch"] / 4 and found["host_cores"] == 112  # machines of four chips
    rows = found["collectives"]
    most = sum(2 * row["bytes"] for row in rows.values())
    assert most / 4 < found["exchange_seconds"] * 50e9 < most  # a chip of 4x4 has two links or more, groups have one
    assert found["command"].startswith("python -m launch.tpu_vm run smoke --topology=v5e:4x4 --zone=ZONE -- python -m ")
    assert " --config.mesh.fsdp=8 " in found["command"] and found["command"].endswith("/smoke")
    assert found["dtype"] == "bfloat16" and found["price"] == 2 * found["chip_hours"]
    assert {"all-gather", "all-reduce"} <= set(found["collectives"])
    schedule = found["schedule"]
    assert schedule["kinds"]["matmul"] > 0 and schedule["missing"] == 0 and 0 < schedule["mfu"] < 1
    assert 0 < schedule["cycles_per_image"] < found["cycles_per_image"]  # the compiler's estimate is pessimistic
    assert schedule["exchange_exposed"] + schedule["exchange_hidden"] > 0
    assert 0.9 < found["flops"] / found["model_flops"] < 1  # images need no gradient


def test_the_table_has_a_column_for_each_plan(monkeypatch, capsys):
    """Two strategies, the first too large: advice is asked for, and shown."""

    def compile_too_large_at_first(request):
        _, found = compile_here(request.words, request.inference)
        asked.append(request.words)
        peak = found.step.executable.peak_bytes
        if len(asked) == 1:
            workload = dataclasses.replace(found.workload, memory_bytes=peak)
            return dataclasses.replace(
                found, workload=workload, step=dataclasses.replace(found.step, needed_bytes=2 * peak)
            )
        return found

    asked = []
    monkeypatch.setattr(plan, "compile_in_subprocess", compile_too_large_at_first)
    plan.main(["plan", *WORDS, "--cpu=8", "--strategy=replicated,fsdp", "--inference"])
    text = capsys.readouterr().out
    first, *_ = text.splitlines()
    assert first.split() == ["cpu", "cpu"]
    change = [word for word in asked[1] if word not in asked[0]]
    assert change and f"cpu, data=8: it fits with {' '.join(change)} (compiled):" in text
    assert next(line.split() for line in text.splitlines() if line.startswith("fits")) == ["fits", "no", "yes"]


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Lets a script play the compiler's process."""

    def play(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(client.sys, "executable", str(path))

    return play


def test_why_the_compilers_process_failed_is_passed_on(child):
    child("echo noise >&2; echo 'vit_jax: no such field.' >&2; exit 2")
    with pytest.raises(UserError, match=r"^no such field\.$"):
        client.compile_in_subprocess(PlanRequest((), "cpu"))
    child("echo '{}' | head -c 0; echo 'F0101 lock held' >&2; kill -ABRT $$")
    with pytest.raises(UserError, match=r"^the compiler crashed on this program with signal 6: F0101 lock held"):
        client.compile_in_subprocess(PlanRequest((), "v5e:2x2"))


@pytest.mark.flaky(reruns=1)  # it waits on the clock
def test_what_is_compiled_is_shown_while_it_lasts(child, capsys, monkeypatch):
    evaluation_step = EvaluationReport(8, 1, 900, None, compile_seconds=1.0, remembered=False)
    found = make_compilation(900, evaluation_step)
    answers = [{"compiling": "the train step"}, {"compiling": "the evaluation step"}]
    answers += [{"compiled": records.compilation_to_json(found)}]
    child("; sleep 0.3; ".join(f"echo '{json.dumps(answer)}'" for answer in answers))
    monkeypatch.setattr(client, "QUIET_SECONDS", 0.1)
    assert client.compile_in_subprocess(PlanRequest((), "v5e:2x2")) == found
    assert capsys.readouterr().err.splitlines() == [
        f"compiling the train step; {client.FIRST_TIME}",
        "0 s",
        f"compiling the evaluation step; {client.FIRST_TIME}",
        "0 s",
    ]
    client.compile_in_subprocess(PlanRequest((), "v5e:4x4"))
    first, share, *_ = capsys.readouterr().err.splitlines()
    assert first == "compiling the train step; the last time, such a function took 0 s"
    assert re.fullmatch(r"0 s, \d\d%", share)
    for other in (PlanRequest((), "v6e:2x2"), PlanRequest((), "v5e:2x2", reads_schedules=True)):
        client.compile_in_subprocess(other)
        assert client.FIRST_TIME in capsys.readouterr().err


def test_the_compilers_process_is_no_host_of_a_pod(monkeypatch):
    for name in ("TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES", "SLURM_JOB_ID", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.setenv(name, "10.0.0.1,10.0.0.2")
    found = targets.compiler_environment(PlanRequest((), "v5e:2x2"))
    assert "10.0.0.1,10.0.0.2" not in found.values() and found["JAX_PLATFORMS"] == "cpu"
    assert found.items() >= targets.NO_POD.items()
    assert targets.compiler_environment(PlanRequest((), "cpu", emulated_devices=3))["XLA_FLAGS"].endswith(
        "device_count=3"
    )


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu for this kind of machine")
def test_the_devices_are_those_of_all_slices(monkeypatch):
    def describe(platform, topology_name, num_slices=1, **options):
        return SimpleNamespace(devices=[topology_name] * num_slices)

    monkeypatch.setattr(targets.topologies, "get_topology_desc", describe)
    find = getattr(targets.find_devices, "__wrapped__", targets.find_devices)  # unchecked, as these are no devices
    assert [find("v5e:2x4", slices) for slices in (1, 3)] == [["v5e:2x4"], ["v5e:2x4"] * 3]


def test_wrong_usage_is_refused_before_anything_is_compiled(capsys):
    for words, sentence in (
        (["--topology=v5e:2x2,v9:4"], "unknown TPU 'v9'"),
        (["--topology=v5e:2x2", "--strategy=fsdq"], "did you mean 'fsdp'"),
        (["--cpu", "--schedule"], "only the compiler for TPUs writes schedules"),
    ):
        with pytest.raises(UserError, match=sentence):
            plan.main(["plan", *WORDS, *words])
    with pytest.raises(SystemExit):
        plan.main(["plan", *WORDS])
    assert "--topology" in capsys.readouterr().err


@pytest.mark.flaky(reruns=1)  # it waits on the clock
def test_a_compilation_ends_with_the_process_that_asked():
    worker = "import os; from vit_jax.planning.worker import end_with_parent; parent = os.getppid(); "
    worker += "print(os.getpid(), flush=True); end_with_parent(parent, 0.05)"
    asks = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}]).wait()"
    with subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True) as process:
        number = int(process.stdout.readline())
        process.kill()
    end = time.monotonic() + 20
    while Path(f"/proc/{number}").exists() and "Z" not in Path(f"/proc/{number}/stat").read_text().split()[2]:
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.05)
