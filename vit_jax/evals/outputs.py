"""The outputs of a model for all images of a split, frozen features or logits: computed once for all evaluations.

`OutputFiles` keeps them on this machine's disk, in the cache of `storage.cache`, for later commands.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np

from vit_jax import NPZ_ERRORS, UserError, encode_text, user_errors
from vit_jax.data import EvalBatches
from vit_jax.inference import Inference
from vit_jax.model import Model
from vit_jax.storage import cache, versions
from vit_jax.tasks import Batch
from vit_jax.tree import ArrayTree

PACKAGE = Path(__file__).parents[1]
LIBRARIES = (*versions.COMPILERS, *versions.IMAGE_LIBRARIES, "flax")  # other versions may give other outputs

Arrays: TypeAlias = tuple[np.ndarray, np.ndarray]  # outputs of n images [n, width or classes], their labels [n, ...]
Tick: TypeAlias = Callable[[], None]


class OutputFiles:
    """Outputs by their `output_key`, on disk, for one model with one set of weights.

    Outputs that were read or written once also stay in memory. If the cache on disk fails, the evaluation goes on: a
    warning gives the reason, and this object no longer reads or writes there.
    """

    def __init__(self, model: Model, weights: ArrayTree):
        """Takes the model as chosen for the devices of this process, and its weights as NumPy arrays."""
        self._model, self._weights = model, weights
        self._known, self._is_usable = dict[str, Arrays](), True

    def get(self, key: str) -> Arrays | None:
        """Returns the outputs that are stored under an `output_key`, or None."""
        if key not in self._known and self._is_usable:
            try:
                folder = cache.cached_folder(self._name(key), "the outputs", 0, _fail)
                errors = user_errors(f"cannot read {folder}", *NPZ_ERRORS, advice="remove the folder")
                with errors, np.load(folder / "outputs.npz") as arrays:
                    self._known[key] = arrays["outputs"], arrays["labels"]
            except KeyError:
                return None
            except UserError as error:
                self._give_up(error)
        return self._known.get(key)

    def __setitem__(self, key: str, arrays: Arrays) -> None:
        """Stores outputs under an `output_key`."""
        self._known[key] = outputs, labels = arrays
        if not self._is_usable:
            return

        def write(folder: Path) -> None:
            np.savez(folder / "outputs.npz", outputs=outputs, labels=labels)

        try:
            size = outputs.nbytes + labels.nbytes
            cache.cached_folder(self._name(key), f"storing the outputs for {len(labels):,} images", size, write)
        except UserError as error:
            self._give_up(error)

    def _give_up(self, error: UserError) -> None:
        self._is_usable = False
        words = "%s The outputs of the model are not kept for the next command."
        logging.getLogger(__name__).warning(words, f"{error}".rstrip(".") + ".")

    def _name(self, key: str) -> str:
        return "outputs-" + hashlib.sha256(encode_text(f"{self._digest} {key}")).hexdigest()[:32]

    @functools.cached_property
    def _digest(self) -> str:
        """A digest of everything but the images that the outputs depend on.

        These are the model, its weights, the kind of device, and the versions of this package and of the libraries.
        """
        code = versions.source_digest(PACKAGE), versions.library_versions(LIBRARIES)
        digest = hashlib.sha256(repr((self._model.spec, jax.devices()[0].device_kind, code)).encode())
        for path, leaf in jax.tree_util.tree_flatten_with_path(self._weights)[0]:
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
            digest.update(np.ascontiguousarray(leaf).data)
        return digest.hexdigest()


def _fail(folder: Path) -> None:
    raise KeyError(folder)


OutputCache: TypeAlias = dict[str, Arrays] | OutputFiles  # `output_key` -> outputs, all for the same weights


def output_key(kind: str, batches: EvalBatches) -> str:
    """Returns a key that identifies outputs for fixed weights: their kind, the images and the preprocessing."""
    return f"{kind} {batches.identity}"


def compute_outputs(
    program: Inference,
    kind: str,
    params: ArrayTree,
    batches: EvalBatches,
    cache: OutputCache,
    tick: Tick = lambda: None,
) -> Arrays:
    """Returns the outputs and the labels of all examples, in the order of the source.

    Every host gets the outputs of all examples. They are taken from the cache or, if missing, computed and stored in
    it.

    Args:
        program: the functions of the model.
        kind: "features", the model's `pre_logits` in float32, or "logits".
        params: the parameters, on the devices.
        batches: the batches of the examples.
        cache: a cache of outputs with these parameters.
        tick: called once for each batch.

    Raises:
        UserError: an image cannot be read.
    """
    key = output_key(kind, batches)
    arrays = cache.get(key)
    if arrays is None:
        step = {"features": program.features, "logits": program.logits}[kind]
        arrays = cache[key] = _gather(step, params, batches, tick)
    return arrays


def _gather(
    step: Callable[[ArrayTree, Batch], tuple[jax.Array, jax.Array]], params: ArrayTree, batches: EvalBatches, tick: Tick
) -> Arrays:
    count, whole = len(batches.source), list[np.ndarray]()
    for number, part in enumerate(fetch_late(step(params, batch) for batch in batches)):
        tick()
        whole = whole or [np.empty((count, *array.shape[1:]), array.dtype) for array in part]
        indices = batches.order.indices(number)
        for array, rows in zip(whole, part, strict=True):
            array[indices[indices >= 0]] = rows[indices >= 0]  # without the rows that pad a batch
    outputs, labels = whole
    return outputs, labels


def count_nonfinite(outputs: np.ndarray) -> int:
    """Returns the number of images with an output that is infinite or NaN; `outputs` are [images, ...]."""
    return int(np.count_nonzero(~np.isfinite(outputs).reshape(len(outputs), -1).all(axis=1)))


def refuse_nonfinite(outputs: str, bad: int, count: int) -> None:
    """Raises UserError if the outputs of a model for `bad` of `count` images are not finite, and `bad` is not 0."""
    if bad:
        raise UserError(
            f"{outputs} of {bad:,} of {count:,} images are not finite, as the weights are too large; use others, "
            "such as an earlier checkpoint."
        )


def fetch_late(results: Iterator[ArrayTree]) -> Iterator[ArrayTree]:
    """Yields results on the host. The next result is dispatched before one is fetched, so that devices do not idle.

    There must be at least one result.
    """
    pending = next(results)
    for result in results:
        yield jax.device_get(pending)
        pending = result
    yield jax.device_get(pending)
