"""Adapters as a file by the names of PEFT (github.com/huggingface/peft), for the model of transformers.

Where transformers has no such model, the layers have our names, with the number of the block and a part each of
`query`, `key` and `value`.
"""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax import UserError, tree, user_errors
from vit_jax.adapters import factors_of
from vit_jax.depth import block_name
from vit_jax.interop import archives, huggingface_layout
from vit_jax.interop.mapping import Leaf, Part
from vit_jax.models import Model, ModelSpec
from vit_jax.storage import atomic_write
from vit_jax.tree import ArrayTree

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of all names


def save_adapter(folder: Path, model: Model, trained: ArrayTree, rank: int, alpha: float) -> None:
    """Writes the adapters and the heads of a model into a folder: `adapter_model.safetensors`, `adapter_config.json`.

    Args:
        folder: an existing one.
        model: the model that they adapt.
        trained: the factors and the heads, as NumPy arrays.
        rank: of the adapters.
        alpha: their factor is alpha / rank.

    Raises:
        UserError: the files cannot be written.
    """
    arrays = adapter_arrays(model.vit, trained)
    ends = (".lora_A.weight", ".lora_B.weight")
    layers = [name.removeprefix(PREFIX).removesuffix(ends[0]) for name in arrays if name.endswith(ends[0])]
    saved = {name.removeprefix(PREFIX).rpartition(".")[0] for name in arrays if not name.endswith(ends)}
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
        "base_model_name_or_path": None,
        "task_type": None,
    }
    with contextlib.ExitStack() as files, user_errors(f"cannot write {folder / WEIGHTS}"):
        archives.write_archive(folder / WEIGHTS, files.enter_context(atomic_write(folder / WEIGHTS)), arrays, "float32")
        text = json.dumps(described, indent=2) + "\n"
        files.enter_context(atomic_write(folder / CONFIG)).write_text(text, encoding="utf-8")


def adapter_arrays(spec: ModelSpec, trained: ArrayTree) -> dict[str, np.ndarray]:
    """Returns the arrays of the file: of each linear layer A [rank, inputs] and B [outputs, rank], and the heads'.

    Args:
        spec: of the model.
        trained: the factors and the heads.
    """
    leaves, arrays = tree.flatten(trained), {}
    for name, downs in leaves.items():
        layer, _, part = name.rpartition("/lora/")
        if part != "down":
            continue
        gated = "g" in factors_of(layer).up
        for block, (down, up) in enumerate(zip(downs, leaves[f"{layer}/lora/up"], strict=True)):
            linears = _linear_names(spec, layer, block)
            for index, linear in enumerate(linears):
                a, b = down, up
                if layer.endswith("qkv"):
                    a, b = down[:, index], up[index]
                elif gated and len(linears) > 1:
                    b = up[:, index]
                rank = down.shape[-1]
                arrays[f"{PREFIX}{linear}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, rank).T)
                arrays[f"{PREFIX}{linear}.lora_B.weight"] = np.ascontiguousarray(b.reshape(rank, -1).T)
    table = _table(spec)
    for head in ("head", "distilled_head"):
        if f"{head}/kernel" in leaves:
            linear = head if table is None else table[f"{head}/kernel"].name.removesuffix(".weight")
            arrays[f"{PREFIX}{linear}.weight"] = np.ascontiguousarray(leaves[f"{head}/kernel"].T)
            arrays[f"{PREFIX}{linear}.bias"] = leaves[f"{head}/bias"]
    return arrays


@functools.lru_cache(maxsize=1)
def _table(spec: ModelSpec) -> dict[str, Any] | None:
    """Returns the arrays of the model of transformers by our names; None: there is no such model."""
    try:
        return huggingface_layout.parameter_table(spec, huggingface_layout.choose_form(spec))
    except UserError:
        return None


def _linear_names(spec: ModelSpec, layer: str, block: int) -> list[str]:
    """Returns the names of the linear layers of which one of our layers consists, in a block."""
    table = _table(spec)
    if table is not None:
        return [name.removesuffix(".weight") for name in _leaf_names(table[f"{layer}/kernel"].parts[block])]
    ours = block_name(layer, block).replace("/", ".")
    return [ours.removesuffix("qkv") + part for part in ("query", "key", "value")] if ours.endswith("qkv") else [ours]


def _leaf_names(part: Part) -> list[str]:
    return [part.name] if isinstance(part, Leaf) else [name for inner in part.parts for name in _leaf_names(inner)]
