"""Which dimension of a Transformer to scale: depth, width, MLP, patches or all of them: appendix D.2, Figure 8.

Around 8 blocks of width 1024 with MLPs of 2048 and patches of 32x32 pixels, one dimension is varied at a time.
JFT-300M, 7 epochs, by 5-shot accuracy on ImageNet.

Paper: curves of 20 to 60 % over a tenfold of the compute, without numbers. Depth helps most, up to 64 blocks and less
after 16; width helps least; smaller patches help without new parameters; compute predicts better than parameters.
Hardware and time are not stated.
Ours: not run at this size; no number.
    python -m vit_jax.sweep --config=configs/studies/shape.py --config.data.source=array_record:DATA --workdir=RUNS
    python -m vit_jax.sweep --config=configs/studies/shape.py:small=yes --config.data.data_dir=FOLDER --workdir=RUNS
    python -m vit_jax.sweep --plot=shape.svg RUNS

UNCONFIRMED, so chosen here: all values but the base and the depth of 64; 64 channels a head, 16 in the small form; the
learning rate, that of L/32, which has this width and these patches; `all` halves or doubles depth, width and MLP and
changes the patches with them.
"""

from ml_collections import ConfigDict

from configs import jft
from configs.studies import small

# Depth, width, MLP, patch: of the base, and of both ends of the line `all`; then the values of each line.
BASE, ENDS, HEAD = (8, 1024, 2048, 32), ((4, 512, 1024, 56), (16, 2048, 4096, 16)), 64
LINES = {
    "depth": (2, 4, 16, 32, 64),
    "width": (256, 512, 2048, 4096),
    "mlp": (512, 1024, 4096, 8192),
    "patch": (56, 16, 8),
}
SMALL_BASE, SMALL_ENDS, SMALL_HEAD = (4, 64, 128, 8), ((2, 32, 64, 16), (6, 80, 160, 4)), 16
SMALL_LINES = {"depth": (1, 2, 8, 16), "width": (32, 128, 192), "mlp": (64, 256, 512), "patch": (16, 4)}


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe that all runs share, without the shape; `arg` may be small=yes.

    Raises:
        ValueError: `arg` is something else.
    """
    if small.is_small(arg):
        return shaped(small.recipe(), *SMALL_BASE, SMALL_HEAD)
    return shaped(small.by_five_shots(jft.recipe("ViT/32", epochs=7.0, base_lr=6e-4)), *BASE, HEAD)


def get_grid(arg: str = "") -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run; the base is a point of every line."""
    is_small = small.is_small(arg)
    base, ends, head = (SMALL_BASE, SMALL_ENDS, SMALL_HEAD) if is_small else (BASE, ENDS, HEAD)
    shapes = {f"base/{'-'.join(map(str, base))}": base}
    for place, (line, values) in enumerate((SMALL_LINES if is_small else LINES).items()):
        shapes |= {f"{line}/{value}": (*base[:place], value, *base[place + 1 :]) for value in values}
    shapes |= {f"all/{'-'.join(map(str, shape))}": shape for shape in ends}
    return {name: shape_fields(*shape, head) for name, shape in shapes.items()}


def shape_fields(depth: int, width: int, mlp_dim: int, patch: int, head: int) -> dict[str, object]:
    """Returns the fields of a shape, with so many channels in a head."""
    sizes = {"model.depth": depth, "model.width": width, "model.mlp_dim": mlp_dim, "model.num_heads": width // head}
    return {"model.name": f"ViT/{patch}", **sizes}


def shaped(config: ConfigDict, *shape: int) -> ConfigDict:
    """Gives a recipe a shape."""
    config.update_from_flattened_dict(shape_fields(*shape))
    return config
