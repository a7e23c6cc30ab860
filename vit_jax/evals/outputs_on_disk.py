"""Features and logits on this machine's disk, for later commands. They lie in the cache of `storage.cache`."""

import functools
import hashlib
import logging
from pathlib import Path

import jax
import numpy as np

from vit_jax import NPZ_ERRORS, UserError, encode_text, user_errors
from vit_jax.evals.outputs import Arrays
from vit_jax.model import Model
from vit_jax.storage import cache, versions
from vit_jax.tree import ArrayTree

PACKAGE = Path(__file__).parents[1]
LIBRARIES = (*versions.COMPILERS, *versions.IMAGE_LIBRARIES, "flax")  # other versions may give other outputs


class OutputFiles:
    """An `OutputCache` on disk, for one model with one set of weights.

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
