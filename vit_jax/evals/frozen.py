"""Evaluations that learn a classifier from frozen features, on the host."""

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from vit_jax.evals.fewshot import evaluate_fewshot, summarize_fewshot
from vit_jax.evals.knn import evaluate_knn
from vit_jax.evals.labelled_features import Examples
from vit_jax.evals.probe import evaluate_probe, fit_logistic, fit_sgd

Method: TypeAlias = Callable[
    [ConfigDict, Examples, Examples], dict[str, float]
]  # (eval_config, train, test) -> metrics


def fewshot(eval_config: ConfigDict, train: Examples, test: Examples) -> dict[str, float]:
    """Returns the accuracy of few-shot regression for each number of shots: mean and standard deviation over seeds."""
    accuracy = evaluate_fewshot(train, test, eval_config.shots, eval_config.l2, range(eval_config.seeds))
    return summarize_fewshot(accuracy, eval_config.shots, eval_config.l2)


def knn(eval_config: ConfigDict, train: Examples, test: Examples) -> dict[str, float]:
    """Returns the accuracy of the nearest neighbours' votes for each number of neighbours."""
    accuracy = evaluate_knn(train, test, eval_config.k, eval_config.temperature)
    return {f"{count}nn": float(value) for count, value in zip(eval_config.k, accuracy, strict=True)}


def probe(eval_config: ConfigDict, train: Examples, test: Examples) -> dict[str, float]:
    """Returns the accuracy of logistic regression, and its `l2`.

    The l2 is the one that is best on part of the training examples.
    """
    result = evaluate_probe(train, test, fit_logistic, eval_config.l2, eval_config.validation)
    return {"accuracy": result.accuracy, "l2": result.setting}


def probe_sgd(eval_config: ConfigDict, train: Examples, test: Examples) -> dict[str, float]:
    """Returns the accuracy of a linear classifier trained by SGD, and its learning rate.

    The rate is the one that is best on part of the training examples.
    """
    fit = functools.partial(fit_sgd, epochs=eval_config.epochs)
    result = evaluate_probe(train, test, fit, eval_config.rates, eval_config.validation)
    return {"accuracy": result.accuracy, "rate": result.setting}


METHODS: Mapping[str, Method] = {"fewshot": fewshot, "knn": knn, "probe": probe, "probe_sgd": probe_sgd}


def evaluate_frozen(
    config: ConfigDict,
    name: str,
    train_outputs: tuple[np.ndarray, np.ndarray],
    test_outputs: tuple[np.ndarray, np.ndarray],
) -> dict[str, float]:
    """Returns `<name>/<metric>` of a classifier of frozen features.

    Every host computes the metrics. All return those of the first host, so that they agree to the last bit.

    Args:
        config: the configuration of the run.
        name: the name of the evaluation.
        train_outputs: the features and labels that the classifier is fitted to.
        test_outputs: the features and labels that it is tested on.

    Raises:
        UserError: the features are not finite, or the examples do not suit the method.
    """
    train, test = Examples(*train_outputs), Examples(*test_outputs)
    metrics = METHODS[config.evals[name].kind](config.evals[name], train, test)
    metrics = {f"{name}/{metric}": value for metric, value in metrics.items()}
    metrics |= {f"{name}/n": len(test.labels), f"{name}/n_train": len(train.labels)}
    if jax.process_count() == 1:
        return metrics
    values = np.array([*metrics.values()], np.float64).view(np.uint32)  # as devices may lack float64
    agreed = np.asarray(multihost_utils.broadcast_one_to_all(values)).view(np.float64)
    return {key: type(value)(one) for (key, value), one in zip(metrics.items(), agreed.tolist(), strict=True)}
