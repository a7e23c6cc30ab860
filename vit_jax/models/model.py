"""A model: created by name, initialised, applied."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import UserError, choose
from vit_jax.models.attention_choice import attention_sizes, choose_attention
from vit_jax.models.spec import AttentionKind, ModelSpec, flatten_spec, replace_fields
from vit_jax.models.variants import SIZE_FIELDS, named_fields
from vit_jax.models.vit import ViT

LOSSES = ("softmax", "sigmoid")
CAPTURES = ("attention",)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model without its parameters: hashable, so that it may be a static argument."""

    name: str  # as `create` takes it
    spec: ModelSpec
    preprocess: str | None = None  # the pipe of operations that prepares its images
    class_names: tuple[str, ...] | None = None  # of the logits, in order
    loss: str = "softmax"  # of its training: the function that turns logits into probabilities

    @property
    def fields(self) -> dict[str, Any]:
        """What the name does not say, by flat keyword: `create(model.name, **model.fields).spec == model.spec`."""
        named = flatten_spec(ModelSpec()) | named_fields(self.name)  # without a size in the name, its fields are None
        return {name: value for name, value in flatten_spec(self.spec).items() if value != named[name]}

    def field(self, name: str) -> Any:
        """Returns a field of the spec by its flat keyword."""
        return flatten_spec(self.spec)[name]

    def for_device(self, device_kind: str, images: int, tensor: int = 1) -> "Model":
        """Returns the model with the fastest attention for a kind of device, if it is `auto`.

        Args:
            device_kind: as JAX names it.
            images: on one device, in one part of the batch.
            tensor: devices over which the heads are split.
        """
        if self.spec.attention.kind != "auto":
            return self
        return self.with_attention(choose_attention(device_kind, attention_sizes(self.spec, images, tensor)))

    def with_attention(self, kind: AttentionKind) -> "Model":
        """Returns the same model with another implementation of attention."""
        attention = dataclasses.replace(self.spec.attention, kind=kind)
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, attention=attention))

    def init(self, key: Array, images: Any) -> dict[str, Any]:
        """Returns initial parameters, drawn as published: a plain dict of float32 arrays.

        Args:
            key: a JAX random key.
            images: array or `jax.ShapeDtypeStruct` [batch, height, width, 3]; only height and width matter.

        Raises:
            UserError: the images do not fit the model's resolution or patches.
        """
        # Only shapes matter here, and the loop traces one block instead of all.
        spec = dataclasses.replace(self.spec, scan=True, remat="none")
        example = jax.ShapeDtypeStruct((1, *images.shape[1:]), jnp.float32)
        return ViT(spec).lazy_init(key, example)["params"]

    def apply(
        self,
        params: dict[str, Any],
        images: Float[Array | np.ndarray, "batch height width 3"],
        dropout_key: Array | None = None,
        capture: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "batch classes"], dict[str, Array]]:
        """Returns logits and intermediates. What a jitted caller does not return costs nothing.

        Args:
            params: parameters in the layout of `init`.
            images: values in [-1, 1].
            dropout_key: the random key of dropout and stochastic depth in training; None: nothing is dropped.
            capture: further intermediates to return: "attention".

        Returns:
            logits: float32 [batch, classes]; without a classifier (num_classes=0) the pooled representation.
            out: `pre_logits`, the classifier's float32 input [batch, width], or [batch, representation_size]; `tokens`
                [batch, tokens, width] after the encoder's norm; `blocks`, each block's output [depth, batch, tokens,
                width]; if captured `attention`, float32 weights [depth, batch, heads, tokens, tokens]. A class token is
                row 0 of the tokens.

        Raises:
            UserError: the images do not fit the model's resolution or patches, or a capture is unknown.
        """
        for word in capture:
            choose("capture", word, CAPTURES)
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        params = jax.tree.map(jnp.asarray, params)
        return ViT(self.spec).apply({"params": params}, jnp.asarray(images), tuple(capture), rngs=rngs)


def create(
    name: str,
    /,
    *,
    preprocess: str | None = None,
    class_names: tuple[str, ...] | list[str] | None = None,
    loss: str = "softmax",
    **fields: Any,
) -> Model:
    """Returns a model by name, with any field of its spec changed.

    Examples: `create("ViT-B/16", num_classes=10, resolution=384, pooling="gap")`, `create("R50+ViT-B/16")`,
    `create("ViT/16", width=512, depth=8, mlp_dim=2048, num_heads=8)`.

    Args:
        name: `ViT-<size>/<patch size in pixels>`, with a size of `variants.SIZES`; for a hybrid of `variants.HYBRIDS`
            with `R50+`, `R26+` or `R+` before it; or `ViT/<patch size>`, then with width, depth, mlp_dim and num_heads.
        preprocess: the pipe of operations that prepares its images; not used by the model.
        class_names: names of the logits, in order; not used by the model.
        loss: softmax or sigmoid; not used by the model.
        **fields: flat keywords of `ModelSpec` and its parts; None means the value that the name stands for.

    Raises:
        UserError: a name or field is unknown, or values contradict each other.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    chosen = named_fields(name) | given
    if missing := [field for field in SIZE_FIELDS if chosen[field] is None]:
        raise UserError(f"the model name {name} does not contain a size; set {', '.join(missing)}.")
    spec = replace_fields(ModelSpec(), **chosen)
    choose("loss", loss, LOSSES)
    if not isinstance(preprocess, str | None):
        raise UserError(f"preprocess must be a pipe of operations, not {preprocess!r}.")
    if class_names is not None:
        class_names = tuple(class_names)
        if not all(isinstance(name, str) for name in class_names) or len(class_names) != spec.head.num_classes:
            raise UserError(f"class_names must be {spec.head.num_classes:,} strings, one for each class.")
    return Model(name, spec, preprocess, class_names, loss)
