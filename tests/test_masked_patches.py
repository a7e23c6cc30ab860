"""Masked patch prediction: what is corrupted, what is predicted, and runs that are stopped, split and fine-tuned."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import base, masked_patches, masked_patches_cifar10, masked_patches_digits, smoke
from vit_jax import UserError, data, evaluate, interop, look, predict, sharding, train
from vit_jax.config import check_config, resolve_config
from vit_jax.model import create, parameter_shapes
from vit_jax.program import make_program, prepare, program_without_data
from vit_jax.tasks import MaskedPatches
from vit_jax.tasks.masked_patches import TARGETS, Colors, cut_patches, draw_corruption, join_patches
from vit_jax.training.workdir import load_init

RANDOM = np.random.default_rng(0)
LEVELS = RANDOM.integers(0, 256, (4, 8, 16, 3), dtype=np.int32)
IMAGES = jnp.asarray(LEVELS / 127.5 - 1, jnp.float32)
PIXELS = jnp.asarray(LEVELS.reshape(4, 2, 4, 4, 4, 3).swapaxes(2, 3).reshape(4, 8, 4, 4, 3))  # of 8 patches an image


def small(target="mean_color", devices=-1):
    """The smoke recipe, which reads digits as 16 patches of 4x4 pixels, without the labels."""
    config = smoke.get_config()
    config.task.label_smoothing = config.task.mixup = 0.0
    config.total_steps, config.eval_every, config.mesh.data = 4, 4, devices
    return masked_patches.mask(config, target)


def test_the_recipe_is_that_of_the_paper():
    config = masked_patches.get_config()
    check_config(config)
    assert (config.model.name, config.batch, config.total_steps, config.warmup_steps) == (
        "ViT-B/16",
        4096,
        10**6,
        10**4,
    )
    assert (config.base_lr, config.decay_type, config.optim.name, config.resolution) == (2e-4, "cosine", "adamw", 224)
    assert (config.task.corrupted, config.task.masked, config.task.swapped) == (0.5, 0.8, 0.1)
    assert config.total_steps * config.batch / config.data.num_examples == pytest.approx(13.5, abs=0.1)


def test_a_folder_without_labels_is_learnt_from_and_evaluated(tmp_path):
    for number in range(20):
        Image.fromarray(RANDOM.integers(0, 256, (16, 16, 3), np.uint8)).save(tmp_path / f"{number}.png")
    config = masked_patches.get_config(f"target=patch4,dataset=folder:{tmp_path}")
    check_config(config)
    assert config.task.target == "patch4" and config.data.split == "train[:90%]"
    config.update_from_flattened_dict({"batch": 8, "total_epochs": None, "total_steps": 0, "resolution": 16})
    config.update_from_flattened_dict({"warmup_epochs": None, "model.width": 16, "model.depth": 1, "model.mlp_dim": 16})
    config.model.name, config.model.stochastic_depth = "ViT-mu/8", 0.0
    metrics = train.train(config, tmp_path / "run")
    assert metrics["patches/n"] == 2 and np.isfinite(metrics["patches/loss"])
    assert "18 images without labels" in (tmp_path / "run" / "train.log").read_text()
    with config.unlocked():
        config.evals.knn = base.evaluation("knn", split="train[:90%]", preprocess=config.evals.patches.preprocess)
    with pytest.raises(UserError, match=r"in evals.knn: .* contains images directly .*; it must contain either"):
        prepare(config)


@pytest.mark.parametrize(("small", "tenth"), [(masked_patches_cifar10, 5000), (masked_patches_digits, 144)])
def test_the_small_recipes_have_targets_or_labels(small, tenth):
    for target in TARGETS:
        assert small.get_config(f"target={target}").task.target == target
    few = small.get_config("labels=10")
    assert (few.task.kind, few.data.split, few.data.num_examples) == ("classify", "train[:10%]", tenth)
    for wrong in ("target=colour", "labels=0", "labels=many", "stage=pretrain"):
        with pytest.raises(ValueError, match=r"the argument|must be"):
            small.get_config(wrong)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model.name": "R+ViT-Ti/16", "resolution": 32}, r"R\+ViT-Ti/16 has no patches of pixels, .*; choose a"),
        ({"model.name": "ViT-mu/2", "task.target": "patch4"}, "needs patches of a multiple of 4 pixels, not 2"),
        ({"task.swapped": 0.3}, "together more than 1"),
        ({"task.mixup": 0.2}, "task.kind=masked_patches uses no labels: leave task.loss, .* at their defaults"),
    ],
)
def test_what_does_not_suit_it_is_refused(change, sentence):
    config = small()
    config.data.num_examples = 1438
    config.update_from_flattened_dict(change)
    config.data.preprocess = "resize({resolution})|value_range(-1,1)"
    config.evals.patches.preprocess = config.data.preprocess
    with pytest.raises(UserError, match=sentence):
        program_without_data(config)


def test_half_of_the_patches_are_corrupted_in_three_ways():
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = jax.device_get(jax.jit(lambda keys: draw_corruption(keys, 16, 0.5, 0.8, 0.1))(keys))
    own = np.arange(16)
    assert (drawn.corrupted.sum(axis=1) == 8).all()
    assert not (drawn.masked & ~drawn.corrupted).any()
    swapped = drawn.source != own
    assert not (swapped & (~drawn.corrupted | drawn.masked)).any()
    assert drawn.masked.sum() / 3200 == pytest.approx(0.8, abs=0.02)
    assert swapped.sum() / 3200 == pytest.approx(0.1, abs=0.02)
    assert drawn.corrupted.mean(axis=0) == pytest.approx(np.full(16, 0.5), abs=0.1)  # every patch equally often


def test_what_an_image_is_given_does_not_depend_on_the_others():
    draw = jax.jit(MaskedPatches(4).test_examples)
    first, last = draw({"image": IMAGES}), draw({"image": IMAGES[::-1]})
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, other[::-1]), first, last)


def test_corrupted_images_consist_of_their_own_patches():
    np.testing.assert_array_equal(join_patches(cut_patches(IMAGES, 4), 8), IMAGES)
    task = MaskedPatches(4, swapped=1.0, masked=0.0)
    inputs, targets = jax.device_get(jax.jit(task.train_examples)(jax.random.key(1), {"image": IMAGES}))
    given, own = (np.asarray(cut_patches(jnp.asarray(images), 4)) for images in (inputs["images"], IMAGES))
    for row, patch in np.ndindex(4, 8):
        same = (given[row, patch] == own[row, patch]).all()
        assert same != targets["corrupted"][row, patch]
        assert same or any((given[row, patch] == other).all() for other in own[row])
    np.testing.assert_array_equal(targets["pixels"], PIXELS)


def test_colours_are_those_of_their_definition():
    part = PIXELS.reshape(4, 8, 2, 2, 2, 2, 3).mean(axis=(3, 5))
    for side, means in ((1, PIXELS.mean(axis=(2, 3))[:, :, None]), (2, part.reshape(4, 8, 4, 3))):
        wanted = np.minimum(np.floor(8 * np.array(means) / 255), 7) @ [64, 8, 1]
        np.testing.assert_array_equal(Colors(side).classes(PIXELS), wanted)
    assert Colors(1).classes(jnp.full((1, 1, 4, 4, 3), 255))[0, 0, 0] == 511


@pytest.mark.parametrize(
    ("name", "outputs"),
    [("full", 48), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("mean_color", 512), ("patch4", 8192)])],
)
def test_a_perfect_prediction(name, outputs):
    target = TARGETS[name]
    assert target.outputs(4) == outputs
    if name == "full":
        perfect = PIXELS.reshape(4, 8, 48) / 127.5 - 1
        np.testing.assert_allclose(target.picture(perfect, 4), cut_patches(IMAGES, 4), atol=1e-6)
        np.testing.assert_allclose(target.losses(perfect + 0.5, PIXELS), np.full((4, 8), 0.25), rtol=1e-5)
    else:
        perfect = 100.0 * jax.nn.one_hot(target.classes(PIXELS), 512).reshape(4, 8, -1)
        drawn, shown = (x.mean(axis=(2, 3)) for x in (target.picture(perfect, 4), cut_patches(IMAGES, 4)))
        assert np.abs(drawn - shown).max() < 0.13  # half of a level
        np.testing.assert_allclose(target.losses(0 * perfect, PIXELS), np.full((4, 8), np.log(512)), rtol=1e-5)
    task = MaskedPatches(4, name)
    _, targets = jax.jit(task.test_examples)({"image": IMAGES})
    measure = jax.jit(task.metric_sums)
    sums = measure(perfect, targets, jnp.array([1.0, 1, 0, 1]))
    assert (sums["n"], sums["accuracy"]) == (3, 3) and sums["loss"] < 1e-3
    wrong = measure(jnp.full_like(perfect, jnp.nan), targets, jnp.ones(4))
    assert wrong["accuracy"] == 0 and np.isnan(wrong["loss"])


def test_only_corrupted_patches_count():
    task = MaskedPatches(4)
    _, targets = jax.jit(task.test_examples)({"image": IMAGES})
    perfect = 100.0 * jax.nn.one_hot(Colors(1).classes(PIXELS)[..., 0], 512)
    wrong = jnp.roll(perfect, 7, axis=-1)
    elsewhere = jnp.where(targets["corrupted"][..., None], perfect, wrong)
    assert (task.losses(elsewhere, targets) < 1e-3).all() and (task.losses(wrong, targets) > 1).all()


def test_a_masked_patch_is_not_seen():
    model = create("ViT-mu/4", head="patches", num_classes=8, resolution=16)
    shapes = parameter_shapes(model)
    params = jax.tree.map(lambda leaf: RANDOM.normal(0, 0.1, leaf.shape).astype(np.float32), shapes)
    images = RANDOM.uniform(-1, 1, (2, 16, 16, 3)).astype(np.float32)
    masked = np.zeros((2, 16), bool)
    masked[:, 5] = True  # the second patch of the second row
    changed = images.copy()
    changed[:, 4:8, 4:8] = 0.7
    apply = jax.jit(lambda images, masked: model.apply(params, images, masked=masked))
    (one, out), (other, _) = apply(images, masked), apply(changed, masked)
    np.testing.assert_array_equal(one, other)
    assert one.shape == (2, 16, 8) and out["pre_logits"].shape == (2, 32)
    assert not np.allclose(one, apply(changed, ~masked)[0])


def rows(workdir):
    """The metrics that a run has written, without those of time."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "sec" not in name and "wait" not in name} for line in lines]


@pytest.mark.slow
def test_masked_patches_are_learnt_without_labels_and_fine_tuned(tmp_path, caplog):
    config = small()
    config.base_lr, config.total_steps, config.eval_every = 1e-2, 12, 12
    metrics = train.train(config, tmp_path / "pre")
    first, last = rows(tmp_path / "pre")[0], metrics
    assert last["patches/loss"] < np.log(512) - 0.3 and 0 < last["patches/accuracy"] < 1 and "train/loss" in first
    model, params = interop.load(tmp_path / "pre")
    assert model.field("head") == "patches" and model.class_names is None and params["mask"].any()
    with pytest.raises(UserError, match=r"the google layout does not support .*head patches"):
        interop.save(tmp_path / "model.npz", model, params, layout="google")

    fine, info, program = prepare(smoke.get_config())
    source = str(tmp_path / "pre")
    given, words, _ = load_init(source, fine, program, info.class_names)
    assert words == f"{source}; its head, for masked patches, and its [mask] embedding are left out"
    assert not {"mask", "head/kernel"} & set(given)
    np.testing.assert_array_equal(given["embed/kernel"], params["embed"]["kernel"])
    fine.keep_head = True
    with pytest.raises(UserError, match="head is for masked patches, but this run needs one for classes of images"):
        load_init(source, fine, program, info.class_names)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["mean_color", "full"])
def test_pictures_evaluations_and_refusals_of_exported_weights(target, tmp_path):
    config = small(target)
    config.mesh.data, config.total_steps = 8, 2
    metrics = train.train(config, tmp_path / "pre")
    again = evaluate.evaluate(tmp_path / "pre")
    assert again["patches/loss"] == pytest.approx(metrics["patches/loss"], rel=1e-5)
    alone = evaluate.evaluate(
        tmp_path / "pre/model.npz", source="digits", requests=["patches=masked_patches"], batch=64
    )
    assert alone["patches/loss"] == pytest.approx(metrics["patches/loss"], rel=1e-5)
    assert 0 <= evaluate.evaluate(tmp_path / "pre", requests=["knn"])["knn/5nn"] <= 1
    with pytest.raises(UserError, match="a head for the task classify, but the model's head is for masked_patches"):
        evaluate.evaluate(tmp_path / "pre", requests=["classify"])

    Image.fromarray(LEVELS[0].astype(np.uint8)).save(tmp_path / "one.png")
    files = look.look(tmp_path / "pre", [tmp_path / "one.png"] * 2, tmp_path / "look")
    assert {"predicted_patches.png", "predicted_patches.svg"} <= {file.name for file in files}
    assert "predicted" in files[0].read_text()
    with pytest.raises(UserError, match="leave out --saliency"):
        look.look(tmp_path / "pre", [tmp_path / "one.png"], tmp_path / "look", saliency=True)
    with pytest.raises(UserError, match="predicts masked patches, not classes"):
        predict.predict(tmp_path / "pre", [tmp_path / "one.png"])


@pytest.mark.slow
def test_any_mesh_and_any_parts_of_the_batch_give_the_same():
    config = resolve_config(small("mean_color"))
    config.data.num_examples = 1438
    config.base_lr, config.warmup_steps = 1e-2, 0
    images = (RANDOM.integers(0, 256, (3, 32, 16, 16, 3)) / 127.5 - 1).astype(np.float32)
    results, corrupted = [], []
    for devices, parts, fsdp in ((1, 1, 1), (8, 1, 1), (8, 2, 2)):
        config.accum_steps, config.mesh.fsdp = parts, fsdp
        program = make_program(config, sharding.make_mesh(config, jax.devices()[:devices]), data.spec(config))
        state, losses = program.init(jax.random.key(0), {}), []
        for batch in images:
            given = jax.device_put({"image": batch, "label": np.zeros(32, np.int32)}, program.batch_sharding)
            state, metrics = program.train_step(state, given)
            losses.append(float(metrics["train/loss"]))
        seen = {"image": images[0], "label": np.zeros(32, np.int32), "mask": np.ones(32, np.float32)}
        sums = program.eval_step(state.params, jax.device_put(seen, program.batch_sharding))
        results.append([*losses, *jax.tree.leaves(jax.device_get(sums))])
        draw = jax.jit(program.task.train_examples, in_shardings=(None, program.batch_sharding))
        corrupted.append(jax.device_get(draw(jax.random.key(5), given)))
    np.testing.assert_allclose(results[1:], [results[0]] * 2, rtol=2e-5)
    for other in corrupted[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, corrupted[0])
