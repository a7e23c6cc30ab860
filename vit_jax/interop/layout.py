"""What a layout of files is, and the one reader and the one writer of all layouts.

A layout has families of models. A family is a row of facts: how its files are recognised, how their arrays are named,
which fields of a model the arrays tell. `layout_table.LAYOUTS` lists the layouts with their families. The names of
arrays are a table from our parameters to arrays, by which files are both read and written.
"""

import collections
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vit_jax import UserError, models
from vit_jax.config import Affects, model_fields
from vit_jax.interop import imagenet_classes, licences, model_json
from vit_jax.interop.archives import Archive, RenamedArchive
from vit_jax.interop.model_json import ModelDescription
from vit_jax.interop.published_config import PublishedConfig
from vit_jax.model import Model
from vit_jax.models import BitSpec, ModelSpec

READ_THREADS = min(os.cpu_count() or 1, 4)
MAX_NAMES = 1000  # the most names in one message
MAX_ELEMENTS = 2**40  # of an array

Size = tuple[int, int]  # (height, width) of images, in pixels


# Tables.


class Leaf(NamedTuple):
    """An array of the file that holds one of our parameters, or several.

    If several leaves have the same name, the array of that name holds all of them: they are joined along its first
    axis, in the order of the table.
    """

    name: str
    ones: int = 0  # leading dimensions of 1 that the array has and our parameter lacks
    arrange: Callable[[np.ndarray], np.ndarray] | None = None  # our parameter -> a view with the axes of the file
    merged: int = 1  # leading dimensions of this view that are one in the file


class Stack(NamedTuple):
    """Several arrays of the file that, stacked along an axis, are one of our parameters."""

    axis: int
    parts: list[Any]  # of Leaf or Stack


Part = Leaf | Stack
ParameterTable = dict[str, Part]  # our name -> the arrays of the file
Shapes = dict[str, tuple[int, ...]]
Kind = TypeVar("Kind")


def of_blocks(part: Part, blocks: Sequence[str] | str) -> Part:
    """Returns the arrays of all blocks that make up one of our stacked parameters, given the arrays of one block.

    Args:
        part: the arrays of one block, without the block's name. The axis of a `Stack` in it is an axis of the parameter
            of one block.
        blocks: the prefix of the names in each block. A single text is the prefix in a file whose arrays are stacked
            too: their axis 0 is the layers.
    """
    if isinstance(blocks, str):
        return _of_block(part, blocks, layer_axes=1)
    return Stack(0, [_of_block(part, block, layer_axes=0) for block in blocks])


def _of_block(part: Part, block: str, layer_axes: int) -> Part:
    if isinstance(part, Stack):
        return Stack(part.axis + layer_axes, [_of_block(inner, block, layer_axes) for inner in part.parts])
    return part._replace(name=f"{block}{part.name}")


def convolutions(stages: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Yields (stage, unit, suffix of the name) of every convolution of a ResNet; `stages` are the units in each stage.

    Stages and units are counted from 1. The suffix is 1, 2, 3 or, in the first unit of a stage, also `_proj`.
    """
    for stage, units in enumerate(stages, 1):
        for unit in range(1, units + 1):
            yield from ((stage, unit, suffix) for suffix in (("1", "2", "3", "_proj") if unit == 1 else "123"))


# Rows.


@dataclass(frozen=True, kw_only=True)
class Family:
    """The models of one kind, in the files of one layout.

    The names of arrays in these facts are those of a file without the prefix that precedes them all.

    Attributes:
        name: the name of the family. For transformers it is the model_type in config.json.
        spec: the type of the models' specs.
        marks: the patterns of names by which a file is recognised: each matches an array at least.
        dimensions: how many dimensions the array of the first mark has, where only this tells the family from a later
            one. None: any.
        prefixes: the pattern of the prefixes that a file may have. Of several before the first mark, the longest is
            taken.
        names: the names of the arrays, in the form that `fields` and `table` take.
        classifiers: what the names of a classifier's arrays begin with, if no prefix precedes them. Without it, a file
            that has arrays without the prefix is refused.
        ignores_others: whether they are left out instead, as an optimizer's state is.
        older_names: (pattern, replacement): the changes that make the current name of an array from an older one.
        ignored: the pattern of the names of arrays that no model needs.
        ignored_beside_classifier: the pattern of those that a model with a classifier does not need.
        fields: takes the arrays, their names, and two sizes of images: the one that the user gave, and the one that the
            configuration states; None: not known. Returns the fields of the model that the arrays tell. Raises
            UserError if an array is missing that determines a field, or if the positions fit no size.
        untold: the fields that no array tells and that have no default.
        defaults: field -> its value if a configuration is there that does not state it.
        own_keys: the keys of a configuration that only the models of this family have.
        read_own_keys: takes a configuration. Returns the fields that these keys state; of others, nothing follows.
        table: takes the spec of a model, and the names. Returns our name -> the arrays that the parameter consists of.
            None: a file has the parameters by our names.
        requires: field -> the values of it that the models of the family have.
        unsupported: takes the spec of a model. Returns feature that no model of the family has -> whether this one has
            it, for features that `requires` does not tell.
        position_rows: takes the spec of a ViT. Returns how many rows of the position table in a file precede those of
            the patches.
        zeros: takes the spec of a model. Returns name -> shape of arrays that its library expects although no model
            needs them. In a file that is read, they may be missing or zero.
        is_written: whether files get these names; if not, they are only read.
        prefix: the prefix in files that are written.
        bare_prefix: the prefix in those of a model without classes; None: the same.
        resample: how the family's library resamples positions, see `models.resample_positions`.
        config: takes the name of a file with arrays, and its model. Returns name -> content of the files that describe
            the model. Raises UserError if they cannot.
    """

    name: str
    spec: Any
    marks: tuple[str, ...]
    dimensions: int | None = None
    prefixes: str = ""
    names: Any = None
    classifiers: tuple[str, ...] = ()
    ignores_others: bool = False
    older_names: tuple[tuple[str, str], ...] = ()
    ignored: str = r"(?!)"  # matches nothing
    ignored_beside_classifier: str = r"(?!)"
    fields: Callable[[Archive, Any, Size | None, Size | None], dict[str, Any]] = lambda arrays, names, given, stated: {}
    untold: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    own_keys: frozenset[str] = frozenset()
    read_own_keys: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda content: {}
    table: Callable[[Any, Any], ParameterTable] | None
    requires: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    unsupported: Callable[[Any], Mapping[str, bool]] = lambda spec: {}
    position_rows: Callable[[ModelSpec], int] = lambda spec: spec.position_rows
    zeros: Callable[[Any], dict[str, tuple[int, ...]]] = lambda spec: {}
    is_written: bool = True
    prefix: str = ""
    bare_prefix: str | None = None
    resample: str = "linear"
    config: Callable[[str, Model], dict[str, str]] = lambda name, model: {}

    def find_prefix(self, arrays: Mapping[str, Any]) -> str | None:
        """Returns the prefix of the names of a file's arrays; None: these are not the names of the family."""
        if not self.marks:
            return ""
        first, *others = self.marks
        starts = (re.fullmatch(f"({self.prefixes}){first}", name) for name in arrays)
        found = max((match for match in starts if match), key=lambda match: len(match[1]), default=None)
        if found is None or self.dimensions not in (None, len(arrays[found[0]].shape)):
            return None
        prefix = found[1]
        own = [name.removeprefix(prefix) for name in arrays]
        return prefix if all(any(re.fullmatch(mark, name) for name in own) for mark in others) else None

    def written_prefix(self, spec: ModelSpec | BitSpec) -> str:
        """Returns the prefix in the file that is written of a model."""
        has_classes = self.bare_prefix is None or Model("", spec).field("num_classes")
        return self.prefix if has_classes else self.bare_prefix or ""

    def name_in_file(self, name: str, prefix: str) -> str:
        """Returns the name of an array in a file with a prefix."""
        return name if name.startswith(self.classifiers) else prefix + name

    def arrays(self, archive: Archive, prefix: str) -> Archive:
        """Returns the arrays of a model by their current names, without those that no model needs.

        Args:
            archive: the arrays of a file.
            prefix: what `find_prefix` returned.

        Raises:
            UserError: there are other arrays, or two arrays get the same name.
        """
        has_classifier = any(name.startswith(self.classifiers) for name in archive)
        ignored = f"{self.ignored}|{self.ignored_beside_classifier}" if has_classifier else self.ignored

        def new_name(old: str) -> str | None:
            name = old.removeprefix(prefix)
            for pattern, replacement in self.older_names:
                name = re.sub(pattern, replacement, name)
            is_other = not old.startswith(prefix)
            if re.fullmatch(ignored, name) or (is_other and self.ignores_others):
                return None
            if is_other and not self.classifiers:
                raise UserError(
                    f"its model is in the arrays named {prefix}..., but it contains others, such as {old}; save the "
                    "model alone"
                )
            return name

        return RenamedArchive(archive, new_name, lambda name: self.name_in_file(name, prefix))

    def lacks(self, spec: ModelSpec | BitSpec) -> tuple[list[str], list[str]]:
        """Returns what a model has that no model of the family has: values of `requires`, and other features."""
        model = Model("", spec)
        values = [
            f"{name} {model.field(name)}" for name, allowed in self.requires.items() if model.field(name) not in allowed
        ]
        return values, [feature for feature, has in self.unsupported(spec).items() if has]


def _untold_error(untold: Sequence[str], fields: Mapping[str, Any]) -> UserError:
    needed = " ".join(f"{name}=" for name in untold)
    return UserError(f"its config.json must be in the same folder; without it, give {needed} to vit_jax.load")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of files of weights.

    Attributes:
        name: its name for users.
        suffixes: the suffixes of the files that may have the layout. A file that is written into a folder gets the
            first one.
        families: its families of models, the most particular first. A file is of the first one whose marks it has, and
            a model is written as one of the last one that has all its features.
        read_config: takes a folder, and the family of a file in it. Returns what the configuration in the folder
            states. Raises UserError if it is that of a model of another family.
        read_name: takes the path of a file, and the width of its model. Returns the fields that the names of the file
            and of its folder tell.
        untold_error: takes the names of the fields that are stated nowhere, and the fields of the model that are known.
            Returns the error.
        usual_pipe: takes the fields of a model. Returns the pipe of operations that prepares its images if nothing
            states it; None: not known.
        states_classes: whether files state the names of the classes and the loss of the head.
        is_inferred: whether the model of a file is inferred from its arrays. If so, it is printed on loading. If not, a
            JSON file beside the arrays describes it.
    """

    name: str
    suffixes: tuple[str, ...]
    families: tuple[Family, ...]
    read_config: Callable[[Path, Family], PublishedConfig] = lambda *_: PublishedConfig({})
    read_name: Callable[[Path, int], dict[str, Any]] = lambda path, width: {}
    untold_error: Callable[[Sequence[str], Mapping[str, Any]], UserError] = _untold_error
    usual_pipe: Callable[[Mapping[str, Any]], str | None] = lambda fields: None
    states_classes: bool = True
    is_inferred: bool = True

    def choose_family(self, spec: ModelSpec | BitSpec) -> Family:
        """Returns the family to which a model belongs.

        Raises:
            UserError: it belongs to none. The message names what the nearest family lacks.
        """
        candidates = [one for one in reversed(self.families) if one.is_written and isinstance(spec, one.spec)]
        if not candidates:
            raise self.refuse(["a BiT"])
        lacking = [(family, *family.lacks(spec)) for family in candidates]
        family, values, features = min(lacking, key=lambda one: (len(one[1]), len(one[2])))
        if values or features:
            raise self.refuse([*values, *features])
        return family

    def refuse(self, features: Sequence[str]) -> UserError:
        """Returns the error for a model with features that the layout cannot hold."""
        return UserError(f"the {self.name} layout does not support {', '.join(features)}; use --layout=ours")


def required_defaults(stated: Collection[str]) -> dict[str, tuple[Any, ...]]:
    """Returns field -> its default alone, for the fields that decide a ViT's arrays but that no file states.

    The layout can hold only a model with these values. `stated` are the fields that the files state.
    """
    names = {*model_fields(Affects.WEIGHTS), "stem", "block", "head", "distilled_head"} - set(stated)
    return {name: (value,) for name, value in Model("", ModelSpec()).values.items() if name in names}


# What rows need to infer a model from the names and shapes of arrays.


def matches(names: Iterable[str], pattern: str) -> set[tuple[str, ...]]:
    """Returns the set of the groups, as tuples, with which a pattern matches the beginning of a name."""
    optional_matches = (re.match(pattern, name) for name in names)
    return {match.groups() for match in optional_matches if match}


def count_units(names: Iterable[str], pattern: str) -> tuple[int, ...]:
    """Returns the number of units in each stage of a ResNet.

    The two groups of the pattern match the number of a stage and the number of a unit.
    """
    counts = collections.Counter(int(stage) for stage, _ in matches(names, pattern))
    return tuple(counts[stage] for stage in sorted(counts))


def image_sizes(
    rows: int, kinds: Mapping[Kind, int], patch_size: int, sizes: Sequence[tuple[int, int] | None]
) -> Iterator[tuple[Kind, tuple[int, int]]]:
    """Yields each (kind, (height, width)) for which a position table has this number of rows.

    Args:
        rows: the number of rows in the table.
        kinds: kind of table -> the number of its rows that belong to no patch.
        patch_size: the side of a patch in pixels.
        sizes: the sizes (height, width) of images to try, in pixels, the likeliest first. None: a square of any size.
    """
    for size in sizes:
        for kind, others in kinds.items():
            patches = rows - others
            side = math.isqrt(max(patches, 0))
            height, width = (size[0] // patch_size, size[1] // patch_size) if size else (side, side)
            if height * width == patches > 0:
                yield kind, (height * patch_size, width * patch_size)


def no_image_size(rows: int) -> UserError:
    """Returns the error for a position table of which `image_sizes` yields nothing."""
    return UserError(
        f"its {rows} position embeddings do not form a square grid; give resolution=(height, width) to vit_jax.load, "
        "or --resolution=HEIGHTxWIDTH to vit_jax.convert"
    )


# Recognising, describing, reading and writing.


class WeightsFile(NamedTuple):
    """An open file whose layout is known."""

    layout: Layout
    family: Family
    arrays: Archive  # by the names of the family


def recognise(archive: Archive, layouts: Iterable[Layout]) -> WeightsFile:
    """Returns a file with its layout: the first whose marks it has. The last layout must accept any file.

    Raises:
        UserError: it contains arrays of something else beside a model.
    """
    rows = ((layout, family, family.find_prefix(archive)) for layout in layouts for family in layout.families)
    layout, family, prefix = next(row for row in rows if row[2] is not None)
    return WeightsFile(layout, family, family.arrays(archive, prefix or ""))


def describe_file(file: WeightsFile, path: Path, given: Mapping[str, Any]) -> ModelDescription:
    """Returns the description of a file's model, which we have written into it, or into a file beside it.

    If there is none, it is made from the arrays and from the configuration beside them. Where both give a field,
    the configuration decides, except that an activation swiglu of the arrays remains. A head with as many classes
    as ImageNet or ImageNet-21k is assumed to have those classes if no names are stated. The licence is that of the
    model card beside a file `model.*`, as folders on the Hugging Face hub have it, or else that of the configuration.

    Args:
        file: the file.
        path: its path.
        given: the fields that the user gave.

    Raises:
        UserError: the description is damaged, a field is stated nowhere, the configuration contradicts the arrays, or
            an array is missing that determines a field.
    """
    layout, family, arrays = file
    if described := model_json.read_notes(arrays.notes):
        return described
    if not layout.is_inferred:
        return model_json.read_description(path)
    stated = layout.read_config(path.parent, family)
    size = models.image_size(given["resolution"]) if "resolution" in given else None
    fields = family.fields(arrays, family.names, size, stated.resolution)
    if family.spec is BitSpec:  # it has none of the fields that are stated
        if {value for name in ("image_mean", "image_std") for value in stated.fields.get(name, ())} - {0.5}:
            raise UserError("vit_jax does not support a BiT whose image mean or std is not 0.5")
        stated = stated._replace(fields={}, sizes={})
    if family.untold and not stated.fields:
        stated = stated._replace(fields=layout.read_name(path, fields["width"]))
    fields = {name: given[name] for name in family.untold if name in given} | fields
    if untold := [name for name in family.untold if name not in {**fields, **stated.fields}]:
        raise layout.untold_error(untold, fields)
    stated.check_sizes(_comparable(fields))
    gated = {"activation": "swiglu"} if fields.get("activation") == "swiglu" else {}
    fields = fields | stated.fields | gated
    if fields.get("pooling") in models.CLASS_POOLINGS:  # these have a class token in any case
        fields["class_token"] = "auto"
    count = fields["num_classes"]
    known = stated.class_names if stated.class_names and len(stated.class_names) == count else None
    names = known or imagenet_classes.class_names(count)
    card = licences.read_card(path.parent) if path.name.startswith("model.") else licences.Licence()
    licence = card if card.name else licences.find_licence(stated.licence)
    return ModelDescription(
        models.model_name(fields),
        fields,
        stated.preprocess or layout.usual_pipe(fields),
        list(names) if names else None,
        stated.loss,
        family.resample,
        licence.name,
        licence.address,
    )


def _comparable(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that a configuration must not contradict."""
    unknown = {"num_classes"} if not fields["num_classes"] else set()  # the file may lack its head
    unknown |= {"patch_size"} if fields.get("stem") == "resnet" else set()  # counted in pixels, not in features
    unknown |= {"resolution"} if fields.get("position") != "learned" else set()
    return {name: value for name, value in fields.items() if name not in unknown}


def is_zero(arrays: Archive, name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether an array of weights is there that has this shape and contains nothing but zeros."""
    if name not in arrays or arrays[name].shape != shape or not arrays[name].is_weights:
        return False
    values: np.ndarray = np.empty(shape, np.float32)
    arrays.read_array(name, values)
    return not values.any()


def read_file(file: WeightsFile, spec: ModelSpec | BitSpec, shapes: Shapes) -> dict[str, np.ndarray]:
    """Returns our name -> parameter of a model; `shapes` are the shapes of the parameters.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type.
    """
    _, family, arrays = file
    zeros = {name for name, shape in family.zeros(spec).items() if is_zero(arrays, name, shape)}
    arrays = RenamedArchive(arrays, lambda name: None if name in zeros else name, arrays.name_in_file)
    table: ParameterTable = {name: Leaf(name) for name in shapes}
    if family.table:
        table = family.table(spec, family.names)
    rows = _more_rows(family, spec)
    position = table.get("position")
    if rows and isinstance(position, Leaf):
        count, width = shapes["position"]
        if position.name in arrays and arrays[position.name].shape[-2:-1] == (count,):
            rows = 0  # the file has the rows of the model, as older files of big_vision
        shapes = shapes | {"position": (count + rows, width)}
    return _add_rows(read_parameters(arrays, table, shapes), -rows)


def _more_rows(family: Family, spec: ModelSpec | BitSpec) -> int:
    """Returns how many rows more than a model's the positions in a file have before those of the patches."""
    if not isinstance(spec, ModelSpec) or spec.position.kind != "learned":
        return 0
    return family.position_rows(spec) - spec.position_rows


def _add_rows(params: dict[str, Any], rows: int) -> dict[str, Any]:
    """Returns parameters with more rows of positions, or with fewer, before those of the patches.

    A new row is zero, and the row of the class token is added to the class token before it is removed: a model only
    ever uses the sum of token and position.
    """
    if not rows:
        return params
    position = np.asarray(params["position"])
    if rows > 0:
        return params | {"position": np.pad(position, ((rows, 0), (0, 0)))}
    return params | {"cls": np.asarray(params["cls"]) + position[0], "position": position[-rows:]}


def read_parameters(archive: Archive, table: ParameterTable, shapes: Shapes) -> dict[str, np.ndarray]:
    """Returns our name -> parameter, in float32.

    An array that holds one parameter is read from the file straight to its final place.

    Args:
        archive: the open file, by the names of the table.
        table: the arrays of the file that our parameters consist of.
        shapes: the shapes of our parameters.

    Raises:
        UserError: names every array that is missing, unexpected, or of another shape or type; or the model has no
            parameter for an array that all files of the layout hold; or an array is not finite.
    """
    if absent := [name for name in table if name not in shapes]:
        raise UserError(
            f"every file of this layout holds {absent[0]}, but a model with the given fields has no such parameter; "
            "leave out the field that removes it"
        )
    for name in table:
        if math.prod(shapes[name]) > MAX_ELEMENTS:
            raise UserError(f"the model is too large: {name} would be {list(shapes[name])}")
    zeros = {name: np.broadcast_to(np.float32(0), shapes[name]) for name in table}
    wanted = {name: _joined_shape(views) for name, views in _views(table, zeros).items()}
    wrong = [f"missing {archive.name_in_file(name)}" for name in wanted if name not in archive]
    wrong += [f"unexpected {archive.name_in_file(name)}" for name in archive if name not in wanted]
    for name in [name for name in wanted if name in archive]:
        shape = archive[name].shape
        if _without_leading_ones(shape) != _without_leading_ones(wanted[name]):
            wrong.append(f"{archive.name_in_file(name)} is {list(shape)}, not {list(wanted[name])}")
        elif not archive[name].is_weights:
            wrong.append(f"{archive.name_in_file(name)} is {archive[name].dtype}, not float32")
    if wrong:
        more = f"; and {len(wrong) - MAX_NAMES:,} more" if len(wrong) > MAX_NAMES else ""
        raise UserError("; ".join(wrong[:MAX_NAMES]) + more)
    parameters: dict[str, np.ndarray] = {name: np.empty(shapes[name], np.float32) for name in table}
    views = _views(table, parameters)

    def read_views(name: str, views: list[View]) -> None:
        is_whole = len(views) == 1 and views[0].merged == 1
        joined = views[0].array if is_whole else np.empty(_joined_shape(views), np.float32)
        archive.read_array(name, joined)
        check_finite(archive.name_in_file(name), joined)
        if not is_whole:
            starts = np.cumsum([view.shape[0] for view in views])[:-1]
            for view, values in zip(views, np.split(joined, starts), strict=True):
                view.array[...] = values.reshape(view.array.shape)

    with ThreadPoolExecutor(READ_THREADS) as pool:
        list(pool.map(read_views, views.keys(), views.values()))
    return parameters


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises UserError if a value of an array of weights is NaN or infinite; `name` is the array's name in the file."""
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = np.isfinite(array.sum()) or np.isfinite(array).all()  # the first is fast, but a sum may overflow
    if not is_finite:
        raise UserError(f"{name} contains values that are not finite; the training had failed, or the file is damaged")


def write_file(layout: Layout, params: dict[str, Any], spec: ModelSpec | BitSpec) -> dict[str, Any]:
    """Returns the arrays of a file.

    Args:
        layout: the layout of the file.
        params: our name -> parameter.
        spec: the spec of the model.

    Raises:
        UserError: the layout cannot hold the model.
    """
    family = layout.choose_family(spec)
    if family.table is None:
        return params
    params = _add_rows(params, _more_rows(family, spec))
    prefix = family.written_prefix(spec)
    arrays = file_views(family.table(spec, family.names), params)
    arrays |= {name: np.zeros(shape, np.float32) for name, shape in family.zeros(spec).items()}
    return {family.name_in_file(name, prefix): array for name, array in arrays.items()}


def file_views(table: ParameterTable, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns name -> array of the file: a view of one of our parameters, or a copy that joins several of them."""
    files: dict[str, np.ndarray] = {}
    for name, views in _views(table, parameters).items():
        parts = [view.array.reshape(view.shape) for view in views]
        files[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return files


class View(NamedTuple):
    """A view of one of our parameters, whose first `merged` dimensions are one in the file."""

    array: np.ndarray
    merged: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        shape = self.array.shape
        return shape if self.merged == 1 else (math.prod(shape[: self.merged]), *shape[self.merged :])


def _views(table: ParameterTable, parameters: Mapping[str, np.ndarray]) -> dict[str, list[View]]:
    """Returns name in the file -> the views of our parameters that the array of this name consists of."""
    views: dict[str, list[View]] = {}
    for ours, part in table.items():
        for name, view in _views_of_part(part, np.asarray(parameters[ours])):
            views.setdefault(name, []).append(view)
    return views


def _joined_shape(views: list[View]) -> tuple[int, ...]:
    first = views[0].shape
    return first if len(views) == 1 else (sum(view.shape[0] for view in views), *first[1:])


def _views_of_part(part: Part, array: np.ndarray) -> Iterator[tuple[str, View]]:
    if isinstance(part, Stack):
        for inner, view in zip(part.parts, np.moveaxis(array, part.axis, 0), strict=True):
            yield from _views_of_part(inner, view)
    else:
        arranged = part.arrange(array) if part.arrange else array
        yield part.name, View(arranged[(np.newaxis,) * part.ones], part.merged)


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without leading dimensions of 1, of which old files have more."""
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape
