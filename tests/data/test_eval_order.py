"""The order of an evaluation: every example once, each host its own shards, on any hosts the same batches."""

import random

import numpy as np
import pytest

from tests.data.test_array_record import write_set
from tests.data.test_loader import assert_same, read_batches
from tests.data.test_stream import COUNT, SHARDS, config_of, shard_bytes, shards  # noqa: F401
from vit_jax import UserError, data
from vit_jax.data.order import PADDING, EvalOrder
from vit_jax.data.order_choice import check_eval_disk, eval_order
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.shard_fetcher import ShardFetcher
from vit_jax.data.shards import readers
from vit_jax.data.sources import SourceConfig, open_split
from vit_jax.storage import filesystem

PIPE = parse_pipe("resize(4)|value_range(-1,1)", 4)


@pytest.mark.parametrize("seed", range(20))
def test_every_example_is_read_once_and_the_uses_of_shards_are_stated(seed):
    chance = random.Random(seed)
    readers, lengths = chance.choice([1, 2, 4, 8]), [chance.randint(0, 9) for _ in range(chance.randint(1, 12))]
    lengths[0] += 1
    order = EvalOrder(lengths, batch := readers * chance.randint(1, 6), readers)
    taken = [order[position] for position in range(len(order))]
    assert sorted(index for index in taken if index != PADDING) == list(range(sum(lengths)))
    assert order.batches == -(-max(-(-sum(lengths) // readers), 1) * readers // batch)
    assert np.concatenate([order.indices(number) for number in range(order.batches)]).tolist() == taken
    ends = np.cumsum(lengths)
    for reader in range(readers):
        own = [(at // batch, taken[at]) for at in range(len(order)) if at % batch // (batch // readers) == reader]
        own = [(number, index) for number, index in own if index != PADDING]
        assert [index for _, index in own] == sorted(index for _, index in own)  # a stretch, as it lies
        assert not own or own[-1][1] - own[0][1] == len(own) - 1
        found = [(int(np.searchsorted(ends, index, side="right")), number) for number, index in own]
        uses = order.uses(reader)
        assert set(uses.shards.tolist()) == {shard for shard, _ in found}
        for shard, first, last in zip(*uses, strict=True):
            numbers = [number for one, number in found if one == shard]
            assert (numbers[0], numbers[-1]) == (first, last)


def test_examples_without_shards_follow_each_other():
    order = EvalOrder([30], 8, 1)
    assert [order[position] for position in range(32)] == [*range(30), PADDING, PADDING]


def evaluated(where, rows, batch=16, workers=0):
    source = open_split(SourceConfig(where), "train", streams=True)
    order = eval_order(source, batch)
    fetcher = ShardFetcher(order, source.shards, rows)
    options = {"batch": batch, "rows": rows, "workers": workers, "on_bad": "raise", "fetcher": fetcher}
    batches = read_batches(source.streamed(), PIPE, order, **options)
    taken = list(batches)
    batches.close()
    if fetcher._thread:  # none where worker processes read
        fetcher._thread.join(20)
    return taken


def test_a_host_reads_the_shards_of_its_part_alone_and_batches_are_those_of_any_hosts(shards, tmp_path, monkeypatch):  # noqa: F811
    copied = []
    plain = filesystem.download
    monkeypatch.setattr(
        filesystem, "download", lambda folder, names, to: (copied.extend(names), plain(folder, names, to))
    )
    parts = [evaluated(shards, rows) for rows in np.split(np.arange(16), 4) if not copied.clear()]
    assert len(set(copied)) == len(copied) <= SHARDS / 4 + 1  # its share, and one that a neighbour reads too
    whole = evaluated(f"array_record:{tmp_path}/set", np.arange(16))
    joined = [
        {name: np.concatenate([part[name] for part in rows]) for name in rows[0]} for rows in zip(*parts, strict=True)
    ]
    assert_same(joined, whole)
    seen = [int(image[0, 0, 0]) for one in whole for image in one["image"][one["mask"] == 1]]
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.slow
def test_evaluated_batches_do_not_depend_on_the_number_of_workers(shards, tmp_path):  # noqa: F811
    local = f"array_record:{tmp_path}/set"
    assert_same(evaluated(local, np.arange(16), workers=2), evaluated(local, np.arange(16)))


def test_padding_has_the_form_of_the_labels(tmp_path):
    write_set(tmp_path / "set", [[row % 3, 3] for row in range(5)], 4, max_labels=2)
    for rows in np.split(np.arange(8), 8):  # the last part of the five is one example, in two rows
        for batch in evaluated(f"array_record:{tmp_path}/set", rows, batch=8):
            assert batch["label"].shape == (1, 2) and batch["mask"].shape == (1,)
            assert batch["mask"][0] or not batch["image"].any()


def test_training_and_evaluation_leave_each_other_their_shards(shards):  # noqa: F811
    source = open_split(SourceConfig(shards), "train", streams=True)
    paths = [run.path for run in source.shards.runs]
    for run in source.shards.runs[:4]:
        readers.streamed_reader(run)
    readers.close_streamed(paths[:2], 1)
    assert set(readers._streamed) == set(paths[:2])
    readers.streamed_reader(source.shards.runs[3])
    readers.close_streamed(paths[3:4], 2)
    assert set(readers._streamed) == {*paths[:2], paths[3]}
    readers.close_streamed((), 1)
    assert set(readers._streamed) == {paths[3]}
    readers.close_streamed((), 2)
    assert not readers._streamed and not readers._needed


def test_a_cache_without_room_for_an_evaluation_is_told(shards, monkeypatch):  # noqa: F811
    config = config_of(shards, order="stream", readers=1, window=1)
    config.evals.test.split, config.batch_eval = "train", 8
    source = open_split(SourceConfig(shards), "train")
    need = check_eval_disk(source, eval_order(source, 8), 1)
    assert need == sum(shard_bytes(shards))  # eight readers of three of the 24 shards each
    assert check_eval_disk(source, eval_order(source, 8), 8) < need / 3
    monkeypatch.setenv("VIT_JAX_CACHE_GB", str(0.9 * need / 1e9))
    with pytest.raises(UserError, match=r"evaluating array_record:\S* needs \S+ GB of shards on a host at a time"):
        data.complete_config(config)
