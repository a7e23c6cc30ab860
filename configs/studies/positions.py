"""Position embeddings: which, and where they are added: appendix D.4, Table 8. ViT-B/16 by 5-shot accuracy on ImageNet.

Paper, at the stem, in every block, shared by every block: none 61.38 %; 1-D 64.21, 63.96, 64.29 %; 2-D 64.00, 64.05,
64.02 %; relative 64.03 %. Hardware and time are not stated.
Ours: not run at this size; no number.
    python -m vit_jax.sweep --config=configs/studies/positions.py --config.data.source=array_record:DATA --workdir=RUNS
    python -m vit_jax.sweep --config=configs/studies/positions.py:small=yes --config.data.data_dir=FOLDER

The small form has patches of 4x4 pixels, 64 of them.

UNCONFIRMED, so chosen here: the data, JFT-300M for 7 epochs; what docs/models.md says of the tables.
"""

from ml_collections import ConfigDict

from configs import vit_b16_jft
from configs.studies import small

PLACES = ("stem", "blocks", "shared")
KINDS = {"none": ("stem",), "learned": PLACES, "learned2d": PLACES, "relative": ("stem",)}


def get_config(arg: str = "") -> ConfigDict:
    """Returns the recipe that all runs share; `arg` may be small=yes.

    Raises:
        ValueError: `arg` is something else.
    """
    if not small.is_small(arg):
        return small.by_five_shots(vit_b16_jft.get_config())
    config = small.recipe()
    config.model.name = "ViT-mu/4"
    return config


def get_grid(arg: str = "") -> dict[str, dict[str, object]]:
    """Returns name -> fields of each run."""
    return {
        f"{kind}/{place}": {"model.position": kind, "model.position_place": place}
        for kind, places in KINDS.items()
        for place in places
    }
