"""The similarity of the representations of two layers."""

import numpy as np
from jaxtyping import Float


def linear_cka(representations: Float[np.ndarray, "layers examples width"]) -> Float[np.ndarray, "layers layers"]:
    """Returns the similarity of every pair of layers by linear CKA, between 0 and 1.

    <K_a, K_b> / (|K_a| |K_b|) with K = X Xᵀ of the centred representations X of the same examples, which equals
    |X_aᵀ X_b|² / (|X_aᵀ X_a| |X_bᵀ X_b|), all norms Frobenius's (arXiv 1905.00414, section 3). It does not change if a
    layer is rotated or scaled, and is biased upwards where the examples are not many more than the width. A layer
    whose representations are all equal has similarity 0 to all others.
    """
    centred = representations.astype(np.float64) - representations.mean(axis=1, keepdims=True, dtype=np.float64)
    grams = (centred @ centred.swapaxes(1, 2)).reshape(len(centred), -1)
    norms = np.linalg.norm(grams, axis=1, keepdims=True)
    grams = np.divide(grams, norms, out=np.zeros_like(grams), where=norms > 0)
    return grams @ grams.T
