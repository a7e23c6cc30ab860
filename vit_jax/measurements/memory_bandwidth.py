"""The memory of the devices: how fast they read and write it, and how fast the host fills it."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.measurements.bench import Bench
from vit_jax.measurements.measurement import Measurement
from vit_jax.measurements.published import find_published

MEBIBYTES = (64, 256, 1024)  # of an array on a device
ENOUGH = 0.01  # seconds of a call, above which no larger array is tried
TRANSFER = 64 * 2**20  # bytes: about those of 256 images


def measure_memory(bench: Bench) -> Iterator[Measurement]:
    """Yields how fast each device reads and writes an array while all do so, and how fast the host copies one to it."""
    published = find_published(bench.device.device_kind)
    sharding, devices = NamedSharding(bench.mesh, P(bench.mesh.axis_names)), bench.mesh.devices.size
    scale = jax.jit(lambda x: x * 2, out_shardings=sharding)
    for mebibytes in MEBIBYTES:
        draw = functools.partial(jnp.ones, (devices, mebibytes * 2**18), jnp.float32)
        timing = bench.time(functools.partial(scale, jax.jit(draw, out_shardings=sharding)()))
        if bench.agree(timing.median) > ENOUGH or bench.agree_seconds_left() <= 0:
            break
    moved = 2 * mebibytes * 2**20 / 1e9  # read and written
    yield Measurement(
        f"an array of {mebibytes} MiB read and another written, all devices at once: each",
        "GB/s",
        *timing.rate(moved),
        published.hbm_bandwidth / 1e9 if published else None,
        "published" if published else "",
        advice="memory",
    )
    if bench.device.platform == "cpu":
        yield Measurement("from the host to a device", "GB/s", None, note="a CPU's memory is the host's")
        return
    host: np.ndarray = np.zeros(TRANSFER, np.uint8)
    timing = bench.time(lambda: jax.device_put(host, bench.device))
    yield Measurement("from the host to a device", "GB/s", *timing.rate(TRANSFER / 1e9), advice="transfer")
