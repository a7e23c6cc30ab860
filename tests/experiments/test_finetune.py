"""The fine-tuning recipe: every field against Table 4 and the authors' release, and its argument."""

import re

import pytest

from configs import base, finetune
from tests.conftest import ROOT
from vit_jax import UserError, data, sharding
from vit_jax.config import check_config, flatten_config, parse_command_line, resolve_config
from vit_jax.data.preprocess import parse_pipe
from vit_jax.data.sources import splits
from vit_jax.program import make_program

BASE = flatten_config(base.get_config())
RUN_TIME = {"eval_every", "checkpoint_every"}

COMMON = {
    "resolution": 384,
    "batch": 512,
    "total_epochs": None,
    "warmup_epochs": None,
    "base_lr": 0.03,
    "decay_type": "cosine",
    "grad_norm_clip": 1.0,
    "init_from": None,
    "model.name": "ViT-B/16",
    "model.dropout_rate": 0.0,
    "model.pooling": "token",
    "model.pre_logits": False,
    "data.preprocess": "inception_crop({resolution})|flip_lr|value_range(-1,1)",
    "data.split": "train",
    "task.loss": "softmax",
    "task.label_smoothing": 0.0,
    "task.mixup": 0.0,
    "optim.name": "sgd",
    "optim.moment_dtype": "bfloat16",
    "optim.weight_decay": 0.0,
    "optim.ema_decay": 0.0,
}
PLAIN = "resize({resolution})|value_range(-1,1)"


def evaluated(name, split):
    return {
        f"evals.{name}.split": split,
        f"evals.{name}.preprocess": PLAIN,
        "checkpoint.best_metric": f"{name}/accuracy",
    }


def dataset(name, classes, images, steps, warmup, split="test"):
    counts = {"data.source": f"tfds:{name}", "data.num_classes": classes, "data.num_examples": images}
    return COMMON | counts | {"total_steps": steps, "warmup_steps": warmup} | evaluated("test", split)


def held_out(row, images, kept):
    row = {key: value for key, value in row.items() if not key.startswith("evals.")}
    return row | {"data.split": f"train[:{kept}%]", "data.num_examples": images} | evaluated("val", f"train[{kept}%:]")


IMAGENET = dataset("imagenet2012", 1000, 1_281_167, 20_000, 500, "validation")
CIFAR10 = dataset("cifar10", 10, 50_000, 10_000, 500)
CIFAR100 = dataset("cifar100", 100, 50_000, 10_000, 500)
PETS = dataset("oxford_iiit_pet", 37, 3_680, 500, 100)
FLOWERS = dataset("oxford_flowers102", 102, 1_020, 500, 100)
OWN = held_out(PETS, None, 90) | {"data.num_classes": None, "batch": 128, "base_lr": 0.01}
TESTED = (
    {key: value for key, value in OWN.items() if "val" not in key} | {"data.split": "train"} | evaluated("test", "test")
)

ROWS = {
    "dataset=imagenet2012": IMAGENET,
    "dataset=cifar10": CIFAR10 | {"base_lr": 0.01},
    "dataset=cifar100": CIFAR100,
    "dataset=oxford_iiit_pet": PETS,
    "dataset=oxford_flowers102,split=full": FLOWERS,
    "dataset=imagenet2012,split=dev": held_out(IMAGENET, 1_268_355, 99),
    "dataset=cifar10,split=dev": held_out(CIFAR10, 49_000, 98) | {"base_lr": 0.01},
    "split=dev,dataset=cifar100": held_out(CIFAR100, 49_000, 98),
    "dataset=oxford_iiit_pet,split=dev": held_out(PETS, 3_312, 90),
    "dataset=oxford_flowers102,split=dev": held_out(FLOWERS, 918, 90),
    "model=ViT-B/32,dataset=cifar10": CIFAR10 | {"model.name": "ViT-B/32"},
    "model=ViT-L/32,dataset=cifar10": CIFAR10 | {"model.name": "ViT-L/32"},
    "model=ViT-L/16,dataset=cifar10": CIFAR10 | {"model.name": "ViT-L/16", "model.dropout_rate": 0.1},
    "model=R50+ViT-B/16,dataset=cifar10": CIFAR10 | {"model.name": "R50+ViT-B/16", "model.dropout_rate": 0.1},
    "model=ViT-H/14,dataset=cifar10": CIFAR10
    | {"model.name": "ViT-H/14", "model.dropout_rate": 0.1, "resolution": 378},
    "dataset=imagenet2012,polyak=yes": IMAGENET | {"resolution": 512, "optim.ema_decay": 0.9999},
    "model=ViT-H/14,dataset=imagenet2012,polyak=yes": IMAGENET
    | {"model.name": "ViT-H/14", "model.dropout_rate": 0.1, "resolution": 518, "optim.ema_decay": 0.9999},
    "dataset=folder:photos": OWN | {"data.source": "folder:photos"},
    "dataset=folder:photos,split=full": TESTED | {"data.source": "folder:photos"},
    "dataset=array_record:packed/a=b,model=ViT-S/16": OWN
    | {"data.source": "array_record:packed/a=b", "model.name": "ViT-S/16"},
    "dataset=tfds:food101": OWN | {"data.source": "tfds:food101"},
    "dataset=tfds:beans:0.1.0,split=full": TESTED | {"data.source": "tfds:beans:0.1.0"},
    "dataset=tfds:cifar100": CIFAR100,
    "": OWN | {"data.source": "folder:"},
}


def parse(arg, *words):
    return parse_command_line(["main.py", f"--config={ROOT}/configs/finetune.py:{arg}", *words])[0]


@pytest.mark.parametrize("arg", ROWS)
def test_every_field_is_the_published_one_or_the_default(arg):
    config = parse(arg)
    check_config(config)
    fields = flatten_config(config)
    assert set(ROWS[arg]) <= set(fields) and [*config.evals] == [config.checkpoint.best_metric.partition("/")[0]]
    wrong = {
        key: value
        for key, value in fields.items()
        if key not in RUN_TIME
        and value != (ROWS[arg][key] if key in ROWS[arg] else BASE[re.sub(r"^evals\.\w+", "evals.test", key)])
    }
    assert wrong == {}


@pytest.mark.parametrize("arg", [arg for arg in ROWS if "split=dev" in arg])
def test_what_is_held_out_is_not_trained_on(arg):
    config = parse(arg)
    count = parse(arg.replace("split=dev", "split=full")).data.num_examples
    [(_, kept)] = splits.select_examples(config.data.split, {"train": count})
    [(_, held)] = splits.select_examples(config.evals.val.split, {"train": count})
    assert len(kept) == config.data.num_examples and kept.stop == held.start and held.stop == count


@pytest.mark.parametrize(
    ("arg", "sentence"),
    [
        (
            "dataset=cifar",
            "unknown dataset 'cifar'; choose from imagenet2012, cifar10, cifar100, oxford_iiit_pet, oxford",
        ),
        ("dataset=pets", "unknown dataset 'pets'"),
        (
            "pooling=gap",
            "is not model=MODEL,dataset=DATASET,split=default|full|dev,polyak=no|yes, of which any part may",
        ),
        ("cifar10", "the argument 'cifar10' is not model=MODEL,dataset=DATASET"),
        ("model=", "the argument 'model=' is not model=MODEL,dataset=DATASET"),
        ("split=half", "split=half must be split=VALUE with one of the values default, full, dev"),
        ("polyak=yes,dataset=cifar10", "polyak=yes is for dataset=imagenet2012: in a short run the average stays near"),
    ],
)
def test_a_wrong_argument(arg, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        parse(arg)


def test_the_program_of_a_row():
    config = parse("model=ViT-B/32,dataset=cifar10", "--config.model.pooling=gap", "--config.model.depth=1")
    config = resolve_config(config)
    program = make_program(config, sharding.make_mesh(config), data.spec(config))
    assert program.batch["image"].shape == (512, 384, 384, 3) and program.model.spec.grid == (12, 12)
    assert [str(leaf.dtype) for leaf in program.state.opt_state[1].trace["encoder"]["norm"].values()] == [
        "bfloat16"
    ] * 2
    for pipe in (config.data.preprocess, config.evals.test.preprocess):
        assert parse_pipe(pipe, config.resolution).shape == (384, 384, 3)


def test_the_docstring_knows_the_table():
    text = finetune.__doc__
    for name in ("imagenet2012", "cifar10", "Pets"):
        steps, warmup = {"imagenet2012": (20_000, 500), "cifar10": (10_000, 500), "Pets": (500, 100)}[name]
        assert re.search(rf"^ +{name}\b.* {steps:,} +{warmup} ", text, re.M)
