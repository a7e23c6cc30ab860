"""Linear probes: linear classifiers fitted to frozen features.

The strength of regularisation or the learning rate is chosen on a validation part of the training examples. Features
are whitened as in few-shot regression. Each process runs the same fit in float32 on one of its devices, an accelerator
if there is one. On two CPU cores L-BFGS takes a third to a tenth of scikit-learn's time to the same tolerance.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32, Float64, Int, Int32, PRNGKeyArray
from ml_collections import ConfigDict

from vit_jax import UserError
from vit_jax.evals.labelled_features import Examples, check_examples, measure_scale, permute_classes
from vit_jax.machine import device_memory, host_memory

TOLERANCE = 1e-6  # L-BFGS stops when no element of the mean loss's gradient is greater in size
MAX_STEPS = 1000  # the most steps of L-BFGS
MOMENTUM = 0.9
NEVER = -1e4  # the logit of a class that was never seen
BLOCK = 2**26  # logits that are computed at a time: 256 MiB
ARRAYS_PER_FIT = (
    30  # arrays as large as a classifier that a fit holds; L-BFGS keeps ten steps and ten changes of the gradient
)

Heads = tuple[Float32[np.ndarray, "settings width classes"], Float32[np.ndarray, "settings classes"]]
# (features, labels from 0, rows to fit, settings) -> heads, one for each setting.
Fit = Callable[
    [Float32[np.ndarray, "n width"], Int32[np.ndarray, " n"], Int[np.ndarray, " rows"], Sequence[float]], Heads
]


class Probe(NamedTuple):
    """The result of a linear probe.

    Attributes:
        accuracy: the accuracy on the test examples of a fit with the chosen setting to all training examples.
        setting: the chosen setting.
        validation: the accuracy of each setting on the validation part; empty if there is a single setting.
    """

    accuracy: float
    setting: float
    validation: Float64[np.ndarray, " settings"]


class WhitenedExamples(NamedTuple):
    """Training examples whose features have mean 0 and standard deviation 1, and whose labels count from 0.

    Attributes:
        features: (features - mean) / scale.
        labels: the rows of `classes`.
        classes: the labels that there are, in ascending order.
        mean: of the features as given.
        scale: of the features as given; see `measure_scale`.
    """

    features: Float32[np.ndarray, "n width"]
    labels: Int32[np.ndarray, " n"]
    classes: Int[np.ndarray, " classes"]
    mean: Float32[np.ndarray, " width"]
    scale: Float32[np.ndarray, " width"]


def probe(eval_config: ConfigDict, train: Examples, test: Examples) -> dict[str, float]:
    """Returns the accuracy of logistic regression, and its `l2`.

    The l2 is the one that is best on part of the training examples.
    """
    result = evaluate_probe(train, test, choose_fit(eval_config), eval_config.l2, eval_config.validation)
    return {"accuracy": result.accuracy, "l2": result.setting}


def probe_sgd(eval_config: ConfigDict, train: Examples, test: Examples) -> dict[str, float]:
    """Returns the accuracy of a linear classifier trained by SGD, and its learning rate.

    The rate is the one that is best on part of the training examples.
    """
    result = evaluate_probe(train, test, choose_fit(eval_config), eval_config.rates, eval_config.validation)
    return {"accuracy": result.accuracy, "rate": result.setting}


def choose_fit(eval_config: ConfigDict) -> Fit:
    """Returns how the classifier of an evaluation of the kind `probe` or `probe_sgd` is fitted."""
    return fit_logistic if "l2" in eval_config else partial(fit_sgd, epochs=eval_config.epochs)


def learn_head(
    train: Examples, fit: Fit, setting: float, num_classes: int
) -> tuple[Float32[np.ndarray, "width classes"], Float32[np.ndarray, " classes"]]:
    """Returns kernel and bias of the classifier that `evaluate_probe` scores, for features as they are given.

    A class without training examples has the bias `NEVER`, so that it is never predicted.

    Args:
        train: the training examples.
        fit: see `evaluate_probe`.
        setting: the chosen l2 or learning rate.
        num_classes: the number of classes; labels are below it.
    """
    white = whiten(train)
    [weights], [bias] = fit(white.features, white.labels, np.arange(len(white.labels)), [setting])
    kernel: np.ndarray = np.zeros((len(white.mean), num_classes), np.float32)
    kernel[:, white.classes] = weights / white.scale[:, None]
    shifts: np.ndarray = np.full(num_classes, NEVER, np.float32)
    shifts[white.classes] = bias - white.mean.astype(np.float64) @ kernel[:, white.classes]
    return kernel, shifts


def check_probe(eval_config: ConfigDict, count: int, width: int, classes: int) -> None:
    """Raises the UserError of `check_memory` for the settings that a probe chooses from."""
    settings = eval_config.l2 if "l2" in eval_config else eval_config.rates
    check_memory(count, width, classes, len(settings), jax.local_devices()[0])


def evaluate_probe(
    train: Examples, test: Examples, fit: Fit, settings: Sequence[float], validation: float, seed: int = 0
) -> Probe:
    """Fits a linear classifier with the setting that is best on a validation part of the training examples.

    The validation part is a random fraction of each class, but no example of a class that has only one. Among equally
    good settings the first is chosen. The final fit is to all training examples. Test examples of classes without
    training examples count as wrong.

    Args:
        train: the training examples.
        test: the test examples.
        fit: `fit_logistic` or `fit_sgd`, with further keywords bound by `functools.partial`.
        settings: the values of l2 or of the learning rate to choose from. A single value needs no validation part.
        validation: the fraction of the training examples in the validation part.
        seed: the seed of the random choice of the validation part.

    Raises:
        UserError: a split is empty or has features that are not finite, or there are several settings and no class has
            two training examples.
    """
    check_examples(train, test)
    features, labels, classes, mean, scale = whiten(train)
    chosen, accuracies = settings[0], np.empty(0)
    if len(settings) > 1:
        held_out = select_validation(labels, validation, seed)
        if not len(held_out):
            raise UserError(
                "every class has a single training example, so none can be held out to choose among "
                f"{', '.join(f'{one:g}' for one in settings)}; give l2 (or rates, of probe_sgd) a single value."
            )
        rows = np.setdiff1d(np.arange(len(labels)), held_out)
        heads = fit(features, labels, rows, settings)
        accuracies = _measure_accuracies(heads, features[held_out], labels[held_out])
        chosen = settings[int(accuracies.argmax())]
    heads = fit(features, labels, np.arange(len(labels)), [chosen])
    known = np.searchsorted(classes, test.labels).clip(max=len(classes) - 1)
    expected = np.where(classes[known] == test.labels, known, -1)
    [accuracy] = _measure_accuracies(heads, (test.features - mean) / scale, expected)
    return Probe(float(accuracy), chosen, accuracies)


def whiten(train: Examples) -> WhitenedExamples:
    """Returns training examples with whitened features."""
    mean, scale = (array.astype(np.float32) for array in measure_scale(train.features))
    features = train.features - mean
    features /= scale  # in place: the features of a large split are most of the memory
    classes, labels = np.unique(train.labels, return_inverse=True)
    return WhitenedExamples(features, labels.astype(np.int32), classes, mean, scale)


def probe_memory(count: int, width: int, classes: int, settings: int) -> tuple[int, int]:
    """Returns about how many bytes a probe takes on the host, and on the device that fits it.

    The host holds the features as read and whitened. The device holds the whitened features, the classifiers, the state
    of the optimizer, and a block of logits with its gradient.

    Args:
        count: the number of training examples.
        width: the width of the features.
        classes: the number of classes.
        settings: the number of settings to choose from.
    """
    classifier = (width + 1) * classes
    fit = (settings + ARRAYS_PER_FIT) * classifier + 3 * min(BLOCK, count * classes)
    return 8 * count * width, 4 * (count * width + fit)


def check_memory(count: int, width: int, classes: int, settings: int, device: jax.Device) -> None:
    """Compares the bytes of `probe_memory` with the memory of this machine and of the device that fits the probe.

    Args:
        count: the number of training examples.
        width: the width of the features.
        classes: the number of classes.
        settings: the number of settings to choose from.
        device: the device that fits the probe. The memory of a CPU device is that of the machine.

    Raises:
        UserError: the machine or the device has less memory than the probe needs.
    """
    on_host, on_device = probe_memory(count, width, classes, settings)
    needs = {"this machine": (on_host, host_memory()), "a device": (on_device, device_memory([device]) or on_device)}
    if device.platform == "cpu":
        needs = {"this machine": (on_host + on_device, host_memory())}
    for place, (needed, there) in needs.items():
        if needed > there:
            raise UserError(
                f"a linear probe on {count:,} images, {width:,} features and {classes:,} classes takes "
                f"{needed / 1e9:,.1f} GB, but {place} has {there / 1e9:,.1f}; set train_split to a part, for example "
                "train[:10%], or evaluate by knn or fewshot."
            )


def select_validation(labels: Int[np.ndarray, " n"], fraction: float, seed: int) -> Int[np.ndarray, " rows"]:
    """Returns the rows of a random fraction of each class.

    At least one row of each class that has two examples is taken, and never all of its rows.
    """
    by_class = permute_classes(labels, seed)
    return np.concatenate([rows[: min(max(round(len(rows) * fraction), 1), len(rows) - 1)] for rows in by_class])


def fit_logistic(
    features: Float32[np.ndarray, "n width"],
    labels: Int32[np.ndarray, " n"],
    rows: Int[np.ndarray, " rows"],
    settings: Sequence[float],
) -> Heads:
    """Returns multinomial logistic regressions, fitted by L-BFGS to the examples `rows`, one for each l2 in `settings`.

    A fit minimises the sum of cross-entropies + l2 / 2 ||weights||^2. The bias is not regularised. `l2` is 1 / C of
    scikit-learn's LogisticRegression. The fits are made in descending order of l2, each starting from the one before.
    The heads are returned in the order of `settings`.
    """
    present: np.ndarray = np.zeros(len(labels), np.float32)
    present[rows] = 1  # the same shape for any number of rows, so that only one program is compiled
    classes = int(labels.max()) + 1
    given = jax.device_put((features, labels, present))
    head = (jnp.zeros((features.shape[1], classes)), jnp.zeros(classes))
    heads = {}
    for l2 in sorted(settings, reverse=True):
        head = heads[l2] = _minimise(*given, jnp.float32(l2), head)
    weights, bias = zip(*(jax.device_get(heads[l2]) for l2 in settings), strict=True)
    return np.stack(weights), np.stack(bias)


def fit_sgd(
    features: Float32[np.ndarray, "n width"],
    labels: Int32[np.ndarray, " n"],
    rows: Int[np.ndarray, " rows"],
    settings: Sequence[float],
    epochs: int,
    batch: int = 1024,
    seed: int = 0,
) -> Heads:
    """Returns linear classifiers, trained by SGD with momentum 0.9 on the examples `rows`, one for each learning rate.

    All weights start at 0. The learning rate falls to 0 by a cosine, and there is no weight decay, as in the linear
    evaluations of MoCo (arXiv 1911.05722) and DINO (arXiv 2104.14294), which augment the images. The examples are
    shuffled every epoch. The incomplete batch at the end of an epoch is left out.
    """
    head = (jnp.zeros((features.shape[1], int(labels.max()) + 1)), jnp.zeros(int(labels.max()) + 1))
    rates = jnp.asarray(settings, jnp.float32)
    batch = min(batch, len(rows))
    heads = _descend(features[rows], labels[rows], head, rates, jax.random.key(seed), epochs=epochs, batch=batch)
    weights, bias = jax.device_get(heads)
    return weights, bias


@jax.jit
def _minimise(
    features: Float32[Array, "n width"],
    labels: Int32[Array, " n"],
    present: Float32[Array, " n"],
    l2: Float32[Array, ""],
    head: optax.Params,
) -> optax.Params:
    count = present.sum()

    def objective(head: optax.Params) -> Float32[Array, ""]:
        return (_sum_losses(head, features, labels, present) + l2 / 2 * (head[0] ** 2).sum()) / count

    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(objective)

    def unfinished(carry: tuple) -> Array:
        _, state, steps = carry
        steepest = jnp.maximum(*(jnp.abs(part).max() for part in optax.tree.get(state, "grad")))
        return (steps == 0) | (steps < MAX_STEPS) & (steepest > TOLERANCE)

    def step(carry: tuple) -> tuple:
        head, state, steps = carry
        value, gradient = value_and_grad(head, state=state)
        updates, state = optimizer.update(gradient, state, head, value=value, grad=gradient, value_fn=objective)
        return optax.apply_updates(head, updates), state, steps + 1

    return jax.lax.while_loop(unfinished, step, (head, optimizer.init(head), 0))[0]


@partial(jax.jit, static_argnames=("epochs", "batch"))
def _descend(
    features: Float32[Array, "n width"],
    labels: Int32[Array, " n"],
    head: optax.Params,
    rates: Float32[Array, " settings"],
    key: PRNGKeyArray,
    epochs: int,
    batch: int,
) -> optax.Params:
    steps = len(labels) // batch
    schedule = optax.cosine_decay_schedule(1.0, epochs * steps)
    optimizer = optax.sgd(schedule, MOMENTUM)
    gradient = jax.grad(lambda head, rows: _cross_entropies(head, features[rows], labels[rows]).mean())

    def update(rate: Array, carry: tuple, rows: Int[Array, " batch"]) -> tuple[tuple, None]:
        head, state = carry
        updates, state = optimizer.update(gradient(head, rows), state)
        return (optax.apply_updates(head, jax.tree.map(lambda part: rate * part, updates)), state), None

    def epoch(rate: Array, carry: tuple, key: PRNGKeyArray) -> tuple[tuple, None]:
        rows = jax.random.permutation(key, len(labels))[: steps * batch].reshape(steps, batch)
        return jax.lax.scan(partial(update, rate), carry, rows)

    def train(rate: Array) -> optax.Params:
        return jax.lax.scan(partial(epoch, rate), (head, optimizer.init(head)), jax.random.split(key, epochs))[0][0]

    return jax.vmap(train)(rates)


def _sum_losses(
    head: optax.Params, features: Float32[Array, "n width"], labels: Int32[Array, " n"], weights: Float32[Array, " n"]
) -> Float32[Array, ""]:
    """Returns the weighted sum of the cross-entropies. It computes blocks of rows, as all logits might not fit."""
    rows = max(1, BLOCK // head[1].shape[0])
    whole = len(labels) // rows * rows

    @jax.checkpoint
    def sum_block(head: optax.Params, start: Int32[Array, ""]) -> Float32[Array, ""]:
        block = (jax.lax.dynamic_slice_in_dim(array, start, rows) for array in (features, labels, weights))
        return _dot_losses(head, *block)

    def add(total: Array, start: Array) -> tuple[Array, None]:
        return total + sum_block(head, start), None

    rest = _dot_losses(head, features[whole:], labels[whole:], weights[whole:])
    return jax.lax.scan(add, rest, jnp.arange(0, whole, rows))[0] if whole else rest


def _dot_losses(head: optax.Params, features: Array, labels: Array, weights: Array) -> Float32[Array, ""]:
    return _cross_entropies(head, features, labels) @ weights


def _cross_entropies(
    head: optax.Params, features: Float32[Array, "n width"], labels: Int32[Array, " n"]
) -> Float32[Array, " n"]:
    logits = jnp.matmul(features, head[0], precision="highest") + head[1]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)


def _measure_accuracies(
    heads: Heads, features: Float32[np.ndarray, "n width"], labels: Int[np.ndarray, " n"]
) -> Float64[np.ndarray, " settings"]:
    rows, hits = max(1, BLOCK // heads[1].shape[1]), np.zeros(len(heads[1]))
    for start in range(0, len(labels), rows):
        block = slice(start, start + rows)
        for setting, (matrix, bias) in enumerate(zip(*heads, strict=True)):
            hits[setting] += np.count_nonzero((features[block] @ matrix + bias).argmax(axis=1) == labels[block])
    return hits / len(labels)
