"""The weights that a run starts from: loaded, checked and adapted to its model."""

import logging
from typing import Any

from ml_collections import ConfigDict

from vit_jax import UserError, data, errors_of, interop
from vit_jax.models import Model
from vit_jax.program import Program


def load_init(
    source: str, config: ConfigDict, program: Program, class_names: tuple[str, ...] | None
) -> tuple[dict[str, Any], str]:
    """Returns the parameters of `init_from`, by name, adapted to the model of this run, and words on what they are.

    Raises:
        UserError: they cannot be read, or do not suit the model.
    """
    with errors_of(f"init_from={source}"):
        # Resized once, from the patches as they were trained, and only if that was asked for.
        keys = ("patch_size", "resolution") if config.resample == "flexi" else ()
        asked = {key: program.model.field(key) for key in keys}
        loaded, params = interop.load(source, resample=config.resample, **asked)
        wanted = program.state.params
        check_range(loaded, config, config.keep_head)
        adapted = interop.adapt_parameters(loaded, params, program.model, wanted, config.keep_head, config.resample)
        if config.keep_head:
            interop.check_class_order(loaded.class_names, class_names)
            return adapted, f"{source}, head included"
        left = "; its head, for masked patches, and its [mask] embedding are left out"
        return adapted, source + (left if loaded.field("head") == "patches" else "")


def check_range(loaded: Model, config: ConfigDict, uses_head: bool) -> None:
    """Compares the values of the pixels that weights were trained on with those of a run.

    Weights that are trained further adapt to other values; a warning says that they differ.

    Args:
        loaded: the model of the weights.
        config: of the run.
        uses_head: whether the weights are used as they are, with their head.

    Raises:
        UserError: the values differ, and the weights are used as they are.
    """
    pipes = [pipe for pipe in (loaded.preprocess, config.data.preprocess) if pipe is not None]
    theirs, ours = (f"value_range({low:g},{high:g})" for low, high in map(data.value_range_of, (pipes[0], pipes[-1])))
    if theirs == ours:
        return
    differ = f"its preprocessing ends with {theirs}, that of this run with {ours}"
    if uses_head:
        raise UserError(
            f"{differ}; make {theirs} the last op of data.preprocess and of evals.NAME.preprocess of every evaluation."
        )
    words = (
        "init_from=%s: %s; to keep that of the weights, end data.preprocess and evals.NAME.preprocess with the op %s."
    )
    logging.getLogger(__name__).warning(words, config.init_from, differ, theirs)
