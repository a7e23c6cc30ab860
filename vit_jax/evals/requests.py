"""Evaluations that a command line asks for: [NAME=]WHAT[:FIELD=VALUE,...]."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from ml_collections import ConfigDict

from vit_jax import UserError, choose, data
from vit_jax.config import (
    EVAL_KINDS,
    Place,
    check_evaluations,
    eval_fields,
    evaluation,
    first_evaluation,
    parse_command_line,
    parse_value,
    place_of,
)
from vit_jax.data.sources import source_label

OF_HEAD = ("predictions", "confusion", "mistakes")  # what a command can save of evaluations of the head
OUTPUTS = ("features", *OF_HEAD, "model")  # what a command can save
PROBES = {"probe": "l2", "probe_sgd": "rate"}  # kind of a linear probe -> the metric that is its chosen setting
REQUEST = re.compile(r"(?:(?P<name>\w+)=)?(?P<what>[^:=]+)(?::(?P<fields>.*))?")

# A comma between two fields or values of a request: not one in brackets, nor one before an option of a data source.
COMMA = r",(?!(?:label|image|classes|table|separator|targets)=)(?![^\[(]*[\])])"


def choose_evaluations(
    config: ConfigDict, size: tuple[int, int], preprocess: str | None, requests: Sequence[str], split: str | None
) -> None:
    """Changes `config.evals` to the evaluations that a command line asks for, and checks them.

    Args:
        config: the configuration of the model's run, or one without evaluations if the model has no run.
        size: height and width of the model's images.
        preprocess: the preprocessing of the model's images, or None if unknown.
        requests: evaluations as in `request_evaluations`. If empty, the evaluations of the run stay.
        split: a split for the run's first evaluation (`first_evaluation`), which then is the only one. With None all
            evaluations keep their splits.

    Raises:
        UserError: `split` and `requests` are both given, nothing is requested for a model without a run, or an
            evaluation has no data or does not suit the model.
    """
    if split is not None and requests:
        combined = "--split cannot be combined with --evals"
        raise UserError(f"{combined}; write the split in --evals, for example --evals='test:split=test[:10%]'.")
    known = config.data.preprocess if len(config.evals) else preprocess  # a run trains as its configuration says
    values = None if known is None else data.value_range_of(known)
    if split is not None:
        choose_split(config, split)
    if requests:
        pipe = config.evals[first_evaluation(config)].preprocess if len(config.evals) else preprocess
        with config.unlocked():
            config.evals = request_evaluations(requests, dict(config.evals.items()), pipe, splits_of_run(config))
    if not len(config.evals):
        raise UserError(
            "weights that are not a run have no evaluations of their own; add one, for example "
            "--evals=fewshot:source=tfds:cifar10."
        )
    if unset := [name for name in config.evals if not (config.evals[name].source or config.data.source)]:
        example = f"--evals={unset[0]}:source=tfds:cifar10"
        raise UserError(f"the evaluation {unset[0]} has no data source; add one, for example {example}.")
    check_evaluations(config)
    for name in config.evals:
        data.eval_preprocessor(config, name, (*size, 3), values)


def choose_split(config: ConfigDict, split: str) -> None:
    """Removes all evaluations of `config` but the first (`first_evaluation`), which then reads the given split."""
    first = first_evaluation(config)
    with config.unlocked():
        for name in [name for name in config.evals if name != first]:
            del config.evals[name]
    config.evals[first].split = split


def splits_of_run(config: ConfigDict) -> dict[str, str]:
    """Returns field -> split of an evaluation that is requested by its kind, on the data of a run; {} without a run.

    It evaluates the images of the run's first evaluation, and learns from those of the training.
    """
    if not len(config.evals):
        return {}
    first = config.evals[first_evaluation(config)]
    evaluated = {"split": first.split} if first.source in (None, config.data.source) else {}
    return {"train_split": config.data.split} | evaluated


def request_evaluations(
    arguments: Sequence[str],
    own: Mapping[str, ConfigDict],
    preprocess: str | None,
    splits: Mapping[str, str] = MappingProxyType({}),
) -> ConfigDict:
    """Returns name -> configuration of the requested evaluations.

    Args:
        arguments: requests of the form [NAME=]WHAT[:FIELD=VALUE,...]. WHAT is the name of an evaluation of the run, a
            kind of evaluation, or a recipe FILE.py, which stands for all its evaluations. If a field that takes one
            value is given several, there is one evaluation for each of them.
        own: name -> configuration of the evaluations of the run.
        preprocess: the preprocessing of evaluations that are requested by kind and state none; None: the default.
        splits: field -> split of evaluations that are requested by kind and state neither this field nor a source.

    Raises:
        UserError: there is no such evaluation, kind, file or field, a value has the wrong type, or two evaluations have
            the same name.
    """
    evaluations = ConfigDict()
    for argument in arguments:
        for name, requested in _request(argument, own, preprocess, splits):
            if name in evaluations:
                raise UserError(f"two evaluations are called {name}; give one another name: --evals=NAME={argument}.")
            evaluations[name] = requested
    return evaluations


def _request(
    word: str, own: Mapping[str, ConfigDict], preprocess: str | None, splits: Mapping[str, str]
) -> Iterator[tuple[str, ConfigDict]]:
    match = REQUEST.fullmatch(word)
    if not match:
        raise UserError(f"cannot read --evals={word}; write --evals=[NAME=]KIND[:FIELD=VALUE,...].")
    what, name = match["what"], match["name"]
    if what.endswith(".py"):
        yield from _recipe_evaluations(word)
        return
    if what in own:
        start, name = evaluation(**own[what]), name or what
    else:
        start = evaluation(choose("evaluation or kind of evaluation", what, [*own, *EVAL_KINDS]))
        start.preprocess = preprocess or start.preprocess
    given = parse_fields(match["fields"] or "", start)
    if what not in own and "source" not in given:
        start.update({field: split for field, split in splits.items() if field in start})
    label = name or "_".join([what, *(source_label(value[0]) for field, value in given.items() if field == "source")])
    several = [field for field, values in given.items() if len(values) > 1]
    for values in itertools.product(*given.values()):
        requested, chosen = evaluation(**start), dict(zip(given, values, strict=True))
        for field, value in chosen.items():
            requested[field] = parse_value(start, field, value, "in --evals, ")
        parts = [name or what, *(source_label(chosen[field]) for field in several)]
        yield "_".join(parts) if several else label, requested


def parse_fields(text: str, start: ConfigDict) -> dict[str, list[str]]:
    """Returns field -> texts of its values, from a text FIELD=VALUE,FIELD=VALUE,...

    A field that takes one value may be given several, separated by commas; each is then one text. The value of a field
    that takes a tuple, and of `preprocess`, is always one text.

    Args:
        text: the fields; may be empty.
        start: the configuration of the evaluation whose fields are given.

    Raises:
        UserError: the text has another form, or the kind of the evaluation has no such field.
    """
    given = {}
    for part in re.split(rf"{COMMA}(?=\w+=)", text) if text else ():
        field, equals, value = part.partition("=")
        if not (equals and value):
            raise UserError(f"cannot read {part!r} in --evals; write FIELD=VALUE.")
        known = [one for one in eval_fields(start.kind) if one != "kind"]
        choose(f"field of the {start.kind} evaluation", field, known)
        has_many = isinstance(start[field], tuple) or field == "preprocess"
        given[field] = [value] if has_many else re.split(COMMA, value)
    return given


def list_request_places(request: str) -> Iterator[tuple[str, str, Place]]:
    """Yields field, value and kind of place of each field of a request that names data or a file.

    The request is as in `request_evaluations`; nothing is yielded if it has another form.
    """
    match = REQUEST.fullmatch(request)
    for part in re.split(rf"{COMMA}(?=\w+=)", (match and match["fields"]) or ""):
        field, _, values = part.partition("=")
        if place := place_of(f"evals.*.{field}"):
            for value in re.split(COMMA, values):
                yield f"--evals={request.partition(':')[0]}:{field}", value, place


def parse_outputs(text: str, evaluations: ConfigDict) -> list[str]:
    """Returns the words of --save, each once.

    Args:
        text: words of `OUTPUTS`, separated by commas; may be empty.
        evaluations: name -> configuration of the evaluations.

    Raises:
        UserError: there is no such word, or no evaluation has what it stands for.
    """
    words = list(dict.fromkeys(choose("word of --save", word, OUTPUTS) for word in text.split(",") if word))
    kinds = {own.kind for own in evaluations.values()}
    for word in words:
        tasks = ("classify", "regress") if word == "predictions" else ("classify",)
        if word in OF_HEAD and not any(EVAL_KINDS[kind].task in tasks for kind in kinds):
            kind = "a classifier's head" if len(tasks) == 1 else "the head"
            raise UserError(f"--save={word} needs an evaluation of {kind}, for example --evals=classify.")
        if word == "model" and kinds.isdisjoint(PROBES):
            raise UserError("--save=model needs a linear probe, for example --evals=probe.")
    return words


def _recipe_evaluations(recipe: str) -> Iterator[tuple[str, ConfigDict]]:
    config, _ = parse_command_line(["", f"--config={recipe}"])
    for name, own in config.evals.items():
        yield name, evaluation(**{**own, "source": own.source or config.data.source})
