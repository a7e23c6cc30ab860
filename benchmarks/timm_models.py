"""Writes `vit_jax/interop/timm_models.csv`, which describes timm's architectures, from the models of timm.

Example:
  ../torch/bin/python -m benchmarks.timm_models vit_jax/interop/timm_models.csv

Runs where torch and timm are installed, which our environment does not need. The architectures are read from the file.
All other columns are written anew. Width and depth of a hybrid are those of its Transformer.
"""

import csv
import sys
from pathlib import Path

ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "swiglu"}
COLUMNS = ("architecture", "num_heads", "activation", "norm_epsilon")
COLUMNS += ("width", "depth", "mlp_dim", "resolution", "rotary_grid")


def read_architecture(name):
    """Returns the row of an architecture, in the order of `COLUMNS`."""
    import timm
    import torch

    with torch.device("meta"):
        model = timm.create_model(name)
    block = model.blocks[0]
    sizes = (model.embed_dim, len(model.blocks), block.mlp.fc2.in_features, model.default_cfg["input_size"][1])
    activation = ACTIVATIONS[type(block.mlp.act).__name__]
    rotary_grid = (getattr(getattr(model, "rope", None), "ref_feat_shape", None) or [0])[0]
    return (name, block.attn.num_heads, activation, block.norm1.eps, *sizes, rotary_grid)


def main(argv):
    path = Path(argv[1])
    names = [row["architecture"] for row in csv.DictReader(path.open(encoding="utf-8"))]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(read_architecture, names))


if __name__ == "__main__":
    main(sys.argv)
