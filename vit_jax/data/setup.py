"""The shapes, counts and class names of a run's data: those that a config states, and those of the opened data."""

import contextlib
import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import UserError, errors_of
from vit_jax.config import EVAL_KINDS, Place, eval_fields, first_evaluation, has_classes_of_head, place_of
from vit_jax.data import sources
from vit_jax.data.class_counts import describe_counts, describe_draws, drawn_counts
from vit_jax.data.order_choice import check_eval_disk, choose_order, eval_order
from vit_jax.data.preprocess import Preprocessor, fill_resolution, parse_pipe
from vit_jax.storage import filesystem, pin_revision

# (source, "" for that of training; split) -> examples
OpenSources: TypeAlias = Mapping[tuple[str, str], sources.Source]
COMMON = ("split", "source", "preprocess", "every")  # fields of all evaluations that `describe_evals` treats by name
LEAST_DEVIATION = 1e-5  # of a number, relative to its mean: less is lost in float32
T = TypeVar("T", int, int | None)


@dataclasses.dataclass(frozen=True)
class ClassFacts:
    """What opened training data state of their classes.

    Attributes:
        names: their names in the order of the labels, or None.
        counts: the images of each class in an epoch of training, on average; None: not known without reading images.
    """

    names: tuple[str, ...] | None
    counts: tuple[float, ...] | None


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """Shapes and counts of the training data.

    Attributes:
        image_shape: (height, width, 3) of each image of a batch, float32.
        num_classes: labels are 0 to num_classes - 1; 0: their number is not known. The number of targets of regression.
        num_examples: the number of examples of the training split, which is the length of an epoch.
        max_labels: the most labels of an image in multi-label data, where labels are int32 [max_labels], each class
            once, padded with -1; None: every image has one label.
        has_numbers: whether labels are float32 [num_classes], the targets of regression.
        classes: what the opened data state of their classes; None: the data are not open.
    """

    image_shape: tuple[int, int, int]
    num_classes: int
    num_examples: int
    max_labels: int | None = None
    has_numbers: bool = False
    classes: ClassFacts | None = None


@dataclasses.dataclass(frozen=True)
class DataInfo:
    """The facts about the data that are known only once the data is open.

    Attributes:
        class_names: the names of the classes in the order of the labels, or None.
        fingerprint: what must be unchanged when a run resumes: data set and version, split, count, `contents` (names
            and labels), preprocessing, seed, batch and, if there is any, the order of streamed images and the digest of
            a file of class weights.
        sample: the result of `sample_contents` for the training images.
        preprocess: the pipe of the first evaluation, with the resolution filled in; exported with the model.
        evals: name of an evaluation -> what identifies its data: the fields of `describe_evals`, `contents` (the
            fingerprints of its splits and files) and `sample` (the splits' `sample_contents`, unless the fingerprints
            cover these).
        eval_parts: name of an evaluation -> number of splits that it reads.
        opened: the open sources, so that a large folder is listed only once.
        notes: lines for the user on what was read, and on data that is here but not used.
        class_counts: see `ClassFacts.counts`.
    """

    class_names: tuple[str, ...] | None
    fingerprint: dict[str, str | int]
    sample: str
    preprocess: str
    evals: dict[str, dict[str, str]]
    eval_parts: dict[str, int]
    opened: OpenSources = dataclasses.field(compare=False)
    notes: tuple[str, ...] = dataclasses.field(compare=False)
    class_counts: tuple[float, ...] | None = None


def spec(config: ConfigDict) -> DataSpec:
    """Returns the shapes and counts that the config states, without opening data.

    Raises:
        UserError: `data.num_classes` or `data.num_examples` is unset, or the preprocessing is wrong.
    """
    num_classes, num_examples = config.data.num_classes, config.data.num_examples
    known = {"num_classes": num_classes, "num_examples": num_examples}
    if config.task.kind == "masked_patches":  # which reads no labels
        del known["num_classes"]
    if unknown := [f"--config.data.{field}" for field, value in known.items() if not value or value < 0]:
        raise UserError(f"a plan does not open the data; add {' and '.join(f'{field}=N' for field in unknown)}")
    preprocess = train_preprocessor(config)
    for name in config.evals:
        eval_preprocessor(config, name, preprocess.shape, preprocess.value_range)
    numbers = config.task.kind == "regress"
    return DataSpec(preprocess.shape, num_classes or 0, num_examples, config.data.max_labels, numbers)


def complete_config(config: ConfigDict) -> tuple[ConfigDict, DataInfo]:
    """Opens the data of training and of all evaluations and checks it against the config.

    Returns:
        A copy of the config, and what else the data states. In the copy, `data.num_classes`, `data.num_examples`,
        `data.max_labels` (for multi-label data), `task.target_means` and `task.target_deviations` (for numbers),
        `data.order` and `data.readers` (if streamed) are set, paths are
        absolute, and data sets on the Hugging Face hub are named with their present commit.

    Raises:
        UserError: a source, a split or a preprocessing is wrong or missing, or disagrees with the config.
    """
    preprocess = train_preprocessor(config)
    config = with_sources(config, pin_revision)  # the present commits of data sets on a hub: a run keeps its data
    source = open_training(config)
    completed = with_sources(config, absolute_source)  # so that the run can be evaluated from any folder
    completed.data.update(agreed_counts(config, source))
    for field in ("exclude", "groups"):
        completed.data[field] = config.data[field] and filesystem.absolute_path(config.data[field])
    completed.task.update(target_scale(config, source))
    if config.data.data_dir:
        completed.data.data_dir = filesystem.absolute_path(config.data.data_dir)
    opened = {("", config.data.split): source}
    for name in completed.evals:
        eval_preprocessor(completed, name, preprocess.shape, preprocess.value_range)
        opened |= open_eval_sources(completed, name, opened, source)
    hosts, rows = jax.process_count(), eval_batch_size(completed)
    evaluated = {key: opened[key] for name in completed.evals for key in eval_keys(completed, name)}
    beside = max(check_eval_disk(one, eval_order(one, rows), hosts) for one in evaluated.values())
    order = choose_order(completed, source, beside, hosts)
    completed.data.update(order.fields)
    fingerprint: dict[str, str | int] = {
        "data set": source.name,
        "split": ", ".join(sources.describe_rows(name, rows) for name, rows in source.parts),
        "examples": len(source),
        "classes": source.num_classes,
        "contents": source.fingerprint,
        "preprocessing": preprocess.text + (" fast" if config.data.fast else ""),
        "seed": config.seed,
        "batch": config.batch,
        **({"order": order.identity} if order.identity else {}),
        **({"class weights": digest} if (digest := digest_file(config.task.class_weights)) else {}),
    }
    # Where images are streamed a single stretch of each source is sampled, since most shards are not here.
    samples = {
        key: sources.sample_contents(one, 1 if one.shards and order.identity else sources.STRETCHES)
        for key, one in opened.items()
    }
    evals = {
        name: described
        | identify_contents(
            [
                *((opened[key].fingerprint, samples[key]) for key in eval_keys(completed, name)),
                *((digest, "") for digest in digest_files(config.evals[name]).values()),
            ]
        )
        for name, described in describe_evals(config).items()
    }
    counts, drawn = source.class_counts(), drawn_counts(source, config.data.balance)
    told = [] if counts is None else describe_counts(counts, source.class_names)
    if config.data.balance and counts is not None and drawn is not None:
        told.append(describe_draws(counts, drawn, config.data.balance, bool(order.identity)))
    notes = (
        order.note,
        *told,
        *describe_scale(completed.task, source),
        *itertools.chain(*(one.notes for one in opened.values())),
        *unused_split(config, opened),
    )
    pipe = evals[first_evaluation(config)]["preprocess"]
    parts = {name: len(eval_keys(completed, name)) for name in evals}
    sample, notes = samples["", config.data.split], tuple(dict.fromkeys(filter(None, notes)))
    per_epoch = None if drawn is None else tuple(drawn.tolist())
    return completed, DataInfo(source.class_names, fingerprint, sample, pipe, evals, parts, opened, notes, per_epoch)


def agreed_counts(config: ConfigDict, source: sources.Source) -> dict[str, int | None]:
    """Returns the fields of `config.data` that the training images state; raises UserError if the config disagrees."""
    split = f"{config.data.source} {config.data.split}"
    agreed = {
        "num_classes": agreed_value("num_classes", config.data.num_classes, source.num_classes, config.data.source),
        "max_labels": agreed_value("max_labels", config.data.max_labels, source.max_labels, config.data.source),
        "num_examples": agreed_value("num_examples", config.data.num_examples, len(source), split),
    }
    if config.batch > len(source):
        logging.getLogger(__name__).warning(
            "a batch has %d images, but %s has only %d, so a step sees some of them more than once; lower "
            "--config.batch",
            config.batch,
            split,
            len(source),
        )
    return agreed


def target_scale(config: ConfigDict, source: sources.Source) -> dict[str, tuple[float, ...]]:
    """Returns the fields of `config.task` by which numbers are standardised: as stated, or of the training images.

    Raises:
        UserError: the task does not suit the labels, the numbers are not known without reading images, the stated ones
            are too many or too few, or a number is the same for all images.
    """
    learns, place = config.task.kind == "regress", config.data.source
    if source.has_numbers and not learns:
        raise UserError(
            f"the labels of {place} are numbers, which task.kind={config.task.kind} does not learn; set "
            "--config.task.kind=regress, or leave out ,targets="
        )
    if not learns:
        return {}
    if not source.has_numbers:
        raise UserError(
            f"task.kind=regress learns numbers, but {place} has none; write folder:PATH,table=FILE.csv,targets=COLUMN"
        )
    means, deviations = config.task.target_means, config.task.target_deviations
    if not means:
        numbers = source.labels()
        if numbers is None:
            raise UserError(
                f"the mean of the numbers of {place} is not known without reading its images; set "
                "--config.task.target_means and --config.task.target_deviations"
            )
        means, deviations = (tuple(of(numbers.astype(np.float64), axis=0).tolist()) for of in (np.mean, np.std))
    names = source.class_names or ()
    if len(means) != len(names):
        raise UserError(f"task.target_means has {len(means)} numbers, but {place} has {len(names)}: {', '.join(names)}")
    for name, mean, deviation in zip(names, means, deviations, strict=True):
        if deviation <= LEAST_DEVIATION * abs(mean):
            raise UserError(
                f"{name} is {mean:.6g} for all images of {place} {config.data.split}, or nearly; leave it out, or "
                "subtract a constant from it"
            )
    return {"target_means": means, "target_deviations": deviations}


def describe_scale(task: ConfigDict, source: sources.Source) -> list[str]:
    """Returns a line on how numbers are standardised; no line if none are learnt."""
    scale = zip(source.class_names or (), task.target_means or (), task.target_deviations or (), strict=False)
    told = "; ".join(f"{name} {mean:.6g}, {deviation:.6g}" for name, mean, deviation in scale)
    return [f"Numbers are learnt as (number - mean) / deviation: {told}"] if told else []


def open_training(config: ConfigDict) -> sources.Source:
    """Opens the training images. They need not all fit into the cache, unless `data.order` is global.

    Raises:
        UserError: the source is wrong or missing, or has no such split.
    """
    streams, needs_labels = config.data.order != "global", config.task.kind != "masked_patches"
    return sources.open_source(config, config.data.split, streams=streams, needs_labels=needs_labels)


def with_sources(config: ConfigDict, change: Callable[[str], str]) -> ConfigDict:
    """Returns a copy of the config, with `change` applied to the data sources of training and of all evaluations."""
    changed = config.copy_and_resolve_references()
    for fields in (changed.data, *changed.evals.values()):
        fields.source = fields.source and change(fields.source)
    return changed


def absolute_source(source: str) -> str:
    """Returns a data source with its path made absolute, if it has a path; in a mixture, the paths of all parts."""
    return sources.change_paths(source, filesystem.absolute_path, filesystem.absolute_path)


def describe_splits(opened: OpenSources) -> list[str]:
    """Returns a line for each split that a run reads: its images, its classes and the names of the first ones."""
    return [
        f"Split {split}{f' of {source}' if source else ''}: {sources.describe_classes(one)}"
        for (source, split), one in opened.items()
    ]


def unused_split(config: ConfigDict, opened: OpenSources) -> list[str]:
    """Returns at most one line, on a split that is here and could be evaluated.

    There is no line unless training and the evaluations read only slices of `train` of the training source.
    """
    if {name for (other, _), source in opened.items() for name, _ in source.parts if not other} != {"train"}:
        return []
    if any(sources.divide_folds(config.data.split)[1]):  # of a cross-validation
        return []
    existing = opened["", config.data.split].split_names
    return [
        f"The split {name} is here and not used; to evaluate on it: "
        f"--config.data.split=train --config.evals.{first_evaluation(config)}.split={name}"
        for name in ("val", "validation", "test")
        if name in existing
    ][:1]


def describe_evals(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Returns name of an evaluation -> its `split`, and its `preprocess` with the resolution filled in.

    The text of `split` also contains what else decides the numbers of the evaluation: its source, if it has one of its
    own, and the fields of its kind, unless that is `classify`.
    """
    described = {}
    for name, eval_config in config.evals.items():
        own = [
            field for field in eval_fields(eval_config.kind) if field not in COMMON and eval_config.kind != "classify"
        ]
        words = [eval_config.split, eval_config.source, *(f"{field}={eval_config[field]}" for field in own)]
        pipe = fill_resolution(eval_config.preprocess, config.resolution)
        described[name] = {"split": " ".join(word for word in words if word), "preprocess": pipe}
    return described


def identify_evals(config: ConfigDict) -> dict[str, dict[str, str]]:
    """Returns name of an evaluation -> its `source`, its fields of `describe_evals`, and its `digest_files`."""
    described = describe_evals(config)
    sources = {name: {"source": own.source or config.data.source} for name, own in config.evals.items()}
    return {name: sources[name] | described[name] | digest_files(config.evals[name]) for name in described}


def digest_files(eval_config: ConfigDict) -> dict[str, str]:
    """Returns field -> digest of the file that it names, for an evaluation's fields of labels, class maps and texts.

    Words that stand for a file of the package, and files that cannot be read any more, are left out.
    """
    named = [field for field in eval_fields(eval_config.kind) if place_of(f"evals.*.{field}") is Place.FILE]
    digests = {field: digest_file(eval_config[field]) for field in named}
    return {field: digest for field, digest in digests.items() if digest}


def digest_file(path: str | None) -> str:
    """Returns a digest of the content of a file; empty if it is not named, is no file or cannot be read any more."""
    with contextlib.suppress(UserError):
        if path and filesystem.exists(filesystem.absolute_path(path)):
            return hashlib.sha256(filesystem.read_bytes(filesystem.absolute_path(path))).hexdigest()[:16]
    return ""


def identify_contents(splits: list[tuple[str, str]]) -> dict[str, str]:
    """Returns the `contents` and the `sample` of an evaluation, given (fingerprint, sample) of all that it reads.

    There is no `sample` if all samples are empty.
    """
    contents, sample = (" ".join(filter(None, texts)) for texts in zip(*splits, strict=True))
    return {"contents": contents} | ({"sample": sample} if sample else {})


def eval_keys(config: ConfigDict, name: str) -> list[tuple[str, str]]:
    """Returns the keys in `OpenSources` of the data of an evaluation: (source, or "" for the training source; split).

    The evaluated split comes first. The split that the evaluation learns from, if there is one, comes second.
    """
    eval_config = config.evals[name]
    has_train_split = "train_split" in eval_fields(eval_config.kind)
    splits = [eval_config.split, *([eval_config.train_split] if has_train_split else [])]
    return [(eval_config.source or "", split) for split in splits]


def train_preprocessor(config: ConfigDict) -> Preprocessor:
    """Returns the preprocessing of training images."""
    return parse_pipe(config.data.preprocess, config.resolution, config.data.fast)


def eval_preprocessor(
    config: ConfigDict, name: str, shape: tuple[int, int, int], values: tuple[float, float] | None
) -> Preprocessor:
    """Returns the preprocessing of an evaluation's images.

    Args:
        config: the config of the run.
        name: the name of the evaluation.
        shape: the shape of the model's images.
        values: what 0 and 255 become in the model's images; None: not known, and not checked.

    Raises:
        UserError: the pipe is wrong, or gives images of another shape or range of values.
    """
    with errors_of(f"in evals.{name}"):
        preprocess = parse_pipe(config.evals[name].preprocess, config.resolution)
    if preprocess.shape != shape:
        raise UserError(
            f"evals.{name}.preprocess gives images of {preprocess.shape}, but the model needs {shape}; change the "
            f"sizes in evals.{name}.preprocess"
        )
    if values not in (None, preprocess.value_range):
        found, wanted = (f"value_range({low:g},{high:g})" for low, high in (preprocess.value_range, values))
        raise UserError(
            f"evals.{name}.preprocess ends with {found}, but the model needs {wanted}; make {wanted} the last op of "
            f"evals.{name}.preprocess."
        )
    return preprocess


def agreed_value(field: str, stated: int | None, found: T, where: str) -> T:
    """Returns `found`; raises UserError if the config states another number for the field."""
    if stated is not None and stated != found:
        differs = f"data.{field} is {stated}, but {where} has {'none' if found is None else found}"
        raise UserError(f"{differs}; leave out data.{field}{'' if found is None else ', which is taken from the data'}")
    return found


def open_eval_sources(config: ConfigDict, name: str, opened: OpenSources, train: sources.Source) -> OpenSources:
    """Returns the sources of an evaluation, and opens those that are not open yet.

    Args:
        config: the config, with absolute paths.
        name: the name of the evaluation.
        opened: the sources that are open already.
        train: the images that the model is trained on.

    Raises:
        UserError: a split of the evaluation is wrong, or it evaluates the head and its classes differ from those of
            training.
    """
    eval_config, keys = config.evals[name], eval_keys(config, name)
    if needs_labels(eval_config):
        opened = {key: source for key, source in opened.items() if source.num_classes}
    try:
        eval_sources = {key: opened.get(key) or open_eval_source(config, name, key) for key in keys}
    except UserError as error:
        raise UserError(f"in evals.{name}: {error}") from None
    evaluated = eval_sources[keys[0]]
    if evaluated.overlaps(train):
        logging.getLogger(__name__).warning(
            "evals.%s contains training images: its split overlaps with data.split", name
        )
    elif shared := sorted(evaluated.groups & train.groups):
        logging.getLogger(__name__).warning(
            "evals.%s shares %d groups of data.groups with the training images, such as %s; evaluate on a fold of the "
            "split that training leaves out",
            name,
            len(shared),
            shared[0],
        )
    same = evaluated.has_numbers == train.has_numbers and sources.have_same_classes(evaluated, train)
    if has_classes_of_head(eval_config) and not same:
        other = f"evals.{name}.split={eval_config.split} has other classes than the training data, or another order"
        raise UserError(f"{other}; choose other data, or evaluate the features, with the kind fewshot or knn")
    return eval_sources


def open_eval_source(config: ConfigDict, name: str, key: tuple[str, str]) -> sources.Source:
    """Opens one of the `eval_keys` of an evaluation.

    Raises:
        UserError: there is no such data or split. If the data have a single split, and the evaluation needs another one
            to learn from, the message says how to divide that split.
    """
    source, split = key
    labelled = needs_labels(config.evals[name])
    try:
        return sources.open_source(config, split, source or None, streams=True, needs_labels=labelled)
    except sources.UnknownSplit as error:
        if len(error.existing) > 1 or "train_split" not in eval_fields(config.evals[name].kind):
            raise
        [whole] = error.existing
        fields = f"train_split={whole}[:70%],split={whole}[70%:]"
        raise UserError(f"{error} To learn from a part of {whole} and test on the rest, set {fields}") from None


def needs_labels(eval_config: ConfigDict) -> bool:
    """Returns whether an evaluation reads the labels of its data."""
    return EVAL_KINDS[eval_config.kind].task != "masked_patches"


def eval_batch_size(config: ConfigDict) -> int:
    """Returns the images per evaluation step, over all processes; by default as many as in one accumulation step."""
    return config.batch // config.accum_steps if config.batch_eval is None else config.batch_eval
