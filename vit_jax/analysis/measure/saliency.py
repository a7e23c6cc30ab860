"""Saliency: the gradient of a class's logit with respect to the pixels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def class_saliency(
    logits: Callable[[Array], Array],
    images: Float[Array | np.ndarray, "batch rows columns 3"],
    classes: Int[Array | np.ndarray, " batch"],
) -> Float[Array, "batch rows columns"]:
    """Returns the largest |d logit / d value| of the colours of each pixel (arXiv 1312.6034, section 3.1).

    Args:
        logits: a function from images to logits [batch, classes], such as
            `lambda images: model.apply(params, images)[0]`. One image must not change the logits of another.
        images: the images as the model reads them.
        classes: for each image, the class whose logit is meant.
    """

    def total(images: Array) -> Array:
        return jnp.take_along_axis(logits(images), classes[:, None], axis=1).sum()

    return jnp.abs(jax.grad(total)(jnp.asarray(images))).max(axis=-1)
