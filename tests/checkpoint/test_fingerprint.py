"""Fingerprints: the same wherever an array lies, another for every change of it."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.conftest import ROOT
from vit_jax.checkpoint import fingerprint

# By dtype: one of each size, floats and whole numbers.
DTYPES = ["float32", "bfloat16", "int32", "uint8", "int8", "bool"]


def example(dtype, shape=(8, 4, 6)):
    values = np.random.default_rng(0).normal(size=shape) * 50
    return np.asarray(values > 0 if dtype == "bool" else values.astype(np.int32).astype(jnp.dtype(dtype)))


def meshes():
    for count, shape in ((1, (1, 1)), (2, (2, 1)), (4, (2, 2)), (8, (2, 4))):
        yield jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:count])


def digits(array):
    return fingerprint.fingerprint(array).digits


def test_every_placement_gives_the_value_of_numpy():
    leaves = {dtype: example(dtype) for dtype in DTYPES} | {"scalar": np.float32(7), "empty": np.zeros((0, 3), np.int8)}
    wanted = fingerprint.fingerprints(leaves)
    assert len({mark.digits for mark in wanted.values()}) == len(leaves) - 1  # int8 and uint8 share their bytes
    assert fingerprint.fingerprints({name: jnp.asarray(leaf) for name, leaf in leaves.items()}) == wanted
    specs = [P(), P("a"), P(None, None, "a"), P(("b", "a")), P("b", "a"), P(None, ("a", "b"))]
    specs = dict(zip(leaves, [*specs, P(), P()], strict=True))
    for mesh in meshes():
        shardings = {n: NamedSharding(mesh, s) for n, s in specs.items()}
        shardings["bool"] = NamedSharding(mesh, P(None, "b"))
        placed = {name: jax.device_put(leaf, shardings[name]) for name, leaf in leaves.items()}
        placed["scalar"] = jax.device_put(leaves["scalar"], SingleDeviceSharding(jax.devices()[0]))  # beside the mesh
        assert fingerprint.fingerprints(placed) == wanted, mesh


def test_nothing_is_gathered_and_nothing_is_made_in_memory():
    mesh = list(meshes())[-1]
    specs = (P("a", "b"), P("b"), P(), P(("a", "b")))
    shapes = [jax.ShapeDtypeStruct((64, 4096), jnp.float32, sharding=NamedSharding(mesh, spec)) for spec in specs]
    compiled = fingerprint.rows_on(mesh, specs).lower(shapes).compile()
    moved = re.findall(r"= (\S+) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", compiled.as_text())
    assert moved and {kind for _, kind in moved} == {"all-reduce"}
    assert all(re.fullmatch(r"\(?(u32\[\d,3\]\S*(, )?)+\)?", shape) for shape, _ in moved), moved
    assert compiled.memory_analysis().temp_size_in_bytes < 2**15  # the largest part is 1 MiB


def test_any_flipped_bit_is_told():
    random = np.random.default_rng(1)
    for dtype in (*DTYPES[:-1], "float64", "int64", "float16"):
        array = np.asarray(random.normal(size=(3, 5)) * 9).astype(jnp.dtype(dtype))
        seen = {digits(array)}
        for bit in range(array.nbytes * 8):
            raw = bytearray(array.tobytes())
            raw[bit // 8] ^= 1 << bit % 8
            seen.add(digits(np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)))
        assert len(seen) == array.nbytes * 8 + 1, dtype


def test_fingerprints_in_checkpoints_stay():
    """Another way to compute them would refuse every checkpoint that is there."""
    manifest = json.loads((ROOT / "tests/golden/workdir/checkpoints/10/about/metadata").read_text())
    assert digits(np.int32(10)) == manifest["arrays"]["step"][2]
    assert digits(np.arange(100_000, dtype=np.int32)) == "5ffd23546fae7eb9"


def test_moved_and_rounded_values_are_told():
    array = example("float32", (16, 32)) / 3
    others = [array[::-1], array[[1, 0, *range(2, 16)]], array.T, np.roll(array, 1), -array, array * 0]
    others += [array.astype(jnp.bfloat16).astype(np.float32), np.nextafter(array, 9), np.vstack([array[1:], array[:1]])]
    assert len({digits(other) for other in [array, *others]}) == len(others) + 1
    zeros = [digits(np.zeros(count, np.float32)) for count in range(100)]
    assert len(set(zeros)) == 100


def test_positions_beyond_2_to_the_32_are_told_apart(monkeypatch):
    assert fingerprint.split_index((48, 2**20, 2**13)) == [2**13, 48 * 2**20]
    assert fingerprint.split_index((2**16, 2**16)) == [2**32] and fingerprint.split_index(()) == [1]
    with pytest.raises(ValueError, match="a dimension of 8,589,934,592 is too large"):
        fingerprint.split_index((2**33,))
    monkeypatch.setattr(fingerprint, "LIMIT", 64)
    fingerprint.rows_on.cache_clear()
    array = np.zeros((24, 8, 8), np.float32)
    wanted = fingerprint.fingerprints([array])
    mesh = list(meshes())[-1]
    assert fingerprint.fingerprints([jax.device_put(array, NamedSharding(mesh, P("a", "b")))]) == wanted
    seen = set()
    for row in range(24):
        array[row, 0, 0] = 1
        seen.add(digits(array))
        array[row, 0, 0] = 0
    fingerprint.rows_on.cache_clear()
    assert len(seen) == 24


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_told_by_name(bad):
    mesh = list(meshes())[-1]
    leaves = {"good": np.ones((8, 8), np.float32), "bad": np.ones((8, 8), jnp.bfloat16), "count": np.ones(3, np.int32)}
    leaves["bad"][5, 3] = bad
    placed = {name: jax.device_put(leaf, NamedSharding(mesh, P())) for name, leaf in leaves.items()}
    placed["bad"] = jax.device_put(leaves["bad"], NamedSharding(mesh, P("a", "b")))
    for tree in (leaves, placed):
        assert {name: mark.finite for name, mark in fingerprint.fingerprints(tree).items()} == {
            "good": True,
            "bad": False,
            "count": True,
        }


def test_what_has_no_fingerprint_is_refused():
    for array in (np.array([object()]), np.ones(2, np.complex64), np.array(["a"])):
        with pytest.raises(ValueError, match="no fingerprint is defined for"):
            fingerprint.fingerprint(array)
