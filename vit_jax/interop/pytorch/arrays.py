"""Views of our parameters with the axes of PyTorch, and archives whose names changed between versions."""

import re

import numpy as np

from vit_jax.interop.archives import Archive
from vit_jax.interop.mapping import Leaf, ParameterTable

Renaming = tuple[tuple[str, str], ...]  # pattern, replacement


def linear(kernel: np.ndarray) -> np.ndarray:
    """Returns a view [outputs, inputs] of a kernel [inputs, *outputs]."""
    return kernel.reshape(len(kernel), -1, copy=False).T


def merging_linear(kernel: np.ndarray) -> np.ndarray:
    """Returns a view [outputs, inputs] of a kernel [*inputs, outputs]."""
    return kernel.reshape(-1, kernel.shape[-1], copy=False).T


def convolution(kernel: np.ndarray) -> np.ndarray:
    """Returns a view [outputs, inputs, rows, columns] of a kernel [rows, columns, inputs, outputs]."""
    return kernel.transpose(3, 2, 0, 1)


def flat(bias: np.ndarray) -> np.ndarray:
    """Returns a view of a bias with one axis."""
    return bias.reshape(-1, copy=False)


def dense_leaves(ours: str, theirs: str) -> ParameterTable:
    """Returns the table of a linear layer whose outputs may have several axes.

    `ours` is our name of the layer and `theirs` the prefix of its names in the file, here and in the functions below.
    """
    return {
        f"{ours}/kernel": Leaf(f"{theirs}weight", arrange=linear),
        f"{ours}/bias": Leaf(f"{theirs}bias", arrange=flat),
    }


def merging_leaves(ours: str, theirs: str) -> ParameterTable:
    """Returns the table of a linear layer whose inputs have several axes."""
    return {f"{ours}/kernel": Leaf(f"{theirs}weight", arrange=merging_linear), f"{ours}/bias": Leaf(f"{theirs}bias")}


def norm_leaves(ours: str, theirs: str) -> ParameterTable:
    """Returns the table of a LayerNorm or GroupNorm."""
    return {f"{ours}/scale": Leaf(f"{theirs}weight"), f"{ours}/bias": Leaf(f"{theirs}bias")}


def patch_leaves(theirs: str, bias: bool) -> ParameterTable:
    """Returns the table of the projection of patches, with or without a bias."""
    table: ParameterTable = {"embed/kernel": Leaf(f"{theirs}weight", arrange=convolution)}
    return table | ({"embed/bias": Leaf(f"{theirs}bias")} if bias else {})


class RenamedArchive(Archive):
    """The arrays of another archive by new names."""

    def __init__(self, archive: Archive, renaming: Renaming, ignored: str):
        """Renames the arrays of an archive, and leaves some out.

        Args:
            archive: the archive with the names of a file.
            renaming: the replacements in names, in their order.
            ignored: the pattern of the new names of arrays that are left out, as no model needs them.
        """
        self._archive = archive
        names = ((rename(name, renaming), name) for name in archive)
        self._names = {new: old for new, old in names if not re.fullmatch(ignored, new)}
        self._headers = {new: archive[old] for new, old in self._names.items()}

    def read_array(self, name: str, into: np.ndarray) -> None:
        """Reads an array by its new name; see `Archive`."""
        self._archive.read_array(self._names[name], into)


def rename(name: str, renaming: Renaming) -> str:
    """Returns a name after all replacements."""
    for pattern, replacement in renaming:
        name = re.sub(pattern, replacement, name)
    return name
