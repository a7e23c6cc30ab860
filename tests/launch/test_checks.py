"""Checks before machines cost: where a command writes, its configuration, its config file."""

import contextlib
import re
import shlex
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from launch import checks, job, slurm, tpu_vm
from tests.conftest import ROOT
from tests.launch.helpers import MAINS, make_run
from vit_jax import UserError


def refused(line, shared_disk=False):
    """What a command is refused for; None if it is not."""
    try:
        checks.check_output(make_run(*shlex.split(line)), shared_disk, allowed=False)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("module", ["vit_jax.main", "vit_jax.sweep", "vit_jax.finetune"])
@pytest.mark.parametrize(
    "start",
    [
        "python -m {}",
        "python3.11 -u -m {}",
        "/venv/bin/python {path}",
        "env A=1 B= python -m {}",
        "timeout 9h python {path}",
        "vit-jax {door}",
        "env A=1 python -m vit_jax {door}",
    ],
)
def test_checkpoints_must_not_vanish_with_the_machine(module, start):
    door = module.removeprefix("vit_jax.").replace("main", "train")
    command = start.format(module, path=f"./{module.replace('.', '/')}.py", door=door)
    local = ["", "--workdir=run", "--workdir=gs://b/r --workdir run", "--workdir=", "--workdir", "--workdir=file:///d"]
    assert "writes would be deleted with the machine" in refused(
        f"{command} --workdir=s3://b/r"
    )  # one host alone can write there
    for words in local:
        for shared_disk in (False, True):
            assert f"{module} writes would be deleted with the machine" in refused(
                f"{command} --config=c {words}", shared_disk
            )
    for words in ("--workdir=gs://b/r", "--workdir gs://b", "--workdir=run --workdir=gs://b/r"):
        assert refused(f"{command} {words} --json") is None and refused(f"{command} {words}", shared_disk=True) is None
    assert refused(f"{command} --workdir=/d/run", shared_disk=True) is None
    assert refused(f"{command} --workdir=/d/run").endswith("add --workdir=gs://BUCKET/FOLDER.")


def test_embeddings_are_written_where_they_stay():
    line = "python -m vit_jax.embed --top 5 tfds:cifar10 {} --of=gs://b/run"
    assert refused(line.format("gs://b/out")) is None
    assert refused(line.format("/disk/out"), shared_disk=True) is None
    for place in ("out", "/disk/out"):
        assert refused(line.format(place)).endswith(
            "deleted with the machine that wrote it; write to gs://BUCKET/FOLDER."
        )


@pytest.mark.parametrize(
    "command",
    [
        "python -m vit_jax.pack digits gs://b/packed",
        "python -m vit_jax.convert --layout=google ViT-B/16-imagenet21k /d/x.npz",
        "python -m docs.plans --write docs/plans.md",
        "bash -c 'python -m vit_jax.main --workdir=gs://b/r'",
        "sh -c 'cd /; true' python -m vit_jax.main --workdir=gs://b/r",
        "timeout 9h /bin/bash -c 'true' python -m vit_jax.main --workdir=gs://b/r",
        "python -c 'import vit_jax.main' --workdir=gs://b/r",
        "python mine.py --workdir=gs://b/r",
        "python",
        "./train.sh",
    ],
)
def test_where_a_command_writes_is_known_or_the_user_answers_for_it(command, capsys):
    assert re.fullmatch(
        r"(it is unknown where this command writes|(vit_jax|docs)\.\w+ writes to local folders only), .*"
        r"add --allow-local-output\.",
        refused(command),
    )
    assert refused(command, shared_disk=True) is None  # it starts on the disk that stays
    argv = ["--topology=v5e:2x4", "--dry-run", "--", *shlex.split(command)]
    for way in (["gke", "r", "--image=i"], ["tpu_vm", "run", "r", "--zone=us-west4-a"]):
        with pytest.raises(UserError, match="add --allow-local-output"):
            MAINS[way[0]]([*way, *argv])
        MAINS[way[0]]([*way, "--allow-local-output", *argv])
        assert capsys.readouterr().out


AUGREG = "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0"
REMOTE = "--config=configs/folder.py --config.batch=512 --config.data.source=folder:gs://b/d"
DISTIL = f"{REMOTE} --config.task.kind=distill"
PREDICTIONS = """
from configs import digits
from configs.base import evaluation

def get_config():
    config = digits.get_config()
    config.batch, config.batch_eval = 512, None
    config.evals.test = evaluation(**{**config.evals.test, "kind": "predictions"})
    return config
"""
MISTAKES = [
    ("--config=configs/foldr.py", "did you mean 'configs/folder.py'"),
    (f"{REMOTE} --config.batch_size=512", "unknown config field 'batch_size'; did you mean 'batch'"),
    (f"{REMOTE} --config.base_lr=-1", "base_lr=-1.0 must be at least 0"),
    (f"{REMOTE} --config.model.name=ViT-B16", "unknown model 'ViT-B16'"),
    (f"{REMOTE} --config.data.preprocess=resise(224)", "did you mean 'resize'"),
    (f"{REMOTE} --config.data.source=fodler:gs://b/d", "unknown data source 'fodler'"),
    (f"{REMOTE} --config.mesh.fsdp=3", "multiply to 3, which does not divide 16,"),
    (f"{REMOTE} --config.batch=12", "batch=12 is not divisible by"),
]
NOT_THERE = [
    (
        "--config=configs/folder.py --config.data.source=folder:photos",
        "data.source=folder:photos is not on the new machines",
    ),
    (f"{REMOTE} --config.data.source=folder:~/photos", "use folder:gs://BUCKET/FOLDER."),
    ("--config=configs/vit_b16_imagenet21k.py", "data.source=array_record:imagenet21k is not on the new machines"),
    (f"{REMOTE} --config.data.data_dir=tfds", "data.data_dir=tfds is not on the new machines"),
    (f"{REMOTE} --config.init_from=workdirs/b16", "init_from=workdirs/b16 is not on the new machines"),
    (REMOTE.replace("configs", f"{ROOT}/configs"), "use a path in the folder of the code."),
    (f"{DISTIL} --config.task.teacher=workdirs/t", "task.teacher=workdirs/t is not on the new machines"),
    (
        f"{REMOTE} --config.evals.test.source=folder:data/pets",
        "evals.test.source=folder:data/pets is not on the new machines; use folder:gs://BUCKET/FOLDER.",
    ),
    (
        f"{REMOTE} --config.data.source=mix:1*digits+1*parquet:photos,label=fine,classes=~/names.json",
        "use mix:1*digits+1*parquet:gs://BUCKET/FOLDER,label=fine,classes=gs://BUCKET/FILE.",
    ),
    ("--config={recipe} --config.evals.test.labels=../real.json", "evals.test.labels=../real.json is not on the new"),
    ("--config={recipe} --config.evals.test.class_map=~/map.json", "evals.test.class_map=~/map.json is not on the new"),
]
FINE = [
    REMOTE,
    f"{REMOTE} --config.data.source=folder:/mnt/photos --config.init_from=ViT-B/16-imagenet21k",
    f"{REMOTE} --config.init_from=gs://b/run",
    "--config=configs/smoke.py --config.data.source=digits --config.batch_eval=None",
    f"{REMOTE} --config.init_from=hf-hub:timm/vit_small_patch16_224.augreg_in21k",
    f"{REMOTE} --config.init_from=https://example.com/weights.npz",
    f"{REMOTE} --config.init_from={AUGREG} --config.evals.test.source=tfds:cifar10",
    f"{DISTIL} --config.data.source=mix:1*digits+1*hf://datasets/o/n --config.task.teacher=/mnt/t",
    "--config={recipe} --config.evals.test.class_map=imagenet_a",
    "--config={recipe} --config.evals.test.labels=configs/real.json",
    "--help",
]


@pytest.mark.parametrize("module", ["main", "sweep"])
@pytest.mark.parametrize(("words", "sentence"), [*MISTAKES, *NOT_THERE, *[(words, None) for words in FINE]])
def test_what_would_fail_on_the_machines_fails_before_they_cost(module, words, sentence, tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "predictions.py").write_text(PREDICTIONS)
    words = words.format(recipe="predictions.py")
    git = SimpleNamespace(returncode=0)  # knows every file
    monkeypatch.setattr(job.subprocess, "run", lambda argv, **_: git if argv[0] == "git" else pytest.fail("asked"))
    command = ["python", "-m", f"vit_jax.{module}", *words.split(), "--workdir=gs://b/r"]
    command += ["--sweep.seed=1,2"] if module == "sweep" else []
    ways = [
        ["tpu_vm", "run", "r", "--zone=us-west4-a", "--topology=v5e:4x4"],
        ["gke", "r", "--image=i", "--topology=v5e:4x4"],
    ]
    ways += [["slurm", "r", "--nodes=2", "--gpus=8"]]
    for way in ways:
        fails = sentence if way[0] != "slurm" or (words, sentence) in MISTAKES else None  # its disk is this one
        for dry in ([], ["--dry-run"]) if fails else (["--dry-run"],):
            with pytest.raises(UserError, match=re.escape(fails)) if fails else contextlib.nullcontext():
                MAINS[way[0]]([*way, *dry, "--", *command])


LOCAL_ARGUMENTS = [
    ("vtab workdirs/photos", "checkpoint=workdirs/photos is not on the new machines; use gs://BUCKET/FOLDER."),
    ("vtab ViT-L/16-imagenet21k --data-dir=tfds", "--data-dir=tfds is not on the new machines"),
    ("vtab --data-dir tfds gs://b/run", "--data-dir=tfds is not on the new machines"),
    ("vtab gs://b/run --config.task.teacher=workdirs/t", "task.teacher=workdirs/t is not on the new machines"),
    ("evaluate gs://b/run workdirs/photos", "models=workdirs/photos is not on the new machines"),
    ("evaluate --workdir=workdirs/photos", "--workdir=workdirs/photos is not on the new machines"),
    ("evaluate gs://b/run --source=folder:pets", "--source=folder:pets is not on the new machines"),
    ("evaluate gs://b/run --evals=knn:source=digits,folder:pets", "--evals=knn:source=folder:pets is not on the new"),
    (
        "pack digits gs://b/packed --without=folder:pets,split=test",
        "--without=folder:pets,split=test is not on the new",
    ),
    ("plan --config=configs/digits.py --topology=v5e:4x4 --measured=workdirs/r", "--measured=workdirs/r is not on the"),
    ("measure --out=gs://b/hardware --against=../earlier.json", "--against=../earlier.json is not on the new machines"),
    ("report workdirs/photos", "workdirs=workdirs/photos is not on the new machines; use gs://BUCKET/FOLDER."),
    ("record gs://b/run --evaluations=../evals.json", "--evaluations=../evals.json is not on the new machines"),
    ("report gs://b/run --out=/mnt/report.html", None),
    ("predict workdirs/photos cat.png", "checkpoint=workdirs/photos is not on the new machines"),
    ("predict gs://b/run ~/cat.png", "images=~/cat.png is not on the new machines; use gs://BUCKET/FILE."),
    ("predict gs://b/run cat.png --texts=../words.npz", "--texts=../words.npz is not on the new machines"),
    ("predict gs://b/run folder:pets --split=test", "images=folder:pets is not on the new machines"),
    ("vtab hf-hub:timm/vit_small_patch16_224.augreg_in21k --data-dir=gs://b/tfds", None),
    ("evaluate gs://b/run --evals=knn:source=tfds:cifar10 --evals=test:labels=real.json", None),
    ("predict /mnt/run cat.png --top 3", None),
    ("predict gs://b/run digits --split=test", None),
]


@pytest.mark.parametrize(("words", "sentence"), LOCAL_ARGUMENTS)
def test_arguments_that_name_places_of_this_machine_are_refused(words, sentence):
    command = ["python", "-m", *f"vit_jax.{words}".split()]
    launched = ["gke", "r", "--image=i", "--topology=v5e:4x4", "--dry-run", "--allow-local-output", "--", *command]
    with pytest.raises(UserError, match=re.escape(sentence)) if sentence else contextlib.nullcontext():
        MAINS["gke"](launched)


def test_the_configurations_of_a_command_are_made_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        checks, "_list_configs", lambda *words, make=checks._list_configs: calls.append(words) or make(*words)
    )
    words = f"python -m vit_jax.sweep {REMOTE} --sweep.seed=1,2 --workdir=gs://b/r"
    tpu_vm.main(["tpu_vm", "run", "r", "--zone=us-west4-a", "--topology=v5e:4x4", "--dry-run", "--", *words.split()])
    assert len(calls) == 1


def test_a_config_file_that_would_not_be_copied_is_refused(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    command = [
        "tpu_vm",
        "run",
        "r",
        "--zone=us-west4-a",
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
    with pytest.raises(UserError, match=r"git does not track configs/folder\.py, .*; run git add configs/folder\.py\."):
        tpu_vm.main(command)
    subprocess.run(["git", "add", "configs"], check=True)
    tpu_vm.main(command)
    (tmp_path / "predictions.py").write_text(PREDICTIONS)
    (tmp_path / "real.json").write_text("[]")
    subprocess.run(["git", "add", "predictions.py"], check=True)
    words = ["--config=predictions.py", "--config.evals.test.labels=real.json", "--config.batch=512"]
    with pytest.raises(UserError, match=r"git does not track real\.json, .*; run git add real\.json\."):
        tpu_vm.main([*command, *words])
    subprocess.run(["git", "add", "real.json"], check=True)
    tpu_vm.main([*command, *words])


def test_the_output_of_every_command_of_the_project_is_listed():
    inner = {  # started by the others, or the door to them
        *("vit_jax.planning.worker", "vit_jax.planning.schedules.kernel_cycles", "vit_jax.__main__"),
        *(
            "benchmarks.agreement_torch",
            "benchmarks.train_step_torch",
            "tests.faults.inject",
            "benchmarks.input_others",
            "benchmarks.embed_torch",
        ),
        *("benchmarks.tpu_rows", "benchmarks.published_runs"),
    }
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("vit_jax", "benchmarks", "docs", "tests/faults")
        for path in (ROOT / folder).rglob("*.py")
        if "__main__" in path.read_text()
    }
    assert set(checks.OUTPUTS) == found - inner
    for name, output in checks.OUTPUTS.items():
        source = (ROOT / f"{name.replace('.', '/')}.py").read_text()
        writes = '"--write"' in source or re.search(r"tpu_process import .*\bwrite_cases\b", source) is not None
        assert (output is not None and output.flag == "write") == writes, name
        if output is None:
            assert refused(f"python -m {name} --workdir=run") is None


@pytest.mark.parametrize(
    ("way", "words", "sentence"),
    [
        ("main", "python -m vit_jax.mian --allow", "there is no module vit_jax.mian; did you mean vit_jax.main?"),
        ("main", "python -m vitjax.main", "there is no module vitjax.main; did you mean vit_jax.main?"),
        ("main", "python -m vit_jax.swep", "there is no module vit_jax.swep; did you mean vit_jax.sweep?"),
        ("--zone=us-west-4a", "", "--zone=us-west-4a is not the name of a zone; did you mean us-west4-a?"),
        ("--zone=z", "", "--zone=z is not the name of a zone; zones are named like us-west4-a."),
        ("--time=24h", "", "--time=24h is not a time of Slurm; did you mean --time=24:00:00?"),
        ("--time=2 days", "", "--time=2 days is not a time of Slurm; did you mean --time=2-00:00:00?"),
        ("--time=soon", "", "--time=soon is not a time of Slurm; write hours:minutes:seconds,"),
    ],
)
def test_misspelt_words_rent_no_machines(way, words, sentence):
    command = shlex.split(words) or ["python", "-m", "vit_jax.doctor"]
    ways = [["tpu_vm", "run", "r", "--topology=v5e:1x1", "--zone=us-west4-a"], ["slurm", "r", "--gpus=1"]]
    ways += [["gke", "r", "--image=i", "--topology=v5e:1x1"]]
    if way.startswith("--"):
        ways = [[*one, way] for one in ways if one[0] == ("slurm" if way.startswith("--time") else "tpu_vm")]
    for one in ways:
        for more in (["--dry-run"], ["--dry-run", "--allow-local-output"]):
            with pytest.raises(UserError, match=re.escape(sentence)):
                MAINS[one[0]]([*one, *more, "--", *command])


def test_modules_that_exist_or_are_the_users_own_are_accepted():
    for name in (
        "vit_jax.main",
        "vit_jax.kernel_trials.correctness",
        "benchmarks.load",
        "my_project.main",
        "torchrun",
        "main",
    ):
        checks.check_module(make_run("python", "-m", name))


@pytest.mark.parametrize("time", ["30", "30:00", "24:00:00", "1-12", "1-12:30", "1-12:30:15"])
def test_times_of_slurm(time):
    slurm.check_time(time)


def test_a_forgotten_divider_is_named():
    words = ["r", "--gpus=1", "--dry-run", "python", "-m", "vit_jax.main", "--config=configs/digits.py"]
    with pytest.raises(UserError, match=r"put -- before the command: r --gpus=1 --dry-run -- python -m vit_jax\.main"):
        MAINS["slurm"](["slurm", *words])
