"""Sharpness-aware minimisation: gradients at parameters moved to where the loss is larger, for SAM and GSAM."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import optax
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from vit_jax.tree import ArrayTree

LossAndGrads: TypeAlias = tuple[Float[Array, ""], ArrayTree]
LossAndGradsOf: TypeAlias = Callable[[ArrayTree], LossAndGrads]
# (function of the parameters, parameters, step) -> the loss at the parameters and the gradient to follow
GradientRule: TypeAlias = Callable[[LossAndGradsOf, ArrayTree, jax.typing.ArrayLike], LossAndGrads]
SMALLEST_NORM = 1e-12  # the authors'


def one_pass(loss_and_grads_of: LossAndGradsOf, params: ArrayTree, step: jax.typing.ArrayLike) -> LossAndGrads:
    """Returns the loss and the gradient at the parameters. The step does not look for sharpness."""
    return loss_and_grads_of(params)


@dataclasses.dataclass(frozen=True)
class Sharpness:
    """Sharpness-aware minimization: a step takes its gradient in two passes over its batch.

    Let g be the gradient of the whole batch at the parameters p, and |g| its norm over all parameters. Let s be the
    gradient at p + rho g / |g|. The step follows s - alpha r, where r is the part of g that is orthogonal to s.
    Sources: Foret et al., arXiv 2010.01412 (SAM, alpha 0); Zhuang et al., arXiv 2203.08065, algorithm 1 (GSAM).

    Attributes:
        rho: step -> the length of the move.
        alpha: the weight of the gap between the two losses.
    """

    rho: optax.Schedule
    alpha: float

    def __call__(
        self, loss_and_grads_of: LossAndGradsOf, params: ArrayTree, step: jax.typing.ArrayLike
    ) -> LossAndGrads:
        """Returns the loss at the parameters and the gradient to follow."""
        loss, grads = loss_and_grads_of(params)
        length = self.rho(step) / (optax.tree.norm(grads) + SMALLEST_NORM)
        _, sharp = loss_and_grads_of(jax.tree.map(lambda p, g: p + length * g, params, grads))
        if not self.alpha:
            return loss, sharp
        along = optax.tree.vdot(grads, sharp) / (optax.tree.norm(sharp, squared=True) + SMALLEST_NORM**2)
        return loss, jax.tree.map(lambda s, g: s - self.alpha * (g - along * s), sharp, grads)


def make_sharpness(config: ConfigDict, relative_rate: optax.Schedule) -> GradientRule:
    """Returns how a run looks for sharpness: by `Sharpness`, or not at all (`one_pass`) if `config.optim.sam_rho` is 0.

    Args:
        config: the configuration of the run.
        relative_rate: step -> the learning rate divided by `base_lr`. With it, rho falls linearly from `sam_rho` at 1
            to `sam_rho_min` at 0. If `sam_rho_min` is None, rho is constant.
    """
    largest, least = config.optim.sam_rho, config.optim.sam_rho_min
    if not largest:
        return one_pass
    end = largest if least is None else least
    return Sharpness(lambda step: end + (largest - end) * relative_rate(step), config.optim.sam_alpha)
