"""What happens to queries and keys between their projection and the attention: a LayerNorm of each head, a rotation."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.kernels import Packing, QKChange, lanes_of_heads
from vit_jax.models.layers import NormArrays, layer_norm
from vit_jax.models.rotary import Angles, rotate

QKV: TypeAlias = Float[Array, "batch tokens 3 heads head_dim"]


class HeadChange(NamedTuple):
    """The norms and the rotation of queries and keys; by default there are none.

    Attributes:
        norms: scale and bias of the queries' norm, then of the keys'; empty: there are no norms.
        epsilon: the epsilon of the norms.
        angles: the angles of the rotation; None: there is no rotation.
    """

    norms: tuple[NormArrays, ...] = ()
    epsilon: float = 0.0
    angles: Angles | None = None

    def __call__(self, qkv: QKV) -> QKV:
        """Returns the changed queries and keys, and the unchanged values."""
        if self.for_kernel is None:
            return qkv
        changed = [qkv[:, :, part] for part in range(2)]
        if self.norms:
            pairs = zip(changed, self.norms, strict=True)
            changed = [layer_norm(part, *norm, self.epsilon) for part, norm in pairs]
        if self.angles is not None:
            changed = [rotate(part, self.angles) for part in changed]
        return jnp.stack([*changed, qkv[:, :, 2]], axis=2)

    def centred(self, x: Float[Array, "*dims 3 heads head_dim"]) -> Float[Array, "*dims 3 heads head_dim"]:
        """Returns a kernel or bias of the projection that makes the mean of queries and keys zero in each head.

        Their LayerNorm then need not subtract a mean. Without norms, `x` is returned as it is.
        """
        if not self.norms:
            return x
        compared, values = jnp.split(x.astype(jnp.float32), [2], axis=-3)
        return jnp.concatenate([compared - compared.mean(-1, keepdims=True), values], axis=-3).astype(x.dtype)

    @property
    def for_kernel(self) -> QKChange | None:
        """The change in the form that the attention kernel takes; None: nothing is changed."""
        rotates = self.angles is not None
        return QKChange(self.epsilon if self.norms else None, rotates) if self.norms or rotates else None

    @property
    def norm_rows(self) -> Float[Array, "rows head_dim"]:
        """Four rows: scale and bias of the queries' norm, then of the keys'. There are no rows without norms."""
        return jnp.stack([each for norm in self.norms for each in norm]) if self.norms else jnp.zeros((0, 1))

    def tables(self, norm_rows: jax.Array, packing: Packing, heads: int, head_dim: int) -> tuple[jax.Array, ...]:
        """Returns the tables that the attention kernel needs, see `kernels.QKChange.num_tables`.

        Args:
            norm_rows: scale and bias, as the property of this name returns them.
            packing: the packing of the rows of queries and keys.
            heads: the number of heads on one device.
            head_dim: the channels of a head.
        """
        repeats = lanes_of_heads(head_dim, heads * head_dim) // head_dim
        tables = [jnp.tile(norm_rows, (1, repeats))] if self.norms else []
        if self.angles is not None:
            empty = (0, packing.rows - packing.images * len(self.angles)), (0, 0)
            for function in (np.cos, np.sin):
                pairs = jnp.repeat(jnp.asarray(function(self.angles), jnp.float32), 2, axis=1)
                tables.append(jnp.pad(jnp.tile(pairs, (packing.images, repeats)), empty))
        return tuple(tables)
