"""Which recorded runs are fine-tuned as the paper does it: those with the configuration of its recipe here."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, data
from vit_jax.config import EXECUTION, flatten_config, parse_command_line, parse_config, resolve_config
from vit_jax.data import sources
from vit_jax.experiments.run_record import Record
from vit_jax.paper import PaperNumber

# Data set -> the learning rates that Table 4 chooses from.
RATES: Mapping[str, tuple[float, ...]] = {
    "imagenet2012": (0.003, 0.01, 0.03),
    **dict.fromkeys(("cifar10", "cifar100", "oxford_iiit_pet", "oxford_flowers102"), (0.001, 0.003, 0.01, 0.03)),
}
HYBRID_RATES = (*RATES["imagenet2012"], 0.06)  # on ImageNet, of hybrids and ResNets
VTAB_RATES = (0.01,)
# Fields that do not decide what is computed, or that differ between runs of one protocol.
FREE = re.compile(
    r"seed|base_lr|init_from|batch_eval|accum_steps|log_every|eval_every|checkpoint.*|stall_limit|profile_steps|wandb|"
    r"report|compiler_options|mesh\..*|data\.(data_dir|workers|accept_change|bad_images|max_bad)|"
    rf"optim\.max_nonfinite_skips|model\.({'|'.join(EXECUTION)})|evals\.(?!test\.).*|evals\.test\.every"
)


def list_rates(dataset: str, model: str) -> tuple[float, ...]:
    """Returns the learning rates among which the paper chooses on a data set, or on a task of VTAB.

    Args:
        dataset: `RATES` lists those of Table 4.
        model: its name.
    """
    if dataset == "imagenet2012" and not model.startswith("ViT"):
        return HYBRID_RATES
    return RATES.get(dataset, VTAB_RATES)


def is_of_paper(record: Record, number: PaperNumber) -> bool:
    """Returns whether a run is one of those that a number of the paper is the mean of.

    It started from the paper's weights, and every field that decides what is computed is as in the recipe, but for the
    learning rate, which is one of the paper's.
    """
    model, source = record.config["model"]["name"], record.config["data"]["source"]
    if model != number.model or not number.is_of(record.config["init_from"] or ""):
        return False
    dataset, task = number.dataset.removesuffix("_real"), source.removeprefix("vtab:")
    polyak = ",polyak=yes" if (number.table, dataset) == ("2", "imagenet2012") else ""
    if not dataset.startswith("vtab"):
        recipe = f"configs/finetune.py:model={model},dataset={dataset}{polyak}"
    elif (
        dataset in ("vtab", source) and source != task and task in sources.VTAB_TASKS and sources.VTAB_TASKS[task].group
    ):
        recipe = f"configs/vtab.py:task={task},model={model}"
    else:
        return False
    wanted = _deciding_fields(recipe)
    try:
        config = resolve_config(parse_config(json.dumps(record.config).encode(), record.name))
    except UserError:
        return False
    known = record.steps == wanted["total_steps"] and config.base_lr in list_rates(dataset, model)
    real = not number.dataset.endswith("_real") or _is_real(record, config)
    return known and real and _without_free(config) == wanted


def _is_real(record: Record, config: ConfigDict) -> bool:
    """Returns whether the evaluation `real` is of all of ImageNet's validation images, under ReaL's labels."""
    found = (data.identify_evals(config) | record.evaluations).get("real", {"split": "", "preprocess": ""})
    pipe = data.describe_evals(config)["test"]["preprocess"]
    split = re.fullmatch(r"val(idation)? (?!.*labels=None)(.* )?labels=.*class_map=None.*", found["split"])
    return bool(split) and found["preprocess"] == pipe


@functools.cache
def _deciding_fields(recipe: str) -> dict[str, Any]:
    config, _ = parse_command_line(["", f"--config={recipe}"])
    return _without_free(resolve_config(config))


def _without_free(config: ConfigDict) -> dict[str, Any]:
    return {name: value for name, value in flatten_config(config).items() if not FREE.fullmatch(name)}
