"""Compares the cost of attention in neighbourhoods and of all-to-all attention on a TPU, by the compiler's schedule.

Example:
  python -m benchmarks.neighbourhoods --write=docs/models.md

The case is the attention of a unit in SASA-ResNet-50's third stage, in bfloat16, forward and backward, without its
projection: 8 heads of 32 channels on maps of 14x14 and 32x32 places. All-to-all attention has no relative positions.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.tpu import table
from benchmarks.tpu_process import Report, write_cases
from vit_jax import cli
from vit_jax.models import stand_alone
from vit_jax.planning import records, targets
from vit_jax.planning.compiler import Function, compile_function

TARGET = "v5e:2x2"
HEADS, SIZE = stand_alone.HEADS, 32
IMAGES = {14: 8, 32: 2}  # places on a side -> images, so that both have about as many places in all


def attend_to_all(query: jax.Array, key: jax.Array, value: jax.Array, *positions: jax.Array) -> jax.Array:
    """Returns the attention of each place to all places; `positions` are ignored."""
    del positions
    query, key, value = (x.reshape(len(x), -1, HEADS, SIZE) for x in (query, key, value))
    return jax.nn.dot_product_attention(query, key, value, scale=1.0)


ATTENTIONS = {"all": attend_to_all, "neighbourhood": stand_alone.attend}


def names() -> list[str]:
    return [f"{kind} {side}" for side in IMAGES for kind in ATTENTIONS]


def compile_case(name: str) -> Report:
    """Returns the compiler's report on a case, named `<kind> <places on a side>`."""
    kind, side = name.split()
    mesh = Mesh(np.array(targets.find_devices(TARGET, 1)[:1]), ("data",))

    def step(operands: tuple[jax.Array, ...], grad: jax.Array) -> tuple:
        attended, transpose = jax.vjp(ATTENTIONS[kind], *operands)
        return attended, transpose(grad.reshape(attended.shape))

    places = (IMAGES[int(side)], int(side), int(side), HEADS, SIZE)
    shapes = (places,) * 3 + ((stand_alone.EXTENT, HEADS, SIZE // 2),) * 2 + (places,)
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed) for shape in shapes]
    with jax.set_mesh(mesh):
        function = Function(jax.jit(step), (tuple(arrays[:5]), arrays[5]), (placed,) * 5, {})
        return records.step_to_json(compile_function(function, mesh, TARGET, "schedule"))


def line(name: str, report: Report) -> list[str]:
    """Returns the cells of a row of the table."""
    executable = records.step_from_json(report).executable
    assert executable and executable.schedule
    kind, side = name.split()
    images, places = IMAGES[int(side)], int(side) ** 2
    words = {"all": "all", "neighbourhood": "those of 7x7"}
    thousands = executable.schedule.cycles / images / HEADS / 1000
    return [f"{places}", words[kind], f"{thousands:.2f}", f"{executable.peak_bytes / images / 1e6:.1f}"]


def sections(found: dict[str, Report]) -> list[tuple[str, list[str]]]:
    """Returns the table of the page."""
    heads = ["places", "a place attends to", "1,000 cycles a head and image", "MB an image"]
    return [("neighbourhoods", table(heads, itertools.starmap(line, found.items())))]


def main(argv: list[str]) -> None:
    """Runs the command line. If its only argument is a case, prints the compiler's report on that case as JSON."""
    write_cases(argv, __doc__, dict.fromkeys(names(), TARGET), "benchmarks.neighbourhoods", compile_case, sections)


if __name__ == "__main__":
    cli.run_command(main)
