"""A model and its parameters from whatever holds them, told by its content; and into a file of one of the layouts."""

import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import UserError, checkpoint, choose, models, shown, tree
from vit_jax.interop import archive, google, ours, published, table

LAYOUTS = {"ours": None, "google": google.GOOGLE, "big_vision": google.BIG_VISION}

Flat = dict[str, np.ndarray]  # parameters by name


def load(path: str | Path, *, resample: str = "linear", **fields: Any) -> tuple[models.Model, dict[str, Any]]:
    """Returns the model and the float32 parameters that a path holds.

    What files of other projects do not say is inferred from their arrays, and told on stderr.

    Args:
        path: a workdir (its `model.npz`, or its newest checkpoint while training goes on), one checkpoint folder
            `<workdir>/checkpoints/<step>`, or an npz: ours beside its JSON file, vision_transformer's or big_vision's;
            local or remote; or the name of a published checkpoint, see `vit_jax.list_models`, which is downloaded.
        resample: how learned positions go to another resolution: linear, as the authors did, or bicubic.
        **fields: what to change of the model, as for `vit_jax.create`: resolution, dtype, class_names and the like.

    Raises:
        UserError: the path holds none of these, or not the arrays of the model: names every one that is wrong.
    """
    choose("resample", resample, models.RESAMPLINGS)
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        where = _locate(path)
        model, params = _read_npz(where, given) if where.is_file() else _read_checkpoint(where, given)
        if "head/kernel" in params and not params["head/kernel"].any():
            logging.getLogger(__name__).warning("%s: the head is all zeros, so it is for fine-tuning only", path)
        return _at_resolution(model, params, given, resample)
    except UserError as error:
        raise UserError(f"{shown(path)}: {shown(error)}") from None  # its traceback tells a user nothing more


def save(path: str | Path, model: models.Model, params: dict[str, Any], layout: str = "ours") -> None:
    """Writes `<name>.npz`: float32 arrays by the names of a layout.

    Args:
        path: ends in .npz.
        model: what the parameters are of.
        params: its parameters: arrays, or whatever has `shape`, `dtype` and `__array__`.
        layout: ours, with `<name>.json` beside it (model, preprocessing, class names); google, vision_transformer's;
            or big_vision. The last two hold the arrays alone.

    Raises:
        UserError: the path does not end in .npz or cannot be written, the parameters are not the model's, or the layout
            cannot express it.
    """
    wanted = LAYOUTS[choose("layout", layout, LAYOUTS)]
    if "://" in str(path) or Path(path).suffix != ".npz":
        raise UserError(f"cannot write {path}: give a local path that ends in .npz.")
    path = Path(os.path.expanduser(path))
    arrays = tree.flatten(params)  # made NumPy's one by one as they are written
    _check(model, arrays)
    if wanted:
        arrays = google.arrays({name: np.asarray(leaf) for name, leaf in arrays.items()}, model.spec, wanted)
    with contextlib.ExitStack() as both:  # they take their places when both are written
        archive.write(both.enter_context(archive.replacing(path)), arrays)
        if not wanted:
            ours.write(both.enter_context(archive.replacing(path.with_suffix(".json"))), model)


def _locate(path: str | Path) -> Path:
    """Returns, here, the npz or the checkpoint folder that is meant."""
    try:
        here = Path(path).expanduser()
        downloaded = None if here.exists() else published.bring(str(path))
        where = downloaded or checkpoint.weights_here(path)
        exists = where.exists()
    except (OSError, RuntimeError, ValueError) as error:  # what is no path at all
        raise UserError(f"is no path: {error}") from error
    if not exists:
        raise UserError(f"does not exist, nor is it a published checkpoint; {published.nearest(str(path))}")
    if where.is_file() or checkpoint.is_checkpoint(where):
        return where
    found = where / ours.WEIGHTS if (where / ours.WEIGHTS).is_file() else checkpoint.find(where)
    if found is None:
        raise UserError(f"holds neither {ours.WEIGHTS} nor checkpoints")
    return found


def _read_npz(path: Path, given: dict[str, Any]) -> tuple[models.Model, Flat]:
    with archive.open_archive(path) as file:
        layout = google.detect(file)
        if layout is None:
            model = _model(*ours.arguments(ours.described(path)), given)
            shapes = _shapes(model)
            return model, table.read(file, {name: table.Leaf(name) for name in shapes}, shapes, "")
        layout, inferred = google.infer(file, layout, given.get("resolution"))
        model = _model(models.name_of(inferred), inferred | google.use(inferred), given)
        params = google.read(file, layout, model.spec, _shapes(model))
    print(f"{path.name}: {layout.name} layout, {_describe(model, params)}", file=sys.stderr)
    return model, params


def _read_checkpoint(path: Path, given: dict[str, Any]) -> tuple[models.Model, Flat]:
    params, saved = checkpoint.read_weights(path)
    model = _model(*ours.arguments(saved["model"]), given)
    _check(model, params)
    return model, tree.flatten(params)


def _model(name: str, known: dict[str, Any], given: dict[str, Any]) -> models.Model:
    """Returns the model as the user wants it, but at the resolution that it is stored at."""
    if "num_classes" in given:
        known = known | {"class_names": None}
    resolution = models.create(name, **known).field("resolution")
    return models.create(name, **(known | given | {"resolution": resolution}))


def _at_resolution(
    model: models.Model, params: Flat, given: dict[str, Any], method: str
) -> tuple[models.Model, dict[str, Any]]:
    """Returns the model at the resolution given, if one is; its images are then resized as they are, never cropped."""
    old = model.spec
    resolution = given.get("resolution", model.field("resolution"))
    spec = models.create(model.name, **(model.fields | {"resolution": resolution})).spec
    if spec.position.image_size == old.position.image_size:
        return model, tree.unflatten(params)
    if "position" in params:
        positions = models.resample(params["position"], old.grid, spec.grid, old.class_rows, method)
        params = params | {"position": positions}
    pipe = given.get("preprocess")
    last = (model.preprocess or "").rpartition("|")[2]
    if pipe is None and last.startswith("value_range"):
        height, width = spec.position.image_size
        pipe = f"resize(({height},{width}))|{last}"
    return dataclasses.replace(model, spec=spec, preprocess=pipe), tree.unflatten(params)


def _shapes(model: models.Model) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's parameters by name."""
    return dict(_traced(model.spec))


@functools.lru_cache
def _traced(spec: models.Spec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    # Once for a model: a file is read by its shapes, and what was read, or is written, is compared with them.
    learned = spec.position.position == "learned"
    # Fixed positions are no parameters: their table, maybe a large one, need not be made.
    size = spec.position.image_size if learned else (spec.stem.patch_size, spec.stem.patch_size)
    init, image = models.Model("", spec).init, jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
    wanted = jax.eval_shape(init, jax.random.key(0), image)
    return tuple((name, leaf.shape) for name, leaf in tree.flatten(wanted).items())


def _check(model: models.Model, params: Mapping[str, Any]) -> None:
    """Compares parameters with what a model wants.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    wanted = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in _shapes(model).items()}
    if wrong := tree.differences(params, wanted):
        raise UserError(f"the arrays are not those of the {model.name} described: {'; '.join(wrong)}.")


def _describe(model: models.Model, params: Flat) -> str:
    spec = model.spec
    told = ("width", "depth", "mlp_dim", "num_heads", "stem", "stages", "stem_width")
    words = [model.name, *(f"{name} {value}" for name, value in model.fields.items() if name in told)]
    height, width = spec.position.image_size
    words += [f"{height}x{width} pixels", f"{spec.position.position} positions", f"{spec.head.pooling} pooling"]
    words += ["a tanh layer"] if spec.head.pre_logits else []
    words += [f"{spec.head.num_classes:,} classes", f"{sum(map(np.size, params.values())):,} parameters"]
    return ", ".join(words)
