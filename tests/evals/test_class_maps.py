import json

import numpy as np
import pytest

from vit_jax import UserError
from vit_jax.evals.class_maps import list_class_maps, read_class_map
from vit_jax.interop.class_names import class_names, class_wnids

WNIDS = class_wnids(1000)


@pytest.mark.parametrize(
    "name, shared, covered",
    [("imagenet_a", 200, 200), ("imagenet_r", 200, 200), ("imagenet_v2", 1000, 1000), ("objectnet", 113, 125)],
)
def test_class_maps_have_the_published_sizes(name, shared, covered):
    classes = read_class_map(name, WNIDS)
    flat = [column for columns in classes.members for column in columns]
    assert (len(set(classes.names)), len(flat), len(set(flat))) == (shared, covered, covered)
    assert name in list_class_maps()


def test_classes_are_those_that_they_are_named_after():
    names = class_names(1000)
    objectnet = read_class_map("objectnet", WNIDS)
    covered = {name: [names[column] for column in columns] for name, columns in zip(*objectnet, strict=True)}
    assert covered["banana"] == ["banana"]
    assert covered["alarm_clock"] == ["analog clock", "digital clock"]
    assert covered["chair"] == ["barber chair", "folding chair", "rocking chair, rocker"]
    renditions = read_class_map("imagenet_r", WNIDS)
    assert names[renditions.members[0][0]] == "goldfish, Carassius auratus" and renditions.names[0] == "n01443537"
    assert read_class_map("imagenet_v2", WNIDS).members == tuple((column,) for column in range(1000))
    assert read_class_map("imagenet_a", WNIDS).members[0] == (6,)  # stingray


def test_a_shared_class_has_the_greatest_logit_that_it_covers(tmp_path):
    path = tmp_path / "pets.json"
    path.write_text(json.dumps({"dog": ["n3", "n1"], "cat": ["n2"]}))
    classes = read_class_map(path, ["n0", "n1", "n2", "n3"])
    logits = np.array([[9, 1, 2, 3], [9, 5, 4, 3]], np.float32)
    assert classes.map_logits(logits).tolist() == [[3, 2], [5, 4]]
    labels = classes.map_labels(np.array([0, 1, 2, 2]), ["cat", "cow", "dog"])
    assert labels.tolist() == [1, -1, 0, 0]
    with pytest.raises(UserError, match=r"none of the data's classes \(cow, hen, ...\) is in the class map"):
        classes.map_labels(np.array([0]), ["cow", "hen"])


def test_folders_named_by_number_are_no_sorted_numbers():
    """A folder's classes are sorted as text: 0, 1, 10, 100."""
    names = sorted(map(str, range(1000)))
    labels = read_class_map("imagenet_v2", WNIDS).map_labels(np.arange(1000), names)
    assert labels[2] == 10 and [str(label) for label in labels] == names


def test_what_is_no_class_map_is_refused(tmp_path):
    with pytest.raises(UserError, match="did you mean 'objectnet'"):
        read_class_map("objectnett", WNIDS)
    with pytest.raises(UserError, match="covers 125 classes that the model lacks"):
        read_class_map("objectnet", ["a", "b"])
    with pytest.raises(UserError, match="cannot read"):
        read_class_map(tmp_path / "absent.json", WNIDS)
    for text in ("[]", "{}", '{"dog": []}', '{"dog": "n1"}', '{"dog": [1]}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(UserError, match="is no class map"):
            read_class_map(tmp_path / "wrong.json", WNIDS)
