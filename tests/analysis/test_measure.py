"""Every measure against a plain evaluation in float64, and properties of each."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.decomposition import PCA

from vit_jax.analysis import measure

GRID, PATCH = (2, 3), 8
PATCHES = GRID[0] * GRID[1]
TOKENS = 1 + PATCHES  # a class token before the patches
RANDOM = np.random.default_rng(0)


def attention(*leading):
    """Random weights whose rows sum to 1, in float64."""
    scores = np.exp(RANDOM.normal(size=(*leading, TOKENS, TOKENS)))
    return scores / scores.sum(-1, keepdims=True)


WEIGHTS = attention(3, 2, 4)  # blocks, images, heads
UNIFORM = np.full((2, 4, TOKENS, TOKENS), 1 / TOKENS, np.float32)


def single(array):
    return np.asarray(array, np.float32)


@pytest.mark.parametrize("residual", [0.5, 0.0, 0.25])
def test_rollout(residual):
    found = np.asarray(measure.attention_rollout(single(WEIGHTS), residual))
    for image in range(2):
        product = np.eye(TOKENS)
        for block in range(3):
            mean = sum(WEIGHTS[block, image, head] for head in range(4)) / 4
            step = (1 - residual) * mean + residual * np.eye(TOKENS)
            step = step / step.sum(1, keepdims=True)
            product = np.array([[sum(row * column) for column in product.T] for row in step])
        np.testing.assert_allclose(found[image], product, atol=1e-6)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
    assert (found >= 0).all()


def test_rollout_of_equal_attention_is_equal_and_of_none_stays():
    np.testing.assert_allclose(measure.attention_rollout([UNIFORM], 0.0), 1 / TOKENS, atol=1e-7)
    itself = np.broadcast_to(np.eye(TOKENS, dtype=np.float32), (2, 4, TOKENS, TOKENS))
    np.testing.assert_allclose(measure.attention_rollout([itself, itself])[0], np.eye(TOKENS), atol=1e-7)
    deep = measure.attention_rollout([single(WEIGHTS[0])] * 60, 0.0)[0]  # all rows become those of the fixed point
    np.testing.assert_allclose(deep, np.broadcast_to(deep[:1], deep.shape), atol=1e-5)


def test_maps_of_the_class_token_or_the_mean_patch():
    with_token = np.asarray(measure.query_maps(single(WEIGHTS), GRID, class_token=True))
    without = np.asarray(measure.query_maps(single(WEIGHTS), GRID, class_token=False))
    for row in range(2):
        for column in range(3):
            patch = 1 + 3 * row + column
            np.testing.assert_allclose(with_token[..., row, column], WEIGHTS[..., 0, patch], atol=1e-7)
            mean = sum(WEIGHTS[..., query, patch] for query in range(1, TOKENS)) / PATCHES
            np.testing.assert_allclose(without[..., row, column], mean, atol=1e-7)


def test_maps_leave_out_registers():
    """The seven tokens as a class token, two registers and four patches."""
    with_token = np.asarray(measure.query_maps(single(WEIGHTS), (2, 2), class_token=True))
    without = np.asarray(measure.query_maps(single(WEIGHTS), (2, 2), class_token=False))
    flat = (*WEIGHTS.shape[:-2], 4)
    np.testing.assert_allclose(with_token.reshape(flat), WEIGHTS[..., 0, 3:], atol=1e-7)
    np.testing.assert_allclose(without.reshape(flat), WEIGHTS[..., 3:, 3:].mean(axis=-2), atol=1e-7)


def test_maps_of_registers():
    weights = single(RANDOM.random((2, 3 + PATCHES, 3 + PATCHES)))  # a class token, two registers, the patches
    found = np.asarray(measure.register_maps(weights, GRID, 2))
    np.testing.assert_array_equal(found, weights[:, 1:3, 3:].reshape(2, 2, *GRID))
    assert measure.register_maps(weights, GRID, 0).shape == (2, 0, *GRID)


def test_distance():
    found = np.asarray(measure.attention_distance(single(WEIGHTS), GRID, PATCH))
    expected = np.zeros(WEIGHTS.shape[:3])
    places = [(row, column) for row in range(2) for column in range(3)]
    for i, (row, column) in enumerate(places):
        for j, (other_row, other_column) in enumerate(places):
            pixels = PATCH * math.sqrt((row - other_row) ** 2 + (column - other_column) ** 2)
            expected += WEIGHTS[..., 1 + i, 1 + j] * pixels / PATCHES
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_distance_of_equal_attention_and_of_none():
    limit = measure.uniform_distance(GRID, PATCH)
    found = measure.attention_distance(UNIFORM, GRID, PATCH)
    # The class token's share is left out, and the rest is not divided by its sum.
    np.testing.assert_allclose(found, limit * PATCHES / TOKENS, rtol=1e-6)
    assert not measure.attention_distance(np.eye(TOKENS, dtype=np.float32), GRID, PATCH)
    assert measure.uniform_distance((1, 2), 16) == 8  # half of the attention goes 16 pixels
    np.testing.assert_allclose(measure.uniform_distance((14, 14), 16), 116.49, atol=0.01)


def test_entropy():
    found = np.asarray(measure.attention_entropy(single(WEIGHTS)))
    expected = np.zeros(WEIGHTS.shape[:3])
    for query in range(TOKENS):
        for key in range(TOKENS):
            weight = WEIGHTS[..., query, key]
            expected -= weight * np.log(weight) / TOKENS
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(measure.attention_entropy(UNIFORM), math.log(TOKENS), rtol=1e-6)
    assert float(measure.attention_entropy(np.eye(TOKENS, dtype=np.float32))) == 0


def test_position_similarity():
    table = RANDOM.normal(size=(TOKENS, 5))
    found = measure.position_similarity(single(table), GRID)
    for i in range(PATCHES):
        for j in range(PATCHES):
            one, other = table[1 + i], table[1 + j]
            cosine = sum(one * other) / math.sqrt(sum(one**2) * sum(other**2))
            np.testing.assert_allclose(found[i // 3, i % 3, j // 3, j % 3], cosine, atol=1e-6)
    assert found.max() <= 1 + 1e-12
    assert not measure.position_similarity(np.zeros((TOKENS, 5), np.float32), GRID).any()  # new embeddings


def test_filters_are_the_directions_of_most_variance():
    kernel = RANDOM.normal(size=(2, 2, 3, 40)) * np.linspace(1, 3, 12).reshape(2, 2, 3, 1)
    components, shares = measure.embedding_filters(single(kernel), 5)
    samples = kernel.reshape(12, 40).T
    centred = samples - samples.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    for i in range(5):
        expected, found = vectors[:, -1 - i], components[i].ravel()
        np.testing.assert_allclose(abs(found @ expected), 1, atol=1e-5)
        np.testing.assert_allclose(shares[i], values[-1 - i] / values.sum(), rtol=1e-4)
    assert components.shape == (5, 2, 2, 3)
    assert len(measure.embedding_filters(single(kernel), 28)[0]) == 12  # a filter has no more weights
    assert len(measure.embedding_filters(single(kernel[..., :4]), 28)[0]) == 4


def test_components_of_patches_are_the_directions_of_most_variance():
    tokens = RANDOM.normal(size=(2, 3, 4, 6)) * np.linspace(1, 3, 6) + 100
    found, shares = measure.patch_components(single(tokens))
    samples = tokens.reshape(-1, 6) - tokens.reshape(-1, 6).mean(0)
    values, vectors = np.linalg.eigh(samples.T @ samples)
    for i in range(3):
        direction = vectors[:, -1 - i] * np.sign(vectors[abs(vectors[:, -1 - i]).argmax(), -1 - i])
        np.testing.assert_allclose(found[..., i].ravel(), samples @ direction, atol=1e-3)  # in float32
        np.testing.assert_allclose(shares[i], values[-1 - i] / values.sum(), rtol=1e-3)
    for few in (tokens[0, 0, :2], tokens[0, 0, :1], np.ones((5, 6))):
        scores, shares = measure.patch_components(single(few))
        assert scores.shape == (len(few), 3) and np.isfinite(scores).all() and shares.sum() <= 1 + 1e-6


@pytest.mark.parametrize(("count", "width"), [(60, 20), (20, 60)])
def test_components_are_those_of_scikit_learn(count, width):
    samples = single(RANDOM.normal(size=(count, width)) * np.linspace(1, 3, width) + 5)
    pca = PCA(3, svd_solver="full").fit(samples.astype(np.float64))
    directions, shares = measure.principal_components(samples, 3)
    np.testing.assert_allclose(directions, pca.components_, atol=1e-6)
    np.testing.assert_allclose(shares, pca.explained_variance_ratio_, rtol=1e-6)
    scores, _ = measure.patch_components(samples)
    np.testing.assert_allclose(scores, pca.transform(samples), atol=1e-5)
    assert scores.dtype == np.float32


def test_similarity_of_representations():
    layers = RANDOM.normal(size=(3, 20, 6))
    layers[1] += 2 * layers[0]
    found = measure.linear_cka(single(layers))

    def covariance(a, b):
        a, b = layers[a] - layers[a].mean(0), layers[b] - layers[b].mean(0)
        return sum((a[:, i] @ b[:, j]) ** 2 for i in range(6) for j in range(6))

    for a in range(3):
        for b in range(3):
            np.testing.assert_allclose(found[a, b], covariance(a, b) / math.sqrt(covariance(a, a) * covariance(b, b)))
    assert found[0, 1] > found[0, 2]


def test_similarity_ignores_rotation_scale_and_shift():
    layer = RANDOM.normal(size=(20, 6))
    rotation, _ = np.linalg.qr(RANDOM.normal(size=(6, 6)))
    np.testing.assert_allclose(measure.linear_cka(np.stack([layer, 3 * layer @ rotation + 5])), 1)
    constant = measure.linear_cka(np.stack([layer, np.ones_like(layer)]))
    np.testing.assert_array_equal(constant, [[constant[0, 0], 0], [0, 0]])


def test_saliency():
    weights, images = RANDOM.normal(size=(4, 5, 3, 7)), RANDOM.normal(size=(2, 4, 5, 3))
    classes = np.array([2, 6])

    def logits(images):
        return jnp.einsum("bhwc,hwcn->bn", jnp.square(images), jnp.asarray(weights, jnp.float32))

    found = np.asarray(measure.class_saliency(logits, single(images), classes))
    for number, label in enumerate(classes):
        for row in range(4):
            for column in range(5):
                gradients = [abs(2 * images[number, row, column, c] * weights[row, column, c, label]) for c in range(3)]
                np.testing.assert_allclose(found[number, row, column], max(gradients), rtol=1e-5)
