"""Trees (nested containers of arrays): names of their leaves, number of their elements, comparison of two trees."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

ArrayTree: TypeAlias = Any  # nested containers of arrays, or of what stands for each: its shape, its sharding


def path_name(path: tuple) -> str:
    """Returns the name of a key path, such as `encoder/blocks/mlp/dense1/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten(tree: ArrayTree) -> dict[str, Any]:
    """Returns name -> leaf, in the order of the tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def unflatten(leaves: dict[str, Any]) -> dict[str, Any]:
    """Returns nested dicts from names with slashes: the inverse of `flatten` for trees of dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def map_named(function: Callable[[str, Any], Any], tree: ArrayTree) -> ArrayTree:
    """Returns the tree of `function(name, leaf)`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path_name(path), leaf), tree)


def count(tree: ArrayTree) -> int:
    """Returns the number of elements of all leaves (arrays or their shapes)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def differences(found: ArrayTree, wanted: ArrayTree) -> list[str]:
    """Returns a line per leaf that is missing in `found`, not in `wanted`, or of another shape or type in `found`."""
    have, want = flatten(found), flatten(wanted)
    missing = [f"missing {key}" for key in want if key not in have]
    extra = [f"unexpected {key}" for key in have if key not in want]
    wrong = [
        f"{key} is {_describe(have[key])}, not {_describe(leaf)}"
        for key, leaf in want.items()
        if key in have and _describe(have[key]) != _describe(leaf)
    ]
    return missing + extra + wrong


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
