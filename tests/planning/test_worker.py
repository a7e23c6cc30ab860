"""Plans: of this machine in this process, of an absent TPU slice in a process of its own."""

import importlib.util
import json
import math
import re

import pytest

from tests.conftest import ROOT
from tests.test_program import build
from vit_jax import UserError, main, plan, tree
from vit_jax.planning import client, report, worker
from vit_jax.planning import target as topology

WORDS = [f"--config={ROOT}/configs/smoke.py", "--config.data.num_classes=10", "--config.data.num_examples=1438"]
WORDS += ["--config.task.mixup=0.0"]  # it takes half of the time to compile
FSDP = ["--config.mesh.data=1", "--config.mesh.fsdp=-1"]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def pieces(facts):
    """Bytes of parameters and of the whole state that a device holds, by the numbers of their elements."""
    config, _ = main.parse(["plan", *WORDS, f"--config.mesh.fsdp={facts['mesh']['fsdp']}"])
    program = build(config, devices=facts["mesh"]["fsdp"])
    places = tree.flatten(program.state_shardings.params)
    params = {
        name: leaf.size // math.prod(facts["mesh"][axis] for axis in places[name].spec if axis)
        for name, leaf in tree.flatten(program.state.params).items()
    }
    moments = 2 if config.optim.name == "adamw" else 1
    return sum(params.values()) * 4, moments


def test_the_compiler_here_is_asked_once(cache, monkeypatch):
    before, between, facts = worker.answer([*WORDS, *FSDP], "cpu", False)
    assert (before.pop("compiling"), between) == ("train step", {"compiling": "evaluation step"})
    assert before.items() <= facts.items() and facts["fits"] and not facts["remembered"]
    assert facts["images_per_host"] == facts["batch"] == 8 * facts["images_per_device"]
    assert facts["waiting_bytes"] == facts["images_per_device"] * 16 * 16 * 3 * 7
    params, moments = pieces(facts)
    assert facts["parameter_bytes"] == params and facts["devices"] == 8
    assert 0 < facts["state_bytes"] - params * (1 + moments) < 100  # and counters
    assert facts["peak_bytes"] > facts["state_bytes"] + facts["temp_bytes"]
    assert facts["collectives"]["all-gather"]["bytes"] > 0 and facts["cycles"] is None
    evaluation = facts["evaluation"]
    assert (evaluation["batch"], evaluation["images_per_device"], evaluation["fits"]) == (120, 15, True)
    assert facts["state_bytes"] < evaluation["peak_bytes"]  # the optimizer's, too, lies there meanwhile
    *_, again = worker.answer([*WORDS, *FSDP], "cpu", False)
    assert again == facts | {"remembered": True, "evaluation": evaluation | {"remembered": True}}
    *_, other = worker.answer([*WORDS, *FSDP], "cpu", True)
    assert not other["remembered"] and len(list(cache.iterdir())) == 3
    assert other["peak_bytes"] < facts["peak_bytes"] and "evaluation" not in other
    monkeypatch.setattr(topology, "memory", lambda target, devices: 2 * facts["peak_bytes"])
    *_, large = worker.answer([*WORDS, *FSDP, "--config.batch_eval=20000"], "cpu", False)
    assert large["remembered"] and "needed_bytes" not in large and not large["fits"]
    assert large["evaluation"]["needed_bytes"] > 2500 * 16 * 16 * 3 * 4 > large["memory_bytes"]
    text = report.render([large])
    assert re.search(r"^fits +no$", text, re.M) and re.search(
        r"^needed, evaluation .* 2,500 images a chip$", text, re.M
    )
    assert re.search(r"^peak  ", text, re.M)


def test_what_is_too_large_for_this_machine_is_told(monkeypatch):
    monkeypatch.setattr(topology, "memory", lambda target, devices: 1000)
    *_, facts = worker.answer(WORDS, "cpu", True)
    assert not facts["fits"] and facts["needed_bytes"] == facts["peak_bytes"] > 1000


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu for this kind of machine")
def test_an_absent_slice(capsys):
    mesh = "--config.mesh.fsdp=8"  # cuts a dimension of the slice in two
    plan.main(["plan", *WORDS, mesh, "--config.batch_eval=32", "--topology=v5e:4x4", "--price=2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["devices"] == 16 and found["device_kind"] == "TPU v5 lite"
    params, _ = pieces(found)
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
    assert 0.9 < found["flops"] / found["model_flops"] < 1  # images need no gradient


def test_the_table_has_a_column_for_each_plan(monkeypatch, capsys):
    """Two strategies, the first too large: advice is asked for, and shown."""

    def answer(words, target, inference=False, emulated=1):
        *_, facts = worker.answer(words, "cpu", inference)
        asked.append(words)
        if len(asked) == 1:
            return facts | {"fits": False, "memory_bytes": facts["peak_bytes"], "needed_bytes": 2 * facts["peak_bytes"]}
        return facts

    asked = []
    monkeypatch.setattr(plan, "compile_elsewhere", answer)
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


def test_what_the_compilers_process_says_is_passed_on(child):
    child("echo noise >&2; echo 'vit_jax: no such field.' >&2; exit 2")
    with pytest.raises(UserError, match=r"^no such field\.$"):
        client.compile_elsewhere([], "cpu")
    child("echo '{}' | head -c 0; echo 'F0101 lock held' >&2; kill -ABRT $$")
    with pytest.raises(UserError, match=r"^the compiler crashed on this program, by signal 6: F0101 lock held"):
        client.compile_elsewhere([], "v5e:2x2")


def test_what_is_compiled_is_told_while_it_lasts(child, capsys, monkeypatch):
    facts = {
        "compiling": "train step",
        "model": "ViT-B/16",
        "images_per_device": 16,
        "accum_steps": 2,
        "remat": "full",
        "mesh": {"data": 4},
    }
    second = {"compiling": "evaluation step"}
    lines = [json.dumps(each) for each in (facts, second, {"fits": True})]
    child(f"echo '{lines[0]}'; sleep 0.3; echo '{lines[1]}'; sleep 0.3; echo '{lines[2]}'")
    monkeypatch.setattr(client, "PATIENCE", 0.1)
    found = client.compile_elsewhere([], "v5e:2x2")
    assert found["fits"] and "compiling" not in found
    assert capsys.readouterr().err.splitlines() == [
        "compiling the train step of ViT-B/16, 16 images a device in 2 parts, remat=full, v5e:2x2, data=4: 0 s",
        "compiling the evaluation step of ViT-B/16, v5e:2x2, data=4: 0 s",
    ]


def test_the_compilers_process_is_no_host_of_a_pod(monkeypatch):
    for name in ("TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES", "SLURM_JOB_ID", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.setenv(name, "10.0.0.1,10.0.0.2")
    found = topology.environment("v5e:2x2", 1)
    assert "10.0.0.1,10.0.0.2" not in found.values() and found["JAX_PLATFORMS"] == "cpu"
    assert found.items() >= topology.QUIET.items()
    assert topology.environment("cpu", 3)["XLA_FLAGS"].endswith("device_count=3")


def test_wrong_usage_is_told_before_anything_is_compiled(capsys):
    for words, sentence in (
        (["--topology=v5e:2x2,v9:4"], "unknown TPU 'v9'"),
        (["--topology=v5e:2x2", "--strategy=fsdq"], "did you mean 'fsdp'"),
    ):
        with pytest.raises(UserError, match=sentence):
            plan.main(["plan", *WORDS, *words])
    with pytest.raises(SystemExit):
        plan.main(["plan", *WORDS])
    assert "--topology" in capsys.readouterr().err
