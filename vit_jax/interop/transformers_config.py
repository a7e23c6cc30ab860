"""transformers' `config.json` and `preprocessor_config.json`: read for any model, and written for a model of ours.

Keys: huggingface/transformers 4 and 5.24, configuration_utils.py, and configuration_*.py and image_processing_*.py of
models/{vit,vit_mae,beit,deit,dinov2,dinov2_with_registers,dinov3_vit,siglip,siglip2,clip}.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit_jax import UserError, printable
from vit_jax.interop.layout import Family
from vit_jax.interop.published_config import (
    CONFIG_FILE,
    LOSS_KEY,
    PILLOW_FILTERS,
    Keys,
    Preparation,
    PublishedConfig,
    colours,
    json_text,
    loss_key,
    name_list,
    preparation_of,
    read_choice,
    read_float,
    read_int,
    read_json_object,
    read_loss,
    split_keys,
    write_pipe,
)
from vit_jax.model import Model

PREPROCESSOR_FILE = "preprocessor_config.json"
# hidden_act -> our activation
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
# SwiGLU has a key of its own.
WORDS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu", "swiglu": "gelu"}
# model_type of an image and a text model -> that of its image encoder, where an older configuration does not state it
TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model", "siglip2": "siglip2_vision_model"}
# model_type -> that of models with the same arrays and outputs
SAME = {"vit_mae": "vit"}
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

# Every key that transformers publishes: read, without effect, or with few values.
KEYS = Keys(
    "config.json",
    split_keys(
        """model_type hidden_size num_hidden_layers num_attention_heads intermediate_size mlp_ratio hidden_act
        layer_norm_eps image_size patch_size num_register_tokens id2label problem_type vision_config
        vit_jax_loss"""
    ),
    split_keys(
        """architectures transformers_version dtype torch_dtype text_config projection_dim initializer_factor
        initializer_range logit_scale_init_value hidden_dropout_prob attention_probs_dropout_prob attention_dropout
        dropout drop_path_rate layerscale_value vision_use_head pooler_output_size encoder_stride use_mask_token
        num_labels label2id out_features out_indices stage_names apply_layernorm reshape_hidden_states
        output_hidden_states output_attentions return_dict use_return_dict torchscript use_bfloat16 tf_legacy_loss
        use_cache chunk_size_feed_forward tie_word_embeddings tie_encoder_decoder tokenizer_class prefix finetuning_task
        task_specific_params bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
        cross_attention_hidden_size gradient_checkpointing max_length min_length do_sample early_stopping num_beams
        num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
        no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
        return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
        begin_suppress_tokens exponential_decay_length_penalty attn_implementation mask_ratio norm_pix_loss
        decoder_hidden_size decoder_intermediate_size decoder_num_attention_heads decoder_num_hidden_layers"""
    ),
    {
        "num_channels": (3,),
        "qkv_bias": (True,),
        "pooler_act": ("tanh",),
        "pruned_heads": ({},),
        "is_encoder_decoder": (False,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (),
        "auto_map": (),
    },
)
PROCESSOR_KEYS = Keys(
    "preprocessor_config.json",
    split_keys(
        """image_processor_type feature_extractor_type do_resize size resample do_center_crop crop_size rescale_factor
        do_normalize image_mean image_std"""
    ),
    split_keys(
        """processor_class do_convert_rgb return_tensors data_format input_data_format device disable_grouping
        default_to_square image_seq_length"""
    ),
    {
        "do_rescale": (True,),
        "offset": (False,),
        "do_pad": (False,),
        "pad_size": (),
        "crop_pct": (),
        "do_flip_channel_order": (False,),
        "do_thumbnail": (False,),
        "do_align_long_axis": (False,),
        "do_reduce_labels": (False,),
        "reduce_labels": (False,),
        "size_divisor": (),
        "auto_map": (),
    },
)


def read_folder(folder: Path, family: Family) -> PublishedConfig:
    """Returns what the configurations in a folder state; nothing if there are none or they are not transformers'.

    Raises:
        UserError: as `read_config`.
    """
    content = read_json_object(folder / CONFIG_FILE)
    if not isinstance(content.get("model_type"), str):
        return PublishedConfig({})
    return read_config(content, read_json_object(folder / PREPROCESSOR_FILE), family)


def read_config(content: Mapping[str, Any], preprocessor: Mapping[str, Any], family: Family) -> PublishedConfig:
    """Returns what the configurations of a model of a family state.

    Args:
        content: the content of `config.json`.
        preprocessor: the content of `preprocessor_config.json`; empty if there is none.
        family: the family to which the arrays belong. What the configuration does not state has its defaults.

    Raises:
        UserError: the configuration is that of a model of another family, a value has a wrong type, a key is unknown,
            or vit_jax does not compute the model.
    """
    labels = content
    if isinstance(content.get("vision_config"), Mapping):  # of an image and a text model
        outer = content.get("model_type")
        content = {"model_type": TOWERS.get(str(outer), outer)} | dict(content["vision_config"])
    kind = content.get("model_type")
    if SAME.get(str(kind), kind) != family.name:
        raise UserError(
            f"its model_type is {printable(kind, 60)}, but of the models of transformers with arrays of these names "
            f"vit_jax reads only {family.name}"
        )
    KEYS.check(labels, family.own_keys)
    KEYS.check(content, family.own_keys)
    PROCESSOR_KEYS.check(preprocessor)
    activation = content.get("hidden_act", WORDS[family.defaults["activation"]])
    activations = ACTIVATIONS | ({"silu": "swiglu"} if "use_gated_mlp" in family.own_keys else {})
    activation = activations[read_choice(activation, activations, "hidden_act")]
    fields: dict[str, Any] = {
        "num_heads": read_int(content.get("num_attention_heads", HEADS), "num_attention_heads"),
        "norm_epsilon": read_float(content.get("layer_norm_eps", family.defaults["norm_epsilon"]), "layer_norm_eps"),
        "activation": activation,
    } | family.read_own_keys(content)
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
    plain = kind.startswith(("ViT", "Siglip", "DINOv3"))
    method = preprocessor.get("resample", 2 if kind.startswith("ViT") else 3)
    factor = preprocessor.get("rescale_factor", RESCALE)
    scaled = type(factor) in (int, float) and abs(factor - RESCALE) < 1e-6
    if type(method) is not int or not 0 <= method < len(PILLOW_FILTERS) or not scaled:
        return None
    resize = crop = None
    if preprocessor.get("do_resize", True):
        resize = _size(preprocessor.get("size", 224), square=not kind.startswith(("Bit", "CLIP")))
    if preprocessor.get("do_center_crop", not plain):
        crop_size = _size(preprocessor.get("crop_size", 224), square=True)
        crop = crop_size if isinstance(crop_size, tuple) else None
    if resize is None and crop is None:
        return None
    return write_pipe(Preparation(resize, crop, PILLOW_FILTERS[method]))


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


def describe(
    name: str,
    model: Model,
    model_type: str,
    classes: Sequence[str],
    own_keys: Callable[[Model], dict[str, Any]] = lambda model: {},
    whole: str = "",
) -> dict[str, str]:
    """Returns name -> content of both files.

    Args:
        name: the name of the file with the arrays.
        model: the model.
        model_type: the name of its family.
        classes: the classes of the family: without a classifier, with one, with a second one.
        own_keys: returns the keys that only this family has.
        whole: the model_type of the image and text model whose configuration one with a classifier has, if it has.

    Raises:
        UserError: they cannot state the model or its preprocessing.
    """
    value = model.field
    height, width = model.image_size
    count = value("num_classes")
    config: dict[str, Any] = {
        "architectures": [classes[bool(count) + value("distilled_head")]],
        "model_type": model_type,
        "hidden_size": value("width"),
        "num_hidden_layers": value("depth"),
        "num_attention_heads": value("num_heads"),
        "intermediate_size": value("mlp_dim"),
        "hidden_act": WORDS[value("activation")],
        "layer_norm_eps": value("norm_epsilon"),
        "image_size": height if height == width else [height, width],
        "patch_size": value("patch_size"),
        "num_channels": 3,
        **({"qkv_bias": True} if value("qkv_bias") == "all" else {}),
        "dtype": "float32",
        **loss_key(model),
    }
    if value("pre_logits"):
        config["pooler_output_size"] = value("representation_size") or value("width")
    config |= own_keys(model)
    if count and whole:
        outer = {key: config[key] for key in ("architectures", "dtype", LOSS_KEY)}
        inner = {key: value for key, value in config.items() if key not in outer}
        config = outer | {"model_type": whole, "vision_config": inner}
    if count:
        names = model.class_names or [f"LABEL_{index}" for index in range(count)]
        config["id2label"] = {str(index): name for index, name in enumerate(names)}
        config["label2id"] = {name: index for index, name in enumerate(names)}
    return {"config.json": json_text(config), PREPROCESSOR_FILE: json_text(_preprocessor(model))}


def _preprocessor(model: Model) -> dict[str, Any]:
    prepared, mean, std = preparation_of(model)
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
        "resample": PILLOW_FILTERS.index(prepared.method),
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
