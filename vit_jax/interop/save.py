"""Parameters into a file, in one of the layouts."""

from pathlib import Path
from typing import Any

import numpy as np

from vit_jax import UserError, choose, models, tree
from vit_jax.interop import google, ours
from vit_jax.interop.archive import write

LAYOUTS = {"ours": None, "google": google.GOOGLE, "big_vision": google.BIG_VISION}


def save(path: str | Path, model: models.Model, params: dict[str, Any], layout: str = "ours") -> None:
    """Writes `<name>.npz`: float32 arrays by the names of a layout.

    Args:
        path: ends in .npz.
        model: what the parameters are of.
        params: its parameters.
        layout: ours, with `<name>.json` beside it (model, preprocessing, class names); google, vision_transformer's;
            or big_vision. The last two hold the arrays alone.

    Raises:
        UserError: the path does not end in .npz, the parameters are not the model's, or the layout cannot express it.
    """
    wanted = LAYOUTS[choose("layout", layout, LAYOUTS)]
    path = Path(path).expanduser()
    if path.suffix != ".npz":
        raise UserError(f"cannot write {path.name}: give a path that ends in .npz.")
    ours.check(model, params)
    arrays = {name: np.asarray(leaf, np.float32) for name, leaf in tree.flatten(params).items()}
    if wanted is None:
        ours.write(path, model, arrays)
    else:
        write(path, google.arrays(arrays, model.spec, wanted))
