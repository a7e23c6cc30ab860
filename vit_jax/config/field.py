"""What one row of `fields.FIELDS` states of a field."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any


class OnResume(enum.Enum):
    """What happens when a run is resumed with another value of a field."""

    ACCEPTED = "the run continues; the change is logged"
    DATA = "the run continues if data.accept_change is set"
    REFUSED = "it would be another run"


class Affects(enum.Enum):
    """What a field of the model decides."""

    WEIGHTS = "which arrays there are and what they compute: weights to start from must agree"
    HEAD = "the same of the head: weights to start from must agree if their head is kept"
    TRAINING = "initial values and dropout: weights to start from may differ"
    EXECUTION = "how devices execute the model: a resumed run may differ"


@dataclasses.dataclass(frozen=True)
class Field:
    """A field: its default, its meaning and its rules.

    Attributes:
        name: dotted; `evals.*.NAME` is of every evaluation.
        default: None: unset.
        meaning: one line.
        optional: the type of a field that may be unset, as it is by default.
        least: of a number.
        most: of a number.
        choices: the words that it may be; empty: any value of the type.
        whole: a number that must have no fraction.
        auto: whether the word auto may stand for the whole number.
        on_resume: None: as its group, see `rule_of`.
        affects: of the model's fields.
        kinds: the kinds of evaluations that have the field; empty: all of them, or no field of an evaluation.
        defaults: kind of evaluation -> its default, where it is another.
        renamed_from: its name in earlier versions, which recipes, command lines and `config.json` may still use.
        since: the version that introduced it; `before` stands for it in a `config.json` of an earlier version.
        before: what earlier versions did; None: the default.
        synonyms: what timm, Hugging Face, big_vision, scenic, Keras, DeiT and MAE call it.
    """

    name: str
    default: Any
    meaning: str
    optional: type | None = None
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    whole: bool = False
    auto: bool = False
    on_resume: OnResume | None = None
    affects: Affects = Affects.WEIGHTS
    kinds: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    renamed_from: str | None = None
    since: str = "0.1"
    before: Any = None
    synonyms: str = ""

    @property
    def later(self) -> bool:
        """Whether it is added to every group that may have it when an earlier `config.json` is read."""
        return self.since != "0.1" and not self.kinds

    @property
    def rule(self) -> OnResume:
        """What happens when a run is resumed with another value."""
        return self.on_resume or rule_of(self.name, self.affects)


def rule_of(name: str, affects: Affects = Affects.WEIGHTS) -> OnResume:
    """Returns the rule of a field's group, for a field that states none or that this version lacks."""
    group = name.partition(".")[0]
    if group == "model":
        return OnResume.ACCEPTED if affects is Affects.EXECUTION else OnResume.REFUSED
    return {"task": OnResume.REFUSED, "adapt": OnResume.REFUSED, "data": OnResume.DATA}.get(group, OnResume.ACCEPTED)
