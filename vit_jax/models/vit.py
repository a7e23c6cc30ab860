"""The Vision Transformer (arXiv 2010.11929, equations 1 and 4): stem, patches, positions, encoder, head."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from vit_jax import UserError
from vit_jax.models.encoder import Encoder
from vit_jax.models.layers import Dense, classifier, dropout, norm_of
from vit_jax.models.norms import Channels
from vit_jax.models.operations import PlainOps, Projection, Tokens
from vit_jax.models.pooling import POOLINGS
from vit_jax.models.position import table_of_tokens
from vit_jax.models.resnet import FeatureMap, ResNet, StridedMap
from vit_jax.models.spec import ModelSpec, StemKind

Patches: TypeAlias = Float[Array, "batch patches inputs"]
Images: TypeAlias = Float[Array, "batch rows columns 3"]  # pixels


def normalise(spec: ModelSpec, images: Images) -> Images:
    """Returns images, which are given in [-1, 1], normalised by the spec's mean and standard deviation."""
    mean, std = np.array(spec.stem.mean), np.array(spec.stem.std)
    if (mean == 0.5).all() and (std == 0.5).all():
        return images
    scale, shift = (0.5 / std).astype(np.float32), ((0.5 - mean) / std).astype(np.float32)
    return images.astype(jnp.float32) * scale + shift


# What a stem returns: what is cut into patches, and its intermediates by name.
Stem: TypeAlias = tuple[StridedMap, dict[str, Array]]


def pixel_stem(spec: ModelSpec, images: Images) -> Stem:
    """Returns the images, whose patches become the tokens."""
    return images, {}


def resnet_stem(spec: ModelSpec, images: Images) -> Stem:
    """Returns the feature map of a ResNet, whose patches become the tokens of a hybrid (section 3.1)."""
    return ResNet(spec.stem.stages, spec.stem.width, spec.stem.epsilons, name="stem")(images.astype(spec.dtype))


STEMS: dict[StemKind, Callable[[ModelSpec, Images], Stem]] = {"patches": pixel_stem, "resnet": resnet_stem}


class Embed(nn.Module):
    """The patches, and the parameters of their projection to the width (E of equation 1)."""

    spec: ModelSpec

    @nn.compact
    def __call__(self, x: FeatureMap) -> tuple[Patches, Projection]:
        """Returns the patches in raster order, each flattened with its channels first, and kernel and bias of E."""
        stem, width = self.spec.stem, self.spec.width
        size, channels = stem.kernel_size, stem.channels
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (size, size, channels, width))
        bias = self.param("bias", nn.initializers.zeros, (width,)) if stem.bias else jnp.zeros(width)
        rows, columns = x.shape[1] // size, x.shape[2] // size
        # Channels first in a patch: the images then change their layout in memory twice, otherwise up to four times.
        patches = jnp.moveaxis(x.astype(self.spec.dtype), -1, 1).reshape(-1, channels, rows, size, columns, size)
        patches = patches.transpose(0, 2, 4, 1, 3, 5).reshape(-1, rows * columns, channels * size * size)
        return patches, (kernel, bias)


class ViT(nn.Module):
    """The whole model. Dropout and stochastic depth are active if a `dropout` random stream is given.

    `ops` are the operations in the equations: `PlainOps`, or `execution.DeviceOps`, as `Model.apply` has them.
    """

    spec: ModelSpec
    ops: PlainOps

    @nn.compact
    def __call__(
        self, images: Images, capture: tuple[str, ...] = (), masked: Bool[Array, "batch patches"] | None = None
    ) -> tuple[Float[Array, "batch *patches classes"], dict[str, Array]]:
        """Returns the logits in float32 and named intermediates; see `Model.apply`."""
        spec = self._sized_spec(images)
        ops = self.ops.for_images(spec, images.shape[0])
        # Equation 1: z = [x_class; x_1 E; x_2 E; ...] + E_pos. E has a bias; registers may follow the class token.
        x, stages = STEMS[spec.stem.kind](spec, normalise(spec, images))
        patches, projection = Embed(spec, name="embed")(x)
        replaced = self._replaced(masked) if spec.head.kind == "patches" else None
        learned = self._learned_tokens()
        positions = table_of_tokens(self.param, spec) if spec.position.owner == "model" else None
        z = ops.embed(patches, projection, learned, positions, replaced, functools.partial(dropout, self))
        # Equations 2 and 3 in each block, then the LN of equation 4.
        tokens, out = Encoder(spec, ops, name="encoder")(z, capture)
        return self._classify(tokens, stages | out, ops)

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

    def _learned_tokens(self) -> list[Float[Array, "rows width"]]:
        """Returns the learned tokens before those of the patches: x_class, and registers."""
        spec, rows = self.spec, []
        if spec.class_rows:
            rows.append(self.param("cls", nn.initializers.zeros, (spec.width,))[None])
        if spec.prefix.registers:  # drawn as in DINOv2
            shape = (spec.prefix.registers, spec.width)
            rows.append(self.param("registers", nn.initializers.normal(1e-6), shape))
        return rows

    def _replaced(
        self, masked: Bool[Array, "batch patches"] | None
    ) -> tuple[Bool[Array, "batch patches"], Channels] | None:
        """Returns which patches are masked, and the [mask] embedding that replaces them; None: none are masked."""
        mask = self.param("mask", nn.initializers.zeros, (self.spec.width,))
        return None if masked is None else (masked, mask)

    def _classify(self, tokens: Tokens, out: dict[str, Array], ops: PlainOps) -> tuple[Array, dict[str, Array]]:
        head = self.spec.head
        # Equation 4: y = LN(z)[0], or another pooling. The head is small: float32 costs nothing there.
        x = POOLINGS[head.pooling](self.spec, ops, tokens).astype(jnp.float32)
        if head.final_norm == "pooled":
            x = norm_of(self.spec.block, ops, "pooled_norm")(x)
        rows: tuple[str, ...] = ("batch",)
        out = out | {"tokens": tokens}
        if head.kind == "patches":  # the pooled representation is then for evaluations of features alone
            out["pre_logits"] = ops.place(x, "batch", "width")
            rows, x = ("batch", "tokens"), tokens[:, self.spec.prefix_rows :].astype(jnp.float32)
        if head.projection:
            x = Dense(head.projection, ops, biased=(), name="projection")(ops.place(x, *rows, "width"))
        if head.pre_logits:
            x = ops.place(x, *rows, "width")
            size = head.representation_size or self.spec.width
            x = nn.tanh(Dense(size, ops, name="pre_logits")(x))
        x = ops.place(x, *rows, "width")
        out = {"pre_logits": x} | out
        if not head.num_classes:
            return x, out

        def classify(x: Array, name: str) -> Array:
            return ops.place(classifier(head.num_classes, head.std, head.bias, name, ops)(x), *rows, "classes")

        if not head.distilled:
            return classify(x, "head"), out
        distillation_token = ops.place(tokens[:, self.spec.class_rows].astype(jnp.float32), "batch", "width")
        both = jnp.stack([classify(x, "head"), classify(distillation_token, "distilled_head")], axis=1)
        return both.mean(axis=1), out | {"head_logits": both}
