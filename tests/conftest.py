"""Eight emulated devices for all tests, and small configurations."""

import contextlib
import gc
import io
import json
import os
import subprocess
from pathlib import Path

from tests.faults.hosts import QUICK

ROOT = Path(__file__).parent.parent

os.environ["JAX_PLATFORMS"] = os.environ.get("TESTED_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK}"
# Many tests and processes compile the same small programs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import numpy as np
import pytest
from PIL import Image

from configs import base, smoke

gc.set_threshold(50_000)  # tracing makes many objects and little garbage


def slow_but(usual, names):
    """Returns the names as parameters of a test, those that are not among the usual ones slow."""
    return [name if name in usual else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture
def tiny():
    """A two-block model on 16-pixel synthetic images, for 10 steps, with every kind of randomness on."""
    config = base.get_config()
    config.resolution = 16
    config.batch = 16
    config.total_steps = 10
    config.base_lr = 1e-2
    config.grad_norm_clip = 1.0
    config.model.name = "ViT-mu/4"
    config.model.depth = 2
    config.model.dropout_rate = 0.1
    config.model.stochastic_depth = 0.1
    config.task.mixup = 0.2
    config.optim.weight_decay = 0.1
    config.optim.ema_decay = 0.9
    config.data.num_classes = 10
    config.data.num_examples = 40
    config.evals.test.preprocess = "resize(16)|value_range(-1,1)"
    return config


@pytest.fixture
def quick():
    """The smoke recipe on the embedded digits, without MixUp, which compiles slowly."""
    config = smoke.get_config()
    config.task.mixup = 0.0
    return config


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("no disk may be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture
def tfds_folder(tmp_path):
    """A prepared TFDS dataset of 12 + 5 images of three classes."""
    write_tfds(tmp_path, "tiny", "1.2.3", ["a", "b", "c"], {"train": 12, "test": 5})
    return tmp_path


def write_tfds(folder, name, version, classes, counts, file_name=None, shards=1, labels=None):
    """Writes PNG images, image i of the grey level i % 256, as TFDS prepares them; classes alternate.

    `file_name` is the pattern of a feature of that name, if any; each split has `shards`, at most one an image.
    `labels` has the label of all images of a split, in place of the alternating ones.
    """
    import tensorflow_datasets as tfds
    from array_record.python.array_record_module import ArrayRecordWriter

    described = {"image": tfds.features.Image(encoding_format="png"), "label": tfds.features.ClassLabel(names=classes)}
    features = tfds.features.FeaturesDict(described | ({"file_name": tfds.features.Text()} if file_name else {}))
    where = folder / name / version
    where.mkdir(parents=True)
    serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())
    lengths = {}
    for split, count in counts.items():
        total = min(shards, count)
        ends = [count * (shard + 1) // total for shard in range(total)]
        lengths[split] = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        for shard, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            path = where / f"{name}-{split}.array_record-{shard:05}-of-{total:05}"
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for number in range(start, end):
                encoded = io.BytesIO()
                Image.fromarray(np.full((6, 8, 3), number % 256, np.uint8)).save(encoded, "PNG")
                example = {"image": encoded.getvalue(), "label": (labels or {}).get(split, number % len(classes))}
                named = {"file_name": file_name.format(number + 1).encode()} if file_name else {}
                writer.write(serializer.serialize_example(example | named))
            writer.close()
    features.save_metadata(where)
    (where / "features.json").write_text(json.dumps(features.to_json()))
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    listed = [
        {"name": split, "shardLengths": [*map(str, lengths[split])], "numBytes": "1", "filepathTemplate": template}
        for split in counts
    ]
    info = {"name": name, "version": version, "fileFormat": "array_record", "splits": listed}
    (where / "dataset_info.json").write_text(json.dumps(info))


def bytes_in(folder):
    """The bytes of the shards in a folder while others change it."""
    held = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                held += os.stat(f"{parent}/{name}").st_size if name.endswith(".array_record") else 0
    return held
