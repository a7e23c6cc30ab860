"""Weights in and out of files."""

from pathlib import Path
from typing import Any

from vit_jax import UserError, checkpoint, models
from vit_jax.interop import ours
from vit_jax.interop.adapt import adapt
from vit_jax.interop.ours import WEIGHTS, about

__all__ = ["WEIGHTS", "about", "adapt", "load", "save"]

Params = dict[str, Any]


def load(path: str | Path, **fields: Any) -> tuple[models.Model, Params]:
    """Returns the model and the float32 parameters that a path holds, told by its content.

    Args:
        path: a workdir (its `model.npz`, or its newest checkpoint while training goes on), one checkpoint folder
            `<workdir>/checkpoints/<step>`, or a `model.npz` beside its `model.json`; local or remote.
        **fields: fields of the model to change, as for `vit_jax.create`: dtype, attention, dropout_rate and the like.

    Raises:
        UserError: the path holds none of these.
    """
    given, path = path, checkpoint.weights_here(path)
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    if path.is_file():
        description, params = ours.read(path)
    elif (path / WEIGHTS).is_file():
        description, params = ours.read(path / WEIGHTS)
    else:
        folder = path if checkpoint.is_checkpoint(path) else checkpoint.find(path)
        if folder is None:
            raise UserError(f"{given} holds neither {WEIGHTS} nor checkpoints.")
        params, saved = checkpoint.read_weights(folder)
        description = saved["model"]
    model = ours.model_of(description, fields)
    ours.check(str(given), model, params)
    return model, params


def save(path: str | Path, model: models.Model, params: Params) -> None:
    """Writes `<name>.npz` (float32 arrays by name) and, beside it, `<name>.json` (model, preprocessing, class names).

    Raises:
        UserError: the path does not end in .npz.
    """
    path = Path(path).expanduser()
    if path.suffix != ".npz":
        raise UserError(f"cannot write {path.name}: our layout ends in .npz.")
    ours.write(path, model, params)
