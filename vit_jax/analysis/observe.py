"""Observes a model on images, batch by batch: the attention of no more than one batch is in memory at a time."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

from vit_jax import sharding
from vit_jax.analysis import measure
from vit_jax.inference import Inference
from vit_jax.tree import ArrayTree

KEPT_IMAGES = 128  # images of which everything is kept, as many as in Figure 14
MAX_CKA_PATCHES = 1024  # patches, of all images kept, whose representations are compared
MOST_ATTENTION_BYTES = 2**28  # bytes of attention weights that are in memory at once on a device
PICTURES = ("corrupted", "predicted")  # of masked patches
MOST_IMAGES = 16  # most images of a device at a time: more are no faster


@dataclasses.dataclass(frozen=True)
class Observations:
    """The observations of a model on images.

    Averages are over all images. Arrays with an axis `images` have only the first `KEPT_IMAGES` of them.

    Attributes:
        count: the number of all images.
        pixels: the images as the model reads them, uint8.
        logits: the logits, float32; no classes for a model of masked patches.
        rollout: how much of each patch reaches the class token, or the average patch without one.
        rollout_alone: the rollout without the residual connections.
        heads: the attention of the class token, or of the average patch without one, in each block and head.
        distance: mean attention distance in pixels, averaged over all images.
        registers: the attention of each register in the last block, averaged over its heads.
        components: the first three principal components of the tokens of all patches of these images, after the
            encoder's norm.
        own_components: the same, of the patches of each image by itself.
        component_shares: the shares of the variance that `components` have.
        entropy: entropy of the attention in nats, averaged over all images.
        similarity: similarity of the patches' representations after each pair of blocks, by linear CKA.
        saliency: saliency for the class with the largest logit; None: it was not asked for.
        corrupted: the images as a model of masked patches is given them in an evaluation, with masked patches grey,
            uint8; None for other models.
        predicted: the images with the model's predictions in place of the corrupted patches, uint8; None for other
            models.
    """

    count: int
    pixels: UInt8[np.ndarray, "images height width 3"]
    logits: Float[np.ndarray, "images classes"]
    rollout: Float[np.ndarray, "images rows columns"]
    rollout_alone: Float[np.ndarray, "images rows columns"]
    heads: Float[np.ndarray, "images depth heads rows columns"]
    registers: Float[np.ndarray, "images registers rows columns"]
    components: Float[np.ndarray, "images rows columns 3"]
    own_components: Float[np.ndarray, "images rows columns 3"]
    component_shares: Float[np.ndarray, "3"]
    distance: Float[np.ndarray, "depth heads"]
    entropy: Float[np.ndarray, "depth heads"]
    similarity: Float[np.ndarray, "depth depth"]
    saliency: Float[np.ndarray, "images height width"] | None = None
    corrupted: UInt8[np.ndarray, "images height width 3"] | None = None
    predicted: UInt8[np.ndarray, "images height width 3"] | None = None


def choose_batch(program: Inference, images: int) -> int:
    """Returns the number of images in a step over all devices, for the given number of images in all.

    It is a multiple of the number of devices. On a device it is at most `MOST_IMAGES`, and as many as
    `MOST_ATTENTION_BYTES` allow.
    """
    spec, devices = program.model.vit, program.mesh.size
    tokens = spec.prefix_rows + spec.grid[0] * spec.grid[1]
    heads = spec.attention.num_heads * (2 if spec.block.kind == "axial" else 1)
    # Where blocks are a loop, its result is the attention of all of them.
    bytes_each = 4 * heads * tokens**2 * (spec.depth if spec.scan else 1)
    return devices * max(1, min(MOST_IMAGES, MOST_ATTENTION_BYTES // bytes_each, -(-images // devices)))


def observe(
    program: Inference,
    params: ArrayTree,
    images: Iterable[Float[np.ndarray, "height width 3"]],
    batch: int,
    count: int,
    saliency: bool = False,
    value_range: tuple[float, float] = (-1, 1),
) -> Observations:
    """Returns what a model does with images.

    Args:
        program: the program of the model.
        params: its parameters on the devices.
        images: preprocessed images, which are read as they are needed.
        batch: images of a step over all devices, a multiple of the number of devices.
        count: the number of images, 1 or more.
        saliency: whether to compute the saliency too, which takes twice the time of all else.
        value_range: the values that 0 and 255 of a pixel have in `images`; -1 and 1 for a model of masked patches.
    """
    low, high = value_range
    function = make_observer(program, max(1, MAX_CKA_PATCHES // min(count, KEPT_IMAGES)), saliency)
    kept: list[dict[str, np.ndarray]] = []
    sums: dict[str, np.ndarray | float] = {"distance": 0.0, "entropy": 0.0}
    for number, given in enumerate(_batches(images, batch)):
        full = np.concatenate([given, np.repeat(given[-1:], batch - len(given), axis=0)])
        out = function(params, jax.device_put(full, program.batch_sharding))
        rows = {name: np.asarray(array)[: len(given)] for name, array in out.items()}
        for name in sums:
            sums[name] += rows.pop(name).sum(axis=0, dtype=np.float64)
        pictures = {"pixels": given} | {name: rows[name] for name in PICTURES if name in rows}
        shares = {name: (array.clip(low, high) - low) / (high - low) for name, array in pictures.items()}
        rows |= {name: np.rint(share * 255).astype(np.uint8) for name, share in shares.items()}
        if number * batch < KEPT_IMAGES:
            kept.append({name: array[: KEPT_IMAGES - number * batch] for name, array in rows.items()})
    whole = {name: np.concatenate([rows[name] for rows in kept]) for name in kept[0]}
    tokens, patches = whole.pop("tokens").swapaxes(0, 1), whole.pop("patches")
    whole["similarity"] = measure.linear_cka(tokens.reshape(len(tokens), -1, tokens.shape[-1]))
    whole["components"], whole["component_shares"] = measure.patch_components(patches)
    whole["own_components"] = np.stack([measure.patch_components(of_image)[0] for of_image in patches])
    return Observations(count, **whole, **{name: total / count for name, total in sums.items()})


def make_observer(program: Inference, examples: int, saliency: bool) -> Callable[[ArrayTree, jax.Array], dict]:
    """Returns the compiled function (parameters, batch of images) -> what is kept of the batch, arrays by name.

    The first axis of each array is that of the images. The attention of a block is reduced as soon as it is computed.
    The program never holds the attention of all blocks at once, unless the blocks are a loop.

    Args:
        program: the program of the model.
        examples: the number of patches of each image whose representations are kept.
        saliency: whether to compute the saliency, too.
    """
    model, spec = program.model, program.model.vit
    grid, patches, heads = spec.grid, spec.grid[0] * spec.grid[1], spec.attention.num_heads
    chosen = np.unique(np.linspace(0, patches - 1, min(examples, patches)).round().astype(int))

    def maps(weights: jax.Array) -> jax.Array:
        return measure.query_maps(weights, grid, spec.class_rows > 0)

    def apply(params: ArrayTree, *args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        with sharding.use_mesh(program.mesh):
            return model.apply(params, *args, **kwargs)

    def function(params: ArrayTree, images: jax.Array) -> dict[str, jax.Array]:
        logits, out = apply(params, images, capture=("attention",))
        # The compiler drops an array of all blocks of which only single blocks are used.
        layers = [out["attention"][block] for block in range(spec.depth)]
        blocks = [out["blocks"][block] for block in range(spec.depth)]
        distances = [measure.attention_distance(weights, grid, spec.stem.patch_size) for weights in layers]
        seen = {"logits": logits} if spec.head.kind == "image" else predict_patches(params, images)
        return seen | {
            "rollout": maps(measure.attention_rollout(one_after_another(layers, heads))),
            "rollout_alone": maps(measure.attention_rollout(one_after_another(layers, heads), residual=0.0)),
            "heads": jnp.stack([maps(weights) for weights in layers], axis=1).astype(jnp.float16),
            "registers": measure.register_maps(layers[-1].mean(axis=1), grid, spec.prefix.registers),
            "patches": out["tokens"][:, spec.prefix_rows :].reshape(len(images), *grid, -1).astype(jnp.float32),
            "distance": jnp.stack(distances, axis=1),
            "entropy": jnp.stack([measure.attention_entropy(weights) for weights in layers], axis=1),
            "tokens": jnp.stack([block[:, -patches:][:, chosen] for block in blocks], axis=1).astype(jnp.float32),
        }

    def predict_patches(params: ArrayTree, images: jax.Array) -> dict[str, jax.Array]:
        task: Any = program.task
        inputs, targets = task.test_examples({"image": images})
        outputs, _ = apply(params, **inputs)
        return {"logits": jnp.zeros((len(images), 0))} | task.pictures(inputs, targets, outputs)

    def gradients(params: ArrayTree, images: jax.Array, classes: jax.Array) -> jax.Array:
        return measure.class_saliency(lambda images: apply(params, images)[0], images, classes)

    options = {"out_shardings": program.batch_sharding, "compiler_options": program.compiler_options}
    run = jax.jit(function, in_shardings=(program.params_shardings, program.batch_sharding), **options)
    if not saliency:
        return run
    rows = (program.batch_sharding, program.batch_sharding)
    differentiate = jax.jit(gradients, in_shardings=(program.params_shardings, *rows), **options)

    def run_both(params: ArrayTree, images: jax.Array) -> dict[str, jax.Array]:
        out = run(params, images)
        return out | {"saliency": differentiate(params, images, out["logits"].argmax(-1))}

    return run_both


def one_after_another(blocks: Sequence[jax.Array], heads: int) -> list[jax.Array]:
    """Returns the weights of each attention of `heads` heads. An axial block has two: of rows, then of columns."""
    return [part for weights in blocks for part in jnp.split(weights, weights.shape[1] // heads, axis=1)]


def _batches(images: Iterable[np.ndarray], size: int) -> Iterable[np.ndarray]:
    """Yields batches of a given number of images; the last may be smaller."""
    images = iter(images)
    while rows := list(itertools.islice(images, size)):
        yield np.stack(rows)
