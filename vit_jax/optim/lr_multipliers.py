"""Learning-rate multipliers of parameters: by depth, and by name down to single blocks."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from vit_jax import UserError, refuse, tree
from vit_jax.model import Model
from vit_jax.models import block_name, count_blocks, is_before_blocks, is_stacked
from vit_jax.tree import ArrayTree

Multiplier: TypeAlias = float | Float[np.ndarray, " depth"]  # an array for a stack whose blocks have different ones


@dataclasses.dataclass(frozen=True)
class LrMultipliers:
    """The factors of the parameters' learning rates: for each parameter the factor of its depth times that of its name.

    With `layer_decay` d and N blocks, the factor of depth is d^(N + 1) before the blocks, d^(N - i) in block i (from
    0), and 1 after them: the layers of BEiT (arXiv 2106.08254) and MAE (arXiv 2111.06377, appendix A.1). Where the
    product is 0 the parameter is frozen.

    Attributes:
        patterns: (regular expression, factor of a name). The first pattern that matches the whole name counts; without
            a match the factor is 1. The row of a block in a stack has two names, `encoder/blocks/norm1/scale` and
            `encoder/blocks/0/norm1/scale`.
        layer_decay: d.
        frozen_blocks: how many of the first blocks are frozen, together with everything before the blocks.
    """

    patterns: tuple[tuple[str, float], ...] = ()
    layer_decay: float = 1.0
    frozen_blocks: int = 0

    def of(self, name: str, depth: int) -> Multiplier:
        """Returns the multiplier of a parameter of a model with `depth` blocks: one for each block if they differ."""
        if not is_stacked(name):
            before = is_before_blocks(name)
            factor = self.layer_decay ** (depth + 1) if before else 1.0
            return 0.0 if before and self.frozen_blocks else factor * self._match(name)
        rows = [self.layer_decay ** (depth - i) * self._match(name, block_name(name, i)) for i in range(depth)]
        rows[: self.frozen_blocks] = [0.0] * self.frozen_blocks
        return rows[0] if len(set(rows)) == 1 else np.array(rows)

    def by_name(self, params: ArrayTree) -> dict[str, Multiplier]:
        """Returns the multipliers of all parameters by name.

        Raises:
            UserError: a pattern matches no parameter.
        """
        names, depth = list(tree.flatten(params)), count_blocks(params)
        rows = [block_name(name, i) for name in names if is_stacked(name) for i in range(depth)]
        for pattern, _ in self.patterns:
            if not any(re.fullmatch(pattern, name) for name in (*names, *rows)):
                raise UserError(
                    f"optim.lr_multipliers: no parameter matches {pattern!r}; the parameters are {', '.join(names)}"
                )
        return {name: self.of(name, depth) for name in names}

    def scale(self, updates: ArrayTree) -> ArrayTree:
        """Returns the updates of the trained part of the parameters, each times its multiplier."""
        return self._map(lambda leaf, number: leaf * number, updates)

    def keep_frozen(self, updates: ArrayTree) -> ArrayTree:
        """Returns the updates of the trained part of the parameters with zeros where the multiplier is 0."""
        return self._map(lambda leaf, number: leaf * (number > 0), updates)

    def freeze(self, trained: ArrayTree) -> ArrayTree:
        """Returns the trained part of the parameters with the gradient stopped where the multiplier is 0."""

        def stop(leaf: jax.Array, number: float | np.ndarray) -> jax.Array:
            if np.all(number):
                return leaf
            stopped = jax.lax.stop_gradient(leaf)
            return jnp.where(number > 0, leaf, stopped) if np.any(number) else stopped

        return self._map(stop, trained)

    def _map(self, function: Callable[[jax.Array, float | np.ndarray], jax.Array], trained: ArrayTree) -> ArrayTree:
        depth = self.frozen_blocks + count_blocks(trained)

        def apply(name: str, leaf: jax.Array) -> jax.Array:
            number = self.of(name, depth)
            if isinstance(number, np.ndarray):  # the last rows: those of the blocks that are trained
                number = number[self.frozen_blocks :].astype(np.float32).reshape(-1, *(1 for _ in leaf.shape[1:]))
            return function(leaf, number)

        return tree.map_named(apply, trained)

    def _match(self, *names: str) -> float:
        return next((number for rule, number in self.patterns if any(re.fullmatch(rule, name) for name in names)), 1.0)


UNSCALED = LrMultipliers()


def check_blocks(optim: ConfigDict, model: Model) -> None:
    """Checks the fields of the group `optim` that count blocks.

    Raises:
        UserError: a field counts blocks but the model has none; more blocks are frozen than it has; or all blocks are
            frozen, so that `layer_decay` changes nothing.
    """
    depth, frozen, decay = model.field("depth"), optim.frozen_blocks, optim.layer_decay
    refuse(
        (
            depth is None and (frozen or decay != 1),
            f"{model.name} has no encoder blocks: set optim.frozen_blocks=0 and optim.layer_decay=1; for the rates of "
            "its stages set optim.lr_multipliers, as in root/.*=0,stage1/.*=0.1.",
        ),
        (frozen > (depth or 0), f"optim.frozen_blocks={frozen} must be at most {depth}, the blocks of {model.name}."),
        (
            frozen == depth and decay != 1,
            f"optim.layer_decay={decay:g} changes no rate while optim.frozen_blocks={frozen} freezes all blocks; set "
            "optim.layer_decay to 1, or freeze fewer blocks.",
        ),
    )


def make_lr_multipliers(config: ConfigDict) -> LrMultipliers:
    """Returns the multipliers of a configuration.

    Raises:
        UserError: `optim.lr_multipliers` is not of the form PATTERN=MULTIPLIER,...
    """
    pairs = []
    for part in filter(None, config.optim.lr_multipliers.split(",")):
        pattern, _, number = part.rpartition("=")
        try:
            re.compile(pattern)
            pairs.append((pattern, float(number)))
        except (re.error, ValueError):
            pairs.append((pattern, math.nan))
        if not pattern or not 0 <= pairs[-1][1] < math.inf:
            raise UserError(
                f"cannot parse {part!r} in optim.lr_multipliers; write pairs such as head/.*=10,embed/.*=0, with "
                "multipliers of at least 0."
            )
    return LrMultipliers(tuple(pairs), config.optim.layer_decay, config.optim.frozen_blocks)
