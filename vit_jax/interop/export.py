"""Saves a model with its parameters as an .npz file in one of the layouts."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax import UserError, choose, models, tree, user_errors
from vit_jax.interop import description, layouts, npz
from vit_jax.interop.weights import check_parameters
from vit_jax.storage import atomic_write

LAYOUTS = {"ours": None, "google": layouts.GOOGLE, "big_vision": layouts.BIG_VISION}


def save(path: str | Path, model: models.Model, params: dict[str, Any], layout: str = "ours") -> None:
    """Writes `<name>.npz`: float32 arrays by the names of a layout.

    Args:
        path: ends in .npz.
        model: the model of the parameters.
        params: its parameters: arrays, or objects with `shape`, `dtype` and `__array__`.
        layout: ours, with `<name>.json` beside it (model, preprocessing, class names); google, that of
            vision_transformer; or big_vision. The last two contain only the arrays.

    Raises:
        UserError: the path does not end in .npz or cannot be written, the parameters are not those of the model, or the
            layout cannot express it.
    """
    chosen = LAYOUTS[choose("layout", layout, LAYOUTS)]
    if "://" in str(path) or Path(path).suffix != ".npz":
        raise UserError(f"cannot write {path}: give a local path that ends in .npz.")
    path = Path(os.path.expanduser(path))
    arrays = tree.flatten(params)  # converted to NumPy's one by one as they are written
    check_parameters(model, arrays)
    if chosen:
        arrays = layouts.to_layout({name: np.asarray(leaf) for name, leaf in arrays.items()}, model.spec, chosen)
    with contextlib.ExitStack() as both:  # both files are replaced when both are written
        npz.write_archive(both.enter_context(_replace_file(path)), arrays)
        if not chosen:
            description.write_description(both.enter_context(_replace_file(path.with_suffix(".json"))), model)


@contextlib.contextmanager
def _replace_file(path: Path) -> Iterator[Path]:
    with user_errors(f"cannot write {path}"), atomic_write(path) as temporary:
        yield temporary
