"""Checks that timm and transformers load what we write, and that we load what they write, with equal logits.

Example:
  python -m benchmarks.agreement --python=../torch/bin/python

`--python` is that of an environment with torch (its CPU build suffices), timm, transformers and numpy; our environment
needs none of them. All weights are random. ViTs have the widths of their names and 3 blocks; images have 64 pixels, or
56 for patches of 14. Prints the largest difference of the logits, relative to the largest logit.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

THEIRS = Path(__file__).with_name("agreement_torch.py")
LATER = {"position_rows": "patches", "activation": "gelu", "layer_scale": 1e-5, "num_classes": 11}
DINOV2 = LATER | {"resolution": 56, "class_token": "auto"}
SIGLIP = {"pooling": "map", "num_classes": 0}
# Name of the case -> model, layout, fields. The name decides nothing.
CASES = {
    "timm B/16": ("ViT-B/16", "timm", {"activation": "gelu"}),
    "timm B/16 with the tanh form of GELU": ("ViT-B/16", "timm", {}),
    "timm Ti/16": ("ViT-Ti/16", "timm", {"activation": "gelu", "depth": 12}),
    "timm B/16 GAP": ("ViT-B/16", "timm", {"activation": "gelu", "pooling": "gap", "final_norm": "pooled"}),
    "timm R50+B/16": ("R50+ViT-B/16", "timm", {"activation": "gelu", "stem_epsilons": "timm"}),
    "timm BiT-R50x1": ("BiT-R50x1", "timm", {}),
    "timm DeiT-III B/16": ("ViT-B/16", "timm", LATER),
    "timm DINOv2 B/14 with registers": ("ViT-B/14", "timm", DINOV2 | {"registers": 4}),
    "timm SigLIP B/16": ("ViT-B/16", "timm", SIGLIP),
    "huggingface ViT-B/16": ("ViT-B/16", "huggingface", {"activation": "gelu", "norm_epsilon": 1e-12}),
    "huggingface DINOv2 B/14": (
        "ViT-B/14",
        "huggingface",
        DINOV2 | {"position_rows": "all", "pooling": "token_gap"},
    ),
    "huggingface DINOv2 B/14 with registers": (
        "ViT-B/14",
        "huggingface",
        DINOV2 | {"position_rows": "class", "pooling": "token_gap", "registers": 4},
    ),
    "huggingface SigLIP B/16": ("ViT-B/16", "huggingface", SIGLIP),
}


def write_cases(folder):
    """Writes every case with our logits."""
    import jax
    import numpy as np

    import vit_jax

    rng = np.random.default_rng(0)
    for name, (model_name, layout, fields) in CASES.items():
        model = vit_jax.create(
            model_name,
            **({"resolution": 64, "num_classes": 11} | ({"depth": 3} if "ViT" in model_name else {}) | fields),
        )
        height, width = model.image_size
        images = rng.uniform(-1, 1, (2, height, width, 3)).astype(np.float32)
        shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(images.shape, np.float32))

        def draw(path, leaf):
            scale = path[-1].key == "scale" or path[-1].key.startswith("layer_scale")
            return rng.normal(scale, 0.05, leaf.shape).astype(np.float32)

        params = jax.tree_util.tree_map_with_path(draw, shapes)
        vit_jax.save(folder / name.replace("/", "_"), model, params, layout=layout)
        np.savez(folder / name.replace("/", "_") / "io.npz", images=images, logits=apply(model, params, images))


def apply(model, params, images):
    import jax

    with jax.default_matmul_precision("highest"):
        return jax.jit(model.apply)(params, images)[0]


def read_cases(folder):
    """Prints how far our logits of their models are from theirs."""
    import numpy as np

    import vit_jax

    for path in sorted(folder.iterdir()):
        io = np.load(path / "io.npz")
        model, params = vit_jax.load(path)
        ours = np.asarray(apply(model, params, io["images"]))
        print(f"{path.name}, read by us: {abs(ours - io['logits']).max() / abs(io['logits']).max():.1e}", flush=True)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment with torch, timm and transformers")
    args = parser.parse_args(argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        ours.mkdir()
        theirs.mkdir()
        write_cases(ours)
        subprocess.run([args.python, THEIRS, ours, theirs], check=True)
        read_cases(theirs)


if __name__ == "__main__":
    main(sys.argv)
