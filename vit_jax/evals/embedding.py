"""What a model computes for all images of a source, as Parquet files in a folder: the work of `vit_jax.embed`.

The images, in their order, are cut into ranges of equal length, and each range becomes a file. A host writes its own
files, each whole or not at all, on its own devices: no host waits for another, and a repeated command writes the files
that are missing. `info.json`, written first, states all that the files depend on.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import UserError, data, interop, models, refuse, sharding, tell, user_errors
from vit_jax.data import shards
from vit_jax.data.sources import Rows, Source, row_indices
from vit_jax.evals.outputs import Arrays, fetch_late
from vit_jax.inference import Inference
from vit_jax.json_text import to_json
from vit_jax.storage import filesystem
from vit_jax.tree import ArrayTree

FORMAT, INFO = 1, "info.json"
# A file has at most about this size; and so few images that little is lost with a file that is not finished, but not
# many more than 4,096 files are written.
FILE_BYTES, FEW_ROWS, MANY_FILES = 2**26, 2**12, 2**12
OutputStep: TypeAlias = Callable[[ArrayTree, jax.Array], dict[str, jax.Array]]
DTYPES = ("float32", "float16", "bfloat16")
TOLD = 10  # damaged images that are told one by one


class Outputs(NamedTuple):
    """What is written of each image.

    Attributes:
        vectors: features (`pre_logits`), tokens (of the last block, normalised), logits or, of a regression, the
            numbers, and block_N, the tokens that block N gives, counted from 0.
        dtype: the dtype of these.
        top: the number of most probable classes, with their probabilities.
    """

    vectors: tuple[str, ...]
    dtype: str
    top: int

    def check(self, program: Inference) -> None:
        """Raises UserError if the model lacks an output."""
        model, blocks = program.model, models.count_blocks(program.params)
        classes = model.field("num_classes") or 0
        names = ["features", "tokens", *(["logits"] if classes else []), *(f"block_{n}" for n in range(blocks))]
        absent = [name for name in self.vectors if name not in names]
        refuse(
            (
                self.dtype not in DTYPES,
                f"vectors are written as {', '.join(DTYPES)}, not {self.dtype}.",
            ),
            (
                absent,
                f"{model.name} has no output {', '.join(absent)}; choose from features, tokens"
                f"{', logits' if classes else ''}{f', block_0 to block_{blocks - 1}' if blocks else ''}.",
            ),
            (len({*self.vectors}) < len(self.vectors), f"an output is named twice in {','.join(self.vectors)}."),
            (
                not self.vectors and not self.top,
                "nothing is to be written; name outputs, such as features, or a number of top classes.",
            ),
            (
                self.top and (not classes or model.field("head") == "patches" or model.is_regression),
                f"{model.name} predicts no classes; leave out the top classes, or fine-tune it first.",
            ),
            (not 0 <= self.top <= max(classes, 0), f"top must be between 0 and {classes}, not {self.top}."),
        )


class Info(NamedTuple):
    """What `info.json` states: all that the files depend on.

    Attributes:
        format: the number of this format.
        source: the source as the command names it.
        split: the split as the command names it; "": it names none.
        images: the number of images, one a row.
        rows: the number of images in each file but the last.
        dtype: the dtype of the vectors.
        vectors: name of a vector -> its shape.
        top: the number of classes in the column `classes`.
        model: the name of the model.
        weights: a digest of its weights, see `interop.digest_weights`.
        licence: the licence of the weights, with its address; "" if it is not known.
        preprocess: how the images were preprocessed.
        labels: whether there is a column `label`.
        class_names: the names of the classes of the labels, if they are known.
        data: identifies the data set without the split.
        parts: what the split consists of: [whole split, first image, the image after the last].
        stamps: of each part, a text that changes when its files change.
    """

    format: int
    source: str
    split: str
    images: int
    rows: int
    dtype: str
    vectors: dict[str, list[int]]
    top: int
    model: str
    weights: str
    licence: str
    preprocess: str
    labels: bool
    class_names: list[str] | None
    data: str
    parts: list[list[Any]]
    stamps: list[str]

    @property
    def files(self) -> int:
        """The number of files."""
        return math.ceil(self.images / self.rows)

    def file_name(self, number: int) -> str:
        """Returns the name of a file."""
        return f"vectors-{number:05}-of-{self.files:05}.parquet"

    def range_of(self, number: int) -> range:
        """Returns the indices of the images of a file."""
        return range(number * self.rows, min((number + 1) * self.rows, self.images))


def identify_data(source: Source) -> str:
    """Returns a text that differs between data sets, versions, lists of files and classes, but not between splits."""
    return dataclasses.replace(source, parts=(), shards=None).fingerprint


def stamp_part(source: Source, split: str, rows: Rows) -> str:
    """Returns a text that changes when files of a part of a source change; empty: the digest covers the contents."""
    return source.file_stamp(split, rows) if source.file_stamp else ""


def make_info(
    program: Inference,
    step: OutputStep,
    weights: str,
    source: Source,
    words: tuple[str, str],
    labels: bool,
    wanted: Outputs,
) -> Info:
    """Returns what is going to be written.

    Args:
        program: the functions of the model.
        step: the function of its outputs.
        weights: a digest of its weights.
        source: the images.
        words: source and split as the command names them.
        labels: whether labels are written.
        wanted: what is written of each image.

    Raises:
        UserError: the split has folds.
    """
    parts = [[split, rows.start, rows.stop] for split, rows in source.parts if isinstance(rows, range)]
    if len(parts) < len(source.parts):
        raise UserError(
            f"{words[1]} has folds, whose images do not follow each other; write outputs for the whole split, and "
            "evaluations of folds take theirs from these."
        )
    model = program.model
    image = jax.ShapeDtypeStruct((program.mesh.size, *model.image_size, 3), jnp.float32)
    shapes = jax.eval_shape(step, program.params, image)
    vectors = {name: list(shapes[name].shape[1:]) for name in wanted.vectors}
    row_bytes = sum(math.prod(shape) for shape in vectors.values()) * jnp.dtype(wanted.dtype).itemsize + 1
    return Info(
        format=FORMAT,
        source=words[0],
        split=words[1],
        images=len(source),
        rows=min(max(FEW_ROWS, len(source) // MANY_FILES), max(1, FILE_BYTES // row_bytes)),
        dtype=wanted.dtype,
        vectors=vectors,
        top=wanted.top,
        model=model.name,
        weights=weights,
        licence=interop.describe_licence(model),
        preprocess=model.preprocess or "",
        labels=labels,
        class_names=list(source.class_names) if labels and source.class_names else None,
        data=identify_data(source),
        parts=parts,
        stamps=[stamp_part(source, split, rows) for split, rows in source.parts],
    )


def begin_folder(folder: str, info: Info) -> None:
    """Writes `info.json` into a folder, unless it is there.

    Raises:
        UserError: the folder contains other outputs, or cannot be written to.
    """
    path = filesystem.join_path(folder, INFO)
    if not filesystem.exists(path):
        with user_errors(f"cannot write to {folder}"):
            if not filesystem.is_remote(folder):
                Path(folder).mkdir(parents=True, exist_ok=True)
        filesystem.write_bytes(path, to_json(info._asdict(), indent=1).encode())
        return
    found = read_info(folder)
    for name, old, new in zip(Info._fields, found, info, strict=True):
        if old != new and name not in ("source", "split"):  # whose data the other fields identify
            if name == "stamps":
                raise UserError(
                    f"images of {info.source} have changed since {folder} was written; remove it and write it again."
                )
            what = f"{name} {old!r:.100}, not {new!r:.100}"
            raise UserError(f"{folder} was written with {what}; write to another folder, or remove it.")


def read_info(folder: str) -> Info:
    """Returns what the `info.json` of a folder states.

    Raises:
        UserError: there is no such file, or it is not one of `begin_folder`.
    """
    path = filesystem.join_path(folder, INFO)
    if not filesystem.exists(path):
        raise UserError(f"{folder} contains no {INFO}; write outputs there with python -m vit_jax.embed.")
    stated = filesystem.read_json(path)
    try:
        info = Info(**stated)
        well_formed = (
            info.format == FORMAT
            and all(type(number) is int and number > 0 for number in (info.images, info.rows))
            and all(isinstance(name, str) and isinstance(shape, list) for name, shape in info.vectors.items())
            and all(len(part) == 3 and isinstance(part[0], str) for part in info.parts)
            and len(info.parts) == len(info.stamps)
            and sum(stop - start for _, start, stop in info.parts) == info.images
        )
    except (TypeError, AttributeError):
        well_formed = False
    if not well_formed:
        raise UserError(f"{path} was not written by this version of vit_jax.embed; remove the folder, or use another.")
    return info


def make_step(program: Inference, wanted: Outputs) -> OutputStep:
    """Returns the jitted function (params, images) -> outputs [batch, ...].

    These are the wanted vectors, `finite` (whether all of them are), and `probabilities` and `classes` if top classes
    are wanted.
    """
    model = program.model

    def compute(params: ArrayTree, images: jax.Array) -> dict[str, jax.Array]:
        with sharding.use_mesh(program.mesh):
            logits, out = model.apply(params, images)
        found = {"features": out["pre_logits"], "tokens": out["tokens"]}
        found["logits"] = model.activate(logits) if model.is_regression else logits
        found |= {name: out["blocks"][int(name[6:])] for name in wanted.vectors if name.startswith("block_")}
        outputs = {name: found[name].astype(wanted.dtype) for name in wanted.vectors}
        checked = [*outputs.values(), *([logits] if wanted.top else [])]
        finite = [jnp.isfinite(one).reshape(len(one), -1).all(axis=1) for one in checked]
        if wanted.top:
            outputs["probabilities"], outputs["classes"] = jax.lax.top_k(model.activate(logits), wanted.top)
        return outputs | {"finite": jnp.stack(finite).all(axis=0)}

    return jax.jit(
        compute,
        in_shardings=(program.params_shardings, program.batch_sharding),
        out_shardings=program.batch_sharding,
        compiler_options=program.compiler_options,
    )


@dataclasses.dataclass(frozen=True)
class EmbeddingWriter:
    """Writes the files of a folder that this host is to write.

    Attributes:
        program: the functions of the model, on the devices of this host.
        step: the function of its outputs, of `make_step`.
        source: the images.
        wanted: what is written of each image.
        info: what `begin_folder` has written.
        folder: the folder.
        host: the number of this host, and the number of all hosts.
        max_bad: the largest fraction of all images that may be unreadable.
    """

    program: Inference
    step: OutputStep
    source: Source
    wanted: Outputs
    info: Info
    folder: str
    host: tuple[int, int]
    max_bad: float

    def path(self, number: int) -> str:
        """Returns the path of a file."""
        return filesystem.join_path(self.folder, self.info.file_name(number))

    @property
    def own(self) -> range:
        """The numbers of the files of this host."""
        host, hosts = self.host
        return range(self.info.files * host // hosts, self.info.files * (host + 1) // hosts)

    def find_missing(self) -> tuple[list[int], int]:
        """Returns the numbers of this host's files that are missing or damaged, and the errors in its others."""
        present, missing, errors = list_present(self.folder), [], 0
        for number in self.own:
            name = self.info.file_name(number)
            if name not in present:
                missing.append(number)
                continue
            try:
                footer = shards.read_footer(self.path(number), present[name])
            except UserError as error:
                tell(f"{error}; it is written again.")
                missing.append(number)
                continue
            errors += int(footer.facts.get(b"errors", b"0"))
        return missing, errors

    def run(
        self,
        params: ArrayTree,
        missing: Sequence[int],
        errors: int,
        batch: int,
        workers: int,
        tick: Callable[[int], Any],
    ) -> int:
        """Writes files; returns the number of unreadable images in all files of this host.

        Args:
            params: the parameters, on the devices.
            missing: the numbers of the files, ascending.
            errors: the number of unreadable images in the host's other files.
            batch: the number of images per step on the devices of this host.
            workers: processes that read; 0: threads.
            tick: called with the number of images of each step.

        Raises:
            UserError: more images are unreadable than `max_bad` allows, outputs are not finite, or a file cannot be
                written.
        """
        if not missing:
            return errors
        source = self.source.select([self.info.range_of(number) for number in missing])
        preprocess = data.parse_pipe(self.info.preprocess, 0)
        batches = data.read_in_order(source, preprocess, self.program.batch_sharding, batch, workers)

        def outputs() -> Iterator[dict[str, jax.Array]]:
            for one in batches:
                yield self.step(params, one["image"]) | {"label": one["label"], "mask": one["mask"]}

        start, pieces = 0, list[dict[str, np.ndarray]]()  # of the file that is being collected
        files, told = iter(missing), 0
        number = next(files)
        pending: Future | None = None
        with ThreadPoolExecutor(1) as pool:
            for fetched in fetch_late(outputs()):
                faults = batches.faults
                for fault in list(faults.values())[told:TOLD]:
                    tell(f"{fault}; its row states this error.")
                told = len(faults)
                check_faults(faults, errors, self.info.images, self.max_bad)
                place, rows = 0, min(batch, len(source) - start - count_rows(pieces))
                tick(rows)
                while place < rows:
                    wanted = len(self.info.range_of(number)) - count_rows(pieces)
                    taken = slice(place, min(place + wanted, rows))
                    pieces.append({name: array[taken] for name, array in fetched.items()})
                    place = taken.stop
                    if taken.stop - taken.start < wanted:
                        break
                    if pending:
                        pending.result()
                    arrays = {name: np.concatenate([one[name] for one in pieces]) for name in pieces[0]}
                    pending = pool.submit(self.write, number, source, start, arrays, dict(faults))
                    start, pieces = start + count_rows(pieces), []
                    number = next(files, number)
            if pending:
                pending.result()
        if len(faults) > TOLD:
            tell(f"{len(faults) - TOLD:,} more images are unreadable; their rows state the errors.")
        return errors + len(faults)

    def write(
        self, number: int, source: Source, start: int, arrays: Mapping[str, np.ndarray], faults: Mapping[int, str]
    ) -> None:
        """Writes a file.

        Args:
            number: the number of the file.
            source: the images that are read.
            start: the index there of the first image of the file.
            arrays: name -> outputs, `label` and `mask` of the images.
            faults: index there of an unreadable image -> why it is unreadable.
        """
        present, count = arrays["mask"] > 0, len(arrays["mask"])
        names = [source.example_name(start + row) for row in range(count)]
        if bad := np.flatnonzero(present & ~arrays["finite"]).tolist():
            raise UserError(
                f"outputs for {len(bad):,} of {count:,} images, such as {names[bad[0]]}, are not finite in "
                f"{self.wanted.dtype}; choose bfloat16 or float32, or other weights."
            )
        columns: dict[str, Any] = {"name": names}
        if self.info.labels:
            labels = arrays["label"]
            is_padded = labels.ndim == 2 and labels.dtype == np.int32
            columns["label"] = [row[row >= 0].tolist() for row in labels] if is_padded else labels
        columns["error"] = [faults.get(start + row) for row in range(count)]
        columns |= {name: arrays[name] for name in self.wanted.vectors}
        if self.wanted.top:
            classes = self.program.model.class_names or range(self.program.model.field("num_classes"))
            chosen = [[str(classes[one]) for one in row] for row in arrays["classes"].tolist()]
            columns["classes"] = [row if here else None for row, here in zip(chosen, present, strict=True)]
            columns["probabilities"] = arrays["probabilities"]
        facts = {"errors": str(count - int(present.sum()))}
        filesystem.write_bytes(self.path(number), shards.encode_columns(columns, present, facts))


def count_rows(pieces: Sequence[Mapping[str, np.ndarray]]) -> int:
    """Returns the number of images in pieces of a file."""
    return sum(len(piece["mask"]) for piece in pieces)


def check_faults(faults: Mapping[int, str], before: int, images: int, max_bad: float) -> None:
    """Raises UserError if more images are unreadable than `max_bad` allows; `before` others were found earlier."""
    met = before + len(faults)
    allowed = math.floor(max_bad * images * (1 + 1e-12))
    if faults and met > allowed:
        raise UserError(
            f"{list(faults.values())[-1]}; {met:,} of {images:,} images are unreadable so far, more than the "
            f"{allowed:,} that --max-bad={max_bad:g} allows; repair them or allow more; files that are written stay."
        )


def list_present(folder: str) -> dict[str, int | None]:
    """Returns name -> size of the files in a folder, local (size None) or remote."""
    pattern = filesystem.join_path(folder, "*.parquet")
    return {
        path.rpartition("/")[2]: version.size if version else None
        for path, version in filesystem.expand_pattern(pattern).items()
    }


def count_missing(folder: str, info: Info) -> int:
    """Returns how many files of a folder are missing."""
    present = list_present(folder)
    return sum(info.file_name(number) not in present for number in range(info.files))


def read_vectors(folder: str, info: Info, columns: Sequence[str]) -> dict[str, Any]:
    """Returns name -> values of columns of all files, in order: lists, or arrays without the rows with an error.

    Raises:
        UserError: a file is missing or damaged, or has no such column.
    """
    known = {"name", "error", *info.vectors, *(["label"] if info.labels else [])}
    if absent := [name for name in columns if name not in known]:
        raise UserError(f"{folder} contains no {absent[0]}; write it with python -m vit_jax.embed.")
    if missing := count_missing(folder, info):
        raise UserError(
            f"{folder} lacks {missing:,} of {info.files:,} files; the same vit_jax.embed command writes them."
        )
    parts = [
        shards.read_columns(filesystem.join_path(folder, info.file_name(number)), columns)
        for number in range(info.files)
    ]
    joined: dict[str, Any] = {}
    for name in columns:
        values = [part.pop(name) for part in parts]
        joined[name] = list(itertools.chain(*values)) if isinstance(values[0], list) else np.concatenate(values)
    return joined


def stored_features(folder: str, weights: str, batches: Mapping[str, data.EvalBatches]) -> dict[str, Arrays]:
    """Returns name -> features and labels of the images of evaluations, as far as a folder contains them.

    Args:
        folder: a folder of `vit_jax.embed`.
        weights: the digest of the weights that are evaluated.
        batches: name -> the images that are asked for.

    Raises:
        UserError: the folder contains features of other weights or of changed or damaged images, is not complete, or
            cannot be read.
    """
    info = read_info(folder)
    if info.weights != weights:
        raise UserError(f"{folder} contains outputs of other weights, {info.model} {info.weights}, not of {weights}.")
    found = {}
    starts = np.cumsum([0, *(stop - start for _, start, stop in info.parts)]).tolist()
    loaded: dict[str, Any] = {}
    for name, wanted in batches.items():
        source = wanted.source
        if info.data != identify_data(source) or info.preprocess != wanted.preprocess.text:
            continue
        rows = [
            row_indices(own) - start + at
            for split, own in source.parts
            for (whole, start, stop), at in zip(info.parts, starts, strict=False)
            if split == whole and start <= own[0] and own[-1] < stop
        ]
        if len(rows) < len(source.parts):
            continue
        if info.stamps != [stamp_part(source, split, range(start, stop)) for split, start, stop in info.parts]:
            raise UserError(
                f"images of {info.source} have changed since {folder} was written; remove it and write it again."
            )
        if not loaded:
            loaded = read_vectors(folder, info, ["name", "error", "features", "label"])
            places = np.cumsum([error is None for error in loaded["error"]]) - 1
        indices = np.concatenate(rows)
        if damaged := [index for index in indices.tolist() if loaded["error"][index] is not None]:
            raise UserError(
                f"{loaded['error'][damaged[0]]}; repair or remove it, and write {folder} again: an evaluation skips "
                "no image."
            )
        labels = [loaded["label"][index] for index in indices.tolist()]
        if source.max_labels:
            labels = [[*row, *[-1] * (source.max_labels - len(row))] for row in labels]
        found[name] = loaded["features"][places[indices]].astype(np.float32), np.array(labels, np.int32)
    return found
