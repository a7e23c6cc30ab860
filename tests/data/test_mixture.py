"""Mixtures: shares that are exact, each part in epochs of its own, and classes that join."""

import pickle
from collections import Counter

import grain
import numpy as np
import pytest

from tests.data.test_formats import config_of, examples, here, there  # noqa: F401
from tests.data.test_parquet import write_table
from tests.data.test_sources import open_source, write_image
from tests.data.test_stream import config_of as run_config
from vit_jax import UserError, data
from vit_jax.data import loader
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.setup import absolute_source
from vit_jax.data.sources import Mixture, list_splits
from vit_jax.data.sources.mixture import WeightedSource, parse_mixture, read_weights
from vit_jax.data.sources.source import SourceConfig

PIPE = parse_pipe("resize(4)|value_range(-1,1)", 4)


def mixed(here, *weights):  # noqa: F811
    """The Parquet and the TFRecord set, which have the same images and classes."""
    return f"mix:{weights[0]}*parquet:{here}/parquet+{weights[1]}*tfds:tiny", {"data_dir": f"{here}/tfds"}


@pytest.mark.parametrize(("lengths", "weights"), [((20, 7), (7, 3)), ((5, 5), (1, 1)), ((3, 11, 4), (1, 2, 4))])
def test_shares_are_exact_and_epochs_are_of_each_part(lengths, weights):
    order = loader.mixed_indices(Mixture(lengths, weights), 5)
    count = 25 * sum(weights)
    drawn = [order[position] for position in range(count)]
    starts = np.cumsum([0, *lengths])
    part = np.searchsorted(starts, drawn, side="right") - 1
    for number, weight in enumerate(weights):
        taken = np.cumsum(part == number)
        shares = np.arange(1, count + 1) * weight / sum(weights)
        assert np.abs(taken - shares).max() < len(weights)
        assert taken[sum(weights) - 1 :: sum(weights)].tolist() == [weight * turn for turn in range(1, 26)]
        own = [index for index, one in zip(drawn, part, strict=True) if one == number]
        length, epochs = lengths[number], len(own) // lengths[number]
        passes = [own[epoch * length : (epoch + 1) * length] for epoch in range(epochs)]
        assert all(sorted(one) == list(range(starts[number], starts[number + 1])) for one in passes)
        assert length < 4 or len({tuple(one) for one in passes}) > 1
    assert [order[position] for position in (40, 2, 27)] == [drawn[position] for position in (40, 2, 27)]


def test_a_single_source_keeps_its_order():
    plain = grain.MapDataset.range(23).seed(9).shuffle().repeat(None)
    one = loader.mixed_indices(Mixture((23,), (1,)), 9)
    assert [one[position] for position in range(60)] == [plain[position] for position in range(60)]


def test_weights_are_read_exactly(here):  # noqa: F811
    def weights(*texts):
        return read_weights([WeightedSource(text, "digits") for text in texts])

    assert weights("0.7", "0.3") == (7, 3) and weights("2", "1/3", "1e-1") == (60, 10, 3)
    for wrong in ("x", "0", "-1", "nan", "inf", "", "1/0"):
        with pytest.raises(
            UserError, match=rf"the weight '{wrong}' of digits must be a number above 0, as in mix:0.7\*S"
        ):
            weights("1", wrong)
    parts = parse_mixture("0.5*parquet:gs://b/a+b/x-*.parquet,label=y+1/3*digits+x*folder:c")
    assert parts == [
        ("0.5", "parquet:gs://b/a+b/x-*.parquet,label=y"),
        ("1/3", "digits"),
        ("x", "folder:c"),
    ]
    for wrong in ("digits", "0.5*digits", "digits+synthetic"):
        with pytest.raises(UserError, match=r"cannot read the data source mix:.*; write mix:0.7\*SOURCE\+0.3\*SOURCE"):
            parse_mixture(wrong)
    assert absolute_source("mix:1*folder:/a/../b+2*digits") == "mix:1*folder:/b+2*digits"


def test_the_examples_are_those_of_the_parts(here, there):  # noqa: F811
    name, fields = mixed(here, 0.7, 0.3)
    source = pickle.loads(pickle.dumps(open_source(name, "train[:5]", **fields)))
    parquet, tfds = (open_source(one, "train[:5]", **fields) for one in (f"parquet:{here}/parquet", "tfds:tiny"))
    assert examples(source) == examples(parquet) + examples(tfds) and source.class_names == ("cat", "dog", "owl")
    assert [source.example_name(row) for row in (0, 5)] == [parquet.example_name(0), tfds.example_name(0)]
    assert examples(source.streamed()) == examples(source) and source.shards.remote_bytes == 0
    other, _ = mixed(here, 0.6, 0.4)
    assert open_source(other, "train[:5]", **fields).fingerprint != source.fingerprint
    assert list_splits(SourceConfig(name, **fields)) == ["test", "train"]
    remote, remote_fields = mixed(there, 0.7, 0.3)
    assert examples(open_source(remote, "train[:5]", **remote_fields)) == examples(source)


def test_a_part_in_a_bucket_must_fit(there, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("VIT_JAX_CACHE_GB", "3e-5")
    name, fields = mixed(there, 1, 1)
    with pytest.raises(UserError, match=r"shards to read, such as memory:.*, need .* GB, more than"):
        data.complete_config(run_config(name, **fields))
    for number in range(3):
        write_image(tmp_path / "photos" / ("cat", "dog", "owl")[number] / "1.png", number)
    with pytest.raises(UserError, match=r"shards to read, such as memory:.*, need .* GB, more than"):
        open_source(f"mix:1*folder:{tmp_path}/photos+1*parquet:{there}/parquet", "train")


def test_a_run_draws_in_the_proportions_and_resumes(here, tmp_path):  # noqa: F811
    for number in range(5):
        write_image(tmp_path / "photos" / "bee" / f"{number}.png", 200 + number)
    name, _ = f"mix:3*parquet:{here}/parquet+1*folder:{tmp_path}/photos", None
    completed, info = data.complete_config(run_config(name))
    assert (completed.data.num_classes, completed.data.num_examples) == (4, 25) and completed.data.order == "global"
    source = info.opened["", "train"]

    def batches(start, count, workers=0):
        local = loader.local_train_batches(
            source, PIPE, batch=8, rows=np.arange(8), seed=3, start=start, workers=workers, mixture=source.mixture
        )
        taken = [next(local) for _ in range(count)]
        local.close()
        return taken

    whole = batches(0, 12)
    for one, other in zip(batches(7, 5), whole[7:], strict=True):
        assert all((one[name] == other[name]).all() for name in one)
    assert all(Counter((batch["label"] == 3).tolist()) == {False: 6, True: 2} for batch in whole)
    with pytest.raises(
        UserError, match=r"data.order=stream reads the shards of one source, and not of a mixture; set -"
    ):
        data.complete_config(run_config(name, order="stream"))


def test_classes_join_by_name_or_number(tmp_path):
    def table(name, classes, count=6, **columns):
        described = {"label": {"_type": "ClassLabel", "names": classes}} if classes else None
        labels = columns or {"label": [row % (len(classes) if classes else 2) for row in range(count)]}
        return write_table(tmp_path / f"{name}.parquet", described, count, **labels)

    animals, others, bare = table("a", ["cat", "dog"]), table("b", ["owl", "cat"]), table("c", None)
    joined = open_source(f"mix:1*{animals}+1*{others}", "train")
    assert joined.class_names == ("cat", "dog", "owl") and joined.num_classes == 3
    assert [one["label"] for one in joined] == [0, 1] * 3 + [2, 0] * 3
    numbered = open_source(f"mix:1*{animals}+1*{bare}", "train", num_classes=2)
    assert [one["label"] for one in numbered] == [0, 1] * 6 and numbered.class_names == ("cat", "dog")
    with pytest.raises(
        UserError, match=r"the classes of parquet:.*c.parquet do not join: they have no names, and there a"
    ):
        open_source(f"mix:1*{animals}+1*{others}+1*{bare}", "train", num_classes=2)
    with pytest.raises(UserError, match=r"the classes of .*d.parquet do not join by name, since several have the same"):
        open_source(f"mix:1*{animals}+1*{table('d', ['x', 'x'])}", "train")
    several = table("e", None, label=[[0], [1, 0], [], [1], [0], [1]])
    many = open_source(f"mix:1*{several}+2*{several}", "train", num_classes=2, max_labels=2)
    assert many[1]["label"].tolist() == many[7]["label"].tolist() == [1, 0]
