"""Writes the rows of timm's later models in `vit_jax/interop/published.csv`, from timm's registry and known results.

Example, with clones of pytorch-image-models and open_clip:
  python -m benchmarks.timm_catalog --python=../torch/bin/python --timm=../timm --open-clip=../open_clip

`--python` is the Python of an environment with torch and timm. Rows of other models stay as they are. Addresses,
preprocessing and licences are those of `pretrained_cfg`. Accuracies are those of `results/results-imagenet.csv`, of
open_clip's `docs/openclip_results.csv`, or of the authors' pages in `STATED`. Where two names stand for one file, the
row has the one with the activation of its training.
"""

import argparse
import csv
import itertools
import json
import re
import subprocess
from pathlib import Path

FILE = Path(__file__).parents[1] / "vit_jax" / "interop" / "published.csv"
FAMILIES = (
    r"vit_\w+_dinov3(_qkvb)?\.(lvd1689m|sat493m)",
    r"vit_\w+_clip_(quickgelu_)?\d+\.(openai|laion|datacomp|dfn|metaclip)\w*",
    r"vit_\w+_siglip_(gap_)?\d+\.(v2_webli|webli(_i18n)?)",
    r"eva02_[a-z]+_patch14_\d+\.\w+",
    r"vit_pe_core_\w+\.fb",
    r"vit_\w+\.mae",
    r"beitv2_\w+\.\w+",
    r"vit_\w+\.dino",
    r"vit_\w+_dinov2\.lvd142m",
    r"deit3?_\w+\.\w+",
)
# Word of a tag -> data set. The other words name none.
DATA = {
    name: name
    for name in ["laion2b", "laion400m", "dfn2b", "dfn5b", "merged2b", "webli", "lvd142m", "lvd1689m", "sat493m"]
} | {
    **{"in1k": "imagenet2012", "mae": "imagenet2012", "dino": "imagenet2012", "in12k": "imagenet12k"},
    **{"in22k": "imagenet21k", "m38m": "merged38m", "openai": "wit", "datacompxl": "datacomp1b"},
    **{"2pt5b": "metaclip2.5b", "400m": "metaclip400m", "altogether": "altogether", "worldwide": "metaclip2"},
}
# timm's name, open_clip's name and tag of the same weights. Those of laion2b: timm 0.9, vision_transformer.py.
ZERO_SHOT = """
vit_base_patch32_clip_quickgelu_224.openai ViT-B-32 openai
vit_base_patch16_clip_quickgelu_224.openai ViT-B-16 openai
vit_large_patch14_clip_quickgelu_224.openai ViT-L-14 openai
vit_large_patch14_clip_quickgelu_336.openai ViT-L-14-336 openai
vit_base_patch32_clip_224.laion2b ViT-B-32 laion2b_s34b_b79k
vit_base_patch16_clip_224.laion2b ViT-B-16 laion2b_s34b_b88k
vit_large_patch14_clip_224.laion2b ViT-L-14 laion2b_s32b_b82k
vit_huge_patch14_clip_224.laion2b ViT-H-14 laion2b_s32b_b79k
vit_giant_patch14_clip_224.laion2b ViT-g-14 laion2b_s12b_b42k
vit_gigantic_patch14_clip_224.laion2b ViT-bigG-14 laion2b_s39b_b160k
vit_base_patch32_clip_quickgelu_224.laion400m_e32 ViT-B-32-quickgelu laion400m_e32
vit_base_patch16_clip_224.laion400m_e32 ViT-B-16 laion400m_e32
vit_base_patch16_plus_clip_240.laion400m_e32 ViT-B-16-plus-240 laion400m_e32
vit_large_patch14_clip_224.laion400m_e32 ViT-L-14 laion400m_e32
vit_base_patch32_clip_224.datacompxl ViT-B-32 datacomp_xl_s13b_b90k
vit_base_patch32_clip_256.datacompxl ViT-B-32-256 datacomp_s34b_b86k
vit_base_patch16_clip_224.datacompxl ViT-B-16 datacomp_xl_s13b_b90k
vit_large_patch14_clip_224.datacompxl ViT-L-14 datacomp_xl_s13b_b90k
vit_base_patch16_clip_224.dfn2b ViT-B-16 dfn2b
vit_large_patch14_clip_quickgelu_224.dfn2b ViT-L-14-quickgelu dfn2b
vit_huge_patch14_clip_quickgelu_224.dfn5b ViT-H-14-quickgelu dfn5b
vit_huge_patch14_clip_quickgelu_378.dfn5b ViT-H-14-378-quickgelu dfn5b
vit_base_patch32_clip_quickgelu_224.metaclip_400m ViT-B-32-quickgelu metaclip_400m
vit_base_patch32_clip_quickgelu_224.metaclip_2pt5b ViT-B-32-quickgelu metaclip_fullcc
vit_base_patch16_clip_quickgelu_224.metaclip_400m ViT-B-16-quickgelu metaclip_400m
vit_base_patch16_clip_quickgelu_224.metaclip_2pt5b ViT-B-16-quickgelu metaclip_fullcc
vit_large_patch14_clip_quickgelu_224.metaclip_400m ViT-L-14-quickgelu metaclip_400m
vit_large_patch14_clip_quickgelu_224.metaclip_2pt5b ViT-L-14-quickgelu metaclip_fullcc
vit_huge_patch14_clip_quickgelu_224.metaclip_2pt5b ViT-H-14-quickgelu metaclip_fullcc
vit_base_patch16_siglip_224.webli ViT-B-16-SigLIP webli
vit_base_patch16_siglip_256.webli ViT-B-16-SigLIP-256 webli
vit_base_patch16_siglip_256.webli_i18n ViT-B-16-SigLIP-i18n-256 webli
vit_base_patch16_siglip_384.webli ViT-B-16-SigLIP-384 webli
vit_base_patch16_siglip_512.webli ViT-B-16-SigLIP-512 webli
vit_large_patch16_siglip_256.webli ViT-L-16-SigLIP-256 webli
vit_large_patch16_siglip_384.webli ViT-L-16-SigLIP-384 webli
vit_so400m_patch14_siglip_224.webli ViT-SO400M-14-SigLIP webli
vit_so400m_patch14_siglip_384.webli ViT-SO400M-14-SigLIP-384 webli
"""
# (what the accuracies refer to, where they are stated) -> timm's name -> accuracy in percent.
STATED = {
    ("linear probe", "facebookresearch/dino README.md"): {
        "vit_small_patch16_224.dino": 77.0,
        "vit_small_patch8_224.dino": 79.7,
        "vit_base_patch16_224.dino": 78.2,
        "vit_base_patch8_224.dino": 80.1,
    },
    ("linear probe", "facebookresearch/dinov2 README.md"): {
        "vit_small_patch14_dinov2.lvd142m": 81.1,
        "vit_base_patch14_dinov2.lvd142m": 84.5,
        "vit_large_patch14_dinov2.lvd142m": 86.3,
        "vit_giant_patch14_dinov2.lvd142m": 86.5,
        "vit_small_patch14_reg4_dinov2.lvd142m": 80.9,
        "vit_base_patch14_reg4_dinov2.lvd142m": 84.6,
        "vit_large_patch14_reg4_dinov2.lvd142m": 86.7,
        "vit_giant_patch14_reg4_dinov2.lvd142m": 87.1,
    },
    ("after fine-tuning", "facebookresearch/mae FINETUNE.md"): {
        "vit_base_patch16_224.mae": 83.664,
        "vit_large_patch16_224.mae": 85.952,
        "vit_huge_patch14_224.mae": 86.928,
    },
    ("zero-shot", "facebookresearch/perception_models README.md"): {
        "vit_pe_core_tiny_patch16_384.fb": 62.1,
        "vit_pe_core_small_patch16_384.fb": 72.7,
        "vit_pe_core_base_patch16_224.fb": 78.4,
        "vit_pe_core_large_patch14_336.fb": 83.5,
        "vit_pe_core_gigantic_patch14_448.fb": 85.4,
    },
    ("zero-shot", "big_vision configs/proj/image_text/README_siglip2.md"): {
        "vit_base_patch32_siglip_256.v2_webli": 74.0,
        "vit_base_patch16_siglip_224.v2_webli": 78.2,
        "vit_base_patch16_siglip_256.v2_webli": 79.1,
        "vit_base_patch16_siglip_384.v2_webli": 80.6,
        "vit_base_patch16_siglip_512.v2_webli": 81.2,
        "vit_large_patch16_siglip_256.v2_webli": 82.5,
        "vit_large_patch16_siglip_384.v2_webli": 83.1,
        "vit_large_patch16_siglip_512.v2_webli": 83.5,
        "vit_so400m_patch14_siglip_224.v2_webli": 83.2,
        "vit_so400m_patch16_siglip_256.v2_webli": 83.4,
        "vit_so400m_patch16_siglip_384.v2_webli": 84.1,
        "vit_so400m_patch16_siglip_512.v2_webli": 84.3,
        "vit_giantopt_patch16_siglip_256.v2_webli": 84.5,
        "vit_giantopt_patch16_siglip_384.v2_webli": 85.0,
    },
}
CLASSES = r"deit|beitv2|.*_in(1k|12k|22k)$"  # the names of models whose outputs are classes
NO_CLASSES = r".*\.mim_in22k$"  # EVA-02 before it is fine-tuned


def dump_models():
    """Prints what timm knows of the models of `FAMILIES`, as JSON: name -> version, configuration and sizes."""
    import timm
    import torch
    from timm.models import get_pretrained_cfg

    models, files = {}, {}
    for name in sorted(timm.list_pretrained(), key=lambda name: "quickgelu" not in name):
        cfg = get_pretrained_cfg(name)
        if not any(re.fullmatch(family, name) for family in FAMILIES) or files.setdefault(cfg.hf_hub_id, name) != name:
            continue
        with torch.device("meta"):
            model = timm.create_model(name.partition(".")[0])
        block = model.blocks[0]
        mlp_dim = block.mlp.fc2.in_features
        models[name] = {
            "version": timm.__version__,
            "cfg": cfg.to_dict(),
            "width": model.embed_dim,
            "depth": len(model.blocks),
            "mlp_dim": mlp_dim,
            "num_heads": block.attn.num_heads,
            "patch_size": model.patch_embed.patch_size[0],
        }
    print(json.dumps(models))


def make_row(name, facts, measured, zero_shot):
    """Returns the row of a model: column -> text."""
    from vit_jax.interop import timm_config, timm_vit
    from vit_jax.interop.published_config import scale_pipe
    from vit_jax.models import model_name

    cfg, version = facts["cfg"], facts["version"]
    content = {"architecture": cfg["architecture"], "num_classes": cfg["num_classes"], "pretrained_cfg": cfg}
    stated = timm_config.read_config(content, timm_vit.FAMILY)
    source = f"timm {version} default_cfgs"
    accuracy, of, where = zero_shot.get(name, ("", "", ""))
    if name in measured:
        accuracy, of, where = measured[name], "timm's evaluation", "pytorch-image-models results/results-imagenet.csv"
    for (kind, page), accuracies in STATED.items():
        if name in accuracies:
            accuracy, of, where = f"{accuracies[name]:g}", kind, page
    tag, stated_side = name.partition(".")[2], cfg["input_size"][1]
    side = stated_side // facts["patch_size"] * facts["patch_size"]
    has_classes = re.match(CLASSES, name) and not re.match(NO_CLASSES, name)
    sizes = {key: facts[key] for key in ("width", "depth", "mlp_dim", "num_heads", "patch_size")}
    return {
        "name": cfg["hf_hub_id"].partition("/")[0] + f"/{name}",
        "model": model_name(sizes),
        "layout": "timm",
        "data": "+".join(name for name, _ in itertools.groupby(DATA[word] for word in tag.split("_") if word in DATA)),
        "resolution": side,
        "head": cfg["num_classes"] if has_classes else 0,
        "accuracy": accuracy,
        "of": of,
        "address": f"hf-hub:{cfg['hf_hub_id']}",
        "source": "; ".join([source, *([where] if where else [])]),
        "preprocess": scale_pipe(stated.preprocess, (stated_side, stated_side), (side, side)),
        "preprocess_source": source,
        "image_mean": " ".join(map(str, stated.fields["image_mean"])),
        "image_std": " ".join(map(str, stated.fields["image_std"])),
        "licence": cfg["license"],
        "licence_source": source,
    }


def main():
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--python", "--timm", "--open-clip"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    code = f"import runpy; runpy.run_path({__file__!r})['dump_models']()"
    dumped = subprocess.run([args.python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    with (Path(args.timm) / "results" / "results-imagenet.csv").open() as file:
        measured = {row["model"]: f"{float(row['top1']):g}" for row in csv.DictReader(file)}
    with (Path(args.open_clip) / "docs" / "openclip_results.csv").open() as file:
        open_clip = {(row["name"], row["pretrained"]): row["ImageNet 1k"] for row in csv.DictReader(file)}
    zero_shot = {
        name: (f"{100 * float(open_clip[model, tag]):g}", "zero-shot", "open_clip docs/openclip_results.csv")
        for name, model, tag in map(str.split, ZERO_SHOT.strip().splitlines())
    }
    rows = [make_row(name, facts, measured, zero_shot) for name, facts in json.loads(dumped.stdout).items()]
    with FILE.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        kept, columns = list(reader), reader.fieldnames
    written = {row["name"]: row for row in kept}
    for row in sorted(rows, key=lambda row: row["name"]):
        written[row["name"]] = written.get(row["name"], {}) | row
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(written.values())


if __name__ == "__main__":
    main()
