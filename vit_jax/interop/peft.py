"""Files of adapters with the names of PEFT (github.com/huggingface/peft), which adapts the models of transformers.

Where transformers has no such model, the layers have our names with the number of the block. `query`, `key` and `value`
are then a layer each.
"""

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax import UserError, printable, tree, user_errors
from vit_jax.interop import archives, hub, model_json
from vit_jax.interop.layout import Family, Leaf, ParameterTable, Part, Stack, check_finite
from vit_jax.interop.layout_table import LAYOUTS
from vit_jax.interop.published_config import json_text
from vit_jax.interop.torch_tables import halves
from vit_jax.interop.transformers_families import CLASSIFIERS, IN_MEMORY, VIT_NAMES, parameter_table
from vit_jax.model import Model
from vit_jax.models import KERNELS, ModelSpec, block_name, factors_of, is_stacked
from vit_jax.storage import atomic_write, expand_home
from vit_jax.tree import ArrayTree

CONFIG, WEIGHTS = hub.ADAPTER_FILES
PREFIX = "base_model.model."  # the prefix of all names
ENDS = (".lora_A.weight", ".lora_B.weight")
MASK = "mask"  # the [mask] embedding, by the same name in the file
# Our name of a layer of the head -> its names in files, ours first.
HEADS = {
    "head": ("head", *(names["head"].removesuffix(".") for names in CLASSIFIERS.values())),
    "distilled_head": ("distilled_head", CLASSIFIERS[True]["distilled_head"].removesuffix(".")),
    "pre_logits": ("pre_logits", VIT_NAMES.pre_logits.removesuffix(".")),
}
# Fields of a configuration that change what an adapter computes -> the values that are supported.
SUPPORTED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the weights that are adapted
}
UNSUPPORTED = [  # such fields of which no value is supported
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "loftq_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
]
# Keys of notes in a file's header: how learned positions were resampled, and the digest of the weights to adapt.
METHOD, DIGEST = "resample", "base_digest"


class Adapter(NamedTuple):
    """A folder with adapters that PEFT or `save_adapter` wrote.

    Attributes:
        folder: the folder with `adapter_model.safetensors` and `adapter_config.json`.
        base: the path or name of the weights that they adapt, as the configuration states it.
        revision: the revision of weights on the hub; empty: the newest.
        alpha: the adapters are multiplied by alpha / rank.
        rank_scaled: whether they are multiplied by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732).
    """

    folder: Path
    base: str
    revision: str
    alpha: float
    rank_scaled: bool

    def read(self) -> tuple[dict[str, np.ndarray], Mapping[str, str]]:
        """Returns name without `PREFIX` -> float32 array, and the notes of the file.

        Raises:
            UserError: the file cannot be read.
        """
        with archives.open_archive(self.folder / WEIGHTS) as archive:
            arrays = {name.removeprefix(PREFIX): _read(archive, name) for name in archive}
            return arrays, dict(archive.notes)


def find_adapter(folder: Path) -> Adapter | None:
    """Returns the adapters in a folder; None: there are none.

    Raises:
        UserError: the configuration is missing, cannot be read, is of another kind of adapters, or names no weights.
    """
    if not (folder / WEIGHTS).is_file():
        return None
    if not (folder / CONFIG).is_file():
        raise UserError(f"{CONFIG}, which names the weights to adapt, is missing; copy it into the folder of {WEIGHTS}")
    errors = OSError, ValueError, TypeError, AttributeError, KeyError
    with user_errors(f"{CONFIG} does not describe adapters", *errors):
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        unsupported = {field: described[field] for field in UNSUPPORTED if described.get(field)}
        unsupported |= {
            field: described[field]
            for field, values in SUPPORTED.items()
            if described.get(field, values[0]) not in values
        }
        if unsupported:
            field, value = next(iter(unsupported.items()))
            raise UserError(f"{CONFIG} states {field}={printable(value)}, which is not supported")
        base, revision = described.get("base_model_name_or_path"), described.get("revision")
        if not base:
            raise UserError(
                f"{CONFIG} does not name the weights to adapt; write their path or their name into its field "
                "base_model_name_or_path"
            )
        alpha, rank_scaled = float(described["lora_alpha"]), bool(described.get("use_rslora"))
        return Adapter(folder, str(base), str(revision or ""), alpha, rank_scaled)


def adapted_fields(base: Model, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the fields in which the adapted model differs from its base: those of the head, if the file has a head.

    Args:
        base: the model that is adapted.
        arrays: the arrays of the adapter's file.
    """
    heads = _head_names(arrays)
    if "head" not in heads:
        return {}
    fields: dict[str, Any] = {
        "num_classes": len(arrays[f"{heads['head']}.weight"]),
        "class_names": None,
        "pre_logits": "pre_logits" in heads,
        "representation_size": len(arrays[f"{heads['pre_logits']}.weight"]) if "pre_logits" in heads else 0,
        "distilled_head": "distilled_head" in heads,
    }
    family = _find_family(base.vit)
    if base.field("pooling") == "token" and family and family.name.startswith("dinov2"):
        fields["pooling"] = "token_gap"  # what its classifier reads
    return fields


def add_adapter(
    adapter: Adapter, arrays: dict[str, np.ndarray], model: Model, params: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the parameters with the adapters added to the kernels, and with the adapter's heads.

    Args:
        adapter: the adapters.
        arrays: the arrays that `adapter.read` returns; not changed.
        model: the model with the adapter's heads.
        params: the parameters of the model; not changed. The heads may be missing.

    Raises:
        UserError: an array of the file belongs to no layer of the model, or an adapter does not fit its layer's sizes.
    """
    left = dict(arrays)
    params = params | _adapted_kernels(adapter, left, model.vit, params)
    for head, linear in _head_names(left).items():
        params[f"{head}/kernel"] = left.pop(f"{linear}.weight").T
        params[f"{head}/bias"] = left.pop(f"{linear}.bias", np.zeros(params[f"{head}/kernel"].shape[1], np.float32))
    if MASK in left:
        params[MASK] = left.pop(MASK)
    if left:
        raise UserError(f"{WEIGHTS} has {printable(next(iter(left)))}, which cannot be added to {model.name}")
    return params


def has_head(arrays: Mapping[str, np.ndarray]) -> bool:
    """Returns whether there is a head among the arrays of a file."""
    return bool(_head_names(arrays))


def _head_names(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Returns our name of a layer of the head -> its name in a file, for the layers that the file has."""
    return {head: name for head, names in HEADS.items() for name in names if f"{name}.weight" in arrays}


def _adapted_kernels(
    adapter: Adapter, arrays: dict[str, np.ndarray], spec: ModelSpec, params: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns our name -> kernel, for the kernels to which adapters were added. Removes their arrays from `arrays`.

    Raises:
        UserError: the sizes of an adapter are not those of its kernel.
    """
    linears = {name.removesuffix(ENDS[0]) for name in arrays if name.endswith(ENDS[0])}
    linears = {linear for linear in linears if linear + ENDS[1] in arrays}
    namings = (_kernel_parts(naming, params, spec.depth) for naming in _namings(spec))
    parts = max(namings, key=lambda parts: len(parts.keys() & linears))
    kernels = dict[str, np.ndarray]()
    for linear in sorted(linears & parts.keys()):
        name, index, in_halves = parts[linear]
        a, b = (arrays.pop(linear + end) for end in ENDS)
        if name not in kernels:
            kernels[name] = np.array(params[name])
        kernel, rank = kernels[name], len(a)
        inputs = 2 if name.endswith("attention/out/kernel") else 1  # dimensions of the kernel: heads and channels
        sides = [math.prod(side) for side in (kernel[index].shape[:inputs], kernel[index].shape[inputs:])]
        if (b.shape[1], a.shape[1], len(b)) != (rank, *sides):
            shapes = f"the shapes {[*a.shape]} and {[*b.shape]}"
            raise UserError(f"{WEIGHTS}: the adapters of {linear} have {shapes}, which do not fit the model")
        factor = adapter.alpha / (math.sqrt(rank) if adapter.rank_scaled else rank)
        adapted = halves(kernel[index]) if in_halves else kernel[index]
        adapted += factor * (b @ a).T.reshape(adapted.shape)
    return kernels


def _read(archive: archives.Archive, name: str) -> np.ndarray:
    array: np.ndarray = np.empty(archive[name].shape, np.float32)
    archive.read_array(name, array)
    check_finite(name, array)
    return array


def _kernel_parts(
    naming: "_Naming | None", params: dict[str, np.ndarray], depth: int
) -> dict[str, tuple[str, tuple, bool]]:
    """Returns what each linear layer is in our kernels, by its name, for all blocks.

    It is our name of the kernel, the index of the layer in that kernel, and whether the channels of its heads are in
    halves in the file, see `Names.rotates_halves`.
    """
    parts = {}
    ends = tuple(f"{layer}/kernel" for layer in KERNELS)
    for kernel in (name for name in params if is_stacked(name) and name.endswith(ends)):
        for block in range(depth):
            linears = _linear_names(naming, kernel.removesuffix("/kernel"), block)
            for number, linear in enumerate(linears):
                index = (block, slice(None), number) if len(linears) > 1 else (block,)
                parts[linear] = kernel, index, _in_halves(naming, kernel.removesuffix("/kernel"), number)
    return parts


def save_adapter(
    folder: Path,
    model: Model,
    trained: ArrayTree,
    rank: int,
    alpha: float,
    weights: str | None = None,
    resample: str = "auto",
    digest: str = "",
) -> None:
    """Writes the adapters and the heads of a model into a folder: `adapter_model.safetensors`, `adapter_config.json`.

    Args:
        folder: an existing folder.
        model: the model with the adapters.
        trained: the factors of the adapters and the heads, as NumPy arrays.
        rank: the rank of the adapters.
        alpha: the adapters are multiplied by alpha / rank.
        weights: the path or name by which PEFT and `weights.load` find the weights that are adapted; None: unknown.
        resample: how the learned positions of these weights were resampled to the model's resolution; auto: as the
            library of their layout does.
        digest: the digest of these weights, as `locate.digest_weights` returns it; empty: unknown.

    Raises:
        UserError: the files cannot be written.
    """
    arrays = adapter_arrays(model.vit, trained)
    layers = [name.removeprefix(PREFIX).removesuffix(ENDS[0]) for name in arrays if name.endswith(ENDS[0])]
    heads = [name.removeprefix(PREFIX) for name in arrays if not name.endswith(ENDS)]
    saved = {name.removesuffix(".weight").removesuffix(".bias") for name in heads}
    name, revision = _state_base(weights) if weights else (None, "")
    described = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": layers,
        "modules_to_save": sorted(saved),
        "base_model_name_or_path": name,
        "revision": revision or None,
        "task_type": None,
    }
    with contextlib.ExitStack() as files, user_errors(f"cannot write {folder / WEIGHTS}"):
        method = {} if resample == "auto" else {METHOD: resample}
        notes = model_json.header_notes(model) | method | {DIGEST: digest}
        file = files.enter_context(atomic_write(folder / WEIGHTS))
        archives.write_archive(folder / WEIGHTS, file, arrays, "float32", notes)
        files.enter_context(atomic_write(folder / CONFIG)).write_text(json_text(described), encoding="utf-8")


def _state_base(base: str) -> tuple[str, str]:
    """Returns the name and the revision by which a configuration states weights.

    The name of weights on the hub is OWNER/NAME. An existing local path becomes absolute. The revision is empty if
    there is none.
    """
    if base.startswith(hub.PREFIX):
        name, _, revision = base.removeprefix(hub.PREFIX).partition("@")
        return name, revision
    local = expand_home(base)
    return (str(local.resolve()) if local.exists() else base), ""


def adapter_arrays(spec: ModelSpec, trained: ArrayTree) -> dict[str, np.ndarray]:
    """Returns name -> array of the file: A [rank, inputs] and B [outputs, rank] of each linear layer, and the heads.

    Args:
        spec: the spec of the model.
        trained: the factors of the adapters and the heads.
    """
    leaves, arrays, naming = tree.flatten(trained), {}, _namings(spec)[0]
    for layer in (name.removesuffix("/lora/down") for name in leaves if name.endswith("/lora/down")):
        gated = "g" in factors_of(layer).up
        factors = zip(leaves[f"{layer}/lora/down"], leaves[f"{layer}/lora/up"], strict=True)
        for block, (down, up) in enumerate(factors):
            linears = _linear_names(naming, layer, block)
            for index, linear in enumerate(linears):
                a, b = down, up
                if layer.endswith("qkv"):
                    a, b = down[:, index], halves(up[index]) if _in_halves(naming, layer, index) else up[index]
                elif gated and len(linears) > 1:
                    b = up[:, index]
                rank = down.shape[-1]
                arrays[f"{PREFIX}{linear}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, rank).T)
                arrays[f"{PREFIX}{linear}.lora_B.weight"] = np.ascontiguousarray(b.reshape(rank, -1).T)
    if MASK in leaves:
        arrays[f"{PREFIX}{MASK}"] = leaves[MASK]
    for head in HEADS:
        if f"{head}/kernel" in leaves:
            linear = head if naming is None else naming.layer_names(f"{head}/kernel")[0]
            arrays[f"{PREFIX}{linear}.weight"] = np.ascontiguousarray(leaves[f"{head}/kernel"].T)
            arrays[f"{PREFIX}{linear}.bias"] = leaves[f"{head}/bias"]
    return arrays


class _Naming(NamedTuple):
    """The names that the layers of a model have in the files or in the memory of transformers."""

    family: Family
    prefix: str
    table: ParameterTable

    def layer_names(self, kernel: str, block: int | None = None) -> list[str]:
        """Returns the names of the layers that one of our kernels consists of, or its part of one block."""
        part = self.table[kernel]
        if block is not None:
            assert isinstance(part, Stack)
            part = part.parts[block]
        names = (self.family.name_in_file(name, self.prefix) for name in _leaf_names(part))
        return [name.removesuffix(".weight") for name in names]


@functools.lru_cache(maxsize=1)
def _namings(spec: ModelSpec) -> tuple[_Naming | None, ...]:
    """Returns the names by which an adapter's file may call the layers, the likeliest first.

    The first are those of the model of transformers 5 in memory, which PEFT adapts. The second are those in its files,
    which transformers 4 also has in memory. Then come the same two for the model without a classifier. The last is
    None, which stands for our own names.
    """
    family = _find_family(spec)
    if family is None:
        return (None,)
    places = itertools.product((family.written_prefix(spec), ""), (IN_MEMORY.get(family.name, family), family))
    return (*(_Naming(one, prefix, parameter_table(spec, one.names)) for prefix, one in places), None)


def _find_family(spec: ModelSpec) -> Family | None:
    """Returns the family of transformers to which a model belongs; None if it belongs to none."""
    try:
        return LAYOUTS["huggingface"].choose_family(spec)
    except UserError:
        return None


def _linear_names(naming: _Naming | None, layer: str, block: int) -> list[str]:
    """Returns the names of the linear layers in a block that one of our layers consists of."""
    if naming is not None:
        return naming.layer_names(f"{layer}/kernel", block)
    ours = block_name(layer, block).replace("/", ".")
    return [ours.removesuffix("qkv") + part for part in ("query", "key", "value")] if ours.endswith("qkv") else [ours]


def _in_halves(naming: _Naming | None, layer: str, number: int) -> bool:
    """Returns whether a layer, of the `number` among those that make up one of ours, has its channels in halves."""
    return naming is not None and naming.family.names.rotates_halves and layer.endswith("qkv") and number < 2


def _leaf_names(part: Part) -> list[str]:
    return [part.name] if isinstance(part, Leaf) else [name for inner in part.parts for name in _leaf_names(inner)]
