"""The part of the parameters that is trained: all of them, those after the first blocks, or adapters and the head."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax

from vit_jax import tree
from vit_jax.models import STACK, is_before_blocks, is_factor, is_head, is_stacked
from vit_jax.tree import ArrayTree


@runtime_checkable
class TrainedPart(Protocol):
    """The parameters that are trained: they alone have gradients and a state of the optimizer."""

    def select(self, params: ArrayTree) -> ArrayTree:
        """Returns the trained part of the parameters."""

    def complete(self, params: ArrayTree, trained: ArrayTree) -> ArrayTree:
        """Returns what the model is applied to: the trained part, with the frozen rest of the parameters."""

    def replace(self, params: ArrayTree, trained: ArrayTree) -> ArrayTree:
        """Returns the parameters with another trained part."""


@dataclasses.dataclass(frozen=True)
class LastBlocks:
    """All parameters but the first blocks and what is before them.

    The first blocks are frozen with everything before them, so that no gradient passes through either. The trained part
    has the names of the parameters, without those that are frozen as a whole. Its stacks have the rows of the trained
    blocks only.

    Attributes:
        frozen_blocks: the number of frozen blocks; 0: all parameters are trained.
    """

    frozen_blocks: int

    def select(self, params: ArrayTree) -> ArrayTree:
        """Returns the trained part of the parameters."""
        if not self.frozen_blocks:
            return params
        leaves = {name: leaf for name, leaf in tree.flatten(params).items() if not is_before_blocks(name)}
        rows = {name: leaf[self.frozen_blocks :] if is_stacked(name) else leaf for name, leaf in leaves.items()}
        return tree.unflatten({name: leaf for name, leaf in rows.items() if len(leaf)})

    def complete(self, params: ArrayTree, trained: ArrayTree) -> ArrayTree:
        """Returns what the model is applied to: the trained part, with the frozen rest of the parameters.

        The blocks become a tuple of two stacks, the frozen and the trained blocks. So the gradients of the second stack
        do not touch the first.
        """
        if not self.frozen_blocks:
            return trained
        whole, part = tree.flatten(params), tree.flatten(trained)
        frozen = {name: leaf[: self.frozen_blocks] for name, leaf in whole.items() if is_stacked(name)}
        stacks = [{name: leaf for name, leaf in rows.items() if is_stacked(name)} for rows in (frozen, part)]
        blocks = [tree.unflatten({name.removeprefix(STACK): leaf for name, leaf in stack.items()}) for stack in stacks]
        others = {name: leaf for name, leaf in (whole | part).items() if not is_stacked(name)}
        return tree.unflatten(others | {STACK.rstrip("/"): tuple(filter(None, blocks))})

    def replace(self, params: ArrayTree, trained: ArrayTree) -> ArrayTree:
        """Returns the parameters with another trained part. Arrays that are donated are updated in place."""
        if not self.frozen_blocks:
            return trained
        leaves = tree.flatten(params)
        for name, leaf in tree.flatten(trained).items():
            leaves[name] = (
                jax.lax.dynamic_update_slice_in_dim(leaves[name], leaf, self.frozen_blocks, 0)
                if is_stacked(name)
                else leaf
            )
        return tree.unflatten(leaves)


WHOLE = LastBlocks(frozen_blocks=0)


class Adapters:
    """The factors of all adapters, and the head."""

    def select(self, params: ArrayTree) -> ArrayTree:
        """Returns the trained part of the parameters."""
        leaves = tree.flatten(params).items()
        return tree.unflatten({name: leaf for name, leaf in leaves if is_factor(name) or is_head(name)})

    def complete(self, params: ArrayTree, trained: ArrayTree) -> ArrayTree:
        """Returns what the model is applied to: all parameters. The model adds the adapters to the kernels itself."""
        return self.replace(params, trained)

    def replace(self, params: ArrayTree, trained: ArrayTree) -> ArrayTree:
        """Returns the parameters with another trained part."""
        return tree.unflatten(tree.flatten(params) | tree.flatten(trained))
