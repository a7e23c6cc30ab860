"""Checkpoints in the authors' layouts, by our names."""

import jax
import numpy as np


def authors_params(path):
    """The authors' parameters by our names: vision_transformer's npz and big_vision's."""
    flat = {name.removeprefix("params/"): np.asarray(value) for name, value in np.load(path).items()}

    def sub(prefix):
        return {name.removeprefix(prefix): x for name, x in flat.items() if name.startswith(prefix)}

    def pair(values, name, weight="kernel"):
        return {weight: values[f"{name}/{weight}"], "bias": values[f"{name}/bias"]}

    def mlp(values):
        return {ours: pair(values, f"Dense_{i}") for i, ours in enumerate(("dense1", "dense2"))}

    def block(index):
        values = sub(f"Transformer/encoderblock_{index}/")
        parts = sorted({name.split("/")[0] for name in values})  # LayerNorm x 2, MlpBlock, MultiHeadDotProduct...
        inner = {
            part: {k.removeprefix(f"{part}/"): v for k, v in values.items() if k.startswith(part)} for part in parts
        }
        attention = inner[parts[3]]
        qkv = [pair(attention, name) for name in ("query", "key", "value")]
        return {
            "norm1": pair(values, parts[0], "scale"),
            "norm2": pair(values, parts[1], "scale"),
            "mlp": mlp(inner[parts[2]]),
            "attention": {
                "out": pair(attention, "out"),
                "qkv": {
                    "kernel": np.stack([x["kernel"] for x in qkv], 1),
                    "bias": np.stack([x["bias"] for x in qkv]),
                },
            },
        }

    params = {
        "embed": pair(flat, "embedding"),
        "encoder": {
            "norm": pair(flat, "Transformer/encoder_norm", "scale"),
            "blocks": jax.tree.map(lambda *layers: np.stack(layers), block(0), block(1)),
        },
    }
    params |= {name: pair(flat, name) for name in ("pre_logits", "head") if f"{name}/kernel" in flat}
    if "cls" in flat:
        params["cls"] = flat["cls"][0, 0]
    for name in ("Transformer/posembed_input/pos_embedding", "pos_embedding"):
        if name in flat:
            rows = flat[name][0]
            # big_vision adds positions before the class token comes: its row is zero.
            params["position"] = np.pad(rows, ((int("cls" in flat and len(rows) == 16), 0), (0, 0)))
    if "MAPHead_0/probe" in flat:
        attention = sub("MAPHead_0/MultiHeadDotProductAttention_0/")
        params["map_head"] = {
            "probe": flat["MAPHead_0/probe"][0, 0],
            "norm": pair(flat, "MAPHead_0/LayerNorm_0", "scale"),
            "mlp": mlp(sub("MAPHead_0/MlpBlock_0/")),
            "attention": {name: pair(attention, name) for name in ("query", "key", "value", "out")},
        }
    return params
