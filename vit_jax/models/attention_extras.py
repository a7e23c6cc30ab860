"""The additions of later models to equations 5 to 7: norms and rotation of queries and keys, terms of the scores."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.norms import NormParameters
from vit_jax.models.pattern import attended_pairs
from vit_jax.models.position import RelativeBias, RelativePositions
from vit_jax.models.rotary import Angles, rotate
from vit_jax.models.spec import ModelSpec

QKV: TypeAlias = Float[Array, "batch tokens 3 heads head_dim"]
PerToken: TypeAlias = Float[Array, "batch tokens heads head_dim"]
AttentionWeights: TypeAlias = Float[Array, "batch heads queries keys"]
Queries: TypeAlias = Float[Array, "batch queries heads head_dim"]
ScoreFunction: TypeAlias = Callable[[Queries], AttentionWeights]  # scaled queries -> what is added to their scores
Normalise: TypeAlias = Callable[[PerToken, NormParameters], PerToken]


class Pattern(NamedTuple):
    """Which tokens attend to which, where not all attend to all (`pattern.py`)."""

    spec: ModelSpec

    def scores(self, queries: Queries) -> AttentionWeights:
        """Returns what is added to the scores: zero for the pairs that attend, minus infinity for all others."""
        batch, tokens, heads, _ = queries.shape
        return jnp.broadcast_to(jnp.where(attended_pairs(self.spec), 0.0, -jnp.inf), (batch, heads, tokens, tokens))


class AttentionExtras(NamedTuple):
    """The additions of a model to equations 5 to 7; by default, there are none.

    Attributes:
        norms: the norm of queries, then of keys, over the channels of each head; empty: none.
        angles: by which queries and keys are rotated after their norm; None: not at all.
        relative: the relative positions; None: there are none.
        pattern: which tokens attend to which; None: all to all.
    """

    norms: tuple[NormParameters, ...] = ()
    angles: Angles | None = None
    relative: RelativePositions | RelativeBias | None = None
    pattern: Pattern | None = None

    def normalised_and_rotated(self, qkv: QKV, normalise: Normalise) -> QKV:
        """Returns normalised and rotated queries and keys, and the unchanged values."""
        if not self.norms and self.angles is None:
            return qkv
        changed = [qkv[:, :, part] for part in range(2)]
        if self.norms:
            changed = [normalise(part, norm) for part, norm in zip(changed, self.norms, strict=True)]
        if self.angles is not None:
            changed = [rotate(part, self.angles) for part in changed]
        return jnp.stack([*changed, qkv[:, :, 2]], axis=2)

    @property
    def scores(self) -> ScoreFunction | None:
        """The function of all that is added to the scores; None: nothing is added."""
        functions = [part.scores for part in (self.relative, self.pattern) if part is not None]
        return (lambda queries: sum(function(queries) for function in functions)) if functions else None


NO_EXTRAS = AttentionExtras()
