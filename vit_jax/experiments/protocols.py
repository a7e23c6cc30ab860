"""Tells which recorded runs are fine-tuned as in the paper: those with the configuration of our recipe for it."""

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, data
from vit_jax.config import EXECUTION, flatten_config, parse_command_line, parse_config, resolve_config
from vit_jax.data import sources
from vit_jax.experiments.run_record import RunRecord
from vit_jax.paper import PaperNumber

# Data set -> the learning rates of Table 4, from which the paper chooses.
LEARNING_RATES: Mapping[str, tuple[float, ...]] = {
    "imagenet2012": (0.003, 0.01, 0.03),
    **dict.fromkeys(("cifar10", "cifar100", "oxford_iiit_pet", "oxford_flowers102"), (0.001, 0.003, 0.01, 0.03)),
}
HYBRID_LEARNING_RATES = (*LEARNING_RATES["imagenet2012"], 0.06)  # of hybrids and ResNets on ImageNet
VTAB_LEARNING_RATES = (0.01,)
# Fields that do not decide what is computed, or that may differ between runs of the same protocol.
IRRELEVANT_FIELDS = re.compile(
    r"seed|base_lr|init_from|batch_eval|accum_steps|log_every|eval_every|checkpoint.*|stall_limit|profile_steps|wandb|"
    r"report|compiler_options|mesh\..*|data\.(data_dir|workers|accept_change|bad_images|max_bad)|"
    rf"optim\.max_nonfinite_skips|model\.({'|'.join(EXECUTION)})|evals\.(?!test\.).*|evals\.test\.every"
)


def list_learning_rates(dataset: str, model: str) -> tuple[float, ...]:
    """Returns the learning rates among which the paper chooses on a data set, or on a task of VTAB.

    Args:
        dataset: a key of `LEARNING_RATES`. Any other name is a task of VTAB.
        model: the name of the model.
    """
    if dataset == "imagenet2012" and not model.startswith("ViT"):
        return HYBRID_LEARNING_RATES
    return LEARNING_RATES.get(dataset, VTAB_LEARNING_RATES)


def is_of_paper(record: RunRecord, paper_number: PaperNumber) -> bool:
    """Returns whether a run reproduces a number of the paper.

    It does if it started from the weights of the paper and every field that decides what is computed is as in our
    recipe, except the learning rate, which must be one of those in the paper. For ReaL it must also have evaluated all
    of ImageNet's validation images with ReaL's labels.
    """
    model, source = record.config["model"]["name"], record.config["data"]["source"]
    if model != paper_number.model or not paper_number.is_of(record.config["init_from"] or ""):
        return False
    dataset, task = paper_number.dataset.removesuffix("_real"), source.removeprefix("vtab:")
    polyak = ",polyak=yes" if (paper_number.table, dataset) == ("2", "imagenet2012") else ""
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
    known = record.steps == wanted["total_steps"] and config.base_lr in list_learning_rates(dataset, model)
    real = not paper_number.dataset.endswith("_real") or _is_real(record, config)
    return known and real and _without_free(config) == wanted


def _is_real(record: RunRecord, config: ConfigDict) -> bool:
    """Returns whether the evaluation `real` used all of ImageNet's validation images, ReaL's labels and the same
    preprocessing as the evaluation `test`.
    """
    evaluation = (data.identify_evals(config) | record.evaluations).get("real", {"split": "", "preprocess": ""})
    pipe = data.describe_evals(config)["test"]["preprocess"]
    split = re.fullmatch(r"val(idation)? (?!.*labels=None)(.* )?labels=.*class_map=None.*", evaluation["split"])
    return bool(split) and evaluation["preprocess"] == pipe


@functools.cache
def _deciding_fields(recipe: str) -> dict[str, Any]:
    config, _ = parse_command_line(["", f"--config={recipe}"])
    return _without_free(resolve_config(config))


def _without_free(config: ConfigDict) -> dict[str, Any]:
    return {name: value for name, value in flatten_config(config).items() if not IRRELEVANT_FIELDS.fullmatch(name)}
