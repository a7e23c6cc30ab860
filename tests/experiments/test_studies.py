"""The studies: every point of every grid is a configuration that can be built; the paper's sizes and rates; --only."""

import importlib
import re

import pytest

from tests.conftest import ROOT
from vit_jax import UserError, data
from vit_jax.config import check_config, flatten_config, resolve_config
from vit_jax.experiments import list_combinations
from vit_jax.model import create
from vit_jax.paper import find_paper_number, read_paper_runs

STUDIES = sorted(
    path.stem for path in (ROOT / "configs" / "studies").glob("*.py") if "def get_grid" in path.read_text()
)
POINTS = {"data_size": (24, 12), "head": (6, 6), "pooling": (4, 6), "positions": (8, 8), "resnet_optimizer": (4, 6)}
POINTS |= {"shape": (19, 15), "compute": (18, 6), "regularization": (24, 12), "axial": (6, 6)}


def study(name):
    return importlib.import_module(f"configs.studies.{name}")


def configure(name, arg):
    """The configuration of each point, by name."""
    grid = study(name).get_grid(arg) if arg else study(name).get_grid()
    configs = {}
    for point, fields in grid.items():
        configs[point] = study(name).get_config(arg)
        configs[point].update_from_flattened_dict(fields)
    return configs


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_a_recipe_with_a_grid(name):
    text = study(name).__doc__
    assert f"python -m vit_jax.sweep --config=configs/studies/{name}.py " in text
    assert f"configs/studies/{name}.py:small=yes" in text
    assert re.search(r"Ours: (\d|not run)", text) and "Paper" in text
    for arg, count in zip(("", "small=yes"), POINTS[name], strict=True):
        found = configure(name, arg)
        assert len(found) == count and study(name).get_config(arg).is_locked
        assert len({str(flatten_config(config)) for config in found.values()}) == count
        built = {}
        for point, config in found.items():
            check_config(config)
            resolve_config(config)
            built.setdefault((config.resolution, str(config.model)), config)
            assert data.train_preprocessor(config).shape == (config.resolution, config.resolution, 3), point
        for config in built.values():
            fields = {key: value for key, value in config.model.items() if key != "name"} | {"dtype": "float32"}
            create(config.model.name, num_classes=10, resolution=config.resolution, **fields)
    with pytest.raises(ValueError, match=r"the argument 'big=yes' is not small=no|yes"):
        study(name).get_config("big=yes")


def test_the_optimizers_of_resnets_are_those_of_table_7():
    for point, config in configure("resnet_optimizer", "").items():
        model, optimizer = point.split("/")
        recipe = f"bit_{model.lower()}_jft{'_sgd' if optimizer == 'sgd' else ''}"
        assert flatten_config(config) == flatten_config(importlib.import_module(f"configs.{recipe}").get_config())


def test_data_sizes_are_those_of_figure_4():
    found = configure("data_size", "")
    rates = {"ViT-L/16": "l16", "ViT-L/32": "l32", "ViT-B/32": "b32"}
    for config in found.values():
        stem = rates.get(config.model.name)
        recipe = f"vit_{stem}_jft" if stem else config.model.name.lower().replace("-", "_") + "_jft"
        expected = importlib.import_module(f"configs.{recipe}").get_config()
        assert (config.base_lr, config.model.pre_logits) == (expected.base_lr, expected.model.pre_logits)
        assert resolve_config(config).total_steps == 517_822
        assert config.data.split == f"train[:{config.data.num_examples}]"


def test_the_runs_of_table_6_are_its_recipes():
    found = configure("compute", "")
    stated = [(run.model, run.epochs) for run in read_paper_runs() if run.exaflops]
    assert sorted((config.model.name, config.total_epochs) for config in found.values()) == sorted(stated)
    for point, config in found.items():
        recipe, _, epochs = point.partition("/")[2].rpartition("_")
        expected = importlib.import_module(f"configs.{recipe}").get_config()
        expected.total_epochs = float(epochs)
        assert flatten_config(config) == flatten_config(expected), point
        number = find_paper_number("6", config.model.name, f"runs/{point}", "cifar10")
        assert (number.model, number.epochs) == (config.model.name, config.total_epochs)


def test_the_choice_of_table_3_is_a_point_of_figure_3():
    found = configure("regularization", "")
    for point, recipe in (
        ("imagenet2012/0.3-0.1-0.0001", "vit_b16_imagenet2012"),
        ("imagenet21k/0.03-0.1-0.0", "vit_b16_imagenet21k"),
    ):
        assert flatten_config(found[point]) == flatten_config(importlib.import_module(f"configs.{recipe}").get_config())


def test_a_grid_is_run_by_its_names(tmp_path):
    words = ["sweep", f"--config={ROOT}/configs/studies/pooling.py:small=yes", f"--workdir={tmp_path}"]
    found = list_combinations([*words, "--only=gap/*", "--sweep.seed=0,1"])
    assert [run.name for run in found] == [
        f"gap/{rate},seed={seed}" for rate in ("0.0003", "0.0008", "0.0024") for seed in (0, 1)
    ]
    assert found[-1].folder == f"{tmp_path}/gap/0.0024,seed=1" and found[-1].workdir == str(tmp_path)
    assert (found[-1].config.base_lr, found[-1].config.model.pooling, found[-1].config.seed) == (2.4e-3, "gap", 1)
    assert "--config.base_lr=0.0024" in found[-1].words
    for more, sentence in (
        ("--only=max/*", r"no point of the grid matches --only=max/\*; choose from token/0.0003, .*, gap/0.0024\."),
        (
            "--config.base_lr=0.1",
            "base_lr is a field of the recipe's grid; leave it out, or choose points with --only=",
        ),
        ("--sweep.model.pooling=gap", "model.pooling is a field of the recipe's grid; leave it out"),
    ):
        with pytest.raises(UserError, match=sentence):
            list_combinations([*words, more])


def test_fields_of_a_grid_that_are_lists_or_unset_pass_a_command_line(tmp_path):
    words = ["sweep", f"--config={ROOT}/configs/studies/resnet_optimizer.py", f"--workdir={tmp_path}"]
    [run] = list_combinations([*words, "--only=R50x1/sgd"])
    assert run.config.decay_at == (0.25, 0.575, 0.75, 0.925)
    words[1] = f"--config={ROOT}/configs/studies/data_size.py:small=yes"
    [run] = list_combinations([*words, "--only=BiT/1500"])
    assert (run.config.model.width, run.config.data.num_examples) == (None, 1500)
