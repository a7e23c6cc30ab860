"""transformers' `config.json` and `preprocessor_config.json`: read for any model, and written for a model of ours.

Keys and defaults: huggingface/transformers 5.23, models/{vit,deit,dinov2,dinov2_with_registers,siglip}, their
configuration_*.py and image_processing_*.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit_jax import UserError, printable
from vit_jax.interop.huggingface import huggingface_layout
from vit_jax.interop.pytorch import (
    CONFIG_FILE,
    PublishedConfig,
    colours,
    json_text,
    loss_key,
    name_list,
    pipes,
    read_choice,
    read_float,
    read_int,
    read_json,
    read_loss,
    stated_keys,
)
from vit_jax.model import Model

PREPROCESSOR_FILE = "preprocessor_config.json"
# hidden_act -> our activation
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
WORDS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "swiglu": "gelu"}  # SwiGLU has a key of its own
# model_type -> epsilon and activation of a configuration that states none
DEFAULTS = {
    "vit": (1e-12, "gelu"),
    "deit": (1e-12, "gelu"),
    "dinov2": (1e-6, "gelu"),
    "dinov2_with_registers": (1e-6, "gelu"),
    "siglip_vision_model": (1e-6, "gelu_pytorch_tanh"),
}
CLASSES = {  # model_type -> class without a classifier, with one, with a second one
    "vit": ("ViTModel", "ViTForImageClassification"),
    "deit": ("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
    "dinov2": ("Dinov2Model", "Dinov2ForImageClassification"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
    "siglip_vision_model": ("SiglipVisionModel", "SiglipForImageClassification"),
}
# Our field -> its key, for what arrays tell too
SIZES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "mlp_dim": "intermediate_size",
    "patch_size": "patch_size",
    "registers": "num_register_tokens",
}
# problem_type -> the loss with which transformers trains
PROBLEMS = {"": "", "single_label_classification": "", "multi_label_classification": "sigmoid"}
HEADS, RESCALE = 12, 1 / 255  # where a configuration states none
STANDARD = (0.5, 0.5, 0.5)


def read_folder(folder: Path) -> PublishedConfig:
    """Returns what the configurations in a folder state; nothing if there are none or they are not transformers'.

    Raises:
        UserError: as `read_config`.
    """
    content = read_json(folder / CONFIG_FILE)
    if not isinstance(content.get("model_type"), str):
        return PublishedConfig({})
    return read_config(content, read_json(folder / PREPROCESSOR_FILE))


def read_config(content: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> PublishedConfig:
    """Returns what a model's configurations state.

    Args:
        content: the content of `config.json`.
        preprocessor: the content of `preprocessor_config.json`; empty if there is none.

    Raises:
        UserError: a value has a wrong type, a key is unknown, or vit_jax does not compute the model.
    """
    labels = content
    if isinstance(content.get("vision_config"), Mapping):  # of an image and a text model
        content = {"model_type": "siglip_vision_model"} | dict(content["vision_config"])
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise UserError(
            f"its model_type is {printable(kind, 60)}, but of the models of transformers vit_jax reads only "
            f"{', '.join(DEFAULTS)}"
        )
    stated_keys.TRANSFORMERS.check(labels)
    stated_keys.TRANSFORMERS.check(content)
    stated_keys.TRANSFORMERS_PROCESSOR.check(preprocessor)
    epsilon, activation = DEFAULTS[kind]
    activation = ACTIVATIONS[read_choice(content.get("hidden_act", activation), ACTIVATIONS, "hidden_act")]
    fields: dict[str, Any] = {
        "num_heads": read_int(content.get("num_attention_heads", HEADS), "num_attention_heads"),
        "norm_epsilon": read_float(content.get("layer_norm_eps", epsilon), "layer_norm_eps"),
        "activation": "swiglu" if content.get("use_swiglu_ffn") is True else activation,
    }
    size = content.get("image_size", 224)
    sides = size if isinstance(size, list) and len(size) == 2 else (size, size)
    height, width = (read_int(side, "image_size") for side in sides)
    names = labels.get("id2label")
    listed = name_list(names, len(names)) if isinstance(names, Mapping) else None
    sizes = _read_sizes(content, (height, width))
    if isinstance(names, Mapping) and names:
        sizes["num_classes"] = "the number of classes in id2label", len(names)
    problem = read_choice(labels.get("problem_type") or "", PROBLEMS, "problem_type")
    loss = read_loss(labels) or PROBLEMS[problem]
    if not preprocessor:
        return PublishedConfig(fields, (height, width), None, listed, loss, sizes)
    normalises = preprocessor.get("do_normalize", True)
    fields["image_mean"] = colours(preprocessor.get("image_mean", STANDARD), "image_mean") if normalises else (0.0,) * 3
    fields["image_std"] = colours(preprocessor.get("image_std", STANDARD), "image_std") if normalises else (1.0,) * 3
    return PublishedConfig(fields, (height, width), _read_pipe(preprocessor), listed, loss, sizes)


def _read_sizes(content: Mapping[str, Any], sides: tuple[int, int]) -> dict[str, tuple[str, Any]]:
    """Returns our field -> (key, value), for what a configuration states although the arrays tell it too."""
    sizes = {name: (key, content[key]) for name, key in SIZES.items() if content.get(key) is not None}
    if "mlp_ratio" in content:  # then the key of mlp_dim means nothing
        sizes.pop("mlp_dim", None)
    patch_size = content.get("patch_size")
    if "image_size" in content and type(patch_size) is int and patch_size > 0:
        sizes["resolution"] = "image_size", tuple(side // patch_size * patch_size for side in sides)
    return sizes


def _read_pipe(preprocessor: Mapping[str, Any]) -> str | None:
    """Returns the pipe of operations that equals a processor's preprocessing; None if no pipe does."""
    kind = str(preprocessor.get("image_processor_type") or preprocessor.get("feature_extractor_type") or "")
    plain = kind.startswith(("ViT", "Siglip"))
    method = preprocessor.get("resample", 2 if kind.startswith("ViT") else 3)
    factor = preprocessor.get("rescale_factor", RESCALE)
    scaled = type(factor) in (int, float) and abs(factor - RESCALE) < 1e-6
    if type(method) is not int or not 0 <= method < len(pipes.FILTERS) or not scaled:
        return None
    resize = crop = None
    if preprocessor.get("do_resize", True):
        resize = _size(preprocessor.get("size", 224), square=not kind.startswith("Bit"))
    if preprocessor.get("do_center_crop", not plain):
        crop_size = _size(preprocessor.get("crop_size", 224), square=True)
        crop = crop_size if isinstance(crop_size, tuple) else None
    if resize is None and crop is None:
        return None
    return pipes.write_pipe(pipes.Preparation(resize, crop, pipes.FILTERS[method]))


def _size(size: Any, square: bool) -> int | tuple[int, int] | None:
    """Returns a size that a processor states: the shorter side or (height, width); None if it has another form.

    A single number is the side of a square if `square`, else the shorter side.
    """
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return read_int(size["shortest_edge"], "size")
    if isinstance(size, Mapping) and {"height", "width"} <= set(size):
        return read_int(size["height"], "size"), read_int(size["width"], "size")
    if type(size) is int:
        return (read_int(size, "size"), size) if square else read_int(size, "size")
    return None


def describing_files(name: str, model: Model) -> dict[str, str]:
    """Returns name -> content of both files, for a model that `huggingface.layout` can write.

    Raises:
        UserError: the layout cannot express the model or its preprocessing.
    """
    value, kind = model.field, huggingface_layout.choose_form(model.spec).family
    height, width = model.image_size
    classes = value("num_classes")
    config: dict[str, Any] = {
        "architectures": [CLASSES[kind][bool(classes) + value("distilled_head")]],
        "model_type": kind,
        "hidden_size": value("width"),
        "num_hidden_layers": value("depth"),
        "num_attention_heads": value("num_heads"),
        "intermediate_size": value("mlp_dim"),
        "hidden_act": WORDS[value("activation")],
        "layer_norm_eps": value("norm_epsilon"),
        "image_size": height if height == width else [height, width],
        "patch_size": value("patch_size"),
        "num_channels": 3,
        "qkv_bias": True,
        "dtype": "float32",
        **loss_key(model),
    }
    if value("pre_logits"):
        config["pooler_output_size"] = value("representation_size") or value("width")
    if kind.startswith("dinov2"):
        config |= _dinov2_keys(model)
    if classes:
        names = model.class_names or [f"LABEL_{index}" for index in range(classes)]
        config["id2label"] = {str(index): name for index, name in enumerate(names)}
        config["label2id"] = {name: index for index, name in enumerate(names)}
    return {"config.json": json_text(config), PREPROCESSOR_FILE: json_text(_preprocessor(model))}


def _dinov2_keys(model: Model) -> dict[str, Any]:
    value = model.field
    width, mlp_dim, swiglu = value("width"), value("mlp_dim"), value("activation") == "swiglu"

    def hidden(ratio: int) -> int:  # as the model's code computes it
        return (width * ratio * 2 // 3 + 7) // 8 * 8 if swiglu else width * ratio

    ratios = [ratio for ratio in range(1, 17) if hidden(ratio) == mlp_dim]
    if not ratios:
        sizes = f"mlp_dim {mlp_dim} with width {width}"
        raise UserError(f"the huggingface layout does not support {sizes}; use --layout=ours")
    keys = {"mlp_ratio": ratios[0], "use_swiglu_ffn": swiglu, "layerscale_value": value("layer_scale")}
    return keys | ({"num_register_tokens": value("registers")} if value("registers") else {})


def _preprocessor(model: Model) -> dict[str, Any]:
    prepared, mean, std = pipes.preparation_of(model)
    shorter = isinstance(prepared.resize, int)
    # These classes differ in what they do; the keys alone do not tell them to crop.
    kind = "BitImageProcessor" if shorter else "DeiTImageProcessor" if prepared.crop else "ViTImageProcessor"
    result: dict[str, Any] = {
        "image_processor_type": kind,
        "do_resize": prepared.resize is not None,
        "do_center_crop": prepared.crop is not None,
        "do_rescale": True,
        "rescale_factor": RESCALE,
        "do_normalize": True,
        "resample": pipes.FILTERS.index(prepared.method),
        "image_mean": mean,
        "image_std": std,
    }
    if prepared.resize is not None:
        result["size"] = (
            {"shortest_edge": prepared.resize} if isinstance(prepared.resize, int) else _sides(prepared.resize)
        )
    if prepared.crop is not None:
        result["crop_size"] = _sides(prepared.crop)
    return result


def _sides(size: tuple[int, int]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}
