"""Distillation: the losses in float64, the same view for teacher and student, and a run with its teacher."""

import json
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import smoke
from tests.test_program import batches
from vit_jax import UserError, data, interop, sharding, tasks, train
from vit_jax.config import check_config, resolve_config
from vit_jax.macs import macs_per_image
from vit_jax.model import create
from vit_jax.program import make_program

LABELS = jnp.array([2, 1, 0])
STUDENT, TEACHER = np.random.default_rng(0).normal(size=(2, 3, 3)) * 2


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_soft_targets_are_compared_at_a_temperature(loss, temperature):
    task = tasks.Distill(3, loss, teacher_weight=0.25, temperature=temperature)
    student, teacher, onehot = STUDENT / temperature, TEACHER / temperature, np.eye(3)[LABELS]
    if loss == "softmax":
        p, q = softmax(teacher), softmax(student)
        divergence, by_labels = (p * np.log(p / q)).sum(axis=1), -(onehot * np.log(softmax(STUDENT))).sum(axis=1)
    else:
        p, q, own = sigmoid(teacher), sigmoid(student), sigmoid(STUDENT)
        divergence = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(axis=1)
        by_labels = -(onehot * np.log(own) + (1 - onehot) * np.log(1 - own)).sum(axis=1)
    expected = 0.75 * by_labels + 0.25 * temperature**2 * divergence
    found = task.losses(jnp.float32(STUDENT), (task.targets(LABELS), jnp.float32(TEACHER)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_hard_targets_are_the_best_classes_and_a_second_head_learns_them_alone():
    task = tasks.Distill(3, teacher_weight=0.5, teacher_targets="hard")
    taught = jnp.float32(TEACHER)
    as_labels = task.losses(jnp.float32(STUDENT), (task.targets(jnp.array(TEACHER.argmax(axis=1))), taught))
    plain = tasks.Classify(3)
    np.testing.assert_allclose(as_labels, plain.losses(jnp.float32(STUDENT), jnp.eye(3)[TEACHER.argmax(axis=1)]))
    both = jnp.float32(np.stack([STUDENT, STUDENT[::-1]], axis=1))
    two = tasks.Distill(3, teacher_weight=0.5, teacher_targets="hard", two_heads=True)
    expected = 0.5 * plain.losses(both[:, 0], jnp.eye(3)[LABELS])
    expected += 0.5 * plain.losses(both[:, 1], jnp.eye(3)[TEACHER.argmax(axis=1)])
    np.testing.assert_allclose(two.losses(both, (two.targets(LABELS), taught)), expected, rtol=1e-5)
    assert (two.output, task.output) == ("head_logits", "logits")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task.kind": "distill"}, "needs a teacher: set --config.task.teacher"),
        (
            {"task.teacher": "a"},
            "task.teacher needs --config.task.kind=distill; add that flag, or leave out",
        ),
        ({"task.temperature": 2.0, "task.kind": "masked_patches"}, "task.temperature needs --config.task.kind=distill"),
        (
            {"task.kind": "distill", "task.teacher": "a", "task.teacher_targets": "hard", "task.temperature": 2.0},
            "task.temperature changes only soft targets",
        ),
        ({"task.kind": "distill", "task.teacher": "a", "task.teacher_weight": 1.5}, "must be at least 0 and at most 1"),
    ],
)
def test_fields_that_contradict_each_other(tiny, change, message):
    tiny.update_from_flattened_dict(change)
    with pytest.raises(UserError, match=message):
        check_config(tiny)


def taught(config, devices=1, **fields):
    """The program of a student of a small ViT with random weights, and these."""
    config.task.kind, config.task.teacher = "distill", "teacher.npz"
    teacher = create("ViT-mu/8", **{"resolution": 16, "depth": 1, "num_classes": 10} | fields)
    config = resolve_config(config)
    program = make_program(
        config, sharding.make_mesh(config, jax.devices()[:devices]), data.spec(config), None, teacher
    )
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), program.teacher.params)
    return program, jax.device_put(params, program.teacher.params_shardings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_classes": 7}, "has 7 classes, but the data have 10"),
        ({"num_classes": 0}, "does not classify images"),
        ({"head": "patches", "num_classes": 3}, "does not classify images"),
    ],
)
def test_teachers_that_cannot_teach(tiny, fields, message):
    with pytest.raises(UserError, match=rf"task\.teacher=teacher\.npz {message}"):
        taught(tiny, **fields)


def test_each_of_two_heads_is_trained(tiny):
    tiny.model.position, tiny.model.pooling, tiny.model.registers = "learned", "token", 1
    tiny.model.distilled_head, tiny.task.teacher_weight = True, 1.0
    with pytest.raises(UserError, match=r"task\.teacher_weight=1 trains one of the two heads"):
        taught(tiny)


@pytest.mark.slow
@pytest.mark.parametrize("two_heads", [False, True])
def test_teacher_and_student_see_one_view_on_any_mesh(tiny, two_heads):
    tiny.task.mixup, tiny.task.teacher_weight, tiny.accum_steps, tiny.optim.name = 1.0, 0.75, 2, "sgd"
    tiny.model.dropout_rate = tiny.model.stochastic_depth = 0.0
    tiny.model.position, tiny.model.pooling = "learned", "token"
    tiny.model.registers, tiny.model.distilled_head = int(two_heads), two_heads
    found = []
    for devices, (fsdp, tensor) in ((1, (1, 1)), (8, (2, 2))):
        tiny.mesh.fsdp, tiny.mesh.tensor = fsdp, tensor
        program, params = taught(tiny, devices)
        state = program.init(jax.random.key(0), {})
        step_losses = []
        for step, batch in enumerate(batches(program, 3)):
            if not step:  # the student's head starts at 0: all its classes are equally probable
                keys = jax.random.split(jax.random.fold_in(jax.random.key(tiny.seed), 0))
                inputs, _ = program.task.train_examples(keys[0], batch)
                logits = np.float64(program.teacher.model.apply(jax.device_get(params), inputs["images"])[0])
                p = softmax(logits)
                expected = 0.75 * (p * np.log(p * 10)).sum(axis=1).mean() + 0.25 * np.log(10)
            state, metrics = program.train_step(state, batch, params)
            step_losses.append(float(metrics["train/loss"]))
        np.testing.assert_allclose(step_losses[0], expected, rtol=1e-4)
        found.append((jax.device_get(state.params), step_losses))
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run of a few steps."""
    config = smoke.get_config()
    config.task.mixup, config.total_steps = 0.0, 4
    folder = tmp_path_factory.mktemp("teacher") / "run"
    train.train(config, folder)
    return folder


@pytest.mark.slow
def test_a_run_names_its_teacher_and_goes_on_with_no_other(quick, teacher, tmp_path, capsys):
    quick.task.kind, quick.task.teacher, quick.total_steps, quick.checkpoint_every = "distill", str(teacher), 4, 2
    train.train(quick, tmp_path / "run")
    log = (tmp_path / "run/train.log").read_text()
    [line] = re.findall("^Teacher: .*", log, re.MULTILINE)
    last = [json.loads(row) for row in (teacher / "metrics.jsonl").read_text().splitlines()][-1]
    assert str(teacher) in line and f"test/accuracy {last['test/accuracy']:.2%}" in line
    [process] = json.loads((tmp_path / "run/processes.json").read_text())
    assert process["saved"]["teacher_macs"] == macs_per_image(interop.load(teacher)[0])
    shutil.copytree(teacher, tmp_path / "moved")  # the same weights elsewhere
    quick.total_steps, quick.task.teacher = 6, str(tmp_path / "moved/model.npz")
    other = tmp_path / "other.npz"
    arrays = dict(np.load(teacher / "model.npz"))
    np.savez(other, **arrays | {"head/bias": arrays["head/bias"] + 1})
    shutil.copy(teacher / "model.json", tmp_path / "other.json")
    train.train(quick, tmp_path / "run")
    lines = re.findall("^Teacher: .*", (tmp_path / "run/train.log").read_text(), re.MULTILINE)
    assert "moved/model.npz" in lines[1] and "accuracy" not in lines[1] and len(lines) == 2
    quick.total_steps, quick.task.teacher = 8, str(other)
    with pytest.raises(
        UserError, match=r"has learnt from .*moved/model.npz .*, not from .*other.npz .*, or choose a new"
    ):
        train.train(quick, tmp_path / "run")


@pytest.mark.slow
def test_a_teacher_of_other_classes_or_pixels_is_refused_whatever_is_evaluated(quick, teacher, tmp_path):
    quick.task.kind, quick.task.teacher = "distill", str(tmp_path / "other.npz")
    shutil.copy(teacher / "model.npz", tmp_path / "other.npz")
    stated = json.loads((teacher / "model.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(stated | {"class_names": [*map(str, range(9, -1, -1))]}))
    quick.evals.test.kind = "predictions"
    with quick.unlocked():
        quick.evals.test.labels, quick.evals.test.class_map = None, "order"
    with pytest.raises(UserError, match=r"task.teacher=.*other.npz: class '9' has label 0 in the checkpoint's head"):
        train.train(quick, tmp_path / "run")
    pixels = stated["preprocess"].replace("value_range(-1,1)", "value_range(0,1)")
    (tmp_path / "other.json").write_text(json.dumps(stated | {"preprocess": pixels}))
    with pytest.raises(UserError, match=r"task.teacher=.*other.npz: its preprocessing ends with value_range\(0,1\)"):
        train.train(quick, tmp_path / "run")
