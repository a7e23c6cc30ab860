"""Every command in the READMEs and in docs/ is run, shortened, in the order of a reader; or, where it needs a cloud or
absent data, parsed and dry-run.
"""

import ast
import datetime
import re
import shlex
import shutil
import subprocess
import tomllib

import jax
import numpy as np
import pytest
import tensorstore
import yaml
from PIL import Image

import vit_jax
from benchmarks import (
    bucket,
    calibration,
    feed,
    goodput,
    input,
    load,
    loader,
    neighbourhoods,
    optimizers,
    overhead,
    patterns,
    stream,
    stream_accuracy,
    tpu,
    tpu_check,
    train_step,
)
from configs import base
from docs import architecture, fields, imagenet, pictures, plans, results_page, screenshots, studies
from tests.conftest import ROOT, write_tfds
from tests.data.test_array_record import SINGLE, write_set
from tests.data.test_folder import tiny_imagenet
from tests.faults import table as faults
from vit_jax import (
    UserError,
    cli,
    convert,
    describe,
    doubts,
    embed,
    evaluate,
    finetune,
    look,
    main,
    measure,
    pack,
    plan,
    predict,
    record,
    report,
    sweep,
    vtab,
)
from vit_jax.config import FIELDS, OnResume, check_config, declared_name, parse_command_line, parse_value
from vit_jax.config.fields import rule_of
from vit_jax.distributed import coordination, lost_or_stuck_hosts, supervisor
from vit_jax.measurements import matmul_rate
from vit_jax.planning import PlanRequest, worker
from vit_jax.program import program_without_data
from vit_jax.storage import stores

README = (ROOT / "README.md").read_text()
PATHS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "launch" / "README.md"]
PAGES = {path: path.read_text() for path in PATHS}
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)]
LINES = list(dict.fromkeys(line for language, text in BLOCKS if language == "bash" for line in text.splitlines()))

# Flags added to the commands, so that they take seconds.
SHORT = ["--config.total_steps=1", "--config.eval_every=1", "--config.warmup_steps=0", "--config.model.depth=1"]
SHORT += ["--config.model.stochastic_depth=0.0", "--config.task.mixup=0.0"]  # these compile slowly
SHALLOW = "--config.model.stages=(1,)"  # of a ResNet, for model.depth
PHOTOS = ["--config.batch=8", "--config.resolution=32", "--config.model.width=48"]
TINY = ["--config.model.name=ViT-mu/16", "--config.batch=8", "--config.resolution=32"]
VTAB = ["--config.total_steps=1", "--config.warmup_steps=0", "--config.batch=8", "--config.resolution=32"]
CIFAR = ["--config.batch=8", "--config.batch_eval=16", "--config.data.num_examples=None"]  # the stand-in has fewer

# A word of the command -> why it is only dry-run: its program is built and lowered, without data.
DRY = {
    "-m launch.": "needs a cloud",
    "gs://": "needs a cloud",
    "hf-hub:": "needs a download",
    "-imagenet21k": "needs a download",
    "-imagenet2012-224": "needs a download",
    "CLS-LOC": "needs a download",
    "studies/compute.py:": "takes an hour",
    "cifar5_tuned_compute": "takes an hour",
    "studies/regularization.py:": "takes an hour",
    "cifar10_optimizers.py": "takes an hour",
    "cifar5_methods.py": "takes an hour",
}

OURS = {
    "vit_jax.main": main,
    "vit_jax.look": look,
    "vit_jax.measure": measure,
    "vit_jax.convert": convert,
    "vit_jax.describe": describe,
    "vit_jax.doubts": doubts,
    "vit_jax.embed": embed,
    "vit_jax.evaluate": evaluate,
    "vit_jax.finetune": finetune,
    "vit_jax.pack": pack,
    "vit_jax.plan": plan,
    "vit_jax.predict": predict,
    "vit_jax.record": record,
    "vit_jax.report": report,
    "vit_jax.sweep": sweep,
    "vit_jax.vtab": vtab,
}
BENCHMARKS = {
    "benchmarks.bucket": bucket,
    "benchmarks.calibration": calibration,
    "tests.faults.table": faults,
    "benchmarks.feed": feed,
    "docs.fields": fields,
    "benchmarks.goodput": goodput,
    "benchmarks.input": input,
    "benchmarks.load": load,
    "benchmarks.loader": loader,
    "benchmarks.neighbourhoods": neighbourhoods,
    "benchmarks.optimizers": optimizers,
    "benchmarks.overhead": overhead,
    "benchmarks.patterns": patterns,
    "docs.pictures": pictures,
    "docs.plans": plans,
    "docs.results_page": results_page,
    "docs.imagenet": imagenet,
    "docs.studies": studies,
    "docs.screenshots": screenshots,
    "benchmarks.stream": stream,
    "benchmarks.stream_accuracy": stream_accuracy,
    "benchmarks.tpu": tpu,
    "benchmarks.tpu_check": tpu_check,
    "benchmarks.train_step": train_step,
}
MODULES = OURS | BENCHMARKS  # test_benchmarks runs the latter


def headed(heading):
    """The fenced blocks under a heading."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, re.M | re.S)[1]
    return re.findall(r"^```\w*\n(.*?)^```", section, re.M | re.S)


def commands(line):
    """The arguments of every `python -m MODULE` of ours in a line, those inside a quoted remote command too."""
    words = shlex.split(line.partition(" > ")[0])
    inner = [word.partition("=")[2] for word in words if word.startswith("--command=")]
    if inner:
        return [found for text in inner for found in commands(text)]
    starts = [i for i, word in enumerate(words) if word in MODULES and words[i - 1] == "-m"]
    return [words[i:] for i in starts]


@pytest.mark.parametrize("heading", ["Quickstart", "Tests"])
def test_one_line_to_paste(heading):
    [block] = headed(heading)
    assert block.count("\n") == 1
    assert subprocess.run(["bash", "-n", "-c", block]).returncode == 0


@pytest.mark.parametrize("line", LINES)
def test_lines_are_shell_and_their_flags_exist(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert subprocess.run(["bash", "-n", "-c", line]).returncode == 0
    for name, *words in commands(line):
        if name == "vit_jax.sweep" and "--plot" not in line:
            for run in sweep.list_combinations([name, *words]):
                check_config(run.config)
        if name == "vit_jax.finetune":
            for run in finetune.list_all_trials([name, *words]):
                check_config(run.config)
        if name == "vit_jax.main":
            config, _ = parse_command_line([name, *words])
            check_config(config)
            if any(word in line for word in DRY):
                config.model.depth = 1  # tracing takes as long as the model is deep
                for field, number in (("num_classes", 2), ("num_examples", 10_000)):  # of the reader's own images
                    config.data[field] = config.data[field] or number
                _, program = program_without_data(config)
                assert program.train_step.lower(program.state, program.batch)


TEXTS = {path: re.sub(r"^```.*?^```", "", text, flags=re.M | re.S) for path, text in PAGES.items()}
# The flags that a page names together in its text, and the fields of models: `activation=gelu registers=1`.
FLAGS = [
    code for text in TEXTS.values() for code in re.findall(r"`([^`]*--config\.[\w.]+=(?![A-Z]{2}|\.)[^`]*)`", text)
]
MODEL_FIELDS = re.findall(r"`(?:[\w-]+ )?((?:\w+=[\w.-]+ ?)+)`", TEXTS[ROOT / "docs" / "models.md"])


@pytest.mark.parametrize("code", dict.fromkeys(FLAGS))
def test_flags_in_the_text_exist_and_their_values_are_accepted(code):
    words = [word for word in shlex.split(code) if word.startswith("--config.")]
    teacher = ["--config.task.kind=distill", "--config.task.teacher=workdirs/photos"] if "task" in code else []
    config, _ = parse_command_line(["main", f"--config={ROOT}/configs/digits.py", *words, *teacher])
    check_config(config)


@pytest.mark.parametrize("code", dict.fromkeys(MODEL_FIELDS))
def test_fields_of_models_in_the_text_exist_and_a_model_accepts_their_values(code):
    config, given = base.get_config().model, dict(word.split("=") for word in code.split())
    fields = {name: parse_value(config, name, text) if name in config else int(text) for name, text in given.items()}
    refused = []
    for model in ("ViT-B/16", "ViT-B/14", "R26+ViT-S/32", "BiT-R50x1"):
        try:
            vit_jax.create(model, **fields)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) < 4, refused


def fields_of_recipes():
    """The fields that a recipe other than the base sets."""
    found = set()
    for path in (ROOT / "configs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path.stem != "base" else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(ast.unparse(node).removeprefix("config."))
            if isinstance(node, ast.Constant) and isinstance(node.value, str):  # of a grid, {"optim.name": ...}
                found.add(node.value)
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            group = (
                "evals.*." if called.endswith("evaluation") else called.removeprefix("config.").removesuffix("update")
            )
            found |= {f"{group}{one.arg}" for one in node.keywords} if called else set()
            found |= {"evals.*.kind"} if called.endswith("evaluation") else set()
    return {declared_name(name) for name in found}


def test_every_field_is_set_by_a_recipe_or_by_a_documented_command():
    """Commands and flags in the text are parsed above, code is run below: a field that nobody is shown may go."""
    shown = {name for text in [*LINES, *FLAGS] for name in re.findall(r"--(?:config|sweep)\.([\w.]+)=", text)}
    requests = [word for line in LINES for word in shlex.split(line) if word.startswith("--evals=")]
    code = [text for language, text in BLOCKS if language == "python"]
    shown |= {f"evals.*.{field}" for text in [*requests, *code] for field in re.findall(r"(\w+)=", text)}
    shown |= {f"model.{field}" for text in [*MODEL_FIELDS, *code] for field in re.findall(r"(\w+)=", text)}
    assert set(FIELDS) - {declared_name(name) for name in shown} - fields_of_recipes() == set()


def test_what_is_only_dry_run_is_listed():
    for word in DRY:
        assert any(word in line for line in LINES), word
    assert "Commands that need a cloud, a download or\nan hour are dry-run" in README


def write_photos(folder):
    """Writes data/photos/{cat,dog}/<number>.jpg, the same in one folder, files with several answers for each, and one
    more, data/photo.png.
    """
    random, folder = np.random.default_rng(0), folder / "data"
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(20):
            pixels = random.integers(0, 256, (40, 50, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{i}.jpg")
    Image.fromarray(pixels).save(folder / "photo.png")
    cameras = [f"{name}/{i}.jpg,{name}{i // 5}" for name in ("cat", "dog") for i in range(20)]
    (folder / "cameras.csv").write_text("\n".join(["image,camera", *cameras]) + "\n")
    (folder / "bad.txt").write_text("cat/7.jpg\ndog/0.jpg\n")
    (folder / "photos_unlabelled").mkdir()
    answers = {"tags.csv": ["image,indoors,young"], "lists.csv": ["image,tags"], "ages.csv": ["image,age,weight"]}
    for number, path in enumerate(sorted((folder / "photos").rglob("*.jpg"))):
        name = path.relative_to(folder / "photos")
        answers["tags.csv"].append(f"{name},1,{number % 2}")
        answers["lists.csv"].append(f"{name},{'indoors;young' if number % 2 else 'indoors'}")
        answers["ages.csv"].append(f"{name},{20 + number},{60 - number / 3:.1f}")
    for name, lines in answers.items():
        (folder / name).write_text("\n".join(lines))
    for path in (folder / "photos").rglob("*.jpg"):
        shutil.copy(path, folder / "photos_unlabelled" / f"{path.parent.name}{path.name}")


def write_of_other_libraries(folder):
    """Writes data/{flax,big_vision}, checkpoints as the Flax models of transformers and big_vision leave them."""
    parity = ROOT / "tests" / "fixtures" / "parity"
    shutil.copytree(parity / "hf_flax_vit", folder / "flax")
    for name, array in np.load(parity / "big_vision_tok.npz").items():
        own = f"params~{name.removeprefix('params/')}".replace("/", "~")
        path = folder / "big_vision" / "checkpoint.bv-000010000" / own
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
        tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(array).result()


HERE = [line for line in LINES if not any(word in line for word in DRY)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files of a reader, in which the commands are run one after the other."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs").symlink_to(ROOT / "configs")
    shutil.copytree(ROOT / "results" / "cifar10_shape" / "width", folder / "results" / "cifar10_shape" / "width")
    write_photos(folder)
    write_set(folder / "data" / "shards", SINGLE, info=False)
    write_of_other_libraries(folder / "data")
    tiny_imagenet(folder / "data" / "tiny-imagenet-200")
    parity = ROOT / "tests" / "fixtures" / "parity"
    shutil.copy(parity / "google_vit_in21k_tanh.npz", folder / "data" / "pretrained.npz")
    shutil.copytree(parity / "hf_texts_clip", folder / "data" / "clip")
    shutil.copy(parity / "hf_texts_clip" / "words.npz", folder / "data" / "words.npz")
    for family in ("dinov3", "siglip"):
        shutil.copytree(parity / f"hf_{family}", folder / "data" / family)
        shutil.copy(parity / "hf_texts_clip" / "preprocessor_config.json", folder / "data" / family)
    write_tfds(
        folder / "data" / "tensorflow_datasets", "cifar10", "3.0.2", list("abcdefghij"), {"train": 2000, "test": 20}
    )
    return folder


@pytest.fixture
def reader(place, monkeypatch):
    """Runs commands in that folder; programs for absent chips are compiled for CPUs."""
    monkeypatch.chdir(place)
    for module in (supervisor, cli):
        monkeypatch.setattr(module, "join_cluster", coordination.ProcessGroup)
    monkeypatch.setattr(
        plan,
        "compile_in_subprocess",
        lambda request: [*worker.compile_request(PlanRequest((*request.words, *TINY), "cpu", inference=True))][-1],
    )
    # tests/test_measure.py runs all.
    monkeypatch.setattr(measure, "SECTIONS", {"products": measure.SECTIONS["products"]})
    monkeypatch.setattr(matmul_rate, "SIZES", matmul_rate.SIZES[:1])
    monkeypatch.setenv("VIT_JAX_CACHE", str(place / "cache"))


OURS_HERE = [line for line in HERE if any(name in OURS for name, *_ in commands(line))]
# The first command of each program, if the images and runs that it needs are there without the others.
USUAL = [
    *{
        name: line
        for line in OURS_HERE[::-1]
        for name, *_ in commands(line)
        if not re.search("init_from|workdirs/photos|_folds", line)
    }.values()
]
USUAL.sort(key=OURS_HERE.index)


def paste(line, capsys):
    for name, *words in commands(line):
        words = [re.sub("(--(?:sweep|sizes).*?),.*", r"\1", word) for word in words]  # one value
        words = [re.sub(r"(--sweep\.fold=).*", r"\g<1>2", word) for word in words]
        words = [word for word in words if "_epochs=" not in word]  # SHORT has steps
        words += ["--models=ViT-B/32"] if "--inference" in words else []
        if name in ("vit_jax.main", "vit_jax.sweep") and "--plot" not in line:
            words += ["--only=gap/0.0003"] if "studies" in line else []
            words += SHORT[1:] if "total_steps=0" in line else SHORT
            words = [SHALLOW if "resnet" in line and "depth" in word else word for word in words]
            words += PHOTOS if "photos" in line or "tiny-imagenet" in line else CIFAR if "cifar" in line else []
        if "model=init_from" in line:
            words = [word for word in words if not word.startswith("--config.model.")]
        if name == "vit_jax.finetune":
            words += [*SHORT, *PHOTOS, *CIFAR, "--sweep.base_lr=0.01"]
        words += VTAB if name == "vit_jax.vtab" else []
        assert not OURS[name].main([name, *words])
        if name == "vit_jax.evaluate":
            assert re.search(r'"\w+/(accuracy|5shot|1nn|mae)": [\d.]+[,}]', capsys.readouterr().out)


@pytest.mark.parametrize("line", USUAL)
def test_a_reader_who_pastes_a_command_of_each_program(reader, line, capsys):
    paste(line, capsys)


@pytest.mark.slow
def test_a_reader_who_pastes_everything(reader, capsys):
    for line in OURS_HERE:
        paste(line, capsys)


@pytest.mark.slow
def test_code_of_a_reader_who_pasted_everything(reader, place):
    scope = {}
    for code in [text for language, text in BLOCKS if language == "python"]:
        exec(code, scope)
    assert (place / "workdirs" / "copy.npz").exists() and scope["source"].field("resolution") == 48
    assert scope["out"]["attention"].shape == (1, 1, 4, 16, 16) and (place / "workdirs" / "attention.png").exists()
    assert len(scope["found"]) == 7 and scope["exported"]["block_0"].shape == (7, 16, 64)
    assert scope["features"].shape == (1, 64) and scope["image"].shape == (16, 16, 3)
    assert scope["model"].spec.position.resolution == 384 and (place / "workdirs" / "model.npz").exists()
    assert isinstance(scope["logits"], jax.Array)
    np.testing.assert_allclose(scope["changes"], scope["jacobian"], rtol=0, atol=1e-4 * abs(scope["changes"]).max())
    np.testing.assert_allclose(scope["slopes"][0], scope["slope"], rtol=0, atol=1e-4 * abs(scope["slope"]).max())
    assert scope["losses"][-1] < scope["losses"][0]  # the module of flax.nnx learns, and is saved
    tuned = vit_jax.load(place / "workdirs" / "tuned.npz")[0]
    assert tuned.spec == scope["network"].spec
    expected = np.load(ROOT / "tests" / "fixtures" / "parity" / "hf_flax_vit.io.npz")
    with jax.default_matmul_precision("highest"):
        found, _ = scope["converted"].apply(scope["converted_params"], expected["images"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-5 * abs(expected["logits"]).max())
    # Git ignores all that the commands and the code have left.
    ignored = (ROOT / ".gitignore").read_text().replace("/", "").split()
    left = {path.name for path in place.iterdir()} - {"configs", "cache"}
    assert left == {"data", "workdirs", "results"} and {"data", "workdirs"} <= set(ignored)


def test_the_limits_of_the_page_are_those_of_the_code():
    page = PAGES[ROOT / "docs" / "reliability.md"]
    section = re.search(r"^## Limits of time\n(.*?)^## ", page, re.M | re.S)[1]
    told = re.findall(r"^\| (\w+ [\w' ]+?)(?: \(.*?\))? \| \D*([\d,]+) s", section, re.M)
    assert [(wait, float(limit.replace(",", ""))) for wait, limit in told] == [
        ("for all hosts to start", coordination.JOIN_TIMEOUT_SECONDS),
        ("for a heartbeat of a host", lost_or_stuck_hosts.LOST_AFTER_SECONDS),
        ("without progress on a host", base.get_config().stall_limit),
        ("for a bucket's answer", stores.TIMEOUT),
    ]
    assert base.get_config().stall_limit == lost_or_stuck_hosts.STALLED_AFTER_SECONDS


def test_what_may_change_when_a_run_goes_on_is_what_the_code_lets_change():
    page = PAGES[ROOT / "docs" / "checkpoints.md"]
    rows = re.search(r"^\| fields \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.M)[1].splitlines()
    listed = [re.findall(r"`([\w.]+)`", row.split("|")[1]) for row in rows]
    rules = [OnResume.REFUSED, OnResume.REFUSED, OnResume.DATA, OnResume.ACCEPTED]
    told = {name: rule for names, rule in zip(listed, rules, strict=True) for name in names}
    groups = {group: rule_of(f"{group}.new") for group in ("model", "task", "adapt", "data")}
    assert told == groups | {name: field.rule for name, field in FIELDS.items() if field.rule is not rule_of(name)}


def test_every_program_is_shown():
    ran = [name for line in HERE for name, *_ in commands(line)]
    assert ran.count("vit_jax.main") == 47 and set(ran) == set(MODULES)


def test_the_last_paragraph_says_what_is_not_covered():
    last = README.rstrip().rpartition("\n\n")[2]
    for word in ("JFT-300M",):
        assert re.search(rf"\b{word}\b", last), word


def test_links_lead_somewhere():
    for page, text in (PAGES | {path: path.read_text() for path in ROOT.glob("*.md")}).items():
        for target in re.findall(r"\]\(([\w./]+)(?:#\w+)?\)", text):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_repository_has_one_address():
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    name = address.removeprefix("https://github.com/")
    places = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    for place in places:
        stated = re.findall(
            r"(?:git clone -q https://github\.com|google\.com/github)/([\w-]+/[\w-]+)", place.read_text()
        )
        assert set(stated) <= {name}, f"{place} states another repository than pyproject.toml"
    assert any(f"github/{name}/blob/main/notebooks" in place.read_text() for place in places)


def test_ci_runs_what_contributors_run_and_badges_are_of_what_exists():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["test"]
    assert workflow["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    [variable] = workflow["steps"][-1].pop("env").items()
    assert variable == ("CI", "${{ matrix.python == '3.11' }}") and workflow["steps"][-1] == {"run": ".ci/run"}
    badges = re.findall(r"\[!\[([^]]+)\]", README)
    assert set(badges) == {"Open in Colab"}


def test_the_picture_is_that_of_the_imports():
    """`python -m docs.architecture` draws it anew."""
    assert set(architecture.read_graph()) <= architecture.CAPTIONS.keys()
    assert architecture.draw() == (ROOT / "docs" / "architecture.svg").read_text()


def test_the_recipe_in_the_docs_is_one(tmp_path):
    [recipe] = [text for language, text in BLOCKS if language == "python" and "def get_config" in text]
    (tmp_path / "mine.py").write_text(recipe)
    config, workdir = parse_command_line(["main", f"--config={tmp_path}/mine.py", "--config.batch=64"])
    check_config(config)
    assert (config.model.depth, config.batch, workdir) == (2, 64, "workdirs/mine")
    assert recipe in PAGES[ROOT / "docs" / "recipes.md"]


def test_the_page_of_fields_and_the_table_of_kinds_are_those_of_the_rows():
    """`python -m docs.fields` writes both anew."""
    assert fields.page() == PAGES[ROOT / "docs" / "fields.md"]
    assert f"<!-- kinds -->\n{fields.kinds()}<!-- /kinds -->" in PAGES[ROOT / "docs" / "evaluation.md"]


def test_the_first_version_is_dated():
    text = (ROOT / "CHANGELOG.md").read_text()
    [date] = re.findall(rf"^## {re.escape(vit_jax.__version__)} - (\d{{4}}-\d\d-\d\d)$", text, re.M)
    assert datetime.date.fromisoformat(date)
