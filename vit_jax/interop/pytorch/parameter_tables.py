"""The tables of ViTs in PyTorch's layouts, by which files are both read and written, and archives with other names."""

import re

import numpy as np

from vit_jax import UserError
from vit_jax.interop.archives import Archive
from vit_jax.interop.mapping import Leaf, ParameterTable, Stack, of_blocks
from vit_jax.interop.pytorch.array_names import MapNames, Names
from vit_jax.models import ModelSpec

Renaming = tuple[tuple[str, str], ...]  # pattern, replacement
# What PyTorch puts into names for torch.compile, FSDP and activation checkpointing, of a model or of a part of it.
WRAPPERS = ((r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", ""),)


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


def dense_leaves(ours: str, *theirs: str) -> ParameterTable:
    """Returns the table of a linear layer whose outputs may have several axes.

    `ours` is our name of the layer and `theirs` the prefix of its names in the file, here and in the functions below.
    Several prefixes are those of layers with the same inputs, which are stacked in our layer.
    """
    kinds = (("kernel", 1, "weight", linear), ("bias", 0, "bias", flat))
    table: ParameterTable = {}
    for kind, axis, name, arrange in kinds:
        leaves = [Leaf(f"{part}{name}", arrange=arrange) for part in theirs]
        table[f"{ours}/{kind}"] = Stack(axis, leaves) if len(leaves) > 1 else leaves[0]
    return table


def merging_leaves(ours: str, theirs: str) -> ParameterTable:
    """Returns the table of a linear layer whose inputs have several axes."""
    return {f"{ours}/kernel": Leaf(f"{theirs}weight", arrange=merging_linear), f"{ours}/bias": Leaf(f"{theirs}bias")}


def norm_leaves(ours: str, theirs: str) -> ParameterTable:
    """Returns the table of a LayerNorm or GroupNorm."""
    return {f"{ours}/scale": Leaf(f"{theirs}weight"), f"{ours}/bias": Leaf(f"{theirs}bias")}


def model_leaves(spec: ModelSpec, names: Names) -> ParameterTable:
    """Returns our name -> the arrays that the parameter consists of, for all parameters of a ViT but its ResNet's."""
    table: ParameterTable = {"embed/kernel": Leaf(f"{names.patches}weight", arrange=convolution)}
    if spec.stem.bias:
        table["embed/bias"] = Leaf(f"{names.patches}bias")
    if spec.class_rows:
        table["cls"] = Leaf(names.cls, ones=2)
    if spec.prefix.registers:
        table["registers"] = Leaf(names.registers, ones=1)
    if spec.position.kind == "learned":
        table["position"] = Leaf(names.position, ones=names.position_ones)
    blocks = [f"{names.blocks}{index}." for index in range(spec.depth)]
    table |= {f"encoder/blocks/{name}": of_blocks(part, blocks) for name, part in block_leaves(spec, names).items()}
    pooled = spec.head.final_norm == "pooled"
    table |= norm_leaves("pooled_norm", names.pooled_norm) if pooled else norm_leaves("encoder/norm", names.norm)
    if spec.head.pooling == "map":
        table |= map_leaves(names.map_head)
    if spec.head.pre_logits:
        table |= dense_leaves("pre_logits", names.pre_logits)
    if spec.head.num_classes:
        for ours, theirs in names.heads.items():
            table |= dense_leaves(ours, theirs)
    return table


def block_leaves(spec: ModelSpec, names: Names) -> ParameterTable:
    """Returns the table of one block, without the block's name."""
    table = norm_leaves("norm1", names.norms[0]) | norm_leaves("norm2", names.norms[1])
    table |= dense_leaves("attention/qkv", *names.attention) | merging_leaves("attention/out", names.out)
    if spec.attention.qk_norm:
        table |= norm_leaves("attention/query_norm", names.qk_norms[0])
        table |= norm_leaves("attention/key_norm", names.qk_norms[1])
    if spec.block.layer_scale:
        table |= {f"layer_scale{number}": Leaf(name) for number, name in enumerate(names.layer_scales, 1)}
    gated = spec.block.activation == "swiglu"
    widening, narrowing = names.gated if gated else names.dense
    table |= dense_leaves("mlp/dense1_gated" if gated else "mlp/dense1", *widening)
    return table | dense_leaves("mlp/dense2", narrowing)


def map_leaves(names: MapNames) -> ParameterTable:
    """Returns the table of attention pooling."""
    table: ParameterTable = {"map_head/probe": Leaf(names.prefix + names.probe, ones=2)}
    for ours, theirs in zip(("query", "key", "value"), names.projections, strict=True):
        table |= dense_leaves(f"map_head/attention/{ours}", names.prefix + theirs)
    table |= merging_leaves("map_head/attention/out", names.prefix + names.out)
    table |= norm_leaves("map_head/norm", names.prefix + names.norm)
    for number in (1, 2):
        table |= dense_leaves(f"map_head/mlp/dense{number}", f"{names.prefix}mlp.fc{number}.")
    return table


class RenamedArchive(Archive):
    """The arrays of another archive by new names."""

    def __init__(self, archive: Archive, renaming: Renaming, ignored: str):
        """Renames the arrays of an archive, and leaves some out.

        Args:
            archive: the archive with the names of a file.
            renaming: the replacements in names, in their order.
            ignored: the pattern of the new names of arrays that are left out, as no model needs them.

        Raises:
            UserError: two arrays get the same name.
        """
        self._archive, self.notes = archive, archive.notes
        self._names: dict[str, str] = {}
        for old in archive:
            new = rename(old, renaming)
            if new in self._names:
                raise UserError(
                    f"it contains both {self._names[new]} and {old}, of which only one can be meant; leave out one"
                )
            if not re.fullmatch(ignored, new):
                self._names[new] = old
        self._headers = {new: archive[old] for new, old in self._names.items()}

    def read_array(self, name: str, into: np.ndarray) -> None:
        """Reads an array by its new name; see `Archive`."""
        self._archive.read_array(self._names[name], into)


def rename(name: str, renaming: Renaming) -> str:
    """Returns a name after all replacements."""
    for pattern, replacement in renaming:
        name = re.sub(pattern, replacement, name)
    return name


def unwrapped(archive: Archive) -> Archive:
    """Returns the arrays of a file without the prefix that all names share, and without what `WRAPPERS` put into names.

    A prefix says only what the model was a part of when it was saved: `model.`, `backbone.`, `state_dict_ema.module.`.

    Raises:
        UserError: two arrays get the same name.
    """
    names, prefix = [rename(name, WRAPPERS) for name in archive], ""
    first, last = min(names, default=""), max(names, default="")  # what these two begin with, all begin with
    for part in first.split(".")[:-1]:
        if not last.startswith(f"{prefix}{part}."):
            break
        prefix += f"{part}."
    return RenamedArchive(archive, (*WRAPPERS, (f"^{re.escape(prefix)}", "")), "")
