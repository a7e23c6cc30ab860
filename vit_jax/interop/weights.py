"""Loads a model and its parameters from files, whose layout is recognised by content, and saves them in a layout."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax import (
    UserError,
    checkpoint,
    choose,
    models,
    printable,
    refuse,
    tell,
    tree,
    user_errors,
    without_queries,
)
from vit_jax.interop import archives, imagenet_classes, locate, model_json, peft, published_config, transfer
from vit_jax.interop.catalog import CatalogEntry
from vit_jax.interop.layout import WeightsFile, describe_file, read_file, recognise, write_file
from vit_jax.interop.layout_table import LAYOUTS, PROGRAMS, Target, choose_target
from vit_jax.interop.licences import CARD, Licence, describe_licence, is_own_card, write_card
from vit_jax.interop.program_interface import Export
from vit_jax.model import Model, create, parameter_shapes
from vit_jax.storage import atomic_write

FlatParameters = dict[str, np.ndarray]  # our name -> parameter


def load(path: str | Path, *, resample: str | None = None, **fields: Any) -> tuple[Model, dict[str, Any]]:
    """Returns the model and the float32 parameters at a path.

    What files of other projects do not state is inferred from their arrays. The inferred model is printed to standard
    error.

    Args:
        path: what to load, local or remote. A workdir stands for its `model.npz` or, while training goes on, its newest
            checkpoint. Other paths are one checkpoint folder `<workdir>/checkpoints/<step>`; a file in any layout of
            `layout_table.LAYOUTS` (.npz, .safetensors, or the index of several .safetensors files); and a folder that
            timm, transformers or PEFT wrote. A folder of PEFT stands for the weights that its `adapter_config.json`
            names, with the adapters added. The name of a published checkpoint (`vit_jax.list_models`) and
            `hf-hub:OWNER/NAME` are downloaded.
        resample: how learned positions are resampled to another grid of patches, one of `models.RESAMPLINGS`. None:
            flexi, as FlexiViT does, if patch_size is given; else as the library does whose layout the file has.
        **fields: changes to the model, as for `vit_jax.create`: resolution, dtype, class_names and others. Without a
            resolution it is that of the images which the stated preprocessing gives, else that of the positions;
            resolution="native" always means the latter. For another patch_size the kernel that projects the patches is
            resized, as FlexiViT does.

    Raises:
        UserError: nothing that can be loaded is at the path, the arrays are not those of the model, or the model is not
            the published one with that name. The message names every wrong array.
    """
    model, params = _load(path, resample, fields)
    if licence := describe_licence(model):
        tell(f"licence: {licence}")
    return model, params


def _load(path: str | Path, resample: str | None, fields: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    if resample is not None:
        choose("resample", resample, models.RESAMPLINGS)
    given = {name: value for name, value in fields.items() if value is not None}
    is_native = isinstance(given.get("resolution"), str) and given["resolution"] == "native"
    if is_native:
        del given["resolution"]
    with _errors_of(path):
        located = locate.locate_weights(path)
        entry = located.entry
        if located.adapter:
            model, params = _load_adapted(located.adapter, given, resample)
        else:
            model, params = (_load_file if located.path.is_file() else _load_checkpoint)(located, given)
        if "head/kernel" in params and not params["head/kernel"].any():
            logging.getLogger(__name__).warning("%s: the head is all zeros; fine-tune it before you use it", path)
        pipe = (entry and entry.preprocess) or model.preprocess
        if entry and entry.flexi:
            given = _flexi_sizes(entry) | given
        elif not is_native and given.keys().isdisjoint(("resolution", "patch_size", "preprocess")):
            given |= _stated_resolution(model, pipe)
        before = models.image_size(entry.resolution) if entry else model.image_size
        model, params = _resize(model, params, given, resample)
        if "preprocess" not in given and pipe and pipe.rpartition("|")[2].startswith("value_range"):
            scaled = published_config.scale_pipe(pipe, before, model.image_size)
            model = dataclasses.replace(model, preprocess=scaled)
            if scaled != pipe:
                tell(f"{model.name}: its preprocessing, {pipe}, becomes {scaled} for images of {_in_words(model)}")
        return model, tree.unflatten(params)


def read_model(path: str | Path) -> Model:
    """Returns the model of the weights at a path as `load` does, at the resolution of its positions.

    Only adapters and what they are added to are read. Raises as `load`.
    """
    with _errors_of(path):
        located = locate.locate_weights(path)
        if located.adapter:
            return _load_adapted(located.adapter, {}, None)[0]
        if not located.path.is_file():
            return model_json.restore_model(checkpoint.manifest_of(located.path)["model"])
        with archives.open_archive(located.path) as opened:
            model, _ = _describe(recognise(archives.unwrapped(opened), LAYOUTS.values()), located, {})
        return _resized(model, _flexi_sizes(located.entry) if located.entry and located.entry.flexi else {})


@contextlib.contextmanager
def _errors_of(path: str | Path) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        shown = printable(without_queries(str(path)))
        raise UserError(f"{shown}: {printable(error)}") from None  # the traceback would not help a user


def _flexi_sizes(entry: CatalogEntry) -> dict[str, Any]:
    """Returns patch size and resolution to which FlexiViT's weights are resized."""
    return {"patch_size": create(entry.model).field("patch_size"), "resolution": entry.resolution}


def save(
    path: str | Path,
    model: Model,
    params: dict[str, Any],
    layout: str | None = None,
    dtype: str = "float32",
    *,
    preprocess: bool = False,
    blocks: Sequence[int] = (),
) -> None:
    """Writes the parameters of a model in a layout, or the model as a program: an .onnx or a .stablehlo file.

    A regression's outputs are standardised in our layout, which states how; others get a head whose outputs are the
    numbers.

    Our layout describes the model (with preprocessing and class names) in `<name>.json` beside an .npz file. A single
    .safetensors file has this description in its header. A folder gets the files by which the layout describes a model,
    and a model card with the licence of the weights. A card that was not written here stays as it is.

    Args:
        path: a file that ends in .npz, .safetensors, .onnx or .stablehlo; or a folder, which gets the arrays and the
            files that describe the model. A folder is not that of a run, and has no other weights that `load` would
            take.
        model: the model of the parameters.
        params: the parameters: arrays, or objects with `shape`, `dtype` and `__array__`.
        layout: one of `layout_table.LAYOUTS`: ours; google, the layout of vision_transformer; big_vision; timm or
            huggingface, whose folders their own libraries load. None: timm for a .safetensors file, else ours.
        dtype: the dtype of the arrays in the file: float32, float16 or bfloat16. A program also computes in it; .onnx
            files have no bfloat16, .stablehlo files no float16.
        preprocess: of a program: whether its images are uint8, see `exports.Export`.
        blocks: of a program: the numbers of the blocks whose tokens it returns besides logits and features.

    Raises:
        UserError: the path has another ending or cannot be written, the description would replace a file of another
            kind, the parameters are not those of the model, the layout or the program cannot express the model, or a
            value is beyond the range of the dtype.
    """
    choose("dtype", dtype, archives.WRITTEN_DTYPES)
    target = choose_target(path, layout)
    if target.layout != "ours":  # which alone states means and deviations
        model, params = undo_standardisation(model, params)
    if target.is_program:
        _save_program(target, Export(model, params, dtype, preprocess, tuple(blocks)))
        return
    refuse((preprocess or blocks, f"preprocess and blocks are for .onnx and .stablehlo files, not for {path}."))
    chosen = LAYOUTS[target.layout]
    arrays = tree.flatten(params)
    _check_parameters(model, arrays)
    if target.layout != "ours":  # which is written as it is: an .npz file needs only one array at a time
        arrays = {name: np.asarray(leaf) for name, leaf in arrays.items()}
    arrays = write_file(chosen, arrays, model.spec)
    # A .safetensors file says itself what it contains: m.json may be that of an m.npz.
    is_noted = target.file.suffix == ".safetensors" and (target.layout == "ours" or not target.is_folder)
    is_described = target.is_folder or (target.layout == "ours" and not is_noted)
    texts = chosen.choose_family(model.spec).config(target.file.name, model) if is_described else {}
    notes = model_json.header_notes(model) if is_noted else {}
    with contextlib.ExitStack() as files, user_errors(f"cannot write {path}"):  # replaced when all are written
        target.prepare(texts)
        texts |= _card(target.file.with_name(CARD), model, target.layout) if target.is_folder else {}
        archives.write_archive(target.file, files.enter_context(atomic_write(target.file)), arrays, dtype, notes)
        for name, text in texts.items():
            files.enter_context(atomic_write(target.file.with_name(name))).write_text(text, encoding="utf-8")


def undo_standardisation(model: Model, params: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    """Returns a model of a regression whose head outputs the numbers themselves, with its parameters.

    Other models are returned as they are.
    """
    if model.target_scale is None:
        return model, params
    means, deviations = np.array(model.target_scale, np.float32).T
    heads = {
        name: {"kernel": np.asarray(params[name]["kernel"]) * deviations}
        | {"bias": np.asarray(params[name]["bias"]) * deviations + means}
        for name in ("head", "distilled_head")
        if name in params
    }
    return dataclasses.replace(model, target_scale=None), params | heads


def _card(path: Path, model: Model, layout: str) -> dict[str, str]:
    """Returns name -> text of the model card to write; nothing if another card is there already."""
    if not path.is_file() or is_own_card(path):
        return {path.name: write_card(model, layout)}
    if licence := describe_licence(model):
        tell(f"{path}: this card is not changed; it must state the licence: {licence}")
    return {}


def _save_program(target: Target, export: Export) -> None:
    params = models.merge_adapters(export.params) if models.is_adapted(export.params) else export.params
    arrays = {name: np.asarray(leaf) for name, leaf in tree.flatten(params).items()}
    _check_parameters(export.model, arrays)
    export = export._replace(params=tree.unflatten(arrays))
    export.check()
    files = PROGRAMS[target.file.suffix](target.file.name, export)
    with contextlib.ExitStack() as written, user_errors(f"cannot write {target.file}"):  # replaced when all are written
        target.prepare(name for name in files if name.endswith(".json"))
        for name, chunks in files.items():
            with written.enter_context(atomic_write(target.file.with_name(name))).open("wb") as file:
                file.writelines(chunks)


def _load_file(located: locate.Located, given: dict[str, Any]) -> tuple[Model, FlatParameters]:
    path = located.path
    with archives.open_archive(path) as opened:
        file = recognise(archives.unwrapped(opened), LAYOUTS.values())
        model, loss = _describe(file, located, given)
        shapes = {name: leaf.shape for name, leaf in _wanted_parameters(model).items()}
        params = read_file(file, model.spec, shapes)
    if file.layout.is_inferred:
        assumed = f", {model.loss} assumed (loss= states another)" if model.field("num_classes") and not loss else ""
        tell(f"{path.name}: {file.layout.name} layout, {_summarise(model, params)}{assumed}")
    return model, params


def _describe(file: WeightsFile, located: locate.Located, given: dict[str, Any]) -> tuple[Model, str]:
    """Returns the model of a file, and the loss that is stated for its head; empty: none is."""
    stated = describe_file(file, located.path, given)
    if located.entry:
        _check_entry(located.entry, file.layout.name, stated.fields)
    loss = given.get("loss") or located.loss or stated.loss
    keywords = stated.keywords | {"loss": loss or _usual_loss(stated.fields["num_classes"])}
    keywords |= located.licence.fields if located.licence.name else {}
    if located.entry and "_quickgelu" in located.entry.name:  # the activation of the training, as timm notes
        keywords["activation"] = "quick_gelu"
    return _create_as_stored(stated.model, keywords, given), loss


def _check_entry(entry: Any, layout: str, inferred: dict[str, Any]) -> None:
    """Compares the layout and the model of a file with the file's entry in the catalog.

    The patches and positions in FlexiViT's files may have other sizes.

    Raises:
        UserError: the layout or the model differs.
    """
    resized = inferred | ({"patch_size": create(entry.model).field("patch_size")} if entry.flexi else {})
    fixed = inferred.get("position") != "learned" or entry.flexi  # then no array determines the resolution
    resolution = models.image_size(entry.resolution) if fixed else inferred["resolution"]
    actual = (layout, models.model_name(resized), resolution, inferred["num_classes"])
    listed = (entry.layout, entry.model, models.image_size(entry.resolution), entry.head)
    if actual != listed:
        words = "a {1} in the {0} layout, {2[0]}x{2[1]} pixels, {3:,} classes".format
        stored = words(layout, models.model_name(inferred), inferred["resolution"], inferred["num_classes"])
        raise UserError(
            f"the file contains {stored}, but the catalog lists {words(*listed)}, so the file was not loaded"
        )


def _load_checkpoint(located: locate.Located, given: dict[str, Any]) -> tuple[Model, FlatParameters]:
    params, manifest = checkpoint.read_weights(located.path)
    stated = model_json.check_description(manifest["model"])
    model = _create_as_stored(stated.model, stated.keywords, given)
    _check_parameters(model, params)
    return model, tree.flatten(params)


def _load_adapted(adapter: peft.Adapter, given: dict[str, Any], resample: str | None) -> tuple[Model, FlatParameters]:
    """Returns the model and the parameters that result when adapters are added to the weights that they name.

    If the adapters' file contains a head, it replaces the head of those weights.
    """
    arrays, notes = adapter.read()
    stated, method = model_json.read_notes(notes), notes.get(peft.METHOD, resample)
    sizes = {key: stated.fields[key] for key in ("patch_size", "resolution")} if stated and method == "flexi" else {}
    base = locate.locate_base(adapter)
    if stated:
        sizes = sizes or {"resolution": "native"}  # which are resampled below, once
    elif "resolution" in given:
        sizes = {"resolution": given["resolution"]}
    try:
        source, loaded = _load(base, method, sizes)
    except UserError as error:
        raise UserError(f"cannot load the weights to adapt: {printable(error)}") from None
    digest = notes.get(peft.DIGEST)
    if digest and digest != locate.digest_weights(base):
        logging.getLogger(__name__).warning(
            "%s: these weights are not the file with which the adapters were trained; if they are not the same weights "
            "in another layout, write the path of those into base_model_name_or_path",
            base,
        )
    licence = Licence(source.licence, source.licence_address).fields
    if stated:
        model = _create_as_stored(stated.model, stated.keywords | ({} if stated.licence else licence), given)
    else:
        changes = peft.adapted_fields(source, arrays)
        own = {name: getattr(source, name) for name in model_json.DESCRIBED}
        keywords = source.fields | own | (changes | {"loss": "softmax"} | model_json.ANSWERS if changes else {})
        model = _create_as_stored(source.name, keywords, given)
        fields = source.fields | {"pooling": model.field("pooling")}  # the pooling reads the same parameters
        source = dataclasses.replace(source, spec=create(source.name, **fields).spec)
    wanted = _wanted_parameters(model)
    keep_head = not peft.has_head(arrays)
    try:
        params = transfer.adapt_parameters(source, loaded, model, wanted, keep_head, method)
    except UserError as error:
        message = str(error).partition("; to match it")[0]
        raise UserError(f"the adapters do not fit {base}, the weights that they name: {message}") from None
    params = peft.add_adapter(adapter, arrays, model, {name: np.asarray(leaf) for name, leaf in params.items()})
    _check_parameters(model, params)
    return model, params


def _create_as_stored(name: str, stored: dict[str, Any], given: dict[str, Any]) -> Model:
    """Returns the model with the user's changes, but still with the resolution and the patch size of the file."""
    if "num_classes" in given:
        stored = stored | {"class_names": None, "target_scale": None}
    sizes = {key: create(name, **stored).field(key) for key in ("resolution", "patch_size")}
    return create(name, **(stored | given | sizes))


def _resize(
    model: Model, params: FlatParameters, given: dict[str, Any], method: str | None
) -> tuple[Model, FlatParameters]:
    """Returns the model and its parameters at the resolution and patch size in `given`; unchanged without them."""
    resized = _resized(model, given)
    if resized is model:
        return model, params
    return resized, transfer.resample(model, params, resized, method or ("flexi" if "patch_size" in given else None))


def _resized(model: Model, given: dict[str, Any]) -> Model:
    """Returns a model with the resolution and patch size in `given`; the same object without a change."""
    stored = {key: model.field(key) for key in ("resolution", "patch_size")}
    sizes = {key: given.get(key, value) for key, value in stored.items()}
    if sizes == stored:
        return model
    name, old, new = model.name, model.field("patch_size"), sizes["patch_size"]
    if new != old:
        if model.field("stem") != "patches":
            raise UserError("patch_size cannot change: only patches of pixels can be resized, not those of a ResNet")
        name = f"{name.rpartition('/')[0]}/{new}"
    spec = create(name, **(model.fields | sizes)).spec
    if new != old:
        tell(f"{name}: patches resized from {old}x{old} to {new}x{new} pixels")
    return dataclasses.replace(model, name=name, spec=spec)


def _stated_resolution(model: Model, pipe: str | None) -> dict[str, Any]:
    """Returns the resolution of the images that the pipe of a model gives; nothing if the model cannot have it.

    If it is another than that of the model's positions, a line on standard error says so.
    """
    size = published_config.output_size(pipe) if pipe else None
    if size is None or size == model.image_size or any(side % model.spec.tile for side in size):
        return {}
    stated = model.with_fields(resolution=size)
    tell(
        f"{model.name}: its preprocessing, {pipe}, gives images of {_in_words(stated)}, which are taken; "
        f"its positions are for {_in_words(model)}"
    )
    return {"resolution": size}


def _in_words(model: Model) -> str:
    height, width = model.image_size
    tokens = f", {model.spec.tokens:,} tokens" if isinstance(model.spec, models.ModelSpec) else ""
    return f"{height}x{width} pixels{tokens}"


def _usual_loss(num_classes: int) -> str:
    """Returns the usual loss of heads with this number of classes: sigmoid for ImageNet-21k, else softmax."""
    return "sigmoid" if num_classes > 1000 and imagenet_classes.class_names(num_classes) else "softmax"


def _wanted_parameters(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a model's parameters by name."""
    # The table of fixed positions, which may be large, is not computed.
    size = model.image_size if model.spec.has_sized_parameters else (model.spec.tile, model.spec.tile)
    return tree.flatten(parameter_shapes(model, size))


def _check_parameters(model: Model, params: Mapping[str, Any]) -> None:
    """Compares parameters with those of a model.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    if wrong := tree.differences(params, _wanted_parameters(model)):
        raise UserError(f"the arrays do not match the model {model.name}: {'; '.join(wrong)}.")


def _summarise(model: Model, params: FlatParameters) -> str:
    named = ("width", "depth", "mlp_dim", "num_heads", "stem", "stages", "stem_width")
    words = [model.name, *(f"{name} {value}" for name, value in model.fields.items() if name in named)]
    height, width = model.image_size
    words += [f"{height}x{width} pixels", *model.spec.traits, f"{model.field('num_classes'):,} classes"]
    words += [f"{sum(map(np.size, params.values())):,} parameters"]
    return ", ".join(words)
