"""GKE: the manifest of a JobSet, and what a cluster does with it."""

import copy
import json
import re
import signal
import subprocess
import sys

import jsonschema
import pytest
import yaml

from launch import gke
from tests.conftest import ROOT
from tests.launch.cloud_flags import CHECK, flag_lines, unknown_words
from tests.launch.helpers import HOSTILE, SLICES, install_programs, make_run
from vit_jax import UserError
from vit_jax.planning import parse_topology

SCHEMA = json.loads((ROOT / "tests" / "fixtures" / "jobset.schema.json").read_text())


def manifests():
    """Manifests of all kinds."""
    for text in [*(text for text, *_ in SLICES), "tpu7x:2x2x1", "tpu7x:4x4x4"]:
        for slices in (1, 2):
            for spot, account in ((False, None), (True, "trainer")):
                yield gke.make_manifest(make_run("x", slices=slices), parse_topology(text), "image", spot, account)


def test_manifests_obey_the_strict_schema():
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for manifest in manifests():
        validator.validate(manifest)
        assert yaml.safe_load(yaml.safe_dump(manifest)) == manifest


def test_the_schema_is_strict():
    validator = jsonschema.Draft202012Validator(SCHEMA)
    manifest = next(manifests())

    def objects(value, path=()):
        if isinstance(value, dict):
            yield path
        for key, inner in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
        ):
            yield from objects(inner, (*path, key))

    for path in objects(manifest):
        spoiled = copy.deepcopy(manifest)
        place = spoiled
        for key in path:
            place = place[key]
        place["typo"] = 1
        assert not validator.is_valid(spoiled), path


def test_a_jobset_has_a_pod_for_each_machine_and_starts_again_what_may():
    manifest = gke.make_manifest(
        make_run("x", slices=3, restarts=7), parse_topology("v6e:8x16"), "image", spot=True, account="trainer"
    )
    [slices] = manifest["spec"]["replicatedJobs"]
    machines = slices["template"]["spec"]
    pod = machines["template"]["spec"]
    assert slices["replicas"] == 3 and machines["parallelism"] == machines["completions"] == 32
    assert machines["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    for rule in machines["podFailurePolicy"]["rules"]:
        assert rule["action"] == "FailJob"
        assert rule.get("onExitCodes", {"containerName": "main"})["containerName"] == pod["containers"][0]["name"]
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "8x16",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod["serviceAccountName"] == "trainer" and pod["terminationGracePeriodSeconds"] >= 300
    assert set(manifest["metadata"]["annotations"].values()) == {"cloud.google.com/gke-nodepool"}


def becomes(manifest, pods):
    """What a cluster does when pods of several Jobs have failed: for each its Job, its exit code and whether it was
    disrupted. As Kubernetes' matchPodFailurePolicy and JobSet's findFirstFailedPolicyRuleAndJob do it.
    """
    rules = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    failed = {}  # Job -> reason and message
    for name, code, disrupted in pods:
        for index, rule in enumerate(rules):
            asked = rule.get("onExitCodes")
            if code in asked["values"] if asked else disrupted:
                text = f"failed with exit code {code}" if asked else "has condition DisruptionTarget"
                failed.setdefault(
                    name, ("PodFailurePolicy", f"Pod ns/run {text} matching FailJob rule at index {index}")
                )
                break
        else:
            failed.setdefault(name, ("BackoffLimitExceeded", "Job has reached the specified backoff limit"))
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        for reason, message in failed.values():
            if reason in rule["onJobFailureReasons"] and any(
                re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"]
            ):
                return rule["action"]
    return "RestartJobSet"


def test_a_jobset_tells_preemptions_from_faults_from_what_somebody_should_look_at():
    manifest = gke.make_manifest(make_run("x", slices=2), parse_topology("v5e:4x4"), "image")
    for code in range(1, 256):
        expected = "FailJobSet" if code != 42 and code < 128 else "RestartJobSet"
        free = "RestartJobSetAndIgnoreMaxRestarts"
        assert becomes(manifest, [(0, code, False)]) == (free if code == 42 else expected)
        assert becomes(manifest, [(0, code, True)]) == free  # 137, where the machine did not wait for the save
    for pods, action in [
        ([(0, 137, True), (1, 134, False)], free),  # the other slice has lost it
        ([(0, 134, False), (1, 42, False)], free),
        ([(0, 134, False), (1, 1, False)], "FailJobSet"),
        ([(0, 42, False), (1, 2, False)], "FailJobSet"),
        ([(0, 134, False), (1, 137, False)], "RestartJobSet"),
    ]:
        assert becomes(manifest, pods) == action, pods


def test_each_numa_node_of_a_machine_has_a_container():
    manifest = gke.make_manifest(make_run("x", slices=2), parse_topology("tpu7x:2x2x4"), "image")
    machines = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = machines["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu7x",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
    }
    assert machines["completions"] == 4
    assert [container["resources"]["limits"] for container in pod["containers"]] == [{"google.com/tpu": 2}] * 2
    assert len({container["name"] for container in pod["containers"]}) == 2
    for rule in machines["podFailurePolicy"]["rules"][1:]:  # of all containers
        assert "containerName" not in rule["onExitCodes"]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("tpu7x:2x2x1", "--machine-type=tpu7x-standard-4t --num-nodes=1"),
        ("tpu7x:2x2x2", "--machine-type=tpu7x-standard-4t --num-nodes=2 --placement-policy=tpu7x-2x2x2"),
        ("v5e:4x4", "--machine-type=ct5lp-hightpu-4t --num-nodes=4 --tpu-topology=4x4"),
        ("v4:2x2x2", "--machine-type=ct4p-hightpu-4t --num-nodes=2 --tpu-topology=2x2x2"),
    ],
)
def test_node_pools_name_a_topology_or_a_policy(text, flags):
    *policies, first, second = gke.node_pool_commands(make_run("x", slices=2), parse_topology(text))
    assert [argv[4] for argv in (first, second)] == ["run-0", "run-1"] and first[-len(flags.split()) :] == flags.split()
    assert [argv[5:8] for argv in policies] == (
        [["tpu7x-2x2x2", "--type=HIGH_THROUGHPUT", "--accelerator-topology=2x2x2"]] if "policy" in flags else []
    )


def test_the_container_becomes_the_command_so_that_it_gets_the_signal(tmp_path):
    code = "import os, sys; print(os.getpid(), sys.argv[1:], flush=True); import time; time.sleep(60)"
    manifest = gke.make_manifest(make_run(sys.executable, "-c", code, *HOSTILE), parse_topology("v5e:1x1"), "image")
    [container] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    command = [word.replace("$$", "$") for word in container["command"]]  # as Kubernetes does
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == f"{process.pid} {HOSTILE}\n"
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM


GKE = ["gke", "run", "--topology=v5e:4x4", "--image=i", "--allow-local-output", "--", "python", *HOSTILE]


def test_kubectl_gets_what_the_dry_run_prints(tmp_path, monkeypatch, capsys):
    kubectl = f'''{CHECK}echo "$@" > "$PLAY/words"; cat > "$PLAY/input"; exit "$(cat "$PLAY/code")"'''
    install_programs(tmp_path, monkeypatch, kubectl=kubectl)
    (tmp_path / "flags").write_text(flag_lines())
    (tmp_path / "code").write_text("0")
    gke.main(GKE)
    told = capsys.readouterr().out
    assert "kubectl delete jobset run;" in told
    for command in re.findall(r"kubectl [^;\n]*", told):
        assert unknown_words(command.split()) == []
    gke.main([*GKE[:5], "--dry-run", *GKE[5:]])
    text = capsys.readouterr().out
    pools, manifest = text.rsplit("# ", 1)[0], text[text.index("apiVersion") :]
    assert pools.startswith("# The node pools") and yaml.safe_load(text) == yaml.safe_load(manifest)
    assert (tmp_path / "words").read_text() == "apply --filename=-\n" and (tmp_path / "input").read_text() == manifest
    assert yaml.safe_load(text) == gke.make_manifest(make_run("python", *HOSTILE), parse_topology("v5e:4x4"), "i")
    (tmp_path / "code").write_text("1")
    with pytest.raises(UserError, match="the cluster rejected"):
        gke.main(GKE)
    said = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    install_programs(tmp_path, monkeypatch, kubectl=f"cat > /dev/null; echo '{said}' >&2; exit 1")
    with pytest.raises(UserError, match="cannot reach a cluster; choose one with gcloud container clusters get-cred"):
        gke.main(GKE)
    assert capsys.readouterr().err == f"{said}\n"
    with pytest.raises(UserError, match="GKE joins only slices of several machines, and v5e:2x4 is one machine"):
        gke.main(["gke", "run", "--topology=v5e:2x4", "--slices=2", "--image=i", "--allow-local-output", "--", "x"])
