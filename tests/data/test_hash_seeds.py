"""Nothing that hosts must agree on depends on PYTHONHASHSEED, by which the orders of sets differ in each process."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.data.test_folder_splits import write_splits
from tests.data.test_webdataset import sample, write_tar

SCRIPT = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from vit_jax import UserError
from vit_jax.checkpoint import fingerprint
from vit_jax.data.sources import SourceConfig, list_splits, open_split

for name in sys.argv[2:]:
    config = SourceConfig(name, data_dir=sys.argv[1], num_classes=3)
    for split in (*list_splits(config), "train+test"):
        try:
            source = open_split(config, split)
        except UserError as error:
            print(name, split, error)
        else:
            rows = range(0, len(source), 5)
            labels, names = [source.label(row) for row in rows], [source.example_name(row) for row in rows]
            print(name, split, source.fingerprint, source.class_names, source.notes, labels, names)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
specs = (P("data"), P("fsdp"), P("tensor"), P(("data", "fsdp")), P(None, "tensor"), P("fsdp", "tensor"))
shapes = [jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, spec)) for spec in specs]
print(fingerprint.rows_on(mesh, specs).lower(shapes).as_text())
"""


@pytest.mark.slow
def test_sources_and_programs_are_the_same_under_all_hash_seeds(tmp_path):
    formats = ROOT / "tests" / "fixtures" / "formats"
    splits = {}
    for split, field in (("train", "fine"), ("test", "coarse")):
        write_tar(tmp_path / "tars" / f"{split}.tar", sample(0, json={"fine": 1, "coarse": 2}))
        splits[split] = {"filenames": [f"{split}.tar"], "shard_lengths": [1], "alt_label": field}
    (tmp_path / "tars" / "_info.json").write_text(json.dumps({"splits": splits}))
    folder = write_splits(tmp_path / "photos", "Training", "Testing")
    (tmp_path / "photos" / "words.txt").write_text("cat\ttabby\ndog\tpug\n")
    sources = [folder, f"webdataset:{tmp_path}/tars", "tfds:tiny", f"parquet:{formats}/parquet"]
    sources.append(f"mix:1*{folder}+2*tfds:tiny+3*parquet:{formats}/parquet")
    printed = set()
    for seed in ("0", "1", "2"):
        command = [sys.executable, "-c", SCRIPT, f"{formats}/tfds", *sources]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        printed.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(printed) == 1 and "alt_label" in printed.pop()
