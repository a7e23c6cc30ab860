"""Checks in what a resumed run differs from the run that it continues, and whether it may."""

import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, without_queries
from vit_jax.config.fields import FIELDS, FROM_WEIGHTS, OPTIMIZERS, Affects, OnResume, model_fields, resume_rule
from vit_jax.config.make_config import flatten_config
from vit_jax.config.stored import hide_queries, parse_config
from vit_jax.storage import filesystem, unpin_revision

WORDS = {"contents": "names and labels"}  # entry of a fingerprint -> its name in messages, if that is another
ACCEPT = ", or accept the other data with --config.data.accept_change=True"


def check_resumes(old: ConfigDict, new: ConfigDict, location: str) -> list[str]:
    """Returns the differences between two configurations of a run, one line per field.

    Addresses are compared `without_queries`, which are not stored.

    Args:
        old: the stored configuration of the run.
        new: the configuration that is to continue it.
        location: the workdir, for the message.

    Raises:
        UserError: a field differs whose `OnResume` rule is REFUSED or whose value the optimizer's state contains, or
            DATA if `data.accept_change` is not set.
    """
    lines = _describe_changes(*(hide_queries(flatten_config(config)) for config in (old, new)))
    stored = [f"optim.{field}" for field in OPTIMIZERS[new.optim.name].stored]
    refused = {name for name in lines if resume_rule(name) is OnResume.REFUSED or name in stored}
    data = {name for name in lines if resume_rule(name) is OnResume.DATA}
    if new.data.accept_change:
        data = set()
    if refused | data:
        changes = "; ".join(line for name, line in lines.items() if name in refused | data)
        hint = "" if refused else ACCEPT
        advice = f"restore them or choose a new --workdir{hint}."
        raise UserError(f"the workdir {location} contains a run with other settings ({changes}); {advice}")
    return list(lines.values())


def keep_choices(config: ConfigDict, location: str) -> ConfigDict:
    """Returns the configuration with the choices that the run in a workdir made at its first start.

    Choices are copied only where the configuration leaves them open. They are the order of images (`data.order` and
    `data.readers`), the model of `init_from`, the plain form of attention, the form of the step's numbers, the means
    and deviations of numbers that are learnt, and the commits of data sets on the Hugging Face hub.

    Args:
        config: the configuration, which is not changed.
        location: the workdir, local or remote. Without a config.json there, `config` itself is returned.

    Raises:
        UserError: the workdir cannot be read.
    """
    path = filesystem.join_path(location, "config.json")
    if not filesystem.exists(path):
        return config
    stored, kept = parse_config(filesystem.read_bytes(path), path), config.copy_and_resolve_references()
    if config.data.order in ("auto", stored.data.order):
        kept.data.update({"order": stored.data.order, "readers": kept.data.readers or stored.data.readers})
    if (config.model.name, without_queries(config.init_from or "")) == (FROM_WEIGHTS, stored.init_from):
        kept.model = fill_model(config.model, stored.model.name, stored.model)
    if (config.model.attention, stored.model.attention) == ("auto", "tokens_first"):
        kept.model.attention = stored.model.attention
    if config.step_numbers == "auto":
        kept.step_numbers = stored.step_numbers
    if config.task.kind == "regress" and not config.task.target_means:
        kept.task.update({name: stored.task[name] for name in ("target_means", "target_deviations")})
    kept.data.source = _keep_commit(config.data.source, stored.data.source)
    for name in (name for name in kept.evals if name in stored.evals):
        kept.evals[name].source = _keep_commit(config.evals[name].source, stored.evals[name].source)
    return kept


def fill_model(model: ConfigDict, name: str, fields: Mapping[str, Any]) -> ConfigDict:
    """Returns a copy of `config.model` with a name and fields in place of the defaults of those that decide the arrays.

    Args:
        model: the group of the configuration.
        name: the name of the model.
        fields: the values, without `model.` in their names. Those that the model lacks are left alone.
    """
    filled = model.copy_and_resolve_references()
    open_fields = [one for one in model_fields(Affects.WEIGHTS) if model[one] == FIELDS[f"model.{one}"].default]
    filled.update({"name": name} | {one: fields[one] for one in open_fields if one in fields})
    return filled


def _keep_commit(source: str | None, stored: str | None) -> str | None:
    return stored if stored and unpin_revision(stored) == source else source


def check_data(saved: dict[str, Any], now: dict[str, Any], accepts: bool, location: str) -> list[str]:
    """Returns the differences between the data of a resumed run and the data of its checkpoint, one line for each.

    Args:
        saved: the `data.DataInfo.fingerprint` in the checkpoint.
        now: the `data.DataInfo.fingerprint` of the resumed run.
        accepts: the value of `data.accept_change`.
        location: the workdir, for the message.

    Raises:
        UserError: they differ, and `accepts` is false or the seed or the batch differs too.
    """
    lines = _describe_changes(saved, now)
    acceptable = all(resume_rule(name) is not OnResume.REFUSED for name in lines)  # not seed and batch
    if lines and not (accepts and acceptable):
        hint = ACCEPT if acceptable else ""
        changes = "; ".join(lines.values())
        was = f"the run in {location} was trained on other data ({changes})"
        raise UserError(f"{was}; choose a new --workdir{hint}.")
    return list(lines.values())


def _describe_changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Returns name -> the text `name: old value -> new value`, for the entries that differ."""
    return {
        name: f"{WORDS.get(name, name)}: {_in_words(old.get(name))} -> {_in_words(new.get(name))}"
        for name in old | new
        if not _equal(old.get(name), new.get(name))
    }


def _in_words(value: Any) -> str:
    return "unset" if value is None else str(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b
