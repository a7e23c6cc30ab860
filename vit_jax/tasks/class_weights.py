"""Weights of classes in the loss, and how frequent classes are, from the numbers of images of the classes."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float64
from ml_collections import ConfigDict

from vit_jax import UserError
from vit_jax.data import ClassFacts
from vit_jax.data.sources import compose
from vit_jax.storage import read_json

PerClass: TypeAlias = Float64[np.ndarray, " classes"]
COUNTED = ("balanced", "effective")  # the values of `task.class_weights` that need the numbers of images


def fields_that_count(config: ConfigDict) -> list[str]:
    """Returns the fields of a configuration, as FIELD=VALUE, that need the numbers of images of the classes."""
    task = config.task
    counted = {
        f"task.class_weights={task.class_weights}": task.class_weights in COUNTED,
        f"task.logit_adjustment={task.logit_adjustment:g}": task.logit_adjustment,
    }
    return [field for field, needs in counted.items() if needs]


def make_class_weights(config: ConfigDict, num_classes: int, classes: ClassFacts | None) -> tuple[float, ...] | None:
    """Returns the weight of each class by `task.class_weights`; None if that is unset.

    Args:
        config: the configuration.
        num_classes: the number of classes.
        classes: what the data state of the classes; None: they are not open, as in a plan or where a finished run is
            evaluated, and all weights are 1.

    Raises:
        UserError: a file of weights cannot be read, or does not fit the classes.
    """
    stated, known = config.task.class_weights, np.array((classes and classes.counts) or (), np.float64)
    if stated is None:
        return None
    if classes is None:
        weights = np.ones(num_classes)
    elif stated not in COUNTED:
        weights = read_weights(stated, num_classes, classes.names)
    else:
        weights = (
            balanced_weights(known) if stated == "balanced" else effective_weights(known, config.task.effective_beta)
        )
    return tuple(map(float, weights))


def balanced_weights(counts: PerClass) -> PerClass:
    """Returns weights in proportion to 1 / n for classes of n images, whose mean over all images is 1.

    A class without images has the weight 0. With n images of N in K classes, the weight is N / (K n).
    """
    return scale_weights(np.divide(1.0, counts, where=counts > 0, out=np.zeros_like(counts)), counts)


def effective_weights(counts: PerClass, beta: float) -> PerClass:
    """Returns weights in proportion to (1 - beta) / (1 - beta^n) for classes of n images; their mean over images is 1.

    The inverse is the effective number of n images (Cui et al., arXiv 1901.05555, equation 2): 1 with beta = 0, and n
    as beta approaches 1. The paper scales the weights to a sum of K over the K classes instead.
    """
    numbers = np.ones_like(counts) if beta == 0 else np.expm1(counts * np.log(beta)) / (beta - 1)
    return scale_weights(np.divide(1.0, numbers, where=counts > 0, out=np.zeros_like(counts)), counts)


def scale_weights(weights: PerClass, counts: PerClass) -> PerClass:
    """Returns weights multiplied by a number that makes their mean over all images 1, as the rate is set for that."""
    return weights * (counts.sum() / (weights * counts).sum())


def read_weights(path: str, num_classes: int, names: Sequence[str] | None) -> PerClass:
    """Returns the weights in a JSON file: a list with a number for each class, or an object {class: number}.

    A class that the object lacks has the weight 1. Classes without names are numbered, {"0": 2.5}.

    Raises:
        UserError: the file cannot be read, has another form, names a class that is not there, or a weight is negative.
    """
    stated = read_json(path)
    values = list(stated.values()) if isinstance(stated, dict) else stated
    if not isinstance(values, list) or not all(type(value) in (int, float) and 0 <= value < np.inf for value in values):
        raise UserError(f'cannot read {path}: it must give classes weights of at least 0, such as {{"cat": 2.5}}.')
    if isinstance(stated, list):
        if len(stated) != num_classes:
            raise UserError(f"{path} has {len(stated):,} weights, but the data have {num_classes:,} classes.")
        return np.array(stated, np.float64)
    weights = np.ones(num_classes)
    labels = {compose(name): label for label, name in enumerate(names or map(str, range(num_classes)))}
    for name, value in stated.items():
        if compose(name) not in labels:
            raise UserError(f"{path} has a weight of {name!r}, which is not a class of the data.")
        weights[labels[compose(name)]] = value
    return weights


def make_log_priors(config: ConfigDict, classes: ClassFacts | None) -> tuple[float, ...] | None:
    """Returns what `task.logit_adjustment` adds to the logits in training; None if it is 0, or the data are not open.

    It is tau log(pi) for a class whose share of the images is pi (Menon et al., arXiv 2007.07314, equation 10). A class
    without images counts as one with an image.
    """
    if not config.task.logit_adjustment or classes is None or not classes.counts:
        return None
    counts = np.maximum(classes.counts, 1.0)
    shares = counts / counts.sum()
    return tuple(map(float, config.task.logit_adjustment * np.log(shares)))
