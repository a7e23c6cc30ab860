import json

import numpy as np
import pytest

from tests.evals.helpers import make_source
from vit_jax import UserError
from vit_jax.evals.class_maps import check_names, list_class_maps, read_class_map
from vit_jax.interop.imagenet_classes import class_names, class_wnids
from vit_jax.model import create

WNIDS = class_wnids(1000)


def model(names=None, count=1000):
    """Returns a model with so many classes, or with classes of these names."""
    return create("ViT-mu/4", num_classes=len(names) if names else count, class_names=names)


def data(names=None, ids=None):
    """A source whose classes have these names."""
    return make_source(class_names=names, class_ids=ids)


IMAGENET = model()


@pytest.mark.parametrize(
    "name, shared, covered",
    [("imagenet_a", 200, 200), ("imagenet_r", 200, 200), ("imagenet_v2", 1000, 1000), ("objectnet", 113, 125)],
)
def test_class_maps_have_the_published_sizes(name, shared, covered):
    classes = read_class_map(name, IMAGENET, data())
    flat = [column for columns in classes.members for column in columns]
    assert (len(set(classes.names)), len(flat), len(set(flat))) == (shared, covered, covered)
    assert name in list_class_maps()


def test_classes_are_those_that_they_are_named_after():
    names = class_names(1000)
    objectnet = read_class_map("objectnet", IMAGENET, data())
    covered = {name: [names[column] for column in columns] for name, columns in zip(*objectnet, strict=True)}
    assert covered["banana"] == ["banana"]
    assert covered["alarm_clock"] == ["analog clock", "digital clock"]
    assert covered["chair"] == ["barber chair", "folding chair", "rocking chair, rocker"]
    renditions = read_class_map("imagenet_r", IMAGENET, data())
    assert names[renditions.members[0][0]] == "goldfish, Carassius auratus" and renditions.names[0] == "n01443537"
    assert read_class_map("imagenet_v2", IMAGENET, data()).members == tuple((column,) for column in range(1000))
    assert read_class_map("imagenet_a", IMAGENET, data()).members[0] == (6,)  # stingray


def test_a_shared_class_has_the_greatest_logit_that_it_covers(tmp_path):
    path = tmp_path / "pets.json"
    path.write_text(json.dumps({"dog": ["n3", "n1"], "cat": ["n2"]}))
    classes = read_class_map(str(path), model(["n0", "n1", "n2", "n3"]), data())
    logits = np.array([[9, 1, 2, 3], [9, 5, 4, 3]], np.float32)
    assert classes.map_logits(logits).tolist() == [[3, 2], [5, 4]]
    labels = classes.map_labels(np.array([0, 1, 2, 2]), ["cat", "cow", "dog"])
    assert labels.tolist() == [1, -1, 0, 0]
    assert classes.list_members(labels).tolist() == [[2, -1], [-1, -1], [3, 1], [3, 1]]
    several = classes.map_labels(np.array([[0, 2, -1]]), ["cat", "cow", "dog"])
    assert several.tolist() == [[1, 0, -1]]  # what pads is no class
    with pytest.raises(UserError, match=r"none of the data's classes \(cow, hen, ...\) is in the class map"):
        classes.map_labels(np.array([0]), ["cow", "hen"])


def test_folders_named_by_number_are_no_sorted_numbers():
    """A folder's classes are sorted as text: 0, 1, 10, 100."""
    names = sorted(map(str, range(1000)))
    labels = read_class_map("imagenet_v2", IMAGENET, data()).map_labels(np.arange(1000), names)
    assert labels[2] == 10 and [str(label) for label in labels] == names


def test_what_is_no_class_map_is_refused(tmp_path):
    with pytest.raises(UserError, match="did you mean 'objectnet'"):
        read_class_map("objectnett", IMAGENET, data())
    with pytest.raises(UserError, match="covers 125 classes that the model lacks"):
        read_class_map("objectnet", model(["a", "b"]), data())
    with pytest.raises(UserError, match="cannot read"):
        read_class_map(f"{tmp_path}/absent.json", IMAGENET, data())
    (tmp_path / "twice.json").write_text('{"dog": ["n1"], "dog": ["n2"]}')
    with pytest.raises(UserError, match="the key 'dog' occurs twice"):
        read_class_map(f"{tmp_path}/twice.json", IMAGENET, data())
    for text in ("[]", "{}", '{"dog": []}', '{"dog": "n1"}', '{"dog": [1]}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(UserError, match="is no class map"):
            read_class_map(f"{tmp_path}/wrong.json", IMAGENET, data())


def test_classes_of_equal_names_are_compared_whatever_their_order():
    classes = read_class_map("names", model(["ant", "bee", "cow"]), data(["cow", "dog", "ant"]))
    assert (classes.names, classes.members) == (("ant", "cow"), ((0,), (2,)))
    assert classes.map_labels(np.array([0, 1, 2]), ["cow", "dog", "ant"]).tolist() == [1, -1, 0]
    words, few = ["ray", "great white shark", "tench"], [WNIDS[6], WNIDS[2], WNIDS[0]]
    classes = read_class_map("names", IMAGENET, data(words, few))
    assert classes.members == ((0,), (2,), (6,))
    assert classes.map_labels(np.array([0, 1, 2]), words, few).tolist() == [2, 1, 0]
    empty = read_class_map("names", IMAGENET, data(["ant"]))
    with pytest.raises(UserError, match=r"none of the data's classes \(ant, ...\) is in the class map"):
        empty.map_labels(np.array([0]), ["ant"])


def test_names_that_several_classes_share_are_refused(tmp_path):
    cranes = ["cat", "crane", "dog", "crane"]
    sentence = r"'crane' is the name of several classes of the {} \(1, 3\), so names do not tell these apart"
    with pytest.raises(UserError, match=sentence.format("model")):
        read_class_map("names", model(cranes), data(["crane", "cat"]))
    with pytest.raises(UserError, match=sentence.format("data")):
        read_class_map("names", model(["crane", "cat"]), data(cranes))
    assert read_class_map("names", model(cranes), data(["dog", "cat"])).members == ((0,), (2,))
    (tmp_path / "birds.json").write_text('{"bird": ["crane"]}')
    with pytest.raises(UserError, match=sentence.format("model")):
        read_class_map(f"{tmp_path}/birds.json", model(cranes), data())
    twice = [name.partition(",")[0] for name in class_names(1000)]
    assert len(set(twice)) < 1000  # crane is one of them
    by_id = read_class_map("names", IMAGENET, data(twice, WNIDS))
    assert by_id.members == tuple((column,) for column in range(1000))


def test_a_model_has_the_classes_of_imagenet_unless_it_says_otherwise():
    lemmas = [name.partition(",")[0] for name in class_names(1000)]
    for names in (None, WNIDS, class_names(1000), lemmas):
        assert class_wnids(1000, names) == WNIDS
    assert class_wnids(1000, [f"thing {number}" for number in range(1000)]) is None and class_wnids(10) is None


@pytest.mark.parametrize(
    ("of_model", "of_data", "sentence"),
    [
        (model(["a", "b"]), data(["a", "b"]), None),
        (model(["a", "b"]), data(["x", "y"], ["a", "b"]), None),
        (model(["a", "b"]), data(["0", "1"]), None),  # numbers are no names
        (model(count=2), data(["a", "b"]), None),
        (IMAGENET, data(WNIDS), None),
        (model(class_names(1000)), data(map(str, range(1000)), WNIDS), None),
        (
            model(["a", "b"]),
            data(["b", "a"]),
            "is 'a', but class 0 of folder:x is 'b'; 2 of 2 names are shared",
        ),
        (model(["a", "b"]), data(["x", "y"]), r"0 of 2 names are shared. --evals=predictions:class_map=order ignores"),
        (IMAGENET, data(sorted(map(str, range(1000)))), "whose class 0 is 'n01440764'"),
    ],
)
def test_the_names_of_the_classes_must_be_those_of_the_head(of_model, of_data, sentence):
    if sentence is None:
        check_names(of_model, of_data, "evals.test", "folder:x")
    else:
        with pytest.raises(UserError, match=sentence):
            check_names(of_model, of_data, "evals.test", "folder:x")


def test_the_classes_of_a_bit_are_compared_too():
    bit = create("BiT-R14x1", width=32, num_classes=2, class_names=("cat", "dog"))
    check_names(bit, data(["cat", "dog"]), "evals.test", "folder:pets")
    with pytest.raises(UserError, match="whose class 0 is 'cat', but class 0 of folder:pets is 'dog'"):
        check_names(bit, data(["dog", "cat"]), "evals.test", "folder:pets")
