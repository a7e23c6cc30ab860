"""timm's `config.json`: reads what it states of a model, and writes one for a model of ours. And timm's architectures.

Keys: huggingface/pytorch-image-models 1.0.31, timm/models/_hub.py (save_config_for_hf), _pretrained.py,
vision_transformer.py and resnetv2.py, timm/data/config.py and timm/data/transforms_factory.py. `timm_models.csv` lists
the architectures whose form is that of one of our models; `benchmarks.timm_models` writes it from timm's models.
"""

import csv
import functools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vit_jax import UserError, models
from vit_jax.interop.layout import Family
from vit_jax.interop.published_config import (
    CONFIG_FILE,
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

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu")  # timm's words are ours
POOLINGS = {"token": "token", "avg": "gap", "map": "map"}  # timm's word -> ours
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # where a configuration states none
DEFAULT_CROP = 0.875
FIRST = {"resnet": "patch_embed.backbone.stem.conv", "patches": "patch_embed.proj", None: "stem.conv"}
# Architectures of the hybrids, by the units of the ResNet's stages; other arguments are stated.
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
BITS = {f"BiT-R{size}": f"resnetv2_{size}_bit" for size in ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")}
GATED = "vit_giant_patch14_dinov2"  # has the MLP of SwiGLU, which `model_args` cannot state
# What `model_args` cannot change -> (pattern of the names, {0}: the patch size; the name for any other sizes)
FORMS = {
    "plain": (r"vit_[a-z]+_patch{0}_\d+", "vit_base_patch16_224"),
    "layer_scale": (r"deit3_[a-z]+_patch{0}_\d+|vit_[a-z]+_patch{0}_dinov2", "vit_base_patch16_224"),
    "distilled": (r"deit_[a-z]+_distilled_patch{0}_\d+", "deit_base_distilled_patch16_224"),
    "map": (r"vit_\w+_patch{0}_siglip_\d+", "vit_base_patch16_224"),
    "beit": (r"beitv2_[a-z]+_patch{0}_\d+", "beitv2_base_patch16_224"),
    "clip": (r"vit_[a-z]+_patch{0}_clip_\d+", "vit_base_patch16_clip_224"),
}

# Every key that timm publishes: read, without effect, or with few values.
_SOURCE_READ = split_keys("input_size fixed_input_size interpolation crop_pct crop_mode mean std label_names license")
_SOURCE_WITHOUT_EFFECT = split_keys(
    """url file state_dict hf_hub_id hf_hub_filename custom_load source tag architecture num_classes test_input_size
    min_input_size test_crop_pct pool_size test_pool_size first_conv classifier description origin_url
    paper_name paper_ids notes label_descriptions num_features"""
)
_READ = split_keys("architecture num_classes global_pool model_args pretrained_cfg label_descriptions vit_jax_loss")
_SOURCE_SUPPORTED: Mapping[str, tuple[Any, ...]] = {"label_offset": (0,)}

SOURCE_KEYS = Keys("pretrained_cfg", _SOURCE_READ, _SOURCE_WITHOUT_EFFECT, _SOURCE_SUPPORTED)
# Older files have the keys of pretrained_cfg one level higher.
KEYS = Keys("config.json", _READ | _SOURCE_READ, _SOURCE_WITHOUT_EFFECT - _READ, _SOURCE_SUPPORTED)
ARGUMENT_KEYS = Keys(
    "model_args",
    split_keys(
        """img_size dynamic_img_size strict_img_size patch_size global_pool embed_dim depth num_heads act_layer
        reg_tokens pre_norm"""
    ),
    split_keys(
        """num_classes mlp_ratio init_values class_token no_embed_class fc_norm qk_norm weight_init fix_init
        drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate device dtype
        layers width_factor stem_chs channels zero_init_last"""
    ),
    {
        "in_chans": (3,),
        "qkv_bias": (True, False),
        "proj_bias": (True, False),
        "scale_attn_norm": (False,),
        "scale_mlp_norm": (False,),
        "pos_embed": ("learn", "none", ""),
        "final_norm": (True,),
        "pool_include_prefix": (False,),
        "dynamic_img_pad": (False,),
        "output_stride": (32,),
        "stem_type": ("", "fixed"),
        "avg_down": (False,),
        "preact": (True,),
        "basic": (False,),
        "bottle_ratio": (0.25,),
        "norm_layer": ("layernorm", "rmsnorm"),  # told by the arrays; the epsilon is that of `DEFAULTS`
        **dict.fromkeys(("embed_layer", "embed_norm_layer"), ()),
        **dict.fromkeys(("block_fn", "mlp_layer", "attn_layer", "conv_layer"), ()),
    },
)


class Architecture(NamedTuple):
    """The values that the name of an architecture implies unless a configuration states others.

    The values of a hybrid are those of its Transformer.
    """

    num_heads: int
    activation: str
    norm_epsilon: float
    width: int
    depth: int
    mlp_dim: int
    resolution: int
    rotary_grid: int

    @property
    def unseen_fields(self) -> dict[str, Any]:
        """The fields that no array of a file tells."""
        grid = {"rotary_grid": self.rotary_grid} if self.rotary_grid else {}
        return {name: getattr(self, name) for name in ("num_heads", "activation", "norm_epsilon")} | grid


def find_architecture(name: str) -> Architecture | None:
    """Returns the architecture with a name, which may have a tag after a dot; None if it is not listed."""
    return _read_table().get(name.partition(".")[0])


def nearest_name(model: Model) -> str:
    """Returns the name of an architecture with the sizes of a ViT; another of its form if none has its width.

    The model differs from the architecture only in what timm's `model_args` can state.
    """
    value = model.field
    kind = "map" if value("pooling") == "map" else "layer_scale" if value("layer_scale") else "plain"
    kind = "beit" if value("position") == "relative_bias" else kind
    kind = "clip" if value("pre_norm") else "distilled" if value("distilled_head") else kind
    return nearest_of(model, *FORMS[kind])


def nearest_of(model: Model, pattern: str, default: str) -> str:
    """Returns the name of a pattern, as in `FORMS`, whose architecture has the width of a model.

    Of several, one with all of its sizes is preferred, then one with its patch size, then the nearest resolution.
    """
    sizes = tuple(map(model.field, ("num_heads", "width", "depth", "mlp_dim")))
    side, own = max(model.image_size), re.compile(pattern.format(model.field("patch_size")))
    distances = {
        name: (
            (one.num_heads, one.width, one.depth, one.mlp_dim) != sizes,
            not own.fullmatch(name),
            abs(one.resolution - side),
        )
        for name, one in _read_table().items()
        if re.fullmatch(pattern.format(r"\d+"), name) and one.width == model.field("width")
    }
    return min(distances, key=distances.__getitem__, default=default)


@functools.cache
def _read_table() -> dict[str, Architecture]:
    types = Architecture.__annotations__
    with Path(__file__).with_name("timm_models.csv").open(newline="", encoding="utf-8") as file:
        return {
            row["architecture"]: Architecture(**{name: kind(row[name]) for name, kind in types.items()})
            for row in csv.DictReader(file)
        }


def read_folder(folder: Path, family: Family) -> PublishedConfig:
    """Returns what the configuration in a folder states; nothing if there is none or it is not timm's.

    Raises:
        UserError: as `read_config`.
    """
    content = read_json_object(folder / CONFIG_FILE)
    return read_config(content, family) if isinstance(content.get("architecture"), str) else PublishedConfig({})


def read_config(content: Mapping[str, Any], family: Family) -> PublishedConfig:
    """Returns what the configuration of a model of a family states. The family's own keys are in `model_args`.

    Raises:
        UserError: a value has a wrong type, a key is unknown, or vit_jax does not compute the model.
    """
    source, args = _dict(content.get("pretrained_cfg", content)), _dict(content.get("model_args"))
    KEYS.check(content)
    if source is not content:
        SOURCE_KEYS.check(source)
    ARGUMENT_KEYS.check(args, family.own_keys)
    architecture = find_architecture(str(content["architecture"]))
    fields = architecture.unseen_fields if architecture else {}
    if "num_heads" in args:
        fields["num_heads"] = read_int(args["num_heads"], "num_heads")
    if args.get("act_layer") is not None and fields.get("activation") != "swiglu":
        fields["activation"] = read_choice(args["act_layer"], ACTIVATIONS, "act_layer")
    fields |= family.read_own_keys(args)
    pooling = args.get("global_pool") or content.get("global_pool") or ""
    if pooling:
        fields["pooling"] = POOLINGS[read_choice(pooling, POOLINGS, "global_pool")]
    fields["image_mean"] = colours(source.get("mean") or IMAGENET_MEAN, "mean")
    fields["image_std"] = colours(source.get("std") or IMAGENET_STD, "std")
    size = source.get("input_size") or (3, 224, 224)
    if not isinstance(size, list | tuple) or len(size) != 3 or size[0] != 3:
        raise UserError(f"input_size in its configuration must be [3, height, width], not {size!r}")
    height, width = (read_int(side, "input_size") for side in size[1:])
    resolution = height, width  # of the positions
    if args.get("img_size") is not None:
        resolution = _read_image_size(args["img_size"])
        takes_any = args.get("dynamic_img_size") is True or args.get("strict_img_size") is False
        if "input_size" not in source or not (takes_any or source.get("fixed_input_size") is False):
            height, width = resolution
    sizes = {"width": ("the width of its architecture", architecture.width)} if architecture else {}
    sizes |= _read_sizes(content, args)
    pipe = _read_pipe(source, height, width)
    licence = source["license"] if isinstance(source.get("license"), str) else ""
    return PublishedConfig(fields, resolution, pipe, _read_names(content), read_loss(content), sizes, licence)


def _read_image_size(size: Any) -> tuple[int, int]:
    sides = size if isinstance(size, list | tuple) else (size, size)
    if len(sides) != 2:
        raise UserError(f"img_size in its configuration must be [height, width], not {size!r}")
    height, width = (read_int(side, "img_size") for side in sides)
    return height, width


def read_name(path: Path, width: int) -> dict[str, Any]:
    """Returns the fields that the name of a file, or else of its folder, tells as the name of a timm architecture.

    Returns none if neither name is that of an architecture of this width.
    """
    for name in (path.name, path.parent.name):
        architecture = find_architecture(name)
        if architecture and architecture.width == width:
            return architecture.unseen_fields
    return {}


def untold_error(untold: Sequence[str], fields: Mapping[str, Any]) -> UserError:
    """Returns the error for a file whose number of heads is stated nowhere."""
    return UserError(
        "the number of attention heads is not known: a timm file does not state it, and neither the file nor its "
        f"folder is named after a timm architecture of width {fields['width']}; give num_heads=N to vit_jax.load, or "
        "--num-heads=N to vit_jax.convert, which writes a file that states it"
    )


def _read_sizes(content: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Returns our field -> (key, value), for what a configuration states although the arrays tell it too."""
    keys = {"width": "embed_dim", "depth": "depth", "patch_size": "patch_size", "registers": "reg_tokens"}
    keys |= {"pre_norm": "pre_norm"}
    sizes = {name: (key, args[key]) for name, key in keys.items() if args.get(key) is not None}
    if isinstance(args.get("patch_size"), list) and len(set(args["patch_size"])) == 1:
        sizes["patch_size"] = "patch_size", args["patch_size"][0]
    return sizes | ({"num_classes": ("num_classes", content["num_classes"])} if "num_classes" in content else {})


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read_pipe(source: Mapping[str, Any], height: int, width: int) -> str | None:
    """Returns the pipe of timm's evaluation; None if no pipe of ours equals it, as with borders around the image."""
    crop = read_float(source.get("crop_pct") or DEFAULT_CROP, "crop_pct")
    method, mode = source.get("interpolation") or "bicubic", source.get("crop_mode") or "center"
    if not 0.1 <= crop <= 1 or method not in PILLOW_FILTERS:
        return None
    rows, columns = (math.floor(side / crop) for side in (height, width))
    resize: int | tuple[int, int] = (rows, columns) if mode == "squash" else rows
    if mode not in ("squash", "center") or (mode == "center" and rows != columns):
        return None
    return write_pipe(Preparation(resize, (height, width), method))


def _read_names(content: Mapping[str, Any]) -> list[str] | None:
    """Returns the descriptions of the classes if each class has one and all differ, else the names of the classes.

    Returns None if there are no usable names.
    """
    count = content.get("num_classes")
    names = content.get("label_names") or _dict(content.get("pretrained_cfg")).get("label_names")
    listed = name_list(names, count) if isinstance(count, int) else None
    words = _dict(content.get("label_descriptions"))
    if not listed or not all(isinstance(words.get(name), str) for name in listed):
        return listed
    described = [words[name] for name in listed]
    return described if len(set(described)) == len(described) else listed


def describe_vit(name: str, model: Model) -> dict[str, str]:
    """Returns `config.json` -> its content, for a ViT that timm's VisionTransformer computes.

    Raises:
        UserError: timm has no architecture like the model, or cannot state its preprocessing.
    """
    value, swiglu = model.field, model.field("activation") == "swiglu"
    args = size_arguments(model) | {
        # timm rounds the product down.
        "mlp_ratio": (value("mlp_dim") * (2 if swiglu else 1) + 0.5) / value("width"),
        "fc_norm": value("final_norm") == "pooled",
        "pos_embed": "none" if value("position") == "none" else "learn",
        "qk_norm": value("qk_norm"),
    }
    if not value("distilled_head"):  # timm's class has the distillation token besides
        args["reg_tokens"] = value("registers")
    if not swiglu:
        args["act_layer"] = value("activation")
    args |= {"qkv_bias": False} if value("qkv_bias") == "none" else {}
    args |= {"proj_bias": False} if not value("dense_bias") else {}
    if value("norm") == "rms":
        args["norm_layer"] = "rmsnorm"
    architecture = GATED if swiglu else nearest_name(model)
    if value("stem") == "resnet":
        if value("stages") not in HYBRIDS or value("stem_width") != 64:
            size = f"ResNet stages {value('stages')} and stem_width {value('stem_width')}"
            raise UserError(f"timm has no hybrid with {size}; use --layout=ours")
        architecture = HYBRIDS[value("stages")]
    return describe(model, architecture, args)


def size_arguments(model: Model) -> dict[str, Any]:
    """Returns the arguments that all ViTs of timm have in common."""
    value = model.field
    return {
        "img_size": list(model.image_size),
        "patch_size": model.vit.stem.kernel_size,  # of a hybrid, in positions of the feature map
        "embed_dim": value("width"),
        "depth": value("depth"),
        "num_heads": value("num_heads"),
        "class_token": bool(model.vit.class_rows),
        "global_pool": {ours: theirs for theirs, ours in POOLINGS.items()}[value("pooling")],
        "no_embed_class": value("position_rows") != "all",  # a position of the class token is added to it
        "init_values": value("layer_scale") or None,
    }


def describe_beit(name: str, model: Model) -> dict[str, str]:
    """Returns `config.json` -> its content, for a BEiT.

    Raises:
        UserError: timm cannot state its preprocessing.
    """
    value, foreign = model.field, ("class_token", "no_embed_class")  # which timm's class does not have
    args = {name: argument for name, argument in size_arguments(model).items() if name not in foreign} | {
        "mlp_ratio": (value("mlp_dim") + 0.5) / value("width"),
        "use_fc_norm": value("final_norm") == "pooled",
    }
    return describe(model, nearest_name(model), args)


def describe_bit(name: str, model: Model) -> dict[str, str]:
    """Returns `config.json` -> its content, for a BiT.

    Raises:
        UserError: timm has no BiT of these sizes, or cannot state its preprocessing.
    """
    name = models.model_name(model.values)  # the name of these sizes, which the model's own name may not be
    if name not in BITS:
        raise UserError(f"timm has no {name} of these sizes; its BiTs are {', '.join(BITS)}; use --layout=ours")
    return describe(model, BITS[name], {})


def describe(model: Model, architecture: str, args: dict[str, Any]) -> dict[str, str]:
    """Returns `config.json` -> its content, for a model that is the architecture with these arguments.

    Raises:
        UserError: timm cannot state its preprocessing.
    """
    value = model.field
    config: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": _outputs(model),
        "num_features": value("width") if value("num_heads") else value("width") * 32,
        "global_pool": args.get("global_pool", "avg"),
        "model_args": args,
        "pretrained_cfg": _pretrained_cfg(model),
        **loss_key(model),
    }
    if model.class_names:
        config["label_names"] = list(model.class_names)
    return {"config.json": json_text(config)}


def _pretrained_cfg(model: Model) -> dict[str, Any]:
    height, width = model.image_size
    prepared, mean, std = preparation_of(model)
    cropped = prepared.crop or (height, width)
    size = prepared.resize if prepared.resize is not None else cropped
    squash = isinstance(size, tuple)
    side, target = (size[0], cropped[0]) if isinstance(size, tuple) else (size, min(cropped))
    if cropped != (height, width) or (isinstance(size, tuple) and size[0] * width != size[1] * height):
        raise UserError(f"the timm layout cannot store the preprocessing {model.preprocess!r}; use --layout=ours")
    return {
        "custom_load": False,
        "input_size": [3, height, width],
        "fixed_input_size": bool(model.field("num_heads")),  # a BiT takes images of any size
        "interpolation": prepared.method,
        "crop_pct": _crop_share(target, side),
        "crop_mode": "squash" if squash else "center",
        "mean": mean,
        "std": std,
        "num_classes": _outputs(model),
        "first_conv": FIRST[model.field("stem")],
        "classifier": _classifier(model),
    }


def _outputs(model: Model) -> int:
    """Returns the number of outputs of timm's classifier, as which timm has the projection of a CLIP."""
    return model.field("num_classes") or model.field("projection") or 0  # a BiT has no projection


def _classifier(model: Model) -> str | list[str]:
    if not model.field("stem"):
        return "head.fc"
    return ["head", "head_dist"] if model.field("distilled_head") else "head"


def _crop_share(target: int, side: int) -> float:
    """Returns about `target / side`, such that `floor(target / share)`, as timm computes it, is `side`."""
    share = target / side
    return share if math.floor(target / share) == side else target / (side + 0.5)
