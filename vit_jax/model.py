"""A model: created by name, initialised, applied."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from vit_jax import UserError, choose
from vit_jax.config import REGRESSION_LOSSES
from vit_jax.execution import (
    CHIP_KERNELS,
    PLAIN_FORMS,
    DeviceOps,
    attention_sizes,
    check_forms,
    choose_attention,
    choose_mlp,
)
from vit_jax.models import (
    RESAMPLINGS,
    AttentionKind,
    BiT,
    FeatureMaps,
    ModelSpec,
    Place,
    PlainOps,
    Spec,
    ViT,
    build_spec,
    default_spec,
    field_words,
    flatten_spec,
    image_size,
    list_places,
    named_fields,
    replace_fields,
    take_maps,
)

LOSSES = ("softmax", "sigmoid", *REGRESSION_LOSSES)
CAPTURES = ("attention",)  # the fields of the spec whose intermediates may be captured
NETWORKS: dict[str, Callable[[Any, PlainOps], nn.Module]] = {"ViT": ViT, "BiT": BiT}  # by `family` of the spec


@dataclasses.dataclass(frozen=True)
class Model:
    """A model without its parameters: hashable, so that it may be a static argument."""

    name: str  # as `create` takes it
    spec: Spec
    preprocess: str | None = None  # the pipe of operations that prepares its images
    class_names: tuple[str, ...] | None = None  # the names of the logits, or of the numbers of regression, in order
    loss: str = "softmax"  # of its training, one of LOSSES; softmax or sigmoid turns logits into probabilities
    resample: str = "linear"  # how the library of its weights resamples learned positions: a key of RESAMPLINGS
    licence: str = ""  # of its weights, as the Hugging Face hub names it, such as apache-2.0; empty: not known
    licence_address: str = ""  # where the licence is published; empty: not known
    multi_label: bool = False  # whether an image may have several classes, or none
    target_scale: tuple[tuple[float, float], ...] | None = None  # (mean, deviation) of each number of regression

    def __post_init__(self):
        """Raises UserError if the chosen form of attention does not compute what the model adds to it."""
        if isinstance(self.spec, ModelSpec):
            check_forms(self.spec)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the spec whose values differ from those that the name stands for, by flat keyword.

        `create(model.name, **model.fields).spec == model.spec`.
        """
        # Without a size in the name, its fields are None.
        named = flatten_spec(default_spec(self.name)) | named_fields(self.name)
        return {name: value for name, value in self.values.items() if value != named[name]}

    @property
    def resized(self) -> dict[str, tuple[Any, Any]]:
        """The changed fields of the size: field -> (the value that the name stands for, the value in the spec).

        Fields for which the name states no value are left out.
        """
        named = named_fields(self.name)
        sizes = {field: (named.get(field), size) for field, size in self.spec.sizes.items()}
        return {field: pair for field, pair in sizes.items() if pair[0] not in (None, pair[1])}

    @property
    def is_regression(self) -> bool:
        """Whether its outputs are numbers, not the logits of classes."""
        return self.loss in REGRESSION_LOSSES

    def activate(
        self, logits: Float[Array | np.ndarray, "batch outputs"]
    ) -> Float[Array | np.ndarray, "batch outputs"]:
        """Returns the probabilities of the classes; of regression the numbers, with mean and deviation undone."""
        if self.loss == "softmax":
            return jax.nn.softmax(logits)
        if self.loss == "sigmoid":
            return jax.nn.sigmoid(logits)
        if self.target_scale is None:
            return logits
        means, deviations = np.array(self.target_scale, np.float32).T
        return logits * deviations + means

    @property
    def values(self) -> dict[str, Any]:
        """Every field of the spec by flat keyword; a BiT has other fields than a ViT."""
        return flatten_spec(self.spec)

    def field(self, name: str) -> Any:
        """Returns the value of a field of the spec, given by flat keyword; None if the spec has no such field."""
        return self.values.get(name)

    def choices(self, name: str) -> tuple[str, ...]:
        """Returns the words that a field accepts."""
        return field_words(self.spec)[name]

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of its images in pixels."""
        return image_size(self.field("resolution"))

    @property
    def kernels(self) -> dict[str, str]:
        """Field -> its form, for the forms that a chip may execute wrongly (`fused` and `cudnn`)."""
        return {name: kind for name in PLAIN_FORMS if (kind := self.field(name)) in CHIP_KERNELS}

    @property
    def vit(self) -> ModelSpec:
        """The spec of a ViT.

        Raises:
            UserError: the model is not a ViT.
        """
        if not isinstance(self.spec, ModelSpec):
            raise UserError(f"{self.name} is not a ViT: it has no attention and no patches.")
        return self.spec

    def for_device(self, device_kind: str, images: int, tensor: int = 1) -> "Model":
        """Returns the model with `attention=auto` and `mlp=auto` replaced by the fastest forms on a kind of device.

        Fields with another value stay as they are, and so does the attention of a model with an attention pattern.

        Args:
            device_kind: the kind of device, as JAX names it.
            images: the number of images that one device computes at a time, in one of the `accum_steps` parts of a
                batch.
            tensor: the number of devices over which the heads are split.
        """
        if not isinstance(self.spec, ModelSpec):
            return self
        chosen = self
        if self.spec.attention.kind == "auto" and not self.spec.attention.is_sparse:
            chosen = self.with_attention(choose_attention(device_kind, attention_sizes(self.spec, images, tensor)))
        if self.spec.block.mlp == "auto":
            chosen = chosen.with_fields(mlp=choose_mlp(device_kind, chosen.vit, images, tensor))
        return chosen

    def with_attention(self, kind: AttentionKind) -> "Model":
        """Returns the same ViT with another form of attention; a BiT is returned unchanged."""
        return self.with_fields(attention=kind) if isinstance(self.spec, ModelSpec) else self

    def with_fields(self, **fields: Any) -> "Model":
        """Returns the same model with other values of some fields of its spec, by flat keyword."""
        return dataclasses.replace(self, spec=replace_fields(self.spec, **fields))

    def init(self, key: Array, images: Any) -> dict[str, Any]:
        """Returns initial parameters, drawn as published: a plain dict of float32 arrays.

        Args:
            key: a JAX random key.
            images: array or `jax.ShapeDtypeStruct` [batch, height, width, 3]; only height and width matter.

        Raises:
            UserError: the images do not fit the model's resolution or patches.
        """
        example = jax.ShapeDtypeStruct((1, *images.shape[1:]), jnp.float32)  # only shapes matter here
        spec = self.spec.quick_to_trace
        return NETWORKS[spec.family](spec, DeviceOps(spec=spec)).lazy_init(key, example)["params"]

    def apply(
        self,
        params: dict[str, Any],
        images: Float[Array | np.ndarray, "batch height width 3"],
        dropout_key: Array | None = None,
        capture: tuple[str, ...] = (),
        masked: Bool[Array | np.ndarray, "batch patches"] | None = None,
        ops: PlainOps | None = None,
    ) -> tuple[Float[Array, "batch *patches classes"], dict[str, Array]]:
        """Returns logits and intermediates. An intermediate that a jitted caller does not return costs nothing.

        Args:
            params: parameters in the layout of `init`.
            images: values in [-1, 1].
            dropout_key: the random key of dropout and stochastic depth in training; None: nothing is dropped.
            capture: the names of further intermediates to return; "attention" is the only one, and only a ViT has it.
            masked: the patches, in raster order, that the [mask] embedding replaces; only with head=patches.
            ops: the operations; None: in the forms that the spec names, which have first derivatives in reverse mode
                only. `PlainOps()` allows any differentiation without a mesh, and a batch of unknown size; it has no
                use for the fields attention, mlp, remat, scan and grad_dtype.

        Returns:
            logits: float32 [batch, classes]. Without a classifier (num_classes=0) they are the pooled representation.
                With head=patches they are [batch, patches, outputs].
            out: the intermediates by name. A ViT has:
                `pre_logits`: the classifier's float32 input [batch, width], [batch, representation_size] or [batch,
                    projection]; with pooling=token_gap and neither of these layers [batch, 2 x width]; with
                    head=patches the pooled representation, which has no such layer.
                `tokens`: [batch, tokens, width] after the encoder's norm. A class token is row 0.
                `blocks`: the output of each block [depth, batch, tokens, width].
                `attention`: float32 weights [depth, batch, heads, tokens, tokens], only if captured. An Axial-ViT has
                    twice as many heads here: first those along rows, then those along columns.
                `head_logits`: [batch, 2, classes], only with distilled_head. The logits are the mean of these two.
                A hybrid also has those of its ResNet, as a BiT.
                A BiT has `root`, `stage1`, `stage2`, ..., the output of each [batch, rows, columns, channels];
                `tokens` [batch, positions, channels]; and their mean over the positions, `pre_logits`.

        Raises:
            UserError: the images do not fit the model's resolution or patches, or a capture is unknown.
        """
        if masked is not None and self.field("head") != "patches":
            raise UserError(f"{self.name} has no [mask] embedding; create the model with head='patches'.")
        for word in capture:
            if self.field(choose("capture", word, CAPTURES)) is None:
                raise UserError(f"{self.name} has no {word} to capture.")
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        params = jax.tree.map(jnp.asarray, params)
        network = NETWORKS[self.spec.family](self.spec, ops or DeviceOps(spec=self.spec))
        more = {} if masked is None else {"masked": jnp.asarray(masked)}
        return network.apply({"params": params}, jnp.asarray(images), tuple(capture), **more, rngs=rngs)

    def feature_maps(
        self,
        params: dict[str, Any],
        images: Float[Array | np.ndarray, "batch height width 3"],
        blocks: int | Sequence[Place] = 1,
        norm: bool = True,
        dropout_key: Array | None = None,
    ) -> FeatureMaps:
        """Returns the outputs of chosen blocks as maps, the class token and the registers apart.

        Inside `jax.jit`, nothing else is kept, and no block after the last chosen one of a ViT is computed: the blocks
        are compiled one by one, even if the spec has `scan`.

        Args:
            params: parameters in the layout of `init`.
            images: values in [-1, 1], of any height and width that the patches divide.
            blocks: the number of last blocks, or the blocks in any order: from 0, or from -1 backwards. The numbers of
                a BiT are those of its stages. A BiT and a hybrid also have the words `root` (after its pooling),
                `stage1`, `stage2`, ....
            norm: whether the norm after the last block is applied to the tokens of every chosen block. With
                final_norm=pooled there is none before the pooling, so that tokens stay as they are. A pre-activation
                BiT has a norm with a ReLU, which is applied to its last stage alone.
            dropout_key: as for `apply`.

        Raises:
            UserError: the images do not fit the model, or it has no such block.
        """
        places = list_places(self.spec, blocks)
        unrolled = self.with_fields(scan=False) if isinstance(self.spec, ModelSpec) else self
        _, out = unrolled.apply(params, images, dropout_key)
        return take_maps(self.spec, DeviceOps(spec=self.spec), params, out, places, images.shape[1:3], norm)


def parameter_shapes(model: Model, image_size: tuple[int, int] | None = None) -> dict[str, Any]:
    """Returns the `jax.ShapeDtypeStruct`s of the parameters of a model, in the layout of `Model.init`.

    Args:
        model: the model.
        image_size: (height, width) of images in pixels; by default, those of the model.

    Raises:
        UserError: the images do not fit the model's resolution or patches.
    """
    shapes = _trace_shapes(model.spec.quick_to_trace, image_size or model.image_size)
    return jax.tree.map(lambda shape: shape, shapes)  # a copy, since the shapes are kept


@functools.lru_cache
def _trace_shapes(spec: Spec, image_size: tuple[int, int]) -> dict[str, Any]:
    """Returns the shapes of the parameters of a model. A program asks for those of one model several times."""
    images = jax.ShapeDtypeStruct((1, *image_size, 3), jnp.float32)
    return jax.eval_shape(Model("", spec).init, jax.random.key(0), images)


def create(
    name: str,
    /,
    *,
    preprocess: str | None = None,
    class_names: tuple[str, ...] | list[str] | None = None,
    loss: str = "softmax",
    multi_label: bool = False,
    target_scale: Sequence[Sequence[float]] | None = None,
    resample: str = "linear",
    licence: str = "",
    licence_address: str = "",
    **fields: Any,
) -> Model:
    """Returns a model by name, with any field of its spec changed.

    Examples: `create("ViT-B/16", num_classes=10, resolution=384, pooling="gap")`, `create("R50+ViT-B/16")`,
    `create("ViT/16", width=512, depth=8, mlp_dim=2048, num_heads=8)`.

    Args:
        name: one of these forms:
            `ViT-<size>/<patch size in pixels>`, with a size of `variants.SIZES`;
            `R50+`, `R26+` or `R+` before such a name, for a hybrid of `variants.HYBRIDS`;
            `ViT/<patch size>`, which needs the fields width, depth, mlp_dim and num_heads;
            `Axial-` before a ViT that is no hybrid, for an Axial-ViT;
            `BiT-R<layers>x<width factor>`, with layers of `bit_spec.UNITS`;
            a name of `bit_spec.resnets`;
            `BiT`, which needs the fields stages and width.
        preprocess: the pipe of operations that prepares its images; not used by the model.
        class_names: names of the logits, in order; not used by the model.
        loss: softmax or sigmoid, or the loss of a regression: l1, l2 or huber; not used by the model.
        multi_label: whether an image may have several classes, or none; not used by the model.
        target_scale: the mean and the deviation of each number of a regression; not used by the model.
        resample: how positions are resampled to another resolution, see `resample_positions`; not used by the model.
        licence: the licence of its weights, as the Hugging Face hub names it; empty: not known.
        licence_address: where the licence is published; empty: not known.
        **fields: flat keywords of `ModelSpec` and its parts, or of `BitSpec`. None means the value that the name stands
            for. A field that only the other kind of model has is ignored if it has its default value, because a
            configuration states the fields of both kinds.

    Raises:
        UserError: a name or field is unknown, or values contradict each other.
    """
    spec = build_spec(name, fields)
    choose("loss", loss, LOSSES)
    choose("resample", resample, RESAMPLINGS)
    if not isinstance(preprocess, str | None):
        raise UserError(f"preprocess must be a pipe of operations, not {preprocess!r}.")
    for word, text in {"licence": licence, "licence_address": licence_address}.items():
        if not isinstance(text, str):
            raise UserError(f"{word} must be a text, not {text!r}.")
    model = Model(name, spec, preprocess, None, loss, resample, licence, licence_address, multi_label)
    if target_scale is not None:
        scale = tuple((float(mean), float(deviation)) for mean, deviation in target_scale)
        count, numbers = model.field("num_classes"), [number for pair in scale for number in pair]
        whole = loss in REGRESSION_LOSSES and len(scale) == count
        if not (whole and all(map(math.isfinite, numbers)) and all(deviation > 0 for _, deviation in scale)):
            raise UserError(f"target_scale must be a mean and a deviation above 0 for each of {count:,} numbers.")
        model = dataclasses.replace(model, target_scale=scale)
    if class_names is not None:
        class_names = tuple(class_names)
        if not all(isinstance(name, str) for name in class_names) or len(class_names) != model.field("num_classes"):
            raise UserError(f"class_names must be {model.field('num_classes'):,} strings, one for each class.")
    return dataclasses.replace(model, class_names=class_names)
