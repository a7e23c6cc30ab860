"""The part of `benchmarks.agreement` that runs where torch, timm and transformers are installed."""

import json
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import safetensors.torch
import timm
import torch
import transformers

SMALL = {"img_size": 64, "num_classes": 11, "depth": 3}
TIMM = {
    "timm vit_base_patch16_224": ("vit_base_patch16_224", SMALL),
    "timm vit_base_patch16_224, GAP": (
        "vit_base_patch16_224",
        SMALL | {"class_token": False, "global_pool": "avg"},
    ),
    "timm vit_base_r50_s16_224": ("vit_base_r50_s16_224", SMALL),
    "timm resnetv2_50x1_bit": ("resnetv2_50x1_bit", {"num_classes": 11}),
    "timm deit3_base_patch16_224": ("deit3_base_patch16_224", SMALL),
    "timm deit_base_distilled_patch16_224": ("deit_base_distilled_patch16_224", SMALL),
    "timm vit_base_patch14_reg4_dinov2": ("vit_base_patch14_reg4_dinov2", {"img_size": 56, "depth": 3}),
    "timm vit_base_patch16_siglip_224": ("vit_base_patch16_siglip_224", {"img_size": 64, "depth": 3}),
    "timm vit_so400m_patch14_siglip_378": ("vit_so400m_patch14_siglip_378", {"img_size": 56, "depth": 3}),
    "timm vit_small_patch16_dinov3_qkvb": ("vit_small_patch16_dinov3_qkvb", {"img_size": 64, "depth": 3}),
    "timm eva02_base_patch14_224": ("eva02_base_patch14_224", {"img_size": 56, "depth": 3}),
    "timm vit_pe_core_tiny_patch16_384": ("vit_pe_core_tiny_patch16_384", {"img_size": 64, "depth": 3}),
    "timm vit_base_patch16_clip_quickgelu_224": (
        "vit_base_patch16_clip_quickgelu_224",
        {"img_size": 64, "depth": 3},
    ),
    "timm beitv2_base_patch16_224": ("beitv2_base_patch16_224", SMALL),
}
HF = {
    "huggingface ViTForImageClassification": (transformers.ViTForImageClassification, {"image_size": 64}),
    "huggingface ViTModel": (transformers.ViTModel, {"image_size": 64}),
    "huggingface DeiTModel": (transformers.DeiTModel, {"image_size": 64}),
    "huggingface DeiTForImageClassificationWithTeacher": (
        transformers.DeiTForImageClassificationWithTeacher,
        {"image_size": 64},
    ),
    "huggingface Dinov2ForImageClassification": (transformers.Dinov2ForImageClassification, {"image_size": 56}),
    "huggingface Dinov2WithRegistersForImageClassification": (
        transformers.Dinov2WithRegistersForImageClassification,
        {"image_size": 56, "patch_size": 14},
    ),
    "huggingface SiglipVisionModel": (transformers.SiglipVisionModel, {"image_size": 64}),
    "huggingface DINOv3ViTModel": (transformers.DINOv3ViTModel, {"image_size": 64, "num_register_tokens": 4}),
    "huggingface CLIPVisionModelWithProjection": (
        transformers.CLIPVisionModelWithProjection,
        {"image_size": 64, "patch_size": 16},
    ),
    "huggingface BeitForImageClassification": (
        transformers.BeitForImageClassification,
        {"image_size": 64, "use_relative_position_bias": True, "use_mask_token": False},
    ),
}


def inputs(images, mean, std):
    """Returns images as a torch library passes them to a model, [batch, 3, height, width], normalised by mean and std.

    Args:
        images: [batch, height, width, 3], values in [-1, 1].
        mean: the mean of each colour, for values in [0, 1].
        std: the standard deviation of each colour.
    """
    pixels = (images + 1) / 2
    return torch.from_numpy(((pixels - np.float32(mean)) / np.float32(std)).transpose(0, 3, 1, 2).copy()).float()


def logits_of(model, images):
    with torch.no_grad():
        result = model(images)
    for key in ("logits", "image_embeds", "pooler_output"):
        if getattr(result, key, None) is not None:
            return getattr(result, key).numpy()
    return result.last_hidden_state[:, 0].numpy() if hasattr(result, "last_hidden_state") else result.numpy()


def read_folder(path):
    """Loads a folder with the library for which it was written, and checks that it has all arrays and no others.

    A ViT without a tanh layer is loaded with `add_pooling_layer=False`, as transformers would otherwise add such a
    layer with random weights.

    Returns:
        The model, and the mean and standard deviation of its preprocessing.
    """
    config = json.loads((path / "config.json").read_text())
    if "architecture" in config:
        model = timm.create_model(f"local-dir:{path}", pretrained=True)
        return model.eval(), model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    kind = config["architectures"][0]
    bare = kind in ("ViTModel", "DeiTModel") and "pooler_output_size" not in config
    model, info = getattr(transformers, kind).from_pretrained(
        path, output_loading_info=True, **({"add_pooling_layer": False} if bare else {})
    )
    wrong = [f"{what}: {names}" for what, names in info.items() if names]
    if wrong:
        raise ValueError("; ".join(wrong))
    processor = transformers.AutoImageProcessor.from_pretrained(path)
    return model.eval(), processor.image_mean, processor.image_std


def randomise(model):
    for value in model.parameters():
        value.data += 0.05 * torch.randn_like(value)
    return model.eval()


def write_models(folder):
    """Writes models with random weights by the functions of both libraries, and their logits."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    for name, (architecture, fields) in TIMM.items():
        model = randomise(timm.create_model(architecture, **fields))
        timm.models.save_for_hf(model, folder / name, model_args=fields, safe_serialization=True)
        cfg = model.pretrained_cfg
        size = fields.get("img_size", 64)
        images = rng.uniform(-1, 1, (2, size, size, 3)).astype(np.float32)
        logits = logits_of(model, inputs(images, cfg["mean"], cfg["std"]))
        np.savez(folder / name / "io.npz", images=images, logits=logits)
        if cfg["mean"] == (0.5, 0.5, 0.5):  # a file without its config does not state the mean
            alone = folder / f"{name}, alone"
            alone.mkdir()
            safetensors.torch.save_file(model.state_dict(), alone / f"{architecture}.safetensors")
            np.savez(alone / "io.npz", images=images, logits=logits)
    for name, (kind, fields) in HF.items():
        labels = {"num_labels": 11} if "Classification" in name else {}
        config = kind.config_class(**fields, **labels, num_hidden_layers=3)
        model = randomise(kind(config))
        images = rng.uniform(-1, 1, (2, fields["image_size"], fields["image_size"], 3)).astype(np.float32)
        logits = logits_of(model, inputs(images, 0.5, 0.5))
        in_memory = folder / f"{name}, in memory"
        model.save_pretrained(folder / name)
        model.config.save_pretrained(in_memory)
        safetensors.torch.save_file(model.state_dict(), in_memory / "model.safetensors")
        for path in (folder / name, in_memory):
            transformers.ViTImageProcessor().save_pretrained(path)
            np.savez(path / "io.npz", images=images, logits=logits)


def compare(path):
    """Compares the logits that their library computes from a folder that we wrote with ours.

    Returns:
        The largest difference, relative to our largest logit (infinite if the library fails), and a line on what is
        wrong, empty if nothing is.
    """
    io = np.load(path / "io.npz")
    try:
        model, mean, std = read_folder(path)
        logits = logits_of(model, inputs(io["images"], mean, std))
    except Exception as error:  # any exception of the library means that the folder is wrong
        return math.inf, f"{path.name} {io['row']}: {type(error).__name__}: {error}"
    difference = abs(logits - io["logits"]).max() / abs(io["logits"]).max()
    return difference, "" if difference <= io["limit"] else f"{path.name} {io['row']}: {difference:.1e}"


def main(ours, theirs):
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = {path.name: compare(path) for path in sorted(Path(ours).iterdir())}
    groups = {}
    for name, (difference, _) in found.items():
        groups.setdefault(name.partition(" #")[0], []).append(difference)
    for name, differences in groups.items():
        count = f" ({len(differences)} models)" if len(differences) > 1 else ""
        print(f"{name}{count}, written by us: {max(differences):.1e}", flush=True)
    failed = [line for _, line in found.values() if line]
    print("\n".join([f"{len(found)} folders loaded", *failed]), flush=True)
    write_models(Path(theirs))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
