"""A bench of the emulated devices, for a tiny model."""

import time

import jax

from vit_jax import measure, sharding
from vit_jax.distributed import SINGLE_HOST
from vit_jax.measurements import Bench

MODEL = "ViT-mu/16"
TINY = ["--config.resolution=32", "--config.model.depth=1"]


def make_bench(*words, devices=None, coordinator=SINGLE_HOST, seconds=60.0, folder=None):
    config, given = measure.read_config([*TINY, *words])
    devices = jax.devices() if devices is None else devices
    config.batch = config.batch if "batch" in given else len(devices)
    mesh = sharding.make_mesh(config, devices)
    bench = Bench(config, mesh, coordinator, (MODEL,), folder, given)
    bench.deadline = time.monotonic() + seconds
    return bench
