"""Features kept on this machine's disk from one command to the next, in the cache of limited size."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.evals.examples import Examples
from vit_jax.storage import cache


class FeatureFiles:
    """The features by one model with one set of weights; a `FeatureCache`.

    What was read or written once stays in memory too.
    """

    def __init__(self, model: Any, weights: Any):
        """Identifies the weights: NumPy arrays, of a model on the devices of this process."""
        digest = hashlib.sha256(repr((model.spec, jax.devices()[0].device_kind)).encode())
        for path, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]:
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
            digest.update(np.ascontiguousarray(leaf).data)
        self._weights, self._known = digest.hexdigest(), dict[str, Examples]()

    def get(self, identity: str) -> Examples | None:
        """Returns the features of the examples with an `EvalBatches.identity`, or None.

        Raises:
            UserError: the cache cannot be read.
        """
        if identity in self._known:
            return self._known[identity]
        try:
            folder = cache.cached_folder(self._key(identity), "the features", 0, _fail)
        except KeyError:
            return None
        with np.load(folder / "features.npz") as arrays:
            return self._known.setdefault(identity, Examples(arrays["features"], arrays["labels"]))

    def __setitem__(self, identity: str, examples: Examples) -> None:
        """Keeps the features of some examples.

        Raises:
            UserError: they do not fit into the cache.
        """
        self._known[identity] = examples
        size = sum(array.nbytes for array in examples)

        def write(folder: Path) -> None:
            np.savez(folder / "features.npz", features=examples.features, labels=examples.labels)

        cache.cached_folder(self._key(identity), f"{len(examples.labels):,} images' features", size, write)

    def _key(self, identity: str) -> str:
        return "features-" + hashlib.sha256(f"{self._weights} {identity}".encode()).hexdigest()[:32]


def _fail(folder: Path) -> None:
    raise KeyError(folder)
