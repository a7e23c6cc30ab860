"""How the arrays of a training state are sharded."""

import itertools

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax import tree
from vit_jax.sharding.axis_rules import PARAMETER_AXES, dimensions_of, partition
from vit_jax.tree import ArrayTree


def state_shardings(state: ArrayTree, mesh: Mesh) -> ArrayTree:
    """Returns the sharding of every leaf of a training state (or of parameters), by `axis_rules.py`.

    The names of optimizer moments and of the moving average end in the name of their parameter. They are sharded as the
    parameter is. A mean over some dimensions of the parameter is split along the dimensions that it still has. An array
    that has only some of the layers is split like the parameter of all layers. Other leaves are copied to every device.
    A dimension that its mesh axis does not divide is not split.
    """
    shapes = {name: leaf.shape for name, leaf in tree.flatten(state).items()}
    owned = {name.removeprefix("params/"): shape for name, shape in shapes.items() if name.startswith("params/")}
    parameters = owned or shapes

    def place(name: str, shape: tuple[int, ...]) -> P:
        parts = name.split("/")
        endings = ("/".join(parts[start:]) for start in range(len(parts)))
        parameter = next((parameters[ending] for ending in endings if ending in parameters), None)
        return P() if parameter is None else _parameter_partition(name, shape, parameter, mesh)

    return tree.map_named(lambda name, leaf: NamedSharding(mesh, place(name, leaf.shape)), state)


def _parameter_partition(name: str, shape: tuple[int, ...], parameter: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the partition of an array that has all dimensions of a parameter, or some of them.

    Args:
        name: the name of the array, which ends in the name of the parameter.
        shape: the shape of the array.
        parameter: the shape of the parameter.

    Raises:
        KeyError: `PARAMETER_DIMENSIONS` has no row for the parameter, or one for another number of dimensions.
    """
    dimensions = dimensions_of(name)
    if len(parameter) - len(dimensions) not in (0, 1):
        raise KeyError(f"{name} {parameter} has other dimensions than {dimensions}")
    dimensions = ("layers",) * (len(parameter) - len(dimensions)) + dimensions
    sizes = dict(zip(dimensions, parameter, strict=True))
    fits = {name: {size} if name != "layers" else range(size + 1) for name, size in sizes.items()}  # some are frozen
    choices = itertools.combinations(dimensions, len(shape))
    kept = next((names for names in choices if all(size in fits[d] for d, size in zip(names, shape, strict=True))), ())
    return partition(PARAMETER_AXES, kept, shape, mesh) if kept else P()
