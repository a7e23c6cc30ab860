"""The Vision Transformer (arXiv 2010.11929, equations 1 to 4): stem, patches, positions, encoder, head."""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from vit_jax import UserError
from vit_jax.models.attention import choose_packing
from vit_jax.models.attention_choice import attention_sizes
from vit_jax.models.encoder import Encoder
from vit_jax.models.head import POOLINGS
from vit_jax.models.layers import Dense, LayerNorm, Tokens, add_bias, classifier, dropout, product
from vit_jax.models.part_specs import StemKind
from vit_jax.models.position import table_of_tokens
from vit_jax.models.resnet import FeatureMap, ResNet, StridedMap
from vit_jax.models.spec import ModelSpec
from vit_jax.sharding import constrain, gather, local_size

Images: TypeAlias = Float[Array, "batch rows columns 3"]  # pixels


def normalise(spec: ModelSpec, images: Images) -> Images:
    """Returns images, which are given in [-1, 1], normalised by the spec's mean and standard deviation."""
    mean, std = np.array(spec.stem.mean), np.array(spec.stem.std)
    if (mean == 0.5).all() and (std == 0.5).all():
        return images
    scale, shift = (0.5 / std).astype(np.float32), ((0.5 - mean) / std).astype(np.float32)
    return images.astype(jnp.float32) * scale + shift


def pixel_stem(spec: ModelSpec, images: Images) -> StridedMap:
    """Returns the images, whose patches become the tokens."""
    return images


def resnet_stem(spec: ModelSpec, images: Images) -> StridedMap:
    """Returns the feature map of a ResNet, whose patches become the tokens of a hybrid (section 3.1)."""
    return ResNet(spec.stem.stages, spec.stem.width, spec.stem.epsilons, name="stem")(images.astype(spec.dtype))


STEMS: dict[StemKind, Callable[[ModelSpec, Images], StridedMap]] = {"patches": pixel_stem, "resnet": resnet_stem}


class Embed(nn.Module):
    """Patches in raster order, each flattened and projected to the width (E of equation 1)."""

    spec: ModelSpec
    before: int  # empty rows before the patches
    rows: int  # of an image in all, with the empty ones

    @nn.compact
    def __call__(self, x: FeatureMap) -> tuple[Tokens, Float[Array, " width"]]:
        """Returns the projections and their bias.

        The projections are zero in empty rows. The caller still has to add the bias to the rows of the patches.
        """
        stem, width, dtype = self.spec.stem, self.spec.width, self.spec.dtype
        size, channels = stem.kernel_size, stem.channels
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (size, size, channels, width))
        kernel = kernel.astype(self.spec.kernel_dtype)
        kernel = gather(kernel, "embed/kernel", dtype)
        rows, columns = x.shape[1] // size, x.shape[2] // size
        # Channels first in a patch: TPUs then change the layout of the images twice, otherwise three or four times.
        patches = jnp.moveaxis(x.astype(dtype), -1, 1).reshape(-1, channels, rows, size, columns, size)
        patches = patches.transpose(0, 2, 4, 1, 3, 5).reshape(-1, rows * columns, channels * size * size)
        after = self.rows - self.before - rows * columns
        patches = jnp.pad(patches, ((0, 0), (self.before, after), (0, 0)))
        bias = self.param("bias", nn.initializers.zeros, (width,)) if stem.bias else jnp.zeros(width)
        return product(patches, jnp.moveaxis(kernel, 2, 0).reshape(-1, width)), bias


class ViT(nn.Module):
    """The whole model. Dropout and stochastic depth are active if a `dropout` random stream is given."""

    spec: ModelSpec

    @nn.compact
    def __call__(
        self, images: Images, capture: tuple[str, ...] = (), masked: Bool[Array, "batch patches"] | None = None
    ) -> tuple[Float[Array, "batch *patches classes"], dict[str, Array]]:
        """Returns the logits in float32 and named intermediates; see `Model.apply`."""
        spec = self._sized_spec(images)
        patches, before = math.prod(spec.grid), spec.prefix_rows
        sizes = attention_sizes(spec, local_size("batch", len(images)))
        # Axial blocks pack lines themselves.
        kind = spec.attention.kind if spec.block.kind == "standard" else "tokens_first"
        packing = choose_packing(
            kind, sizes._replace(tokens=before + patches, heads=local_size("heads", spec.attention.num_heads))
        )
        unshared = packing.unshared
        x = STEMS[spec.stem.kind](spec, normalise(spec, images))
        x, bias = Embed(spec, before, unshared.rows, name="embed")(x)
        if spec.head.kind == "patches":
            x = self._mask(x, masked, before)
        added = jnp.broadcast_to(bias, (patches, spec.width))  # to the projections: prefix, biases and positions
        added = jnp.concatenate([*self._prefix(), added])
        table = table_of_tokens(self.param, spec) if spec.position.owner == "model" else None
        if table is not None:
            added += table
        x = constrain(add_bias(x, unshared.pack(added[None])), ("batch", "tokens", "width")).reshape(-1, spec.width)
        # As one matrix, all arrays of the blocks have one layout in memory, that of their matmuls.
        x = constrain(unshared.repack(dropout(self, x, unshared), packing), ("batch", "width"))
        x, out = Encoder(spec, name="encoder")(x, packing, capture)
        return self._classify(x, out)

    def _sized_spec(self, images: Images) -> ModelSpec:
        """Returns the spec with the resolution of the images.

        Raises:
            UserError: the images have another resolution than the one for which the model's parameters are made.
        """
        size, position = images.shape[1:3], self.spec.position
        if size == position.image_size:
            return self.spec
        if self.spec.has_sized_parameters:
            raise UserError(
                "images of {}x{} pixels do not fit a model of resolution {}x{}; ".format(*size, *position.image_size)
                + f"create the model with resolution={size[0] if size[0] == size[1] else size} and resample its "
                "position embeddings with vit_jax.models.resample_positions; vit_jax.load(PATH, resolution=...) does "
                "both."
            )
        return dataclasses.replace(self.spec, position=dataclasses.replace(position, resolution=size))

    def _prefix(self) -> list[Float[Array, "rows width"]]:
        """Returns the learned tokens before those of the patches."""
        spec, rows = self.spec, []
        if spec.class_rows:
            rows.append(self.param("cls", nn.initializers.zeros, (spec.width,))[None])
        if spec.prefix.registers:  # drawn as in DINOv2
            shape = (spec.prefix.registers, spec.width)
            rows.append(self.param("registers", nn.initializers.normal(1e-6), shape))
        return rows

    def _mask(self, x: Tokens, masked: Bool[Array, "batch patches"] | None, before: int) -> Tokens:
        """Returns the rows with the [mask] embedding in place of masked patches, which start at row `before`."""
        mask = self.param("mask", nn.initializers.zeros, (self.spec.width,))
        if masked is None:
            return x
        after = x.shape[1] - before - masked.shape[1]
        rows = jnp.pad(masked, ((0, 0), (before, after)))[..., None]
        return jnp.where(rows, add_bias(jnp.zeros_like(x), mask), x)

    def _classify(self, tokens: Tokens, out: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        head = self.spec.head
        # The head is small: float32 costs nothing there.
        x = POOLINGS[head.pooling](self.spec, tokens).astype(jnp.float32)
        if head.final_norm == "pooled":
            x = LayerNorm(self.spec.block.norm_epsilon, name="pooled_norm")(x)
        rows: tuple[str, ...] = ("batch",)
        out = out | {"tokens": tokens}
        if head.kind == "patches":  # the pooled representation is then for evaluations of features alone
            out["pre_logits"] = constrain(x, ("batch", "width"))
            rows, x = ("batch", "tokens"), tokens[:, self.spec.prefix_rows :].astype(jnp.float32)
        if head.pre_logits:
            x = constrain(x, (*rows, "width"))
            size = head.representation_size or self.spec.width
            x = nn.tanh(Dense(size, name="pre_logits")(x))
        x = constrain(x, (*rows, "width"))
        out = {"pre_logits": x} | out
        if not head.num_classes:
            return x, out

        def classify(x: Array, name: str) -> Array:
            return constrain(classifier(head.num_classes, head.std, head.bias, name)(x), logits)

        logits = (*rows, "classes")
        if not head.distilled:
            return classify(x, "head"), out
        distillation_token = constrain(tokens[:, self.spec.class_rows].astype(jnp.float32), ("batch", "width"))
        both = jnp.stack([classify(x, "head"), classify(distillation_token, "distilled_head")], axis=1)
        return both.mean(axis=1), out | {"head_logits": both}
