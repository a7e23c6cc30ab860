"""VTAB's tasks: labels by their definitions, splits as in TFDS, data that are missing or others."""

import collections
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from configs.base import get_config
from tests.data.test_sources import TFDS
from vit_jax import UserError
from vit_jax.data.sources import VTAB_GROUPS, VTAB_TASKS, kinds, splits, vtab

# Images of the splits of each data set, in TFDS.
COUNTS = {
    "caltech101": {"train": 3_060, "test": 6_084},
    "cifar10": {"train": 50_000, "test": 10_000},
    "cifar100": {"train": 50_000, "test": 10_000},
    "clevr": {"train": 70_000, "validation": 15_000, "test": 15_000},
    "diabetic_retinopathy_detection/btgraham-300": {"train": 35_126, "validation": 10_906, "test": 42_670},
    "dmlab": {"train": 65_550, "validation": 22_628, "test": 22_735},
    "dsprites": {"train": 737_280},
    "dtd": {"train": 1_880, "validation": 1_880, "test": 1_880},
    "eurosat/rgb": {"train": 27_000},
    "kitti:3.1.0": {"train": 6_347, "validation": 423, "test": 711},
    "oxford_flowers102": {"train": 1_020, "validation": 1_020, "test": 6_149},
    "oxford_iiit_pet": {"train": 3_680, "test": 3_669},
    "patch_camelyon": {"train": 262_144, "validation": 32_768, "test": 32_768},
    "resisc45": {"train": 31_500},
    "smallnorb": {"train": 24_300, "test": 24_300},
    "sun397/tfds": {"train": 76_128, "validation": 10_875, "test": 21_750},
    "svhn_cropped": {"train": 73_257, "test": 26_032, "extra": 531_131},
}
# Task -> (split and first image of val200, split and first and last image of test), by the percentages of VTAB's code.
PLACES = {
    "caltech101": ("train", 2_754, "test", 0, 6_084),
    "cifar100": ("train", 45_000, "test", 0, 10_000),
    "dtd": ("validation", 0, "test", 0, 1_880),
    "flowers102": ("validation", 0, "test", 0, 6_149),
    "pets": ("train", 2_944, "test", 0, 3_669),
    "sun397": ("validation", 0, "test", 0, 21_750),
    "svhn": ("train", 73_257 * 90 // 100, "test", 0, 26_032),
    "camelyon": ("validation", 0, "test", 0, 32_768),
    "eurosat": ("train", 16_200, "train", 21_600, 27_000),
    "resisc45": ("train", 18_900, "train", 25_200, 31_500),
    "retinopathy": ("validation", 0, "test", 0, 42_670),
    "clevr_count": ("train", 63_000, "validation", 0, 15_000),
    "clevr_distance": ("train", 63_000, "validation", 0, 15_000),
    "dmlab": ("validation", 0, "test", 0, 22_735),
    "dsprites_location": ("train", 589_824, "train", 663_552, 737_280),
    "dsprites_orientation": ("train", 589_824, "train", 663_552, 737_280),
    "kitti_distance": ("validation", 0, "test", 0, 711),
    "smallnorb_azimuth": ("test", 0, "test", 12_150, 24_300),
    "smallnorb_elevation": ("test", 0, "test", 12_150, 24_300),
    "cifar10": ("train", 45_000, "test", 0, 10_000),
}


def test_nineteen_tasks_in_three_groups():
    groups = collections.Counter(task.group for task in VTAB_TASKS.values())
    assert groups == {"natural": 7, "specialized": 4, "structured": 8, "": 1} and list(groups)[:3] == [*VTAB_GROUPS]


@pytest.mark.parametrize("name", VTAB_TASKS)
def test_splits(name):
    task = VTAB_TASKS[name]
    found = vtab.find_splits(task, COUNTS[task.dataset])
    val, first, test, start, stop = PLACES[name]
    assert found["train800"] == (("train", range(800)),) and found["val200"] == ((val, range(first, first + 200)),)
    assert found["train800val200"] == found["train800"] + found["val200"]
    assert found["test"] == ((test, range(start, stop)),)


def test_slices_of_a_split_of_two_parts():
    parts = (("train", range(800)), ("validation", range(50, 250)))
    assert vtab.cut_parts(parts, range(790, 810)) == (("train", range(790, 800)), ("validation", range(50, 60)))
    assert vtab.cut_parts(parts, range(900, 1000)) == (("validation", range(150, 250)),)
    assert vtab.cut_parts(parts, range(5)) == (("train", range(5)),)


def test_clevr_labels():
    assert [vtab.count_objects({"size": np.zeros(count)}) for count in range(3, 11)] == [*range(8)]
    distances = {6.1: 0, 8.0: 0, 8.001: 1, 8.5: 1, 8.6: 2, 9.2: 3, 9.7: 4, 10.0: 4, 10.01: 5, 14.0: 5}
    for distance, label in distances.items():
        pixels = np.array([[1.0, 2.0, 20.0], [500.0, 3.0, distance], [0.0, 0.0, 15.0]], np.float32)
        assert vtab.bin_object_distance({"pixel_coords": pixels}) == label, distance


def test_kitti_labels():
    def label(*objects):
        types, depths = zip(*objects, strict=True) if objects else ((), ())
        location = [[-30.0, 1.5, depth] for depth in depths]
        return vtab.bin_vehicle_distance({"type": np.array(types), "location": np.array(location, np.float32)})

    assert [label((0, depth)) for depth in (-1.0, 7.9, 8.0, 8.1, 20.0, 20.1, 90.0)] == [0, 0, 0, 1, 1, 2, 2]
    assert label((3, 5.0), (7, 1.0)) == label() == 3  # people and others are no vehicles
    assert label((3, 5.0), (2, 30.0), (1, 12.0)) == 1


def test_dsprites_bins():
    positions = collections.Counter(map(vtab.bin_position, range(32)))
    assert positions == dict.fromkeys(range(16), 2)
    orientations = [vtab.bin_orientation(label) for label in range(40)]
    assert orientations == [int(np.floor(np.float32(label) / np.float32(2.5))) for label in range(40)]
    assert [orientations.count(label) for label in range(16)] == [3, 2] * 8


def write_records(folder, name, features, records):
    """Writes splits as TFDS prepares them: name of a split -> its records."""
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter

    where = folder / name / "1.0.0"
    where.mkdir(parents=True)
    serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())
    for split, rows in records.items():
        writer = ArrayRecordWriter(str(where / f"{name}-{split}.array_record-00000-of-00001"), "group_size:1")
        for row in rows:
            writer.write(serializer.serialize_example(features.encode_example(row)))
        writer.close()
    features.save_metadata(where)
    (where / "features.json").write_text(json.dumps(features.to_json()))
    listed = [
        {
            "name": split,
            "shardLengths": [str(len(rows))],
            "numBytes": "1",
            "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        }
        for split, rows in records.items()
    ]
    info = {"name": name, "version": "1.0.0", "fileFormat": "array_record", "splits": listed}
    (where / "dataset_info.json").write_text(json.dumps(info))


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def open_task(name, split, folder):
    config = get_config()
    config.data.source, config.data.data_dir = f"vtab:{name}", str(folder)
    return kinds.open_source(config, split)


def test_clevr_from_records(tmp_path):
    import tensorflow_datasets as tfds

    tensor = tfds.features.Tensor(shape=(3,), dtype=np.float32)
    objects = tfds.features.Sequence({"size": tfds.features.ClassLabel(num_classes=2), "pixel_coords": tensor})
    features = tfds.features.FeaturesDict({"image": tfds.features.Image(encoding_format="png"), "objects": objects})
    grey = np.full((4, 4, 3), 7, np.uint8)

    def record(number):
        depths = [9.2 + number % 3] * (3 + number % 8)
        return {
            "image": encoded(grey),
            "objects": {"size": [0] * len(depths), "pixel_coords": [[0.0, 0.0, depth] for depth in depths]},
        }

    rows = [record(number) for number in range(2000)]
    write_records(tmp_path, "clevr", features, {"train": rows, "validation": rows[:11], "test": rows[:1]})
    count, distance = (open_task(f"clevr_{name}", "test", tmp_path) for name in ("count", "distance"))
    assert [example["label"] for example in count] == [number % 8 for number in range(11)]
    assert [example["label"] for example in distance] == [[3, 5, 5][number % 3] for number in range(11)]
    assert (count.num_classes, distance.num_classes, count.class_names) == (8, 6, None)
    assert count.fingerprint != distance.fingerprint
    both = open_task("clevr_count", "train800val200[799:]", tmp_path)
    assert both.parts == (("train", range(799, 800)), ("train", range(1800, 2000)))
    assert [both[i]["label"] for i in (0, 1)] == [799 % 8, 0] and np.asarray(both[1]["image"]).tolist() == grey.tolist()
    assert not count.overlaps(both) and both.overlaps(open_task("clevr_count", "val200", tmp_path))


def test_dsprites_from_records(tmp_path):
    import tensorflow_datasets as tfds

    labels = {
        f"label_{name}": tfds.features.ClassLabel(num_classes=n)
        for name, n in (("orientation", 40), ("x_position", 32))
    }
    image = tfds.features.Image(shape=(2, 2, 1), encoding_format="png")
    features = tfds.features.FeaturesDict({"image": image, **labels})
    pixels = np.array([[0, 1], [1, 0]], np.uint8)
    rows = [{"image": encoded(pixels), "label_orientation": i % 40, "label_x_position": i % 32} for i in range(2100)]
    write_records(tmp_path, "dsprites", features, {"train": rows})
    orientation, location = (open_task(f"dsprites_{name}", "test", tmp_path) for name in ("orientation", "location"))
    first = 2100 * 90 // 100
    assert [row["label"] for row in orientation] == [int(i % 40 / 2.5) for i in range(first, 2100)]
    assert [row["label"] for row in location] == [i % 32 // 2 for i in range(first, 2100)]
    assert np.asarray(location[0]["image"]).tolist() == (pixels[..., None].repeat(3, axis=2) * 255).tolist()


@pytest.mark.skipif(not TFDS.exists(), reason="needs the prepared CIFAR-10")
def test_cifar10_stands_in():
    splits_of_task = {split: open_task("cifar10", split, TFDS) for split in vtab.VTAB_SPLITS}
    assert [len(source) for source in splits_of_task.values()] == [800, 200, 1000, 10_000]
    config = get_config()
    config.data.source, config.data.data_dir = "tfds:cifar10", str(TFDS)
    plain = kinds.open_source(config, "train[45000:45200]")
    assert plain[3]["label"] == splits_of_task["val200"][3]["label"] == splits_of_task["train800val200"][803]["label"]
    assert plain.class_names == splits_of_task["test"].class_names


def test_what_is_missing_is_named_with_the_command(tmp_path, tfds_folder):
    with pytest.raises(UserError, match=re.escape("unknown VTAB task 'pet'; did you mean 'pets'")):
        open_task("pet", "test", tmp_path)
    command = re.escape(f"tfds build dtd --file_format=array_record --data_dir={tmp_path}`")
    with pytest.raises(UserError, match=f"no TFDS dataset 'dtd' in .*; prepare it with .*{command}$"):
        open_task("dtd", "test", tmp_path)
    with pytest.raises(UserError, match=r"; download its files first, into .*/downloads/manual$"):
        open_task("resisc45", "test", tmp_path)
    (tfds_folder / "tiny").rename(tfds_folder / "dtd")
    with pytest.raises(UserError, match="'dtd' has 3 classes, but VTAB's has 47"):
        open_task("dtd", "test", tfds_folder)
    (tfds_folder / "dtd").rename(tfds_folder / "clevr")
    with pytest.raises(UserError, match="'clevr' has no feature objects, which VTAB reads"):
        open_task("clevr_count", "test", tfds_folder)
    with pytest.raises(UserError, match="unknown split 'train'"):
        splits.select_examples("train", dict.fromkeys(vtab.VTAB_SPLITS, 1))
    with pytest.raises(UserError, match="reaches beyond the 12 examples"):
        vtab.find_splits(VTAB_TASKS["dtd"], {"train": 12, "validation": 12, "test": 12})
