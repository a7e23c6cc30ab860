"""The training step: the same on every mesh, in parts, and when a batch is bad."""

import dataclasses
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax import UserError, data, evals, optim, sharding, tasks, tree
from vit_jax.config import resolve_config
from vit_jax.model import create
from vit_jax.program import make_program
from vit_jax.step import TrainStep
from vit_jax.training import run_summary


def build(config, devices=1):
    config = resolve_config(config)
    mesh = sharding.make_mesh(config, jax.devices()[:devices])
    return make_program(config, mesh, data.spec(config))


def batches(program, steps, seed=0):
    random = np.random.default_rng(seed)
    shape = program.batch["image"].shape
    for _ in range(steps):
        images = random.normal(size=shape).astype(np.float32)
        labels = random.integers(0, program.task.num_classes, shape[0]).astype(np.int32)
        # The class shifts the image, so that there is something to learn.
        images += labels[:, None, None, None] / 5
        yield jax.device_put({"image": images, "label": labels}, program.batch_sharding)


def losses(program, steps=10):
    state = program.init(jax.random.key(0), {})
    result = []
    for batch in batches(program, steps):
        state, metrics = program.train_step(state, batch)
        result.append(float(metrics["train/loss"]))
    return np.array(result), state


def test_a_program_creates_its_model_and_makes_its_task_once(tiny):
    with (
        mock.patch("vit_jax.program.create", wraps=create) as created,
        mock.patch.object(tasks, "make_task", wraps=tasks.make_task) as make_task,
    ):
        program = build(tiny)
    assert (created.call_count, make_task.call_count) == (1, 1)
    assert program.model.field("num_classes") == program.task.num_classes == 10


def test_parts_of_a_batch_have_the_gradient_of_the_whole(tiny):
    tiny.model.dropout_rate = tiny.model.stochastic_depth = 0.0
    program = build(tiny)
    state = program.init(jax.random.key(0), {})
    random = np.random.default_rng(1)  # the head starts at 0, where gradients are simple
    params = jax.tree.map(lambda x: x + 0.02 * random.normal(size=x.shape).astype(np.float32), state.params)
    batch = next(batches(program, 1))
    targets, optimizer = program.task.targets(batch["label"]), optax.identity()

    def gradient(parts):
        update = TrainStep(
            program.model, program.task, optimizer, program.schedule, 0, accum_steps=parts, ema_decay=0.0
        )
        inputs = {"images": batch["image"]}
        return jax.jit(update.loss_and_grads)(params, params, inputs, targets, jax.random.key(2))

    loss, grads = gradient(1)
    loss_in_parts, grads_in_parts = gradient(4)
    assert abs(loss - loss_in_parts) < 1e-6
    for name, leaf in tree.flatten(grads).items():
        difference = np.linalg.norm(leaf - tree.flatten(grads_in_parts)[name])
        assert difference <= 1e-5 * np.linalg.norm(leaf), name


def test_the_table_of_parameters_shows_what_is_frozen(tiny):
    tiny.optim.lr_multipliers = "head/.*=10,embed/.*=0"
    tiny.mesh.fsdp = 8
    table = run_summary.parameter_table(build(tiny, devices=8))
    lines = {line.split()[0]: line.split("  ")[-1].strip() for line in table}
    assert lines["head/bias"] == "rate x 10" and lines["embed/kernel"] == "frozen, split over fsdp"
    assert lines["cls"] == "split over fsdp"


@pytest.mark.parametrize(
    ("change", "share"),
    [
        ({}, lambda name: 1),
        ({"optim.lr_multipliers": "embed/.*=0,encoder/blocks/0/.*=0"}, lambda name: (2 - ("blocks" in name)) / 2),
        ({"optim.frozen_blocks": 1}, lambda name: 0.5 if "blocks" in name else name.startswith(("head", "encoder"))),
        ({"adapt.rank": 2}, lambda name: name.startswith("head") or name.endswith(("/down", "/up"))),
    ],
)
def test_the_summary_counts_what_is_trained(tiny, change, share):
    tiny.update_from_flattened_dict(change)
    program = build(tiny)
    leaves = tree.flatten(program.state.params)
    shares = {name: 0 if "lr" in str(change) and name.startswith("embed") else share(name) for name in leaves}
    trained = int(sum(leaf.size * shares[name] for name, leaf in leaves.items()))
    told = next(line for line in run_summary.banner_lines(tiny, program) if line.startswith("Model: "))
    words = f"{tree.count(leaves):,} parameters" + (f" ({trained:,} of them trained)" if change else "")
    assert f", {words}, activations" in told
    remark = run_summary.parameter_table(program)[-1].split("  ")[-1].strip()
    assert remark == (f"{trained:,} trained" if change else f"{tree.count(leaves):,}")


def test_a_bad_batch_changes_nothing_but_the_counters(tiny):
    program = build(tiny)
    state = program.init(jax.random.key(0), {})
    good, bad = batches(program, 2)
    bad = bad | {"image": bad["image"].at[3].set(jnp.nan)}
    before = jax.device_get(state)
    state, metrics = program.train_step(state, bad)
    assert np.isnan(metrics["train/loss"]) and metrics["train/skips"] == 1
    after = jax.device_get(state)
    changed = [name for name, leaf in tree.flatten(after).items() if np.any(leaf != tree.flatten(before)[name])]
    counters = {name for name in changed if name.endswith("count")}
    assert set(changed) - counters == {"step", "skips"} and len(counters) == 2  # the schedule keeps to the step
    state, metrics = program.train_step(state, good)
    assert metrics["train/skips"] == 0 and np.isfinite(metrics["train/loss"])


def make_step(config, optimizer, schedule):
    """A step whose optimizer is given; its model is not run."""
    model = create("ViT-mu/16")
    return TrainStep(model, tasks.make_task(config, model, 10), optimizer, schedule, 0, accum_steps=1, ema_decay=0.9)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "skips"), [(1e39, 1), (1e30, 0)])  # infinite in float32; only the norm is
def test_a_rate_that_is_not_finite_changes_nothing(tiny, rate, skips):
    tiny.base_lr, tiny.warmup_steps = rate, 0
    tiny.optim.name, tiny.optim.weight_decay = "sgd", 0.0
    config = resolve_config(tiny)
    schedule = optim.make_schedule(config)
    update = make_step(config, optim.make_optimizer(config, schedule, optim.UNSCALED), schedule)
    state = update.init({"kernel": jnp.array([2.0, 3.0])})
    after, metrics = update.apply_grads(state, state.params, jnp.ones(()), {"kernel": jnp.array([0.0, -100.0])})
    assert after.step == 1 and after.skips == metrics["train/skips"] == skips and np.isfinite(metrics["norm/grads"])
    chex.assert_tree_all_finite(after)
    if skips:
        assert metrics["norm/updates"] == 0
        chex.assert_trees_all_close((after.params, after.ema), (state.params, state.ema))
    else:
        assert np.isinf(metrics["norm/updates"]) and after.params["kernel"][1] > 1e29


def test_parameters_whose_update_is_not_finite_keep_their_values(tiny):
    update = make_step(resolve_config(tiny), optax.sgd(1e20), lambda step: jnp.ones(()))
    state = update.init({"kernel": jnp.array([2.0, 3.0])})
    grads = {"kernel": jnp.array([1e19, -1e-20])}
    after, metrics = update.apply_grads(state, state.params, jnp.ones(()), grads)
    np.testing.assert_allclose(after.params["kernel"], [2.0, 4.0])
    np.testing.assert_allclose(after.ema["kernel"], [2.0, 3.1], rtol=1e-6)
    assert metrics["norm/updates"] == 1 and after.skips == 0


def test_the_moving_average_and_the_norm_of_the_update_follow_the_parameters(tiny):
    program = build(tiny)
    state = program.init(jax.random.key(0), {})
    before = expected = jax.device_get(state.params)
    for batch in batches(program, 3):
        state, metrics = program.train_step(state, batch)
        params = jax.device_get(state.params)
        change = optax.tree.norm(optax.tree.sub(params, before))
        np.testing.assert_allclose(metrics["norm/updates"], change, rtol=1e-5)
        before, expected = params, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, expected, params)
    chex.assert_trees_all_close(state.eval_params, expected, rtol=1e-5, atol=1e-7)


def test_predict_is_the_model_without_dropout(tiny):
    program = build(tiny)
    images = next(batches(program, 1))["image"]
    given = {"head/kernel": np.random.default_rng(0).normal(size=(32, 10)).astype(np.float32)}
    params = program.init(jax.random.key(0), given).params
    apply = jax.jit(program.model.apply)
    logits, _ = apply(params, images)
    np.testing.assert_allclose(program.predict(params, images), logits, rtol=1e-5, atol=1e-5)
    dropped, _ = apply(params, images, dropout_key=jax.random.key(1))
    assert np.abs(logits - dropped).max() > 0.1


def test_a_representation_of_another_width_is_split_as_the_rest(tiny):
    tiny.model.pre_logits, tiny.model.representation_size, tiny.mesh.fsdp, tiny.model.depth = True, 24, 4, 1
    program = build(tiny, devices=8)
    shapes = {"pre_logits/kernel": (32, 24), "pre_logits/bias": (24,), "head/kernel": (24, 10)}
    places = tree.flatten(program.state_shardings.params)
    shards = {name: places[name].shard_shape(shape) for name, shape in shapes.items()}
    assert shards == {"pre_logits/kernel": (8, 24), "pre_logits/bias": (24,), "head/kernel": (6, 10)}
    images = next(batches(program, 1))["image"]
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32) / 4, program.state.params)
    logits, out = jax.jit(program.model.apply)(params, jax.device_get(images))
    params = jax.device_put(params, program.state_shardings.params)
    assert out["pre_logits"].shape == (16, 24) and np.abs(logits).max() > 0.1
    np.testing.assert_allclose(program.predict(params, images), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_largest_config_has_shapes_and_shardings_without_memory():
    from configs import vit_l16_jft

    config = vit_l16_jft.get_config()
    config.data.source = "synthetic"
    config.mesh.data, config.mesh.fsdp = 1, 8
    program = build(config, devices=8)
    assert tree.count(program.state.params) == 323_099_507  # paper.md A.4: L/16, 18,291 classes, with pre_logits
    shapes, places = tree.flatten(program.state), tree.flatten(program.state_shardings)
    largest = sum(np.prod(places[name].shard_shape(leaf.shape)) for name, leaf in shapes.items())
    assert largest < 1.01 * sum(np.prod(leaf.shape) for leaf in shapes.values()) / 8
    lowered = program.train_step.lower(program.state, program.batch)
    assert lowered.out_info[1]["train/loss"].shape == ()


@pytest.mark.slow
def test_the_largest_config_takes_a_step_at_reduced_depth():
    from configs import vit_l16_jft

    config = vit_l16_jft.get_config()
    config.data.source = "synthetic"
    config.model.depth, config.batch, config.mesh.fsdp = 1, 8, 4
    program = build(config, devices=8)
    found, _ = losses(program, steps=2)
    np.testing.assert_allclose(found[0], 18_290 * np.log1p(np.exp(-10)) + np.log1p(np.exp(10)), rtol=1e-4)
    assert np.isfinite(found).all()


@pytest.mark.slow
def test_frozen_parameters_stay_and_cost_nothing(tiny):
    tiny.optim.lr_multipliers, tiny.grad_norm_clip, tiny.task.mixup = "head/.*=1,.*=0", None, 0.0
    program = build(tiny)
    before = tree.flatten(jax.device_get(program.init(jax.random.key(0), {}).params))
    state = program.init(jax.random.key(0), {})
    for batch in batches(program, 3):
        state, metrics = program.train_step(state, batch)
    after = tree.flatten(state.params)
    for name, leaf in before.items():
        assert np.array_equal(leaf, after[name]) == (not name.startswith("head/")), name
    assert metrics["norm/grads"] > 0
    flops = program.train_step.lower(program.state, program.batch).cost_analysis()["flops"]
    tiny.optim.lr_multipliers = ""
    whole = build(tiny)
    assert flops < 0.6 * whole.train_step.lower(whole.state, whole.batch).cost_analysis()["flops"]


@pytest.mark.slow
def test_an_evaluation_holds_as_many_images_as_a_part_of_a_step(tiny):
    tiny.model.depth, tiny.accum_steps = 1, 2
    found = []
    for batch_eval, rows in ((None, 8), (32, 32)):
        tiny.batch_eval = batch_eval
        program = build(tiny, devices=8)
        assert {name: leaf.shape[0] for name, leaf in program.eval_batch.items()} == dict.fromkeys(
            ("image", "label", "mask"), rows
        )
        given = {"head/kernel": np.random.default_rng(0).normal(size=(32, 10)).astype(np.float32)}
        params = program.init(jax.random.key(0), given).params
        found.append(evals.run_evaluators(evals.make_evaluators(tiny, program), params))
    part, more = found
    assert part["test/n"] == more["test/n"] == 40 and part["test/accuracy"] == more["test/accuracy"]
    assert part["test/top5"] == more["test/top5"] and part["test/loss"] == pytest.approx(more["test/loss"], rel=1e-6)


def test_an_evaluation_step_is_tried_before_training_and_compiled_once(tiny, caplog):
    tiny.model.depth = 1
    program = build(tiny, devices=8)
    weights = program.init(jax.random.key(0), {}).eval_params
    with jax.log_compiles():
        evals.check_fits(tiny, program, program.eval_batch, weights)
        assert evals.run_evaluators(evals.make_evaluators(tiny, program), weights)["test/n"] == 40
    assert sum("Finished XLA compilation of jit(eval_step)" in record.getMessage() for record in caplog.records) == 1

    def run(error):
        def step(params, batch):
            raise jax.errors.JaxRuntimeError(error)

        evals.check_fits(tiny, dataclasses.replace(program, eval_step=step), program.eval_batch, weights)

    sentence = (
        r"^an evaluation step of 16 images does not fit into the devices' memory \(RESOURCE_EXHAUSTED: Out of memory\);"
        r" set --config.batch_eval to less than 16 and a multiple of 8\.$"
    )
    with pytest.raises(UserError, match=sentence):
        run("RESOURCE_EXHAUSTED: Out of memory\nmore")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        run("INTERNAL: a bug")


@pytest.mark.slow
def test_images_with_several_labels(tiny):
    tiny.data.max_labels = 3
    with pytest.raises(UserError, match=r"several labels per image needs --config.task.loss=sigmoid"):
        build(tiny)
    tiny.task.loss = "sigmoid"
    tiny.mesh.data = 8
    tiny.model.depth = 1
    tiny.model.dropout_rate = tiny.model.stochastic_depth = tiny.task.mixup = 0.0  # they only take long to compile
    program = build(tiny, devices=8)
    assert program.batch["label"].shape == (16, 3)
    images = np.random.default_rng(0).normal(size=program.batch["image"].shape).astype(np.float32)
    one = np.arange(16, dtype=np.int32)[:, None] % 10
    few = np.concatenate([one, np.full_like(one, -1), np.where(one > 4, one - 1, -1)], axis=1)
    state = program.init(jax.random.key(0), {})
    weights = jax.device_get(state.eval_params)
    for labels in (np.pad(one, ((0, 0), (0, 2)), constant_values=-1), few):
        batch = {"image": images, "label": labels, "mask": np.ones(16, np.float32)}
        sums = program.eval_step(weights, batch)
        best = np.argmax(program.predict(weights, images), axis=1)
        assert float(sums["accuracy"]) == sum(b in row for b, row in zip(best, labels, strict=True))
        # A head of zeros: every class has probability 1/2.
        np.testing.assert_allclose(sums["loss"], 16 * 10 * np.log(2), rtol=1e-5)
    state, metrics = program.train_step(state, {"image": jnp.asarray(images), "label": jnp.asarray(few)})
    np.testing.assert_allclose(metrics["train/loss"], 10 * np.log(2), rtol=1e-5)
