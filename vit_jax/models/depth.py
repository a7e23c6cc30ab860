"""Where the parameters lie in the depth of a model: before its blocks, in a stack of them, or after the last one."""

import re

from vit_jax import tree
from vit_jax.tree import ArrayTree

STACK = "encoder/blocks/"  # how the names of stacked parameters [depth, ...] begin, which have a row for each block
_HEAD = re.compile("((distilled_)?head|pre_logits)/.*|mask")
_AFTER = re.compile("(encoder/norm|map_head|pooled_norm|pre_logits|projection|(distilled_)?head)/.*")


def is_stacked(name: str) -> bool:
    """Returns whether a parameter has a row for each block."""
    return name.startswith(STACK)


def is_head(name: str) -> bool:
    """Returns whether a parameter belongs to the head, which a run does not take from the weights that it starts from.

    These are the classifiers, the tanh layer before them, and the [mask] embedding of masked patches.
    """
    return _HEAD.fullmatch(name) is not None


def is_before_blocks(name: str) -> bool:
    """Returns whether a parameter acts before the first block, or in all of them alike.

    These are the patch projection, a hybrid's ResNet, the class token, registers, the [mask] embedding, a LayerNorm
    before the blocks, and the positions, unless each block has its own.
    """
    return not is_stacked(name) and not _AFTER.fullmatch(name)


def block_name(name: str, block: int) -> str:
    """Returns the name of one block's row of a stacked parameter: `encoder/blocks/0/norm1/scale`."""
    return f"{STACK}{block}/{name.removeprefix(STACK)}"


def count_blocks(params: ArrayTree) -> int:
    """Returns the number of encoder blocks in the parameters: the length of their stacked arrays, 0 without blocks."""
    return next((leaf.shape[0] for name, leaf in tree.flatten(params).items() if is_stacked(name)), 0)
