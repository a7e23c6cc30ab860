"""The recipes of the paper, of AugReg and of big_vision's S/16: every field against the published tables."""

import importlib
import re

import pytest

from configs import augreg, base
from tests.conftest import ROOT
from vit_jax import UserError, interop
from vit_jax.config import check_config, flatten_config, parse_command_line, resolve_config
from vit_jax.data.preprocess import OPS, parse_pipe
from vit_jax.data.sources import splits

BASE = flatten_config(base.get_config())
TRAIN = "inception_crop({resolution})|flip_lr|value_range(-1,1)"
EVAL = "resize_small({resolution*256/224})|central_crop({resolution})|value_range(-1,1)"
AUGMENTED = "inception_crop({resolution})|flip_lr|randaug(%d,%d)|value_range(-1,1)"

# Fields of reading, evaluation and saving, which the tables do not state.
RUN_TIME = {"eval_every", "eval_every_epochs", "checkpoint_every", "data.workers"}

COMMON = {
    "batch": 4096,
    "resolution": 224,
    "accum_steps": 1,
    "warmup_steps": 10_000,
    "linear_end": 1e-5,
    "cooldown_steps": 0,
    "grad_norm_clip": None,
    "init_from": None,
    "model.position": "learned",
    "model.pooling": "token",
    "model.pre_logits": True,
    "model.head_bias": -10.0,
    "model.dropout_rate": 0.0,
    "model.stochastic_depth": 0.0,
    "data.preprocess": TRAIN,
    "evals.test.preprocess": EVAL,
    "task.loss": "sigmoid",
    "task.label_smoothing": 0.0,
    "task.mixup": 0.0,
    "task.mixup_probability": 1.0,
    "optim.name": "adamw",
    "optim.decays": "all",
    "optim.decay_factor": "rate",
    "optim.ema_decay": 0.0,
    "checkpoint.best_metric": "test/accuracy",
}
AUGREG = {
    "total_epochs": 300.0,
    "base_lr": 1e-3,
    "decay_type": "cosine",
    "grad_norm_clip": 1.0,
    "optim.moment_dtype": "bfloat16",
    "optim.weight_decay": 1e-4,
    "optim.decays": "kernels",
    "optim.decay_factor": "schedule",
}
JFT = COMMON | {
    "decay_type": "linear",
    "data.source": "array_record:jft300m",
    "data.split": "train",
    "data.num_classes": 18_291,
    "data.num_examples": 303_000_000,
    "evals.test.split": "test[:50000]",
    "optim.weight_decay": 0.1,
}
IMAGENET21K = COMMON | {
    "total_epochs": 90.0,
    "base_lr": 1e-3,
    "decay_type": "linear",
    "model.dropout_rate": 0.1,
    "data.source": "array_record:imagenet21k",
    "data.split": "train[51200:]",
    "data.num_classes": 21_843,
    "data.num_examples": 14_145_922,
    "evals.test.split": "train[:51200]",
    "optim.weight_decay": 0.03,
}
IMAGENET = COMMON | {
    "total_epochs": 300.0,
    "base_lr": 3e-3,
    "decay_type": "cosine",
    "grad_norm_clip": 1.0,
    "model.dropout_rate": 0.1,
    "data.source": "tfds:imagenet2012",
    "data.split": "train",
    "data.num_classes": 1000,
    "data.num_examples": 1_281_167,
    "evals.test.split": "validation",
    "task.label_smoothing": 1e-4,
    "optim.weight_decay": 0.3,
}
AUGREG21K = IMAGENET21K | AUGREG | {"model.dropout_rate": 0.0, "model.pooling": "gap", "model.pre_logits": False}
HELD_OUT = (
    IMAGENET
    | AUGREG
    | {
        "model.dropout_rate": 0.0,
        "task.label_smoothing": 0.0,
        "data.split": "train[:99%]",
        "data.num_examples": 1_268_355,
        "evals.minival.split": "train[99%:]",
        "evals.minival.preprocess": EVAL,
        "checkpoint.best_metric": "minival/accuracy",
    }
)
TAUGHT = {  # big_vision's bit_i1k.py
    "total_epochs": 1200.0,
    "base_lr": 0.03,
    "warmup_steps": 5_000,
    "model.pre_logits": False,
    "model.head_bias": 0.0,
    "data.split": "train[:98%]",
    "data.num_examples": 1_255_544,
    "data.preprocess": "inception_crop({resolution})|flip_lr|value_range(-1,1)",
    "task.kind": "distill",
    "task.teacher": "timm/resnetv2_152x2_bit.goog_teacher_in21k_ft_in1k",
    "task.teacher_weight": 1.0,
    "task.loss": "softmax",
    "task.mixup": 1.0,
    "optim.weight_decay": 3e-4,
}
DROPPED = {"model.dropout_rate": 0.1, "model.stochastic_depth": 0.1}
PLAIN90 = {
    "batch": 1024,
    "total_epochs": 90.0,
    "model.pooling": "gap",
    "model.position": "sincos2d",
    "model.head_bias": 0.0,
    "task.loss": "softmax",
}
# JAX-Toolbox, rosetta/projects/vit.
NVIDIA = {
    "total_epochs": None,
    "total_steps": 95_000,
    "model.head_bias": 0.0,
    "model.norm_epsilon": 1e-5,
    "model.image_mean": (0.485, 0.456, 0.406),
    "model.image_std": (0.229, 0.224, 0.225),
    "task.loss": "softmax",
    "task.label_smoothing": 0.0,
    "data.preprocess": "inception_crop({resolution},area_min=8,antialias=True)|flip_lr|color_jitter|autoaugment"
    "|value_range(-1,1)",
    "evals.test.preprocess": "resize({resolution},antialias=True)|value_range(-1,1)",
}


def aug(alpha, *randaug):
    return {"task.mixup": alpha, "data.preprocess": AUGMENTED % randaug if randaug else TRAIN}


def row(group, name, **fields):
    return group | {"model.name": name} | fields


# Table 3 of the paper, then big_vision's vit_i21k.py, vit_i1k.py and vit_s16_i1k.py.
ROWS = {
    "vit_b16_jft": row(JFT, "ViT-B/16", total_epochs=7.0, base_lr=8e-4),
    "vit_b32_jft": row(JFT, "ViT-B/32", total_epochs=7.0, base_lr=8e-4),
    "vit_l16_jft": row(JFT, "ViT-L/16", total_epochs=14.0, base_lr=4e-4),
    "vit_l32_jft": row(JFT, "ViT-L/32", total_epochs=7.0, base_lr=6e-4),
    "vit_h14_jft": row(JFT, "ViT-H/14", total_epochs=14.0, base_lr=3e-4),
    "r50_vit_b16_jft": row(JFT, "R50+ViT-B/16", total_epochs=7.0, base_lr=8e-4),
    "r50_vit_b32_jft": row(JFT, "R50+ViT-B/32", total_epochs=7.0, base_lr=8e-4),
    "r50_vit_l16_jft": row(JFT, "R50+ViT-L/16", total_epochs=14.0, base_lr=4e-4),
    "r50_vit_l32_jft": row(JFT, "R50+ViT-L/32", total_epochs=7.0, base_lr=2e-4),
    "vit_b16_imagenet21k": row(IMAGENET21K, "ViT-B/16"),
    "vit_b32_imagenet21k": row(IMAGENET21K, "ViT-B/32"),
    "vit_l16_imagenet21k": row(IMAGENET21K, "ViT-L/16"),
    "vit_l32_imagenet21k": row(IMAGENET21K, "ViT-L/32"),
    "vit_h14_imagenet21k": row(IMAGENET21K, "ViT-H/14"),
    "r50_vit_b16_imagenet21k": row(IMAGENET21K, "R50+ViT-B/16"),
    "r50_vit_l32_imagenet21k": row(IMAGENET21K, "R50+ViT-L/32"),
    "r26_vit_b32_imagenet21k": row(IMAGENET21K, "R26+ViT-B/32"),
    "vit_b16_imagenet2012": row(IMAGENET, "ViT-B/16"),
    "vit_b32_imagenet2012": row(IMAGENET, "ViT-B/32"),
    "vit_l16_imagenet2012": row(IMAGENET, "ViT-L/16"),
    "vit_l32_imagenet2012": row(IMAGENET, "ViT-L/32"),
    "vit_s16_imagenet21k": row(AUGREG21K, "ViT-S/16", **aug(0.0, 2, 0)),
    "vit_s32_imagenet21k": row(AUGREG21K, "ViT-S/32", **aug(0.0)),
    "vit_ti16_imagenet21k": row(AUGREG21K, "ViT-Ti/16", **aug(0.0)),
    "r26_vit_s32_imagenet21k": row(AUGREG21K, "R26+ViT-S/32", **aug(0.0, 2, 0)),
    "r_vit_ti16_imagenet21k": row(AUGREG21K, "R+ViT-Ti/16", **aug(0.0)),
    "vit_b16_imagenet21k_augreg": row(AUGREG21K, "ViT-B/16", **aug(0.2, 2, 10)),
    "vit_b32_imagenet21k_augreg": row(AUGREG21K, "ViT-B/32", **aug(0.2, 2, 10)),
    "vit_l16_imagenet21k_augreg": row(AUGREG21K, "ViT-L/16", **aug(0.5, 2, 15)),
    "r50_vit_l32_imagenet21k_augreg": row(AUGREG21K, "R50+ViT-L/32", **aug(0.2, 2, 15), **DROPPED),
    "vit_b16_imagenet2012_augreg": row(HELD_OUT, "ViT-B/16", **aug(0.5, 2, 15), **{"model.head_bias": -6.9}),
    "vit_b32_imagenet2012_augreg": row(HELD_OUT, "ViT-B/32", **aug(0.5, 2, 15), **{"model.head_bias": -6.9}),
    "vit_l16_imagenet2012_augreg": row(HELD_OUT, "ViT-L/16", **aug(0.5, 2, 15), **{"model.head_bias": -6.9}),
    "vit_s16_imagenet2012": row(HELD_OUT, "ViT-S/16", **aug(0.5, 2, 15), **{"model.head_bias": -6.9}),
    "vit_ti16_imagenet2012": row(HELD_OUT, "ViT-Ti/16", **aug(0.0, 2, 0), **{"model.head_bias": -6.9}),
    "vit_s16_imagenet2012_90ep": row(HELD_OUT, "ViT-S/16", **aug(0.2, 2, 10), **PLAIN90),
    "vit_s16_imagenet2012_300ep": row(HELD_OUT, "ViT-S/16", **aug(0.2, 2, 10), **PLAIN90 | {"total_epochs": 300.0}),
    "vit_s16_imagenet2012_90ep_linear": row(
        HELD_OUT, "ViT-S/16", **aug(0.2, 2, 10), **(PLAIN90 | {"model.pre_logits": False})
    ),
    "vit_b16_imagenet2012_autoaugment": row(IMAGENET, "ViT-B/16", **NVIDIA),
}


# BiT: Table 3, Table 7 and its own pre-training.
BIT = JFT | {"model.pre_logits": False}
SGD = {
    "base_lr": 0.48,
    "warmup_steps": 5_000,
    "decay_type": "step",
    "decay_at": (0.25, 0.575, 0.75, 0.925),
    "optim.name": "sgd",
    "optim.weight_decay": 1e-3,
    "optim.decays": "kernels",
}
ROWS |= {
    "bit_r50x1_jft": row(BIT, "BiT-R50x1", total_epochs=7.0, base_lr=1e-3),
    "bit_r50x2_jft": row(BIT, "BiT-R50x2", total_epochs=7.0, base_lr=1e-3),
    "bit_r101x1_jft": row(BIT, "BiT-R101x1", total_epochs=7.0, base_lr=8e-4),
    "bit_r152x1_jft": row(BIT, "BiT-R152x1", total_epochs=7.0, base_lr=6e-4),
    "bit_r152x2_jft": row(BIT, "BiT-R152x2", total_epochs=7.0, base_lr=6e-4),
    "bit_r200x3_jft": row(BIT, "BiT-R200x3", total_epochs=14.0, base_lr=6e-4),
    "bit_r50x1_jft_sgd": row(BIT | SGD, "BiT-R50x1", total_epochs=7.0),
    "bit_r152x2_jft_sgd": row(BIT | SGD, "BiT-R152x2", total_epochs=7.0),
    "bit_r50x1_imagenet2012_taught": row(HELD_OUT, "BiT-R50x1", **TAUGHT),
    "bit_imagenet21k": row(
        IMAGENET21K | SGD,
        "BiT-R50x1",
        **{"decay_at": (30 / 90, 60 / 90, 80 / 90), "model.pre_logits": False, "model.dropout_rate": 0.0},
    ),
}


def parse(name, *words):
    return parse_command_line(["main.py", f"--config={ROOT}/configs/{name}", *words])[0]


def test_every_published_model_has_a_recipe():
    files = {path.stem for pattern in ("*vit_*", "bit_*") for path in (ROOT / "configs").glob(f"{pattern}.py")}
    assert set(ROWS) == files - {"bit_hyperrule"}


def test_every_field_is_the_published_one_or_the_default():
    for name in ROWS:
        fields = flatten_config(importlib.import_module(f"configs.{name}").get_config())
        assert set(ROWS[name]) <= set(fields)
        wrong = {
            key: value
            for key, value in fields.items()
            if key not in RUN_TIME
            and value != (ROWS[name][key] if key in ROWS[name] else BASE[re.sub(r"^evals\.\w+", "evals.test", key)])
        }
        assert wrong == {}


@pytest.mark.parametrize(
    ("name", "words", "steps"),
    [
        ("vit_b16_jft", (), 517_822),
        ("vit_h14_jft", (), 1_035_644),
        ("vit_l16_jft", (), 1_035_644),
        ("vit_l16_jft", ("--config.total_epochs=7",), 517_822),
        ("r50_vit_l16_jft", (), 1_035_644),
        ("vit_b16_imagenet2012", (), 93_835),
        ("vit_s16_imagenet2012_90ep", (), 111_476),
        # The paper's 14.2 million images, held-out ones included, make 312,000 and 104,000: half a percent more.
        ("vit_b16_imagenet21k", (), 310_823),
        ("vit_l16_imagenet21k", ("--config.total_epochs=30",), 103_607),
        ("vit_s16_imagenet21k", (), 1_036_078),
        ("bit_r152x2_jft", ("--config.total_epochs=14",), 1_035_644),
    ],
)
def test_lengths_in_steps(name, words, steps):
    config = resolve_config(parse(f"{name}.py", *words))
    assert (config.total_steps, config.warmup_steps) == (steps, 10_000)


def test_the_commands_of_the_docstrings():
    for name in ROWS:
        source = (ROOT / f"configs/{name}.py").read_text()
        [command] = re.findall(r"^    python -m vit_jax\.main --config=configs/(.*) --workdir=RUN$", source, re.M)
        config = parse(*command.split())
        check_config(config)
        assert config.task.teacher is None or interop.is_download_name(config.task.teacher)
        assert command.startswith(f"{name}.py") and "DATA" in config.data.source + (config.data.data_dir or "")
        pipes = [config.data.preprocess, *(config.evals[key].preprocess for key in config.evals)]
        for pipe in pipes:
            if "randaug" not in pipe or "randaug" in OPS:
                assert parse_pipe(pipe, config.resolution).shape == (224, 224, 3)
        for words in re.findall(r"`(--config\..*?)`", source):
            check_config(parse(*command.split(), words))


def test_what_is_held_out_is_not_trained_on():
    counts = {"train": 1_281_167, "validation": 50_000}
    config = parse("vit_s16_imagenet2012.py")
    [(_, kept)] = splits.select_examples(config.data.split, counts)
    [(_, held)] = splits.select_examples(config.evals.minival.split, counts)
    assert len(kept) == config.data.num_examples and kept.stop == held.start and held.stop == counts["train"]
    config = parse("vit_b16_imagenet21k.py")
    [(_, kept)] = splits.select_examples(config.data.split, {"train": 14_197_122})
    [(_, held)] = splits.select_examples(config.evals.test.split, {"train": 14_197_122})
    assert len(kept) == config.data.num_examples and kept.start == held.stop == 51_200


@pytest.mark.parametrize(
    ("level", "fields"),
    [
        ("none", aug(0.0)),
        ("light1", aug(0.0, 2, 0)),
        ("light2", aug(0.2, 2, 10)),
        ("medium1", aug(0.2, 2, 15)),
        ("medium2", aug(0.5, 2, 15)),
        ("strong1", aug(0.5, 2, 20)),
        ("strong2", aug(0.8, 2, 20)),
    ],
)
def test_levels_of_augmentation(level, fields):
    for name in ("vit_s16_imagenet21k", "vit_ti16_imagenet2012", "r50_vit_l32_imagenet21k_augreg"):
        default, config = flatten_config(parse(f"{name}.py")), flatten_config(parse(f"{name}.py:aug={level}"))
        assert config == default | fields
    assert level in augreg.LEVELS and len(augreg.LEVELS) == 7


HYPERRULE = {
    "dataset=cifar10": (10_000, 500, (0.3, 0.6, 0.9), 0.1, 160, 128),
    "dataset=tfds:cifar100,split=dev": (10_000, 500, (0.3, 0.6, 0.9), 0.1, 160, 128),
    "dataset=oxford_iiit_pet": (500, 100, (0.4, 0.6, 0.8), 0.0, 512, 480),
    "dataset=imagenet2012": (20_000, 500, (0.3, 0.6, 0.9), 0.1, 512, 480),
    "dataset=folder:photos": (500, 100, (0.4, 0.6, 0.8), 0.0, 512, 480),
    "dataset=folder:photos,images=20000,small=yes": (10_000, 500, (0.3, 0.6, 0.9), 0.1, 160, 128),
    "model=BiT-R101x3,dataset=folder:photos,images=500000": (20_000, 500, (0.3, 0.6, 0.9), 0.1, 512, 480),
}


@pytest.mark.parametrize("arg", HYPERRULE)
def test_the_hyper_rule(arg):
    config = flatten_config(parse(f"bit_hyperrule.py:{arg}"))
    steps, warmup, decay_at, mixup, around, resolution = HYPERRULE[arg]
    name = "val" if "evals.val.split" in config else "test"
    expected = {
        "total_steps": steps,
        "warmup_steps": warmup,
        "decay_type": "step",
        "decay_at": decay_at,
        "task.mixup": mixup,
        "resolution": resolution,
        "data.preprocess": f"resize({around})|random_crop({{resolution}})|flip_lr|value_range(-1,1)",
        f"evals.{name}.preprocess": "resize({resolution})|value_range(-1,1)",
        "base_lr": 0.003,
        "batch": 512,
        "grad_norm_clip": None,
        "optim.name": "sgd",
        "optim.moment_dtype": "float32",
        "optim.weight_decay": 0.0,
        "task.loss": "softmax",
        "model.name": "BiT-R101x3" if "R101x3" in arg else "BiT-R50x1",
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("arg", ["images=many", "small=no,polyak=yes", "small=maybe", "dataset=cifar11", "model"])
def test_a_wrong_argument_of_the_hyper_rule(arg):
    with pytest.raises(UserError, match=r"the argument|unknown dataset|must be|is not a number"):
        parse(f"bit_hyperrule.py:{arg}")


@pytest.mark.parametrize("arg", ["aug=heavy", "aug=", "medium1", "augment=medium1", "aug=medium1,epochs=3"])
def test_a_wrong_argument(arg):
    levels = f"{arg} must be aug=VALUE with one of the values none, light1, light2, medium1, medium2"
    form = f"the argument '{arg}' is not aug=AUG, of which any part may be left out"
    with pytest.raises(UserError, match=f"{re.escape(levels)}|{re.escape(form)}"):
        parse(f"vit_s16_imagenet21k.py:{arg}")
