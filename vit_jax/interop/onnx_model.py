"""A model as ONNX, written from its spec and its parameters with standard operators that runtimes fuse.

The functions below follow those of `models/`, one for each part. What depends on no image, such as tables of positions
and angles, is computed here by the functions of the model and becomes a constant. The comments say where the graph
differs from the model's equations.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from vit_jax import UserError, models
from vit_jax.config import EXECUTION_FIELDS
from vit_jax.interop.model_json import header_notes
from vit_jax.interop.onnx_builder import Arrays, Graph, Value
from vit_jax.interop.onnx_resnet import bit_features, resnet_stem
from vit_jax.interop.program_interface import Export, choose_dtype
from vit_jax.model import Model
from vit_jax.models import BIASED, ROTARIES, BitSpec, ModelSpec, flatten_spec

OPSET, IR_VERSION = 20, 9  # the first with Gelu, of ONNX 1.15; the format's version at that time
MOST_BYTES = 2**31 - 2**24  # of weights in the file; more of them go beside it: a protobuf has less than 2 GB

# The fields of the spec that this file writes, with these words or, if none are stated, with any value. Every other
# field must have its default.
WRITTEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("width", "depth", "mlp_dim", "num_heads", "patch_size", "resolution", "num_classes"), ()),
    **dict.fromkeys(("embed_bias", "pre_norm", "image_mean", "image_std", "registers", "norm_epsilon"), ()),
    **dict.fromkeys(("relative_clip", "rotary_grid", "rotary_theta", "qk_norm", "attention_window", "dense_bias"), ()),
    **dict.fromkeys(("layer_scale", "pre_logits", "representation_size", "projection", "distilled_head"), ()),
    **dict.fromkeys(("mlp_norm", "map_heads", "map_mlp_dim", "map_prefix"), ()),
    "class_token": ("auto", "always"),
    "position": ("learned", "learned2d", "relative", "sincos2d", "sincos2d_moco", "none"),
    "position_place": ("stem", "blocks", "shared"),
    "position_rows": ("all", "class", "patches"),
    "relative_tables": ("block", "head", "model"),
    "rotary": ("none", "axial", "axial_xy", "centred"),
    "qkv_bias": ("all", "query_value", "none"),
    "attention_pattern": ("full", "local", "local2d", "strided", "fixed"),
    "block": ("standard", "axial"),
    "norm": ("layer", "rms"),
    "activation": ("gelu_tanh", "gelu", "quick_gelu", "swiglu"),
    "head": ("image", "patches"),
    "pooling": ("token", "gap", "map", "token_gap"),
    "final_norm": ("tokens", "pooled"),
    **dict.fromkeys(("stages", "stem_width"), ()),
    "stem": ("patches", "resnet"),
    "stem_epsilons": ("released", "timm"),
}
BIT_WRITTEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("stages", "width", "se_reduction", "resolution", "num_classes"), ()),
    "unit": ("pre_activation", "post_activation"),
    "border": ("zeros", "lowest"),
}
# The fields that change only initial values and training.
TRAINING = ("position_std", "dropout_rate", "stochastic_depth", "stochastic_depth_schedule", "head_bias", "head_std")


def unwritten_fields(model: Model) -> dict[str, Any]:
    """Returns the fields of a model, with their values, that this file cannot write."""
    written = WRITTEN if isinstance(model.spec, ModelSpec) else BIT_WRITTEN
    defaults = flatten_spec(type(model.spec)())
    others = {name: value for name, value in model.values.items() if name not in (*EXECUTION_FIELDS, *TRAINING)}
    return {
        name: value
        for name, value in others.items()
        if value != defaults[name] and (name not in written or (written[name] and value not in written[name]))
    }


def write_onnx(name: str, export: Export) -> dict[str, Iterable[bytes]]:
    """Returns name -> content of the file `name` and, if the weights are larger than 2 GB, of the one with these.

    Raises:
        UserError: onnx-ir is not installed, the dtype is neither float32 nor float16, a field of the model is not
            written, or a weight is beyond the range of float16.
    """
    try:
        import onnx_ir as ir
    except ImportError:
        raise UserError("an .onnx file needs onnx-ir: pip install -e '.[onnx]'") from None
    choose_dtype(".onnx", export.dtype, ("float32", "float16"))
    if fields := unwritten_fields(export.model):
        stated = ", ".join(f"{field}={value}" for field, value in fields.items())
        raise UserError(f"ONNX is not written for a model with {stated}; write a .stablehlo file.")
    graph = Graph(ir, export.dtype)
    images = ir.Value(
        name="images",
        type=ir.TensorType(ir.DataType[export.image_dtype.replace("float32", "float").upper()]),
        shape=ir.Shape(export.shape),
    )
    spec = export.model.spec
    if isinstance(spec, ModelSpec):
        found, shapes = _network(graph, spec, export, images), _output_shapes(spec)
    else:
        found, shapes = _bit(graph, spec, export, images), _bit_shapes(spec)
    outputs = [graph.output(found[name], name, shapes[name]) for name in export.outputs]
    beside, chunks = f"{name}.data", list[bytes]()
    if sum(value.const_value.nbytes for value in graph.constants) > MOST_BYTES:
        chunks = graph.move_beside(beside)
    content = ir.Graph(
        [images], outputs, nodes=graph.nodes, initializers=graph.constants, opset_imports={"": OPSET}, name="vit"
    )
    whole = ir.Model(content, ir_version=IR_VERSION, producer_name="vit_jax")
    whole.metadata_props.update(header_notes(export.model))
    return {name: [ir.to_proto(whole).SerializeToString()], **({beside: chunks} if chunks else {})}


def _network(g: Graph, spec: ModelSpec, export: Export, images: Value) -> dict[str, Value]:
    """Adds a ViT and returns its outputs by name: `Model.apply`."""
    params = export.params
    x = _embed(g, spec, params, _normalised(g, export, images, spec.stem.mean, spec.stem.std))
    encoder, blocks = params["encoder"], {}
    if spec.stem.pre_norm:
        x = g.norm(x, encoder["pre_norm"], spec.block.norm_epsilon)
    shared = _shared(g, spec)
    for number in range(spec.depth):
        layer = _row(encoder["blocks"], number)
        x = BLOCKS[spec.block.kind](g, spec, layer, encoder, shared, x)
        blocks[f"block_{number}"] = x
    if spec.head.final_norm == "tokens":
        x = g.norm(x, encoder["norm"], spec.block.norm_epsilon)
    logits, features = _classify(g, spec, params, x)
    return {"features": features, **blocks} | _probabilities(g, export, logits)


def _probabilities(g: Graph, export: Export, logits: Value) -> dict[str, Value]:
    """Returns the logits and, if they are asked for, the probabilities."""
    if "probabilities" not in export.outputs:
        return {"logits": logits}
    is_softmax = export.model.loss == "softmax"
    return {"logits": logits, "probabilities": g.Softmax(logits, axis=-1) if is_softmax else g.Sigmoid(logits)}


def _bit(g: Graph, spec: BitSpec, export: Export, images: Value) -> dict[str, Value]:
    """Adds a BiT and returns its outputs by name: `Model.apply`."""
    params, half = export.params, (0.5,) * 3
    features = bit_features(g, spec, params, _normalised(g, export, images, half, half))
    is_narrow, g.dtype = g.dtype != "float32", "float32"
    features = g.cast(features) if is_narrow else features
    if not spec.num_classes:
        return {"features": features}
    logits = g.dense(features, params["head"]["kernel"], params["head"]["bias"])
    return {"features": features} | _probabilities(g, export, logits)


def _bit_shapes(spec: BitSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the outputs of a BiT for one image."""
    classes = (spec.num_classes,)
    return {"logits": classes, "probabilities": classes, "features": (spec.feature_width,)}


def _output_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the outputs of a ViT for one image."""
    patches = (math.prod(spec.grid),) if spec.head.kind == "patches" else ()
    logits = (*patches, spec.head.num_classes)
    shapes = {"logits": logits, "probabilities": logits, "features": (spec.feature_width,)}
    return shapes | {f"block_{number}": (spec.tokens, spec.width) for number in range(spec.depth)}


def _row(stacked: Arrays, number: int) -> Arrays:
    return {k: _row(v, number) if isinstance(v, dict) else v[number] for k, v in stacked.items()}


def _normalised(
    g: Graph, export: Export, images: Value, image_mean: tuple[float, ...], image_std: tuple[float, ...]
) -> Value:
    """Returns the values that the model begins with: `value_range` and `vit.normalise` in one step, in float32."""
    scale, shift = export.scale_and_shift
    mean, std = np.array(image_mean), np.array(image_std)
    scale, shift = scale * 0.5 / std, (shift * 0.5 + 0.5 - mean) / std
    dtype, g.dtype = g.dtype, "float32"
    x = g.cast(images) if export.preprocess else images
    if not ((scale == 1).all() and (shift == 0).all()):
        x = g.Add(g.Mul(x, scale), shift)
    g.dtype = dtype
    return g.cast(x) if dtype != "float32" else x


def _embed(g: Graph, spec: ModelSpec, params: Arrays, x: Value) -> Value:
    """Returns the tokens: patches E + what is added to each token (equation 1)."""
    stem, (rows, columns) = spec.stem, spec.grid
    if stem.kind == "resnet":
        x = resnet_stem(g, spec, params["stem"], x)
    size, kernel = stem.kernel_size, params["embed"]["kernel"]
    if size > 1:
        x = g.reshape(x, 0, rows, size, columns, size, stem.channels)
        x = g.Transpose(x, perm=[0, 1, 3, 2, 4, 5])
    x = g.reshape(x, 0, rows * columns, size * size * stem.channels)
    x = g.MatMul(x, kernel.reshape(-1, spec.width))
    added: np.ndarray = np.zeros((spec.tokens, spec.width), np.float32)
    if spec.stem.bias:
        added[spec.prefix_rows :] += params["embed"]["bias"]
    if spec.class_rows:
        added[0] += params["cls"]
    if spec.prefix.registers:
        added[spec.class_rows : spec.prefix_rows] += params["registers"]
    if spec.position.owner == "model" and (table := _table(spec, params)) is not None:
        added += table
    if spec.prefix_rows:
        x = g.Pad(x, np.array([0, spec.prefix_rows, 0, 0, 0, 0]))
    return g.Add(x, added)


def _table(spec: ModelSpec, arrays: Arrays) -> np.ndarray | None:
    """Returns the table of positions whose parameters are among the arrays; None: there is none."""
    table = models.table_of_tokens(lambda name, *_: jnp.asarray(arrays[name]), spec)
    return None if table is None else np.asarray(table)


class Shared(NamedTuple):
    """What all blocks share: constants of the graph; None where the model has none.

    Attributes:
        rotation: cosines, and sines with the sign of the channel that each is multiplied with.
        offsets: for each pair of tokens, its place among the products of all queries with all rows of the table.
        pattern: 0 for the pairs of tokens that attend to each other, else minus infinity.
    """

    rotation: tuple[Value, Value] | None
    offsets: Value | None
    pattern: Value | None


def _shared(g: Graph, spec: ModelSpec) -> Shared:
    rotation = offsets = pattern = None
    if (angles := ROTARIES[spec.position.rotary](spec)) is not None:
        signs = np.tile([-1.0, 1.0], angles.shape[1])
        rotation = tuple(
            g.constant(each) for each in (np.cos(angles).repeat(2, 1), np.sin(angles).repeat(2, 1) * signs)
        )
    if spec.position.is_relative:
        count = _relative_rows(spec)
        rows = models.offset_rows(spec, count)
        offsets = g.constant(np.arange(spec.tokens)[:, None] * (count + 1) + rows)
    if spec.attention.is_sparse:
        pattern = g.constant(np.where(models.attended_pairs(spec), 0.0, -np.inf))
    return Shared(rotation, offsets, pattern)


def _relative_rows(spec: ModelSpec) -> int:
    """Returns the number of rows of a table of relative positions."""
    return models.relative_table(lambda name, init, shape, dtype: jnp.empty(shape), spec).shape[-2]


def _block(g: Graph, spec: ModelSpec, layer: Arrays, encoder: Arrays, shared: Shared, x: Value) -> Value:
    """Returns the tokens after a block (equations 2 and 3)."""
    epsilon = spec.block.norm_epsilon
    if spec.position.place != "stem":
        x = g.Add(x, _table(spec, encoder if spec.position.owner == "encoder" else layer))
    y = _attention(g, spec, layer["attention"], encoder, shared, g.norm(x, layer["norm1"], epsilon))
    x = g.Add(x, _scaled(g, layer, "layer_scale1", y))
    y = _mlp(g, spec, layer["mlp"], g.norm(x, layer["norm2"], epsilon))
    return g.Add(x, _scaled(g, layer, "layer_scale2", y))


def _scaled(g: Graph, layer: Arrays, name: str, x: Value) -> Value:
    return g.Mul(x, layer[name]) if name in layer else x


def _axial_block(g: Graph, spec: ModelSpec, layer: Arrays, encoder: Arrays, shared: Shared, x: Value) -> Value:
    """Returns the tokens after two blocks: to the first a row of patches is an image, to the second a column."""
    rows, columns = spec.grid
    x = g.reshape(x, -1, columns, spec.width)
    x = _block(g, spec, layer["rows"], encoder, shared, x)
    x = g.Transpose(g.reshape(x, -1, rows, columns, spec.width), perm=[0, 2, 1, 3])
    x = _block(g, spec, layer["columns"], encoder, shared, g.reshape(x, -1, rows, spec.width))
    x = g.Transpose(g.reshape(x, -1, columns, rows, spec.width), perm=[0, 2, 1, 3])
    return g.reshape(x, -1, rows * columns, spec.width)


BLOCKS = {"standard": _block, "axial": _axial_block}


def _attention(g: Graph, spec: ModelSpec, arrays: Arrays, encoder: Arrays, shared: Shared, x: Value) -> Value:
    """Returns the result of self-attention (equations 5 to 8)."""
    heads, size = spec.attention.num_heads, spec.head_dim
    kernel, biased, bias = arrays["qkv"]["kernel"], BIASED[spec.attention.qkv_bias], np.zeros((3, heads, size))
    if biased is None or biased:
        bias[slice(None) if biased is None else list(biased)] = arrays["qkv"]["bias"]
    x = g.dense(x, kernel.reshape(spec.width, -1), bias)
    x = g.Transpose(g.reshape(x, 0, 0, 3 * heads, size), perm=[0, 2, 1, 3])
    query, key, value = g.many("Split", 3, x, axis=1, num_outputs=3)  # [batch, heads, tokens, head_dim]
    if spec.attention.qk_norm:
        query, key = (
            g.norm(part, arrays[name], spec.block.norm_epsilon)
            for part, name in ((query, "query_norm"), (key, "key_norm"))
        )
    if shared.rotation:
        query, key = (_rotated(g, part, *shared.rotation) for part in (query, key))
    query = g.Mul(query, size**-0.5)
    scores = g.MatMul(query, g.Transpose(key, perm=[0, 1, 3, 2]))
    if spec.position.is_relative:
        table = _relative_table(spec, encoder if spec.position.owner == "encoder" else arrays)
        # The products of each query with all rows of the table, of which `offsets` chooses one for each key.
        products = g.reshape(g.MatMul(query, table.swapaxes(-1, -2)), 0, 0, -1)
        scores = g.Add(scores, g.Gather(products, shared.offsets, axis=2))
    if shared.pattern is not None:
        scores = g.Add(scores, shared.pattern)
    attended = g.Transpose(g.MatMul(g.Softmax(scores, axis=-1), value), perm=[0, 2, 1, 3])
    out = arrays["out"]
    return g.dense(g.reshape(attended, 0, 0, spec.width), out["kernel"].reshape(-1, spec.width), out.get("bias"))


def _rotated(g: Graph, x: Value, cos: Value, sin: Value) -> Value:
    """Returns `x` with every pair of channels turned; the sines have the sign of the other channel of the pair."""
    other = np.arange(cos.shape[1]).reshape(-1, 2)[:, ::-1].reshape(-1)
    return g.Add(g.Mul(x, cos), g.Mul(g.Gather(x, other, axis=3), sin))


def _relative_table(spec: ModelSpec, arrays: Arrays) -> np.ndarray:
    """Returns the table of relative positions, with a last row of zeros for the pairs without an offset."""
    table = np.asarray(models.relative_table(lambda name, *_: jnp.asarray(arrays[name]), spec))
    return np.pad(table, (*((0, 0),) * (table.ndim - 2), (0, 1), (0, 0)))


def _mlp(g: Graph, spec: ModelSpec, arrays: Arrays, x: Value) -> Value:
    hidden, second = ACTIVATIONS[spec.block.activation](g, arrays, x), arrays["dense2"]
    if spec.block.mlp_norm:
        hidden = g.norm(hidden, arrays["hidden_norm"], spec.block.norm_epsilon)
    return g.dense(hidden, second["kernel"], second.get("bias"))


def _dense1(g: Graph, arrays: Arrays, x: Value) -> Value:
    return g.dense(x, arrays["dense1"]["kernel"], arrays["dense1"].get("bias"))


def _quick_gelu(g: Graph, arrays: Arrays, x: Value) -> Value:
    x = _dense1(g, arrays, x)
    return g.Mul(x, g.Sigmoid(g.Mul(x, 1.702)))


def _swiglu(g: Graph, arrays: Arrays, x: Value) -> Value:
    kernel, bias = arrays["dense1_gated"]["kernel"], arrays["dense1_gated"].get("bias", (None, None))
    first, second = (g.dense(x, kernel[:, part], bias[part]) for part in range(2))
    return g.Mul(g.Mul(first, g.Sigmoid(first)), second)


# The hidden channels of an MLP.
ACTIVATIONS: dict[str, Callable[[Graph, Arrays, Value], Value]] = {
    "gelu_tanh": lambda g, arrays, x: g.Gelu(_dense1(g, arrays, x), approximate="tanh"),
    "gelu": lambda g, arrays, x: g.Gelu(_dense1(g, arrays, x)),
    "quick_gelu": _quick_gelu,
    "swiglu": _swiglu,
}


def _token(g: Graph, spec: ModelSpec, params: Arrays, x: Value) -> Value:
    return g.Gather(x, np.array(0), axis=1)


def _patches(g: Graph, spec: ModelSpec, x: Value) -> Value:
    return g.Slice(x, np.array([spec.prefix_rows]), np.array([spec.tokens]), np.array([1])) if spec.prefix_rows else x


def _mean(g: Graph, spec: ModelSpec, params: Arrays, x: Value) -> Value:
    return g.ReduceMean(_patches(g, spec, x), np.array([1]), keepdims=0)


def _probe(g: Graph, spec: ModelSpec, params: Arrays, x: Value) -> Value:
    """Returns the result of `AttentionPooling`.

    The query is a constant, so that its product with the keys is one of the patches with a matrix.
    """
    x = x if spec.head.map_prefix else _patches(g, spec, x)
    spec, arrays = spec.map_spec, params["map_head"]
    heads, size, attention = spec.attention.num_heads, spec.head_dim, arrays["attention"]
    query, key, value = (attention[name] for name in ("query", "key", "value"))
    constant = np.einsum("w,whd->hd", arrays["probe"], query["kernel"]) + query["bias"]
    constant *= size**-0.5
    scores = g.dense(x, np.einsum("whd,hd->wh", key["kernel"], constant), np.einsum("hd,hd->h", key["bias"], constant))
    weights = g.Softmax(g.Transpose(scores, perm=[0, 2, 1]), axis=-1)
    values = g.reshape(g.dense(x, value["kernel"].reshape(spec.width, -1), value["bias"]), 0, 0, heads, size)
    values = g.Transpose(values, perm=[0, 2, 1, 3])
    x = g.reshape(g.MatMul(g.Unsqueeze(weights, np.array([2])), values), 0, spec.width)
    x = g.dense(x, attention["out"]["kernel"].reshape(-1, spec.width), attention["out"].get("bias"))
    return g.Add(x, _mlp(g, spec, arrays["mlp"], g.norm(x, arrays["norm"], spec.block.norm_epsilon)))


def _token_and_mean(g: Graph, spec: ModelSpec, params: Arrays, x: Value) -> Value:
    return g.Concat(_token(g, spec, params, x), _mean(g, spec, params, x), axis=1)


POOLINGS = {"token": _token, "gap": _mean, "map": _probe, "token_gap": _token_and_mean}


def _classify(g: Graph, spec: ModelSpec, params: Arrays, tokens: Value) -> tuple[Value, Value]:
    """Returns logits and features, in float32 like the head: `ViT._classify`."""
    head, x = spec.head, POOLINGS[spec.head.pooling](g, spec, params, tokens)
    is_narrow, g.dtype = g.dtype != "float32", "float32"
    x = g.cast(x) if is_narrow else x
    if head.final_norm == "pooled":
        x = g.norm(x, params["pooled_norm"], spec.block.norm_epsilon)
    pooled = x
    if head.kind == "patches":
        x = _patches(g, spec, tokens)
        x = g.cast(x) if is_narrow else x
    if head.projection:
        x = g.dense(x, params["projection"]["kernel"])
    if head.pre_logits:
        x = g.Tanh(g.dense(x, params["pre_logits"]["kernel"], params["pre_logits"]["bias"]))
    features = pooled if head.kind == "patches" else x
    if not head.num_classes:
        return x, features
    logits = g.dense(x, params["head"]["kernel"], params["head"]["bias"])
    if head.distilled:
        x = g.Gather(tokens, np.array(spec.class_rows), axis=1)
        x = g.cast(x) if is_narrow else x
        second = g.dense(x, params["distilled_head"]["kernel"], params["distilled_head"]["bias"])
        logits = g.Mul(g.Add(logits, second), 0.5)
    return logits, features
