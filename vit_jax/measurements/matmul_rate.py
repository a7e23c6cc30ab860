"""The rate of large matrix products, which no other program exceeds."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from vit_jax.measurements.bench import Bench, Call, Timing
from vit_jax.measurements.measurement import Measurement
from vit_jax.measurements.published import find_published

SIZES = (512, 1024, 2048, 4096, 8192, 16384)  # of square matrices
ENOUGH = 0.01  # seconds: from there on, what a call costs beside its product does not count


def measure_products(bench: Bench) -> Iterator[Measurement]:
    """Yields the rate of square products on all devices at once, and the rate of the slowest device alone."""
    devices = bench.mesh.devices.flatten()
    published = find_published(bench.device.device_kind)
    everywhere = NamedSharding(bench.mesh, P(bench.mesh.axis_names))
    size, timing = time_growing_products(bench, everywhere, len(devices))
    operations = 2 * size**3 / 1e9
    yield Measurement(
        f"square products of {size} in {bench.dtype}, all devices at once: each",
        "GFLOP/s",
        *timing.rate(operations),
        published.flops / 1e9 if published else None,
        "published" if published else "",
        advice="products",
    )
    if len(bench.mesh.local_devices) > 1:
        calls = [
            make_product_call(bench.dtype, size, SingleDeviceSharding(device), 1) for device in bench.mesh.local_devices
        ]
        timings: dict[jax.Device, Timing] = dict(zip(bench.mesh.local_devices, bench.time_in_turns(calls), strict=True))
        slowest, best = (of(timings, key=lambda device: timings[device].median) for of in (max, min))
        yield Measurement(
            "the same, devices in turns: the slowest",
            "GFLOP/s",
            *timings[slowest].rate(operations),
            timings[best].rate(operations)[0],
            "the fastest",
            advice="products",
            note=str(slowest),
        )


def time_growing_products(bench: Bench, sharding: NamedSharding, devices: int) -> tuple[int, Timing]:
    """Returns the smallest size whose product takes longer than `ENOUGH`, and its time.

    If no product takes so long, or the time is short, it is the last size that was tried.
    """
    for size in SIZES:
        timing = bench.time(make_product_call(bench.dtype, size, sharding, devices))
        if bench.agree(timing.median) > ENOUGH or bench.agree_seconds_left() <= 0:
            break
    return size, timing


def make_product_call(dtype: str, size: int, sharding: Sharding, devices: int) -> Call:
    """Returns a call that multiplies two square matrices on each of the `devices` devices of `sharding`."""

    def draw() -> tuple[jax.Array, jax.Array]:
        numbers = jax.random.normal(jax.random.key(0), (devices, size, size), jnp.float32).astype(dtype)
        return numbers, numbers + 1

    operands = jax.jit(draw, out_shardings=(sharding, sharding))()
    multiply = jax.jit(lambda a, b: a @ b, out_shardings=sharding)
    return lambda: multiply(*operands)
