"""Compares the cost of attention in patterns and of full attention on a TPU, by the compiler's schedule.

Example:
  python -m benchmarks.patterns --write=docs/models.md

The case is one layer of ViT-B/16 in bfloat16, forward and backward: the projection to queries, keys and values, and the
attention. Takes a quarter of an hour on two cores.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.tpu import table
from benchmarks.tpu_process import Report, write_cases
from vit_jax import cli
from vit_jax.execution import ATTENTIONS, attention_sizes, choose_packing, fastest_attention
from vit_jax.model import create
from vit_jax.models import AttentionExtras, Pattern
from vit_jax.models.pattern import attended_pairs
from vit_jax.models.spec import ModelSpec
from vit_jax.planning import records, targets
from vit_jax.planning.compiler import Function, compile_function

TARGET = "v5e:2x2"
IMAGES = {224: 32, 512: 8}  # resolution -> images, so that both have nearly as many patches in all
# (implementation, pattern, {resolution: window}).
CASES = (
    ("fused", "full", {224: 0, 512: 0}),
    ("tokens_first", "full", {224: 0, 512: 0}),
    ("auto", "local", {224: 14, 512: 32}),
    ("auto", "local2d", {224: 4, 512: 4}),
    ("auto", "local2d", {224: 7, 512: 8}),
    ("auto", "strided", {224: 14, 512: 32}),
    ("auto", "fixed", {224: 14, 512: 32}),
)


def names() -> list[str]:
    return [f"{kind} {pattern} {windows[size]} {size}" for size in IMAGES for kind, pattern, windows in CASES]


def spec_of(name: str) -> ModelSpec:
    kind, pattern, window, resolution = name.split()
    fields = {"attention": kind, "attention_pattern": pattern, "attention_window": int(window)}
    return create("ViT-B/16", resolution=int(resolution), pooling="gap", dtype="bfloat16", **fields).vit


def compile_case(name: str) -> Report:
    """Returns the compiler's report on a case, named `<implementation> <pattern> <window> <resolution>`."""
    spec, [device, *_] = spec_of(name), targets.find_devices(TARGET, 1)
    kind, images, mesh = spec.attention.kind, IMAGES[spec.position.image_size[0]], Mesh(np.array([device]), ("data",))
    heads, head_dim = spec.attention.num_heads, spec.head_dim
    sizes = attention_sizes(spec, images)
    packing = choose_packing(kind, sizes, device.device_kind)
    extras = AttentionExtras()
    if spec.attention.is_sparse:
        extras = AttentionExtras(pattern=Pattern(spec))
    attention = fastest_attention(sizes) if kind == "auto" else ATTENTIONS[kind]
    attend = functools.partial(attention, packing=packing, extras=extras)

    def step(operands: tuple[jax.Array, ...], grad: jax.Array) -> tuple:
        attended, transpose = jax.vjp(lambda *operands: attend(*operands)[0], *operands)
        return attended, transpose(grad)

    rows = images // packing.images * packing.rows, spec.width
    shapes = rows, (spec.width, 3, heads, head_dim), (3, heads, head_dim), rows
    dtypes = jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bfloat16
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for shape, dtype in zip(shapes, dtypes, strict=True)]
    with jax.set_mesh(mesh):
        function = Function(jax.jit(step), (tuple(arrays[:3]), arrays[3]), (placed,) * 3, {})
        return records.step_to_json(compile_function(function, mesh, TARGET, "schedule"))


def line(name: str, report: Report) -> list[str]:
    """Returns the cells of a row of the table."""
    spec, executable = spec_of(name), records.step_from_json(report).executable
    assert executable and executable.schedule
    images = IMAGES[spec.position.image_size[0]]
    keys = f"{attended_pairs(spec).mean(0).sum():.0f}" if spec.attention.is_sparse else f"{spec.tokens}"
    kind, pattern, window, _ = name.split()
    thousands = executable.schedule.cycles / images / spec.attention.num_heads / 1000
    words = {"fused": "full, the kernel", "tokens_first": "full, the plain form", "auto": f"{pattern}, {window}"}
    return [f"{spec.tokens}", words[kind], keys, f"{thousands:.2f}", f"{executable.peak_bytes / images / 1e6:.1f}"]


def sections(found: dict[str, Report]) -> list[tuple[str, list[str]]]:
    """Returns the table of the page."""
    heads = ["patches", "pattern, window", "keys of a query", "1,000 cycles a head and image", "MB an image"]
    return [("patterns", table(heads, itertools.starmap(line, found.items())))]


def main(argv: list[str]) -> None:
    """Runs the command line. If its only argument is a case, prints the compiler's report on that case as JSON."""
    write_cases(argv, __doc__, dict.fromkeys(names(), TARGET), "benchmarks.patterns", compile_case, sections)


if __name__ == "__main__":
    cli.run_command(main)
