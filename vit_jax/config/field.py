"""The declaration of a configuration field: one row of `fields.FIELDS`."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any


class OnResume(enum.Enum):
    """The rules for a run that is resumed with another value of a field."""

    ACCEPTED = "the run continues; the change is logged"
    DATA = "the run continues if data.accept_change is set"
    REFUSED = "it would be another run"


class Affects(enum.Enum):
    """The effects that a field of the model's group may have."""

    WEIGHTS = "which arrays there are and what they compute: weights to start from must agree"
    HEAD = "the same of the head: weights to start from must agree if their head is kept"
    TRAINING = "initial values and dropout: weights to start from may differ"
    EXECUTION = "how devices execute the model: a resumed run may differ"


class Place(enum.Enum):
    """The kinds of files that a field may name, which another machine may lack."""

    SOURCE = "a data source"
    WEIGHTS = "weights, by path or by published name"
    FOLDER = "a folder"
    FILE = "a file, or a word that stands for one of the package"


@dataclasses.dataclass(frozen=True)
class Field:
    """The declaration of a field: its default, its meaning and its rules.

    Attributes:
        name: the dotted name; `evals.*.NAME` is a field of every evaluation.
        default: the default value; None: unset.
        meaning: one line of documentation.
        optional: the type of a field that may be unset, and is unset by default; None: the field must have a value.
        minimum: the smallest number allowed, inclusive. In a tuple it holds for each number.
        maximum: the largest number allowed, inclusive. In a tuple it holds for each number.
        choices: the words allowed; empty: any value of the type, or those of the model's specs.
        is_integer: whether its numbers must be whole.
        auto: whether the value may be the word auto instead of a whole number.
        on_resume: the rule for a resumed run; None: the rule of the field's group, see `rule_of`.
        affects: what a field of the model's group affects; not used for other groups.
        place: what the field names in files; None: nothing.
        kinds: the kinds of evaluations that have the field; empty: all kinds, or it is not a field of an evaluation.
        defaults: kind of evaluation -> default, for kinds whose default is not `default`.
        renamed_from: the name in earlier versions, which recipes, command lines and `config.json` may still use.
        since: the version that introduced the field. In a `config.json` of an earlier version it gets the value
            `before`.
        before: the value that earlier versions behaved like; None: `default`.
        synonyms: the names in timm, Hugging Face, big_vision, scenic, Keras, DeiT and MAE, separated by spaces.
    """

    name: str
    default: Any
    meaning: str
    optional: type | None = None
    minimum: float = -math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()
    is_integer: bool = False
    auto: bool = False
    on_resume: OnResume | None = None
    affects: Affects = Affects.WEIGHTS
    place: Place | None = None
    kinds: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    renamed_from: str | None = None
    since: str = "0.1"
    before: Any = None
    synonyms: str = ""

    @property
    def later(self) -> bool:
        """Whether reading a `config.json` adds this field where it is absent, because an earlier version wrote it.

        Fields of only some kinds of evaluations are not added.
        """
        return self.since != "0.1" and not self.kinds

    @property
    def rule(self) -> OnResume:
        """The rule for a run that is resumed with another value of this field."""
        return self.on_resume or rule_of(self.name, self.affects)


def rule_of(name: str, affects: Affects = Affects.WEIGHTS) -> OnResume:
    """Returns the rule for a resumed run that holds for a field's group.

    It applies to fields that state no rule, and to fields of a stored configuration that this version does not have.
    """
    group = name.partition(".")[0]
    if group == "model":
        return OnResume.ACCEPTED if affects is Affects.EXECUTION else OnResume.REFUSED
    return {"task": OnResume.REFUSED, "adapt": OnResume.REFUSED, "data": OnResume.DATA}.get(group, OnResume.ACCEPTED)
