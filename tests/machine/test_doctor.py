"""The doctor's report, and what it says of clusters and of full disks."""

import json
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.machine.helpers import marks, touch
from vit_jax import doctor
from vit_jax.machine import Finding, check_cluster, check_kernel, check_space, packages
from vit_jax.machine.cluster import CLUSTERS


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))


def test_a_real_run_in_good_health(capsys):
    doctor.main(["doctor", "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line.keys() == {"mark", "subject", "message", "told", "remedy"} for line in found)
    messages = {line["subject"]: line["message"] for line in found}
    assert messages["devices"] == "8 x cpu (cpu)"
    shown = {*packages.ALWAYS_SHOWN, *packages.FEATURES, "Python", "vit_jax", "memory", "cache"}
    assert shown <= messages.keys()
    assert messages["pictures"] == "[plot]" and messages["vit_jax"].endswith(f", {ROOT / 'vit_jax'}")


def test_what_is_broken_ends_with_code_2_and_states_the_remedy(capsys):
    missing = Finding("missing", "gs:// paths", "needs gcsfs", "a command")
    doctor.main(["doctor"], [lambda: [missing]])
    assert capsys.readouterr().out == "missing  gs:// paths: needs gcsfs\n         -> a command\n"
    with pytest.raises(SystemExit) as end:
        doctor.main(["doctor"], [lambda: [missing], lambda: [Finding("broken", "devices", "none")]])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("environment", "mark", "message"),
    [
        ({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}, "ok", "Cloud TPU: process 1 of 2, counted from 0"),
        (
            {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_PROCESS_ADDRESSES": "a:1,a:2,b:1,b:2"},
            "ok",
            "Cloud TPU: process 3 of 4, counted from 0",
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "warning", "not set: TPU_WORKER_ID"),
        ({"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}, "warning", "not set: MEGASCALE_COORDINATOR_ADDRESS"),
        ({"SLURM_JOB_ID": "7"}, "warning", "Slurm: process ? of ?"),
        (dict.fromkeys(("SLURM_JOB_ID", *CLUSTERS[2].variables), "3"), "ok", "Slurm: process 3 of 3"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "warning", "OMPI_MCA_orte_hnp_uri"),
        ({"https_proxy": "x", "GRPC_PROXY": "y"}, "warning", "https_proxy, GRPC_PROXY set"),
    ],
)
def test_the_environment_describes_a_cluster(environment, mark, message):
    [finding] = check_cluster(environment)
    assert finding.mark == mark and message in finding.message and bool(finding.remedy) == (mark == "warning")
    assert not list(check_cluster({}))


def test_disks_that_are_full(monkeypatch, tmp_path):
    assert marks(check_space())["cache"] == "ok"
    found = check_space(disk_usage=lambda folder: SimpleNamespace(free=5e8))
    assert marks(found) == {"memory": "ok", "this folder": "warning", "cache": "warning"}
    monkeypatch.setenv("VIT_JAX_CACHE", str(touch(tmp_path / "file")))
    [finding] = [finding for finding in check_space() if finding.subject == "cache"]
    assert finding.mark == "warning" and "VIT_JAX_CACHE" in finding.remedy


def test_the_kernel_of_an_accelerator_is_compared(tmp_path):
    def found(answer, **environment):
        return list(check_kernel(60, answer, tmp_path, environment))

    assert found("raise SystemExit(3)") == []  # no accelerator
    here = {"TPU_WORKER_ID": "0", "PATH": str(tmp_path)}
    assert found("print('noise'); print('[[\"MLP\", \"fused\", null]]')", **here) == [Finding("ok", "MLP", "fused")]
    [wrong] = found('print(\'[["MLP", "fused", "is wrong"]]\')', **here)
    assert wrong.mark == "warning" and wrong.message == "fused is wrong" and "report" in wrong.remedy
    [failed] = found("raise SystemExit(3)", **here)
    assert failed.mark == "warning" and failed.message == "were not compared: exit code 3"
