"""What `init` draws, and the numbers of a training step, are those of tests/golden/digests.json.

Linen draws parameters from the names of scopes and the order of declarations in a scope, and masks of dropout from the
order of `make_rng`: code that is moved changes them easily. `UPDATE_GOLDEN=1 pytest -n0 -m "slow or not slow"
tests/models/test_digests.py` writes them anew: runs that were started before then draw other numbers than they did.
"""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.conftest import ROOT
from tests.models.test_models import random_values, tiny_hybrid
from vit_jax import data, optim, sharding, tree
from vit_jax.config import resolve_config
from vit_jax.model import create, parameter_shapes
from vit_jax.models import add_adapters
from vit_jax.program import create_model, for_mesh, make_train_step

GOLDEN = ROOT / "tests" / "golden" / "digests.json"
TOLERANCE = 1e-5  # of the mean magnitude of an array

vit = functools.partial(create, "ViT-mu/8", resolution=(32, 24), depth=2, num_classes=3, head_std=0.02)
bit = functools.partial(create, "BiT", stages=(1, 2), width=32, resolution=(28, 24), num_classes=3, head_std=0.02)

# Each form of a part that has parameters, once.
MODELS = {
    "class token, tanh layer": vit(pre_logits=True, representation_size=16, registers=2),
    "GAP, LayerScale, norms and rotation of queries and keys": vit(
        pooling="gap", layer_scale=0.1, qk_norm=True, rotary="axial", final_norm="pooled"
    ),
    "MAP, SwiGLU, positions of a grid": vit(pooling="map", activation="swiglu", position="learned2d"),
    "two heads, norm before the blocks": vit(registers=1, distilled_head=True, pre_norm=True, position_rows="patches"),
    "positions in blocks": vit(position_place="blocks", class_token="always", pooling="gap", layer_scale=0.1),
    "shared positions, sparse attention": vit(position_place="shared", registers=2, attention_pattern="strided"),
    "relative positions": vit(position="relative"),
    "relative positions of heads": vit(position="relative", relative_tables="head", qk_norm=True),
    "relative positions of the model": vit(position="relative", relative_tables="model"),
    "masked patches": vit(head="patches", registers=1),
    "axial": create("Axial-ViT-mu/8", resolution=(32, 24), depth=2, num_classes=3, qk_norm=True),
    "hybrid": tiny_hybrid(registers=1),
    "root alone": create("R+ViT-mu/4", resolution=8, num_classes=3),
    "BiT": bit(),
    "BiT, post-activation": bit(unit="post_activation"),
    "squeeze-and-excitation": bit(unit="post_activation", se_reduction=16),
    "axial ResNet": bit(unit="axial"),
    "stand-alone attention": bit(unit="stand_alone", root="attention"),
    "augmented": bit(unit="augmented"),
}
USUAL = (
    "class token, tanh layer",
    "MAP, SwiGLU, positions of a grid",
    "axial",
    "hybrid",
)


def describe(params):
    """Name -> a line with dtype and shape, mean magnitude, and a mean with weights, which the order changes."""
    return {name: describe_array(np.asarray(leaf)) for name, leaf in sorted(tree.flatten(params).items())}


def describe_array(array):
    flat = array.astype(np.float64).ravel()
    means = abs(flat).mean(), (flat * np.cos(np.arange(flat.size))).mean()
    return f"{array.dtype}{json.dumps(array.shape)} {means[0]:.7g} {means[1]:.7g}"


def check(kind, name, found):
    """Compares with the golden file, or writes it anew."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        golden.setdefault(kind, {})[name] = found
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    (shapes, numbers), (wanted_shapes, wanted) = map(split, (found, golden[kind][name]))
    assert shapes == wanted_shapes
    for key, (magnitude, mean) in wanted.items():
        np.testing.assert_allclose(numbers[key], (magnitude, mean), rtol=0, atol=TOLERANCE * magnitude, err_msg=key)


def split(lines):
    rows = {name: line.rsplit(" ", 2) for name, line in lines.items()}
    return {name: row[0] for name, row in rows.items()}, {name: [*map(float, row[1:])] for name, row in rows.items()}


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_init_draws_the_same(name):
    model = MODELS[name]
    images = jax.ShapeDtypeStruct((1, *model.image_size, 3), jnp.float32)
    check("init", name, describe(jax.jit(lambda: model.init(jax.random.key(0), images))()))


def test_adapters_are_drawn_the_same():
    params = random_values(parameter_shapes(MODELS["MAP, SwiGLU, positions of a grid"]))
    check("init", "adapters", describe(add_adapters(params, 2, 4.0, "attention,mlp", jax.random.key(1))))


STEPS = {
    "ViT": {},
    "axial": {"name": "Axial-ViT-mu/4", "pooling": "gap"},
    "hybrid": {"name": "R50+ViT-mu/16", "stages": (1, 1)},
}


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", ["ViT", "axial", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_step_has_the_same_numbers(name, scan, tiny):
    """The model has dropout, stochastic depth and adapters; scanned blocks draw as unrolled ones do."""
    tiny.batch, tiny.adapt.rank, tiny.model.scan = 4, 2, scan
    tiny.task.mixup = 0.0
    tiny.model.dropout_rate, tiny.model.stochastic_depth = 0.3, 0.5
    tiny.model.update(STEPS[name])
    config = resolve_config(tiny)
    spec = data.spec(config)
    model, task = create_model(config, spec)
    model = for_mesh(model, config, sharding.make_mesh(config, jax.devices()[:1]), None)
    # The state of this optimizer is the gradient; that of all parameters, not of the adapters alone.
    step = dataclasses.replace(
        make_train_step(config, model, task), optimizer=optax.trace(0.0), trained_part=optim.WHOLE
    )
    shapes = jax.eval_shape(
        lambda params: add_adapters(params, 2, 4.0, "attention,mlp", jax.random.key(0)), parameter_shapes(model)
    )
    random = np.random.default_rng(2)
    batch = {
        "image": random.uniform(-1, 1, (4, *spec.image_shape)).astype(np.float32),
        "label": random.integers(0, 10, 4).astype(np.int32),
    }
    state, metrics = jax.jit(step)(step.init(random_values(shapes)), batch)
    check("step", name, describe({**state.opt_state.trace, "metrics": metrics}))


def test_the_file_has_no_other_digests():
    golden = json.loads(GOLDEN.read_text())
    assert (golden["init"].keys(), golden["step"].keys()) == ({*MODELS, "adapters"}, {*STEPS})
