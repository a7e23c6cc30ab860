"""Models: named sizes, and how to create, initialise and apply one."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax import UserError, choose
from vit_jax.models.spec import ModelSpec, flatten, replace
from vit_jax.models.vit import ViT

# Table 1 (B, L, H); Ti and S are of "How to train your ViT" (2106.10270), g and G of "Scaling ViTs" (2106.04560);
# mu is for tests.
SIZES = {
    #      width depth mlp_dim num_heads
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}

SHAPE = ("width", "depth", "mlp_dim", "num_heads")

# First word and last number of a hybrid's name -> units per stage of its ResNet, pixels on a side under a token.
HYBRIDS = {
    ("R50", 16): ((3, 4, 9), 16),  # the units of stage 4 moved to stage 3
    ("R50", 32): ((3, 4, 6, 3), 32),
    ("R26", 32): ((2, 2, 2, 2), 32),
    # AugReg's R+ViT-Ti/16: the root alone, at stride 4, under 8x8 patches; so it divides by 32, whatever its name says.
    ("R", 16): ((), 32),
}

CAPTURES = ("attention",)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model without its parameters: hashable, so that it may be a static argument."""

    name: str  # as `create` reads it
    spec: ModelSpec
    preprocess: str | None = None  # the pipe of operations that its images went through
    class_names: tuple[str, ...] | None = None  # of the logits, in order
    loss: str = "softmax"  # that it was trained with: what makes probabilities of the logits, softmax or sigmoid

    @property
    def fields(self) -> dict[str, Any]:
        """What differs from the name, by flat keyword: `create(model.name, **model.fields).spec == model.spec`."""
        named = flatten(ModelSpec()) | _named(self.name)  # a name without a size says nothing of the shape: None
        return {name: value for name, value in flatten(self.spec).items() if value != named[name]}

    def field(self, name: str) -> Any:
        """Returns a field of the spec, wherever in it it lies."""
        return flatten(self.spec)[name]

    def init(self, key: Array, images: Any) -> dict[str, Any]:
        """Returns initial parameters, a plain dict of float32 arrays; initialised as published.

        Args:
            key: a JAX random key.
            images: array or `jax.ShapeDtypeStruct` [batch, height, width, 3]; only height and width matter.

        Raises:
            UserError: the images do not fit the model's resolution or patches.
        """
        # Initialising needs shapes only, and the loop form traces one block instead of all.
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
        """Returns logits and what the model computed on the way.

        What a jitted caller does not return costs nothing.

        Args:
            params: parameters in the layout of `init`.
            images: values in [-1, 1].
            dropout_key: given, the model trains: dropout and stochastic depth draw from it.
            capture: what else to return; "attention".

        Returns:
            logits: float32 [batch, classes]; without a classifier (num_classes=0) the pooled representation.
            out: `pre_logits`, the classifier's float32 input [batch, width], or [batch, representation_size]; `tokens`
                [batch, tokens, width] after the encoder's norm; `blocks`, each block's output [depth, batch, tokens,
                width]; if captured `attention`, float32 weights [depth, batch, heads, tokens, tokens]. A class token is
                row 0 of the tokens.

        Raises:
            UserError: the images do not fit the model's resolution or patches, or an unknown capture.
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
        name: `ViT-<size>/<patch size in pixels>`, with a size of `SIZES`; `R50+`, `R26+` or `R+` before it for a hybrid
            of `HYBRIDS`; or `ViT/<patch size>` with the fields width, depth, mlp_dim and num_heads.
        preprocess: the pipe of operations that its images go through; not read by the model.
        class_names: names of the logits, in order; not read by the model.
        loss: softmax or sigmoid; not read by the model.
        **fields: fields of `ModelSpec` and its parts by name; None means as named.

    Raises:
        UserError: no such name or field, or values that do not go together.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    chosen = _named(name) | given
    if missing := [field for field in SHAPE if chosen[field] is None]:
        raise UserError(f"{name} names no size; give {', '.join(missing)}.")
    spec = replace(ModelSpec(), **chosen)
    choose("loss", loss, ("softmax", "sigmoid"))
    if not isinstance(preprocess, str | None):
        raise UserError(f"preprocess must be a pipe of operations, not {preprocess!r}.")
    if class_names is not None:
        class_names = tuple(class_names)
        if not all(isinstance(name, str) for name in class_names) or len(class_names) != spec.head.num_classes:
            raise UserError(f"class_names must be {spec.head.num_classes:,} strings, one for each class.")
    return Model(name, spec, preprocess, class_names, loss)


def model_name(fields: dict[str, Any]) -> str:
    """Returns the name of the models with these fields, by flat keyword: with a size, else `ViT/<patch size>`."""
    whole = flatten(ModelSpec()) | fields
    options = [f"ViT-{size}/{whole['patch_size']}" for size in SIZES]
    if whole["stem"] == "resnet":
        options = [f"{stem}+ViT-{size}/{number}" for stem, number in HYBRIDS for size in SIZES]
    fits = [name for name in options if all(whole[field] == value for field, value in _named(name).items())]
    return next(iter(fits), f"ViT/{whole['patch_size']}")


def _named(name: str) -> dict[str, Any]:
    """Returns the fields that a name stands for; those of the shape are None if it names no size."""
    found = re.fullmatch(r"(?:(R\d{0,3})\+)?ViT(?:-([A-Za-z]+))?/([1-9]\d{0,5})", name)
    stem, size, number = found.groups() if found else (None, "", "0")
    hybrid = HYBRIDS.get((stem, int(number))) if stem and size else None
    if size not in (None, *SIZES) or (stem and not hybrid):
        options = [f"ViT-{size}/{number}" for size in SIZES for number in (8, 14, 16, 32)]
        options += [f"{stem}+ViT-{size}/{number}" for stem, number in HYBRIDS for size in SIZES]
        choose("model", name, options, where="vit_jax/models/__init__.py")
    shape = dict(zip(SHAPE, SIZES[size] if size else (None,) * len(SHAPE), strict=True))
    if not hybrid:
        return shape | {"patch_size": int(number)}
    stages, patch_size = hybrid
    return shape | {"stem": "resnet", "stages": stages, "patch_size": patch_size}
