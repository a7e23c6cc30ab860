"""Evaluations that a command line asks for: [NAME=]WHAT[:FIELD=VALUE,...]."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from ml_collections import ConfigDict

from vit_jax import UserError, choose, data
from vit_jax.config import (
    EVAL_KINDS,
    check_evaluations,
    eval_fields,
    evaluation,
    first_evaluation,
    parse_command_line,
    parse_value,
    source_label,
)

OUTPUTS = ("features", "predictions", "confusion", "mistakes")  # that can be saved beside
REQUEST = re.compile(r"(?:(?P<name>\w+)=)?(?P<what>[^:=]+)(?::(?P<fields>.*))?")


def choose_evaluations(
    config: ConfigDict, size: tuple[int, int], preprocess: str | None, requests: Sequence[str], split: str | None
) -> None:
    """Leaves in the configuration the evaluations that are asked for.

    Args:
        config: of the model's run; or without evaluations, if it has none.
        size: height and width of the model's images.
        preprocess: of the model's images, if known.
        requests: as for `request_evaluations`; empty: those of the run.
        split: in place of the split of the run's first evaluation; None: all on their own splits.

    Raises:
        UserError: nothing is asked for of a model without a run, or something that does not suit the model.
    """
    if split is not None and requests:
        raise UserError("write the split in --evals, for example --evals='test:split=test[:10%]'.")
    known = config.data.preprocess if len(config.evals) else preprocess  # a run trains as its configuration says
    values = None if known is None else data.value_range_of(known)
    if split is not None:
        choose_split(config, split)
    if requests:
        pipe = config.evals[first_evaluation(config)].preprocess if len(config.evals) else preprocess
        with config.unlocked():
            config.evals = request_evaluations(requests, dict(config.evals.items()), pipe)
    if not len(config.evals):
        raise UserError(
            "only a run has evaluations of its own; say which, for example --evals=fewshot:source=tfds:cifar10."
        )
    if unset := [name for name in config.evals if not (config.evals[name].source or config.data.source)]:
        raise UserError(f"say on which data, for example --evals={unset[0]}:source=tfds:cifar10.")
    check_evaluations(config)
    for name in config.evals:
        data.eval_preprocessor(config, name, (*size, 3), values)


def choose_split(config: ConfigDict, split: str) -> None:
    """Leaves of the evaluations the first, and has it read another split."""
    first = first_evaluation(config)
    with config.unlocked():
        for name in [name for name in config.evals if name != first]:
            del config.evals[name]
    config.evals[first].split = split


def request_evaluations(words: Sequence[str], own: Mapping[str, ConfigDict], preprocess: str | None) -> ConfigDict:
    """Returns the evaluations, by name.

    Args:
        words: each of them [NAME=]WHAT[:FIELD=VALUE,...], where WHAT is an evaluation of the run, a kind of evaluation
            or a recipe, FILE.py, whose evaluations are all meant. A field of one value that is given several stands for
            an evaluation with each.
        own: the evaluations of the run.
        preprocess: of the model's images, if known: for evaluations that state none.

    Raises:
        UserError: there is no such evaluation, kind, file or field, a value has the wrong type, or two evaluations have
            one name.
    """
    found = ConfigDict()
    for word in words:
        for name, requested in _request(word, own, preprocess):
            if name in found:
                raise UserError(f"two evaluations are called {name}; name one: --evals=NAME={word}.")
            found[name] = requested
    return found


def _request(word: str, own: Mapping[str, ConfigDict], preprocess: str | None) -> Iterator[tuple[str, ConfigDict]]:
    match = REQUEST.fullmatch(word)
    if not match:
        raise UserError(f"cannot read --evals={word}; write --evals=[NAME=]KIND[:FIELD=VALUE,...].")
    what, name = match["what"], match["name"]
    if what.endswith(".py"):
        yield from _recipe_evaluations(word)
        return
    if what in own:
        start, name = ConfigDict(own[what]), name or what
    else:
        start = evaluation(choose("evaluation or kind of evaluation", what, [*own, *EVAL_KINDS]))
        start.preprocess = preprocess or start.preprocess
    given = parse_fields(match["fields"] or "", start)
    label = name or "_".join([what, *(source_label(value[0]) for field, value in given.items() if field == "source")])
    several = [field for field, values in given.items() if len(values) > 1]
    for values in itertools.product(*given.values()):
        requested, chosen = ConfigDict(start), dict(zip(given, values, strict=True))
        for field, value in chosen.items():
            requested[field] = parse_value(start, field, value, "in --evals, ")
        parts = [name or what, *(source_label(chosen[field]) for field in several)]
        yield "_".join(parts) if several else label, requested


def parse_fields(text: str, start: ConfigDict) -> dict[str, list[str]]:
    """Returns the values of each field in FIELD=VALUE,...: one, unless a field of a single value is given several.

    Raises:
        UserError: the text has another form, or the kind of the evaluation has no such field.
    """
    given = {}
    for part in re.split(r",(?=\w+=)", text) if text else ():
        field, equals, value = part.partition("=")
        if not (equals and value):
            raise UserError(f"cannot read {part!r} in --evals; write FIELD=VALUE.")
        known = [one for one in eval_fields(start.kind) if one != "kind"]
        choose(f"field of the {start.kind} evaluation", field, known)
        has_many = isinstance(start[field], tuple) or field == "preprocess"
        given[field] = [value] if has_many else re.split(r",(?![^\[(]*[\])])", value)
    return given


def _recipe_evaluations(recipe: str) -> Iterator[tuple[str, ConfigDict]]:
    config, _ = parse_command_line(["", f"--config={recipe}"])
    for name, own in config.evals.items():
        yield name, ConfigDict({**own, "source": own.source or config.data.source})
