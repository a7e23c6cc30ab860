"""A model as StableHLO, by `jax.export`: one file for CPUs, TPUs and GPUs, which jax runs without this package.

The weights are inside, so that one call runs the file. A model of more than 2 GB, the most that the file can hold, is
refused; ONNX has none of this limit.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import UserError, encode_text
from vit_jax.interop.model_json import describing_files
from vit_jax.interop.program_interface import Export, choose_dtype
from vit_jax.models import PlainOps

PLATFORMS = ("cpu", "tpu", "cuda")
MOST_BYTES = 2**31 - 2**24  # of weights: a flatbuffer has less than 2 GB
# "Compatibility guarantees" in https://docs.jax.dev/en/latest/export/export.html: jax runs a file that was written by
# a jax of up to 6 months before it, or up to 3 weeks after it.
WINDOW = (
    "jax is only promised to run a .stablehlo file for 6 months after the release that wrote it; keep the checkpoint, "
    "or an .onnx file"
)


def write_stablehlo(name: str, export: Export) -> dict[str, Iterable[bytes]]:
    """Returns name -> content of the file `name` and of the JSON file beside it that describes the model.

    Raises:
        UserError: the dtype is neither float32 nor bfloat16, the weights are larger than 2 GB, or flatbuffers is not
            installed, which `jax.export` needs.
    """
    choose_dtype(".stablehlo", export.dtype, ("float32", "bfloat16"))
    model = export.model.with_fields(dtype=export.dtype)
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(export.dtype), export.params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if size > MOST_BYTES:
        raise UserError(f"the weights are {size / 1e9:.1f} GB, but a .stablehlo file holds 2 GB; write an .onnx file.")
    scale, shift = export.scale_and_shift

    @jax.jit
    def program(images: jax.Array) -> dict[str, Any]:
        if export.preprocess:
            images = images.astype(jnp.float32) * scale + shift
        logits, out = model.apply(params, images, ops=PlainOps())
        found = {"logits": logits, "probabilities": model.activate(logits), "features": out["pre_logits"]}
        found |= {f"block_{number}": out["blocks"][number] for number in export.blocks}
        return {name: found[name].astype(jnp.float32) for name in export.outputs}

    batch = jax.export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((*batch, *export.shape[1:]), export.image_dtype)
    exported = jax.export.export(program, platforms=PLATFORMS)(images)
    try:
        content = bytes(exported.serialize())
    except ImportError:
        raise UserError("a .stablehlo file needs flatbuffers: pip install -e '.[stablehlo]'") from None
    texts = describing_files(name, export.model)
    return {name: [content], **{other: [encode_text(text)] for other, text in texts.items()}}
