"""Vectors of texts in place of classes: transformers' probabilities, the equation in float64, and clear refusals."""

import json

import numpy as np
import pytest
import scipy.special
from PIL import Image

import vit_jax
from configs import base
from tests.conftest import ROOT
from tests.evals.helpers import make_source
from vit_jax import UserError, cli, data, evaluate, predict
from vit_jax.evals import make_texts, read_texts
from vit_jax.evals.texts import check_zeroshot, find_texts, score_zeroshot
from vit_jax.model import create

PARITY = ROOT / "tests" / "fixtures" / "parity"
MODEL = create("ViT-mu/4", num_classes=0, width=4, num_heads=2)
ACTIVATIONS = {
    "hf_texts_clip": lambda logits: scipy.special.softmax(logits, axis=1),
    "hf_texts_siglip": scipy.special.expit,
}


@pytest.fixture(scope="module")
def clip():
    return vit_jax.load(PARITY / "hf_texts_clip")


def write_texts(path, **arrays):
    given = {"names": ["cat", "dog"], "vectors": np.eye(2, 4, dtype=np.float32), "logit_scale": 20.0} | arrays
    np.savez(path, **{name: array for name, array in given.items() if array is not None})
    return str(path)


def evaluation(path):
    return base.evaluation("zeroshot", texts=str(path))


def ordered(found):
    return [[one["probability"] for one in sorted(image["classes"], key=lambda one: one["class"])] for image in found]


# What is computed.


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_probabilities_are_those_of_transformers(name):
    """The code of docs/evaluation.md wrote the file; the library's logits are those of each sentence by itself."""
    expected, words = np.load(PARITY / f"{name}.io.npz"), np.load(PARITY / name / "words.npz")
    sentences, flat = sorted(expected["sentences"].tolist()), {key: words[key] for key in words}
    flat |= {"names": expected["sentences"], "vectors": words["vectors"].reshape(len(sentences), -1)}
    found = predict.predict(PARITY / name, list(expected["images"]), texts=make_texts(**flat))
    order = np.argsort(expected["sentences"])
    logits = expected["logits"].astype(np.float64)[:, order]
    assert [sorted(one["class"] for one in image["classes"]) for image in found] == [sentences] * 3
    np.testing.assert_allclose(ordered(found), ACTIVATIONS[name](logits), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_texts_clip", "hf_texts_siglip"])
def test_sentences_are_averaged_and_the_commands_agree_with_the_equation(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "join_hosts", lambda: None)
    images, words = np.load(PARITY / f"{name}.io.npz")["images"], np.load(PARITY / name / "words.npz")
    model, params = vit_jax.load(PARITY / name)
    pixels = np.stack([data.load_image(image, model.preprocess) for image in images])
    features = np.asarray(model.apply(params, pixels)[1]["pre_logits"], np.float64)
    vectors = words["vectors"].astype(np.float64)
    vectors = (vectors / np.linalg.norm(vectors, axis=2, keepdims=True)).mean(axis=1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = features / np.linalg.norm(features, axis=1, keepdims=True) @ vectors.T
    logits = words["logit_scale"] * cosines + words.get("logit_bias", 0)
    texts = read_texts(PARITY / name / "words.npz")
    np.testing.assert_allclose(texts.logits(features.astype(np.float32)), logits, rtol=1e-5, atol=1e-5)

    for number, image in enumerate(images):
        (tmp_path / "photos" / ["cat", "dog"][number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "photos" / ["cat", "dog"][number % 2] / f"{number}.png")
    given = [str(PARITY / name), f"--texts={PARITY / name}/words.npz"]
    predict.main(
        [
            "predict",
            *given,
            *(str(path) for path in sorted(tmp_path.rglob("*.png"), key=lambda path: path.name)),
            "--json",
        ]
    )
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(ordered(found), ACTIVATIONS[name](logits), rtol=1e-5, atol=1e-6)

    request = f"zeroshot:source=folder:{tmp_path}/photos,split=train,texts={PARITY / name}/words.npz"
    evaluate.main(["evaluate", str(PARITY / name), f"--evals={request}", "--batch=8", "--json"])
    row = json.loads(capsys.readouterr().out)
    hits = logits.argmax(axis=1) == [0, 1, 0]
    assert row["zeroshot_photos/accuracy"] == pytest.approx(hits.mean()) and row["zeroshot_photos/top5"] == 1
    assert row["zeroshot_photos/class_accuracy"] == (hits[[0, 2]].mean() + hits[1]) / 2
    assert row["zeroshot_photos/n"] == 3 and len(row["evals"]["zeroshot_photos"]["texts"]) == 16


def test_classes_are_found_by_name_by_id_or_else_by_number(tmp_path, caplog):
    texts = make_texts(["dog", "n01", "cat", "ant"], np.eye(4, dtype=np.float32), 100)
    assert find_texts(texts, make_source(class_names=["ant", "cat"])).tolist() == [3, 2]
    assert find_texts(texts, make_source(class_names=["a crane", "a crane"], class_ids=["cat", "n01"])).tolist() == [
        2,
        1,
    ]
    assert find_texts(texts, make_source(class_names=list("0123"))).tolist() == [0, 1, 2, 3]
    digits = make_texts(list("3210"), np.eye(4, dtype=np.float32), 100)
    assert find_texts(digits, make_source(class_names=list("0123"))).tolist() == [3, 2, 1, 0]
    for names, sentence in (
        (["cat", "cow", "emu"], r"2 of the 3 classes of the data have no text, the first of them 'cow'; add"),
        (["cat", "cat"], "several classes of the data are called 'cat', so one text"),
        (list("012"), "the data have 3 classes without names, but there are 4 texts; give one text for each"),
    ):
        with pytest.raises(UserError, match=sentence):
            find_texts(texts, make_source(class_names=names))
    path = write_texts(tmp_path / "words.npz")
    check_zeroshot(evaluation(path), make_source(class_names=["dog", "cat"]), MODEL)
    assert not caplog.text
    check_zeroshot(evaluation(path), make_source(class_names=["0", "1"]), MODEL)
    assert "the data do not name their classes; the text of class 0 is 'cat'" in caplog.text


def test_scores_are_of_images_with_a_label_among_all_texts(tmp_path):
    path = write_texts(tmp_path / "words.npz", names=["cat", "dog", "emu"], vectors=np.eye(3, 4, dtype=np.float32))
    features = np.array([[9, 0, 0, 1], [0, 0, 1, 0], [0, 1e-30, 0, 0], [1, 0, 0, 0]], np.float32)
    labels = np.array([1, 0, 0, -1], np.int32)
    found = score_zeroshot(evaluation(path), make_source(class_names=["dog", "cat"]), MODEL, features, labels)
    assert (found["accuracy"], found["class_accuracy"], found["top5"], found["n"]) == (2 / 3, 0.75, 1.0, 3)


def test_what_an_evaluation_is_of_includes_the_contents_of_the_file(quick, tmp_path):
    """Of `evaluate --json`, and of the score by which a run ranks its checkpoints."""
    with quick.unlocked():
        quick.evals.words = evaluation(tmp_path / "words.npz")
        quick.evals.words.preprocess = quick.evals.test.preprocess
    found = []
    for scale in (20.0, 30.0, 30.0):
        write_texts(tmp_path / "words.npz", logit_scale=scale)
        found.append((data.identify_evals(quick)["words"], data.complete_config(quick)[1].evals["words"]))
    for one, other, again in zip(*found, strict=True):
        assert one != other == again and one["split"] == other["split"]
    (tmp_path / "words.npz").unlink()
    assert "texts" not in data.identify_evals(quick)["words"]


# What is refused.

BAD = [
    ({"names": None}, r"a file of texts has the arrays names, vectors, logit_scale; it lacks names\."),
    ({"vectors": None, "logit_scale": None}, "it lacks vectors, logit_scale"),
    ({"bias": 1.0}, "unknown array of texts 'bias'; choose from logit_bias, logit_scale, names, vectors"),
    (
        {"names": np.array(["cat", "dog"], object)},
        "cannot read the texts: Object arrays .*; write it by",
    ),
    ({"names": [1, 2]}, r"names must be a list of strings, one for each class, not int64 \[2\]"),
    ({"names": ["cat", "cat"]}, "'cat' is the name of several texts"),
    ({"names": ["é", "e\u0301"]}, "'é' is the name of several texts"),
    ({"names": []}, "names must be a list of strings"),
    (
        {"vectors": np.eye(3, 4, dtype=np.float32)},
        r"\[2, width\] or \[2, templates, width\], not float32 \[3, 4\]",
    ),
    ({"vectors": np.eye(2, 4, dtype=np.int32)}, "vectors must be floating-point numbers"),
    ({"vectors": np.ones((2, 0), np.float32)}, "vectors must be floating-point numbers"),
    ({"vectors": np.float32([[1, 0, 0, 0], [0, np.nan, 0, 0]])}, "the vectors of 'dog' are not finite"),
    ({"vectors": np.array([[1, 0, 0, 0], [0, 1e300, 0, 0]])}, "the vectors of 'dog' are not finite"),
    ({"vectors": np.float32([[1, 0, 0, 0], [0, 0, 0, 0]])}, "a vector of 'dog' is zero, so it has no direction"),
    ({"vectors": np.float32([[[1, 0, 0, 0], [0, 0, 0, 0]], [[1, 0, 0, 0]] * 2])}, "a vector of 'cat' is zero"),
    ({"vectors": np.float32([[[1, 0, 0, 0], [-1, 0, 0, 0]], [[1, 0, 0, 0]] * 2])}, "a vector of 'cat' is zero"),
    ({"logit_scale": 4.6}, r"logit_scale is 4\.6, but .* between 6 and 1000; .* is the logarithm, so write its exp"),
    ({"logit_scale": np.exp(100.0)}, "logit_scale is 2.6"),
    ({"logit_scale": np.nan}, "logit_scale must be one finite number"),
    ({"logit_scale": [10.0, 20.0]}, r"logit_scale must be one finite number, not float64 \[2\]"),
    ({"logit_bias": np.inf}, "logit_bias must be one finite number"),
    (
        {"vectors": np.eye(2, 7, dtype=np.float32)},
        "have 7 channels, but the features of the model have 10; use",
    ),
]


@pytest.mark.parametrize(("arrays", "sentence"), BAD)
def test_what_is_no_file_of_texts_is_refused(arrays, sentence, tmp_path, clip):
    path = write_texts(tmp_path / "words.npz", **arrays)
    with pytest.raises(UserError, match=sentence) as raised:
        read_texts(path).check_width(clip[0])
    assert str(raised.value).startswith(path) or "channels" in str(raised.value)


def test_files_that_cannot_be_read_are_refused(tmp_path, clip):
    (tmp_path / "text.npz").write_text("cat dog")
    np.save(tmp_path / "one.npy", np.eye(2))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    whole = (PARITY / "hf_texts_clip" / "words.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    for name, sentence in (
        ("text", "text.npz: cannot read the texts"),
        ("one", "it lacks names, vectors, logit_scale"),
        ("cut", "cut.npz: cannot read the texts"),
        ("absent", "cannot read .*absent.npz: No such file"),
    ):
        with pytest.raises(UserError, match=sentence):
            predict.predict(PARITY / "hf_texts_clip", [], texts=tmp_path / f"{name}.npz")
    with pytest.raises(UserError, match=r"hf_texts_clip has no head, .* or give vectors of texts, --texts=FILE\.npz"):
        predict.predict(PARITY / "hf_texts_clip", [])
    with pytest.raises(UserError, match="have 24 channels, but the features of the model have 10"):
        predict.predict(PARITY / "hf_texts_clip", [], texts=PARITY / "hf_texts_siglip" / "words.npz")
    with pytest.raises(UserError, match="set the field texts to a file"):
        check_zeroshot(base.evaluation("zeroshot"), make_source(class_names=["cat"]), clip[0])
