"""A linear probe as a model: the frozen weights with the head that was fitted to their features."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import data, interop, tree, user_errors
from vit_jax.evals.labelled_features import Examples
from vit_jax.evals.outputs import OutputCache, compute_outputs
from vit_jax.evals.probe import choose_fit, learn_head
from vit_jax.evals.requests import PROBES
from vit_jax.inference import Inference
from vit_jax.model import parameter_shapes
from vit_jax.tree import ArrayTree


def save_probed_models(
    folder: Path,
    config: ConfigDict,
    program: Inference,
    params: ArrayTree,
    cache: OutputCache,
    metrics: dict[str, float],
) -> list[str]:
    """Writes `<evaluation>.model.npz` for each linear probe, on the first process: a model that classifies as it does.

    The head is fitted once more, with the setting that the evaluation has chosen, to the features in the cache. The
    model states the preprocessing of the evaluation and the classes of its data.

    Args:
        folder: the folder to write to; created if it does not exist.
        config: the configuration with the evaluations.
        program: the functions of the frozen model.
        params: its parameters, as NumPy arrays or on the devices.
        cache: a cache with the features of the training examples.
        metrics: the metrics of the evaluations.

    Returns:
        The paths of the files that this process wrote; empty on all processes but the first.

    Raises:
        UserError: a file cannot be written.
    """
    written = list[str]()
    for name, eval_config in config.evals.items():
        if eval_config.kind not in PROBES:
            continue
        batches = data.EvalBatches(config, name, program.batch_sharding, {}, part=1)
        train = Examples(*compute_outputs(program, "features", params, batches, cache))
        if jax.process_index() > 0:
            continue
        setting, source = metrics[f"{name}/{PROBES[eval_config.kind]}"], batches.source
        kernel, bias = learn_head(train, choose_fit(eval_config), setting, source.num_classes)
        one_head = {"head": "image", "distilled_head": False} if program.model.field("head") else {}
        model = program.model.with_fields(num_classes=source.num_classes, **one_head)
        pipe, names = batches.preprocess.text, source.class_names
        model = dataclasses.replace(model, preprocess=pipe, class_names=names, loss="softmax")
        arrays = tree.flatten(params) | {"head/kernel": kernel, "head/bias": bias}
        wanted = tree.flatten(parameter_shapes(model))
        with user_errors(f"cannot write to {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        written.append(str(folder / f"{name}.model.npz"))
        interop.save(written[-1], model, tree.unflatten({name: np.asarray(arrays[name]) for name in wanted}))
    return written
