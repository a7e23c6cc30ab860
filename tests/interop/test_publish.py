"""Weights and runs that `convert` publishes on the Hugging Face hub, of which a stand-in is asked."""

import json
import re
import shlex
import shutil

import jax
import numpy as np
import pytest
import yaml

import vit_jax
from tests.conftest import ROOT
from tests.experiments.test_results import write_run
from tests.interop import hub_server
from vit_jax import UserError, convert, interop
from vit_jax.config import evaluation
from vit_jax.evals.requests import request_evaluations
from vit_jax.experiments import describe_run, make_record
from vit_jax.model import create, parameter_shapes

pytest.importorskip("huggingface_hub")

TARGET = "hf-hub:owner/name"
PIPE = "resize(36)|central_crop(32)|value_range(-1,1)"
FILES = {".gitattributes", "README.md", "config.json", "model.safetensors"}


def write_evaluated(folder, evals, **fields):
    """Writes the folder of a run with these evaluations, without its weights."""
    config = json.loads((write_run(folder, **fields) / "config.json").read_text())
    config["evals"] = {name: each.to_dict() for name, each in evals.items()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run with its weights, and the logits of an image."""
    evals = {
        "test": evaluation("classify", preprocess=PIPE),
        "knn": evaluation("knn", k=(1, 3), source="folder:gs://secret/others"),
    }
    folder = write_evaluated(tmp_path_factory.mktemp("publish") / "run", evals, wandb="secret")
    model = create("ViT-mu/16", num_classes=2, resolution=32, preprocess=PIPE, class_names=["cat", "dog"])
    key = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: key.normal(size=leaf.shape).astype(np.float32), parameter_shapes(model))
    vit_jax.save(folder / "model.npz", model, params)
    images = key.uniform(-1, 1, (1, 32, 32, 3)).astype(np.float32)
    return folder, images, model.apply(params, images)[0]


@pytest.fixture
def server(monkeypatch, tmp_path):
    with hub_server.serve(None) as server:
        hub_server.use(server, monkeypatch, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # between attempts
        yield server


def publish(source, *flags, target=TARGET):
    convert.main(["convert", str(source), target, *flags])


def test_a_run_is_published_with_its_record(run, server, capsys):
    folder, images, logits = run
    publish(folder, "--licence=bsd-3-clause", "--dry-run")
    assert server.asked == []
    shown = capsys.readouterr().out
    publish(folder, "--licence=bsd-3-clause", "--private", "--tag=v1")
    printed = capsys.readouterr().out
    assert set(server.files) == FILES and server.private and server.tags == {"v1": server.commit}
    card = server.files["README.md"].decode()
    assert shown == printed.replace(f"{server.address}/owner/name\n", f"\n{card}")
    assert f"{len(server.files['model.safetensors']):,} bytes" in shown
    assert yaml.safe_load(card.split("---\n")[1]) == {
        "license": "bsd-3-clause",
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["vit_jax"],
    }
    model, params = vit_jax.load(TARGET)
    assert model.class_names == ("cat", "dog") and model.licence == "bsd-3-clause"
    np.testing.assert_allclose(model.apply(params, images)[0], logits, rtol=0, atol=1e-5 * abs(logits).max())
    assert "Data: `folder:photos`, split `train`, 2 classes." in card and "secret" not in card
    assert "10 steps of 4,096 images, from random weights, in 3.33 min on 2 cores of X, compilation and" in card
    assert "| test/accuracy | 50.00% | 100 |" in card and "paper" not in card
    [command] = re.findall(r"python -m vit_jax\.evaluate hf-hub:owner/name (.*)", card)
    requests = [word.removeprefix("--evals=") for word in shlex.split(command)]
    asked = request_evaluations(requests, {}, None)
    assert asked.test == evaluation("classify", preprocess=PIPE, source="folder:photos")
    assert asked.knn.k == (1, 3) and asked.knn.source == "folder:others"
    publish(folder, "--licence=bsd-3-clause", "--tag=v1")  # nothing is left to do
    assert len([path for path in server.asked if "/commit/" in path]) == 1


@pytest.fixture
def folder(tmp_path):
    """A folder with the names of a model's files."""
    contents = {"README.md": "---\ntags:\n- vit_jax\n---\n", "config.json": "{}", "model.safetensors": "weights"}
    (tmp_path / "folder").mkdir()
    for name, text in contents.items():
        (tmp_path / "folder" / name).write_text(text)
    return tmp_path / "folder"


def test_an_upload_that_was_cut_goes_on(folder, server):
    server.fails = {"PUT /objects": [0] * 6, "preupload": [429], "commit/": [0], "/tag/": [500]}
    for left in ("PUT /objects", "commit/"):
        with pytest.raises(
            UserError, match=r"^cannot publish owner/name: .*; repeat the command: what has arrived stays"
        ):
            interop.publish(folder, "owner/name")
        assert set(server.files) == {".gitattributes"} and not server.fails[left]
    [digest] = server.objects
    with pytest.raises(UserError, match=r"^cannot publish owner/name: "):
        interop.publish(folder, "owner/name", tag="v1")
    assert set(server.files) == FILES and server.tags == {}
    assert interop.publish(folder, "owner/name", tag="v1") == f"{server.address}/owner/name"
    assert server.tags == {"v1": server.commit}
    assert server.asked.count(f"PUT /objects/{digest}") == 7  # the first command tries six times
    assert len([path for path in server.asked if "/commit/" in path]) == 2


def test_what_is_there_is_replaced_on_request(folder, server):
    server.files = {"README.md": b"# Mine", "notes.txt": b"mine", "model-00001-of-00002.safetensors": b"old"}
    server.tags = {"v1": hub_server.COMMIT}
    before = dict(server.files)
    with pytest.raises(UserError, match=r"has files already \(README.md, .*; choose another name, or add --update"):
        interop.publish(folder, "owner/name")
    with pytest.raises(UserError, match=r"has a tag v1 already, of other files; choose another one"):
        interop.publish(folder, "owner/name", update=True, tag="v1")
    with pytest.raises(
        UserError, match="is there and public; make it private in its settings on the hub, or leave out"
    ):
        interop.publish(folder, "owner/name", update=True, private=True)
    assert server.files == before
    interop.publish(folder, "owner/name", update=True)
    assert server.files == {
        "README.md": b"# Mine",  # a card of somebody else stays
        "notes.txt": b"mine",
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }
    (folder / "README.md").write_text("---\ntags:\n- vit_jax\n---\nNew.\n")
    server.files["README.md"] = b"---\ntags:\n- vit_jax\n---\n"
    interop.publish(folder, "owner/name", update=True)
    assert server.files["README.md"] == (folder / "README.md").read_bytes()


@pytest.mark.parametrize(
    ("fails", "sentence"),
    [
        (
            {},
            "the hub does not know who you are; log in (hf auth login, or HF_TOKEN) with a token that may write to",
        ),
        ({"repos/create": [403]}, "this token may not write to owner/name; use one with the permission to write, or"),
        ({"repos/create": [429]}, "the hub has had too many requests; repeat the command in some minutes: what has"),
        ({"validate-yaml": [400]}, "the hub refuses to write owner/name: Invalid metadata in README.md."),
        ({"preupload": [404]}, "the hub has no owner/name, or this token does not see it; log in"),
        ({"commit/": [412]}, "owner/name was changed by somebody else at the same time; repeat the command"),
        ({"commit/": [500]}, "cannot publish owner/name: "),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(folder, server, monkeypatch, fails, sentence):
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN if fails else "wrong")
    server.fails = fails
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}.*\\.$") as caught:
        interop.publish(folder, "owner/name")
    assert "\n" not in str(caught.value) and "model.safetensors" not in (server.files or {})


def test_without_a_network_the_sentence_says_so(folder, server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^cannot publish owner/name: .*offline.*\.$"):
        interop.publish(folder, "owner/name")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), r"the licence of .*run is not known; name it as in --licence=apache-2\.0 \(https://huggingface.co/docs/"),
        (("--licence=apache2",), "unknown licence 'apache2'; did you mean 'apache-2.0'"),
        (("--licence=mine,ftp://a",), "cannot read the licence mine,ftp://a; write NAME or NAME,https://ADDRESS"),
        (("--licence=mit", "--layout=ours"), "unknown layout on the hub 'ours'; choose from huggingface, timm"),
        (("--licence=mit", "--preprocess"), "--preprocess and --blocks are for files, not for hf-hub:owner/name"),
        (("--licence=mit", "--licence-text=absent"), "cannot read absent: No such file"),
    ],
)
def test_flags_that_do_not_suit(run, server, flags, sentence):
    with pytest.raises(UserError, match=sentence):
        publish(run[0], *flags)
    assert server.asked == []


@pytest.mark.parametrize("name", ["name", "a/b/c", "a/b@v1", "a/b--c", "a/b.git", ""])
def test_names_that_no_repository_has(run, name):
    with pytest.raises(UserError, match=f"'hf-hub:{name}' names no repository; write hf-hub:OWNER/NAME"):
        publish(run[0], "--licence=mit", target=f"hf-hub:{name}")


def test_what_cannot_be_published(run, server, tmp_path, monkeypatch):
    unfinished = write_run(tmp_path / "unfinished", last=9)
    with pytest.raises(UserError, match="is at step 9 of 10; finish the run first"):
        publish(unfinished, "--licence=mit")
    fixed = create("ViT-mu/16", num_classes=2, resolution=32, position="sincos2d")
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), parameter_shapes(fixed))
    vit_jax.save(tmp_path / "fixed.npz", fixed, params)
    with pytest.raises(UserError, match="timm layout"):
        publish(tmp_path / "fixed.npz", "--licence=mit")
    with pytest.raises(UserError, match=r"--tag and --update are for hf-hub:OWNER/NAME, not m\.npz"):
        publish(run[0], "--tag=v1", target="m.npz")
    with pytest.raises(UserError, match="cannot write hf-hub:owner/name: give a local path"):
        vit_jax.save(TARGET, fixed, params)
    assert server.asked == []
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub.utils", None)
    with pytest.raises(UserError, match=r"this needs huggingface_hub: pip install -e '\.\[hub\]'"):
        publish(run[0], "--licence=mit", "--dry-run")


def test_a_licence_that_binds_is_kept_and_its_text_added(server, tmp_path):
    source = tmp_path / "dinov3"
    shutil.copytree(ROOT / "tests" / "fixtures" / "parity" / "hf_dinov3", source)
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: dinov3-license\n---\n")
    with pytest.raises(UserError, match=r"has the licence dinov3-license, .* it also binds .*; leave out the other"):
        publish(source, "--licence=mit")
    with pytest.raises(UserError, match="whose text must lie beside the weights; add --licence-text=FILE"):
        publish(source, "--layout=huggingface")
    (tmp_path / "text").write_text("DINOv3 License")
    publish(source, "--layout=huggingface", f"--licence-text={tmp_path / 'text'}")
    assert server.files["LICENSE"] == b"DINOv3 License"
    card = server.files["README.md"].decode()
    assert "pipeline_tag: image-feature-extraction" in card and str(tmp_path) not in card
    assert "model = DINOv3ViTModel.from_pretrained" in card
    assert json.loads(server.files["config.json"])["architectures"] == ["DINOv3ViTModel"]


def test_the_papers_number_stands_beside_that_of_the_same_test(tmp_path):
    evals = {
        "test": evaluation("classify"),
        "val": evaluation("classify", split="train[98%:]"),
        "few": evaluation("fewshot", shots=(5,)),
    }
    source = {"source": "tfds:cifar10", "num_classes": 10, "num_examples": 50_000}
    fields = {"init_from": "ViT-B/16-imagenet21k", "data": source, "batch": 512}
    folder = write_evaluated(tmp_path / "run", evals, **fields)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "val/accuracy": 0.9, "few/5shot": 0.8, "few/5shot_std": null}\n')
    card = describe_run(make_record(str(folder), "run"), "owner/name")
    assert "| test/accuracy | 50.00% | 100 | 98.95 % (Table 5) |" in card and "arXiv 2010.11929" in card
    assert "| val/accuracy | 90.00% | | |" in card and "(0.102 epochs), from the weights `ViT-B/16-imagenet21k`" in card
    changed = describe_run(make_record(str(folder), "run"), "owner/name", "resampled to 64x64 pixels")
    assert (
        "before the weights were resampled to 64x64 pixels" in changed
        and "preprocess=" not in changed.partition("## R")[2]
    )
    assert interop.repository_of("ViT-B/16-imagenet21k") == interop.repository_of("workdirs/run") == ""
    assert interop.repository_of("vit_base_patch16_dinov3.lvd1689m") == "timm/vit_base_patch16_dinov3.lvd1689m"
    assert interop.repository_of("hf-hub:a/b@v1") == "a/b"
