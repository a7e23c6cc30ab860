"""Collectives over each axis of the mesh, by size.

Rates are bus bandwidths as NCCL's tests define them (doc/PERFORMANCE.md there): the bytes that every device sends in a
second. Each of n devices sends S (n - 1) / n bytes in an all-gather whose result has S bytes on each device, and in a
reduce-scatter whose operand has S bytes on each device. It sends twice as many in an all-reduce of S bytes, and S bytes
in a collective-permute. These rates can be compared with the speed of a link whatever n is.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.measurements.bench import Bench
from vit_jax.measurements.measurement import Measurement
from vit_jax.measurements.published import find_slice
from vit_jax.planning import Collective, find_links

SIZES = (2**16, 2**20, 2**23, 2**26)  # bytes
REPEATS = 8  # in a program, so that the time to start one does not count
LARGE = 2**23  # bytes from which latencies, which are not known, do not count


def all_reduce(axis: str, devices: int, x: jax.Array) -> jax.Array:
    """Returns the sum over the devices."""
    return jax.lax.psum(x, axis)


def all_gather(axis: str, devices: int, x: jax.Array) -> jax.Array:
    """Returns the first parts of the operands of all devices, concatenated; a part is 1 / `devices` of an operand."""
    return jax.lax.all_gather(x[: len(x) // devices], axis, tiled=True)


def reduce_scatter(axis: str, devices: int, x: jax.Array) -> jax.Array:
    """Returns the operand, its beginning replaced by this device's part of the sum over the devices."""
    return x.at[: len(x) // devices].set(jax.lax.psum_scatter(x, axis, tiled=True))


def permute(axis: str, devices: int, x: jax.Array) -> jax.Array:
    """Returns the operand of the device before this one along the axis."""
    return jax.lax.ppermute(x, axis, [(device, (device + 1) % devices) for device in range(devices)])


# Kind, as planning names it -> (the function that each device executes, the bytes that a device sends as a multiple of
# S (n - 1) / n). A multiple of 0 stands for S bytes.
KINDS: dict[str, tuple[Callable[[str, int, jax.Array], jax.Array], float]] = {
    "all-reduce": (all_reduce, 2.0),
    "all-gather": (all_gather, 1.0),
    "reduce-scatter": (reduce_scatter, 1.0),
    "collective-permute": (permute, 0.0),
}


def bus_bytes(kind: str, size: int, devices: int) -> float:
    """Returns the bytes that each of some devices sends in a collective of S = `size` bytes."""
    rounds = KINDS[kind][1]
    return rounds * size * (devices - 1) / devices if rounds else float(size)


def measure_collectives(bench: Bench) -> Iterator[Measurement]:
    """Yields the bus bandwidth of each collective over each axis that has several devices."""
    axes = [(axis, devices) for axis, devices in bench.mesh.shape.items() if devices > 1]
    if not axes:
        yield Measurement("collectives", "GB/s", None, note="there is one device")
    for size in SIZES:  # the largest last, if the time is short
        for axis, devices in axes:
            for kind in KINDS:
                name = f"{kind} of {size // 2**10:,} KiB over {devices} devices of mesh.{axis}"
                if bench.agree_seconds_left() <= 0:
                    yield Measurement(name, "GB/s", None, note="no time was left")
                    continue
                timing = bench.time(collective(bench.mesh, axis, kind, size)).of(REPEATS)
                sent = bus_bytes(kind, size, devices) / 1e9
                seconds = predict_seconds(bench.mesh, axis, kind, size) if size >= LARGE else None
                predicted, source = (sent / seconds, "published links") if seconds else (None, "")
                note = f"{1e6 * timing.median:,.0f} µs"
                yield Measurement(name, "GB/s", *timing.rate(sent), predicted, source, advice="collective", note=note)


def collective(mesh: Mesh, axis: str, kind: str, size: int) -> Callable[[], jax.Array]:
    """Returns a call that executes `REPEATS` collectives of `size` bytes.

    Each collective takes the result of the one before. The first of a call takes that of the previous call, since
    programs with collectives that do not depend on each other block emulated devices.
    """
    devices, everywhere = mesh.shape[axis], P(mesh.axis_names)
    elements = size // 4 // devices * devices
    sharding = NamedSharding(mesh, everywhere)
    x = jax.jit(lambda: jnp.zeros((mesh.size * elements,), jnp.float32), out_shardings=sharding)()

    def repeat(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, REPEATS, lambda _, x: KINDS[kind][0](axis, devices, x), x)

    run = jax.jit(jax.shard_map(repeat, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))

    def call() -> jax.Array:
        nonlocal x
        x = run(x)
        return x

    return call


def predict_seconds(mesh: Mesh, axis: str, kind: str, size: int) -> float | None:
    """Returns how many seconds a collective takes if its busiest link has the published speed.

    Args:
        mesh: the mesh of the devices.
        axis: the axis of the mesh along which the devices exchange.
        kind: the kind of collective, as in `planning.Collective`.
        size: bytes of the whole array, as in `planning.Collective`.

    Returns:
        Seconds; None where no link is known, or the hosts' network carries it.
    """
    devices = list(mesh.devices.flat)
    tpu = find_slice(devices)
    if tpu is None:
        return None
    places = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), mesh.axis_names.index(axis), -1)
    groups = [tuple(group) for group in places.reshape(-1, mesh.shape[axis]).tolist()]
    if kind == "collective-permute":
        groups = [pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)]
    links = find_links(tpu, devices)
    return links.carried_bytes(Collective(kind, size, tuple(groups))) / tpu.link_bandwidth or None
