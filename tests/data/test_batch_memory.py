"""Batches lie where readers have written them, and no longer than somebody holds them."""

import collections
import pickle
import random
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.data import loader
from vit_jax.data.batch_memory import ALIGNMENT, BatchMemory, MemoryClosed

ROW = {"image": np.zeros((5, 7, 3), np.uint8), "label": np.zeros(2, np.int32), "fault": np.array(b"", "S9")}
ROWS = 8


def fill(memory: BatchMemory, number: int) -> None:
    for name, array in memory.get_arrays(number).items():
        array[...] = str(number).encode() if name == "fault" else number % 251


def is_of(batch, number: int) -> bool:
    return (
        (batch["image"] == number % 251).all()
        and (batch["label"] == number % 251).all()
        and (batch["fault"] == str(number).encode()).all()
    )


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_held_stays_and_what_is_not_is_used_again(shared):
    """A batch is held by itself, by a slice of its images, or by an array of JAX over one."""
    memory = BatchMemory(ROW, ROWS, start=3, prefetch=2, shared=shared)
    reader = pickle.loads(pickle.dumps(memory)) if shared else memory  # as in another process
    chosen, held = random.Random(0), collections.deque()
    for number in range(3, 203):
        fill(reader, number)
        batch = memory.take(number)
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            name: ((ROWS, *array.shape), array.dtype) for name, array in ROW.items()
        }
        part = chosen.choice([lambda a: a, lambda a: a[2:4], lambda a: jax.device_put(a), lambda a: a[1:].T])
        held.append((number, batch | {"image": part(batch["image"])}))
        del batch
        while len(held) > chosen.randrange(6):
            assert is_of(held[0][1], held[0][0])
            held.popleft()
    assert all(is_of(batch, number) for number, batch in held)
    assert memory._blocks <= 3 + 6 + 2  # in sight, held, and what JAX lets go with its next array


def test_labels_do_not_hold_the_images():
    memory = BatchMemory(ROW, ROWS, start=0, prefetch=1, shared=False)
    labels = [memory.take(number)["label"] for number in range(50)]
    assert len(labels) == 50 and memory._blocks <= 3


def test_who_reads_too_far_ahead_waits_until_a_batch_is_taken_or_none_is_any_more():
    memory = BatchMemory(ROW, ROWS, start=0, prefetch=1, shared=False)
    ended = []

    def read(number):
        try:
            fill(memory, number)
            ended.append(number)
        except MemoryClosed:
            ended.append("closed")

    for number in (0, 1):
        read(number)
    threads = [threading.Thread(target=read, args=(number,)) for number in (2, 5)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    assert ended == [0, 1]
    assert is_of(memory.take(0), 0)
    threads[0].join(5)
    assert ended == [0, 1, 2]
    memory.close()
    threads[1].join(5)
    assert ended == [0, 1, 2, "closed"]


def test_devices_use_the_images_as_they_lie():
    """Those of a CPU; others are sent them from there."""
    rows = ALIGNMENT * len(jax.devices())  # so that the part of each device is aligned, as images of 224 pixels are
    memory = BatchMemory(ROW, rows, start=0, prefetch=1, shared=True)
    batch = memory.take(0)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    assembled = loader.assemble_global({"image": batch["image"]}, np.arange(rows), rows, sharding)["image"]
    parts = sorted(assembled.addressable_shards, key=lambda shard: shard.index[0].start)
    first, size = batch["image"].ctypes.data, batch["image"].nbytes // len(parts)
    assert [part.data.unsafe_buffer_pointer() for part in parts] == [first + size * i for i in range(len(parts))]
