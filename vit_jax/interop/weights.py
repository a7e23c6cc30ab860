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
from vit_jax.interop import catalog, description, layouts, mapping, npz

LAYOUTS = {"ours": None, "google": layouts.GOOGLE, "big_vision": layouts.BIG_VISION}

Flat = dict[str, np.ndarray]  # parameters by name


def load(path: str | Path, *, resample: str | None = None, **fields: Any) -> tuple[models.Model, dict[str, Any]]:
    """Returns the model and the float32 parameters that a path holds.

    What files of other projects do not say is inferred from their arrays, and told on stderr.

    Args:
        path: a workdir (its `model.npz`, or its newest checkpoint while training goes on), one checkpoint folder
            `<workdir>/checkpoints/<step>`, or an npz: ours beside its JSON file, vision_transformer's or big_vision's;
            local or remote; or the name of a published checkpoint, see `vit_jax.list_models`, which is downloaded.
        resample: how learned positions go to another grid of patches: linear, as the authors did, bicubic, or flexi, as
            FlexiViT does; unset: flexi if patch_size is given, else linear.
        **fields: what to change of the model, as for `vit_jax.create`: resolution, dtype, class_names and the like. To
            another patch_size the kernel of the patches is resized (`models.resize_patches`).

    Raises:
        UserError: the path holds none of these, or not the arrays of the model: names every one that is wrong; or not
            the published model of that name.
    """
    if resample is not None:
        choose("resample", resample, models.RESAMPLINGS)
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        where, listed = _locate(path)
        model, params = _read_npz(where, given, listed) if where.is_file() else _read_checkpoint(where, given)
        if "head/kernel" in params and not params["head/kernel"].any():
            logging.getLogger(__name__).warning("%s: the head is all zeros, so it is for fine-tuning only", path)
        if listed and listed.flexi:
            wanted = models.create(listed.model).field("patch_size")
            given = {"patch_size": wanted, "resolution": listed.resolution} | given
        model, params = _at_size(model, params, given, resample)
        if listed and model.spec.position.image_size == models.image_size(listed.resolution):
            model = dataclasses.replace(model, preprocess=given.get("preprocess", listed.preprocess))
        return model, tree.unflatten(params)
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
        arrays = layouts.arrays({name: np.asarray(leaf) for name, leaf in arrays.items()}, model.spec, wanted)
    with contextlib.ExitStack() as both:  # they take their places when both are written
        npz.write(both.enter_context(npz.replacing(path)), arrays)
        if not wanted:
            description.write(both.enter_context(npz.replacing(path.with_suffix(".json"))), model)


def _locate(path: str | Path) -> tuple[Path, catalog.CatalogEntry | None]:
    """Returns, here, the npz or the checkpoint folder that is meant, and what is listed of it."""
    try:
        here = Path(path).expanduser()
        exists = here.exists()
        listed = None if exists else catalog.listed(str(path))
        downloaded = None if exists else catalog.download_listed(str(path))
        where = downloaded or checkpoint.local_weights(path)
        exists = where.exists()
    except (OSError, RuntimeError, ValueError) as error:  # what is no path at all
        raise UserError(f"is no path: {error}") from error
    if not exists:
        raise UserError(f"does not exist, nor is it a published checkpoint; {catalog.nearest_listed(str(path))}")
    if where.is_file() or checkpoint.is_checkpoint(where):
        return where, listed
    found = (
        where / description.MODEL_FILE
        if (where / description.MODEL_FILE).is_file()
        else checkpoint.find_checkpoint(where)
    )
    if found is None:
        raise UserError(f"holds neither {description.MODEL_FILE} nor checkpoints")
    return found, None


def _read_npz(path: Path, given: dict[str, Any], listed: catalog.CatalogEntry | None) -> tuple[models.Model, Flat]:
    with npz.open_archive(path) as file:
        layout = layouts.detect(file)
        if layout is None:
            model = _model(*description.arguments(description.described(path)), given)
            shapes = _shapes(model)
            return model, mapping.read(file, {name: mapping.Leaf(name) for name in shapes}, shapes, "")
        layout, inferred = layouts.infer(file, layout, given.get("resolution"))
        if listed:
            _check_listed(listed, layout.name, inferred)
        model = _model(models.model_name(inferred), inferred | layouts.use(inferred, layout), given)
        params = layouts.read(file, layout, model.spec, _shapes(model))
    print(f"{path.name}: {layout.name} layout, {_describe(model, params)}", file=sys.stderr)
    return model, params


def _check_listed(listed: catalog.CatalogEntry, layout: str, found: dict[str, Any]) -> None:
    """Compares what a file holds with what the catalogue says of it; of FlexiViT's, patches and positions may differ.

    Raises:
        UserError: it is another model.
    """
    wanted = models.create(listed.model)
    held = found | ({"patch_size": wanted.field("patch_size")} if listed.flexi else {})
    sized = found["position"] == "learned" and not listed.flexi  # else no array tells the resolution
    resolution = found["resolution"] if sized else models.image_size(listed.resolution)
    has = (layout, models.model_name(held), resolution, found["num_classes"])
    due = (listed.layout, wanted.name, models.image_size(listed.resolution), listed.head)
    if has != due:
        words = "a {1} in the {0} layout, {2[0]}x{2[1]} pixels, {3:,} classes".format
        told = words(layout, models.model_name(found), found["resolution"], found["num_classes"])
        raise UserError(f"its file holds {told}, but listed is {words(*due)}; it is not loaded")


def _read_checkpoint(path: Path, given: dict[str, Any]) -> tuple[models.Model, Flat]:
    params, saved = checkpoint.read_weights(path)
    model = _model(*description.arguments(saved["model"]), given)
    _check(model, params)
    return model, tree.flatten(params)


def _model(name: str, known: dict[str, Any], given: dict[str, Any]) -> models.Model:
    """Returns the model as the user wants it, but with the resolution and the patches that it is stored with."""
    if "num_classes" in given:
        known = known | {"class_names": None}
    stored = models.create(name, **known)
    sizes = {key: stored.field(key) for key in ("resolution", "patch_size")}
    return models.create(name, **(known | given | sizes))


def _at_size(model: models.Model, params: Flat, given: dict[str, Any], method: str | None) -> tuple[models.Model, Flat]:
    """Returns the model at the resolution and with the patches given, if they are. At another resolution its images are
    resized as they are, never cropped.
    """
    old = model.spec
    sizes = {key: given.get(key, model.field(key)) for key in ("resolution", "patch_size")}
    flexible = sizes["patch_size"] != model.field("patch_size")
    name = model.name
    if flexible:
        if old.stem.kind != "patches":
            raise UserError("patch_size cannot change: patches of pixels are resized, not those of a ResNet's features")
        name = f"{name.rpartition('/')[0]}/{sizes['patch_size']}"
    spec = models.create(name, **(model.fields | sizes)).spec
    if flexible:
        params = params | {"embed/kernel": models.resize_patches(params["embed/kernel"], spec.stem.patch_size)}
        sides = [f"{size}x{size}" for size in (old.stem.patch_size, spec.stem.patch_size)]
        print(f"{name}: patches resized from {sides[0]} to {sides[1]} pixels", file=sys.stderr)
    if "position" in params and spec.grid != old.grid:
        method = method or ("flexi" if "patch_size" in given else "linear")
        positions = models.resample_positions(params["position"], old.grid, spec.grid, old.class_rows, method)
        params = params | {"position": positions}
    pipe = given.get("preprocess", model.preprocess)
    last = (pipe or "").rpartition("|")[2]
    resized = spec.position.image_size != old.position.image_size
    if resized and "preprocess" not in given and last.startswith("value_range"):
        height, width = spec.position.image_size
        pipe = f"resize(({height},{width}))|{last}"
    return dataclasses.replace(model, name=name, spec=spec, preprocess=pipe), params


def _shapes(model: models.Model) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's parameters by name."""
    return dict(_traced(model.spec))


@functools.lru_cache
def _traced(spec: models.ModelSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    # Once for a model: a file is read by its shapes, and what was read, or is written, is compared with them.
    learned = spec.position.kind == "learned"
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
    words += [f"{height}x{width} pixels", f"{spec.position.kind} positions", f"{spec.head.pooling} pooling"]
    size = spec.head.representation_size
    words += [f"a tanh layer of width {size}" if size else "a tanh layer"] if spec.head.pre_logits else []
    words += [f"{spec.head.num_classes:,} classes", f"{sum(map(np.size, params.values())):,} parameters"]
    return ", ".join(words)
