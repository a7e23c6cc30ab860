"""Features and predictions of every example as .npz files."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import UserError, data, user_errors
from vit_jax.evals.features import FeatureCache, read_features, read_outputs
from vit_jax.storage import atomic_write

OUTPUTS = ("features", "predictions")


def save_outputs(what: str, folder: Path, config: ConfigDict, program: Any, params: Any, cache: FeatureCache) -> None:
    """Writes `<evaluation>.<split>.<what>.npz` for each split that the evaluations read.

    A file has `names`, those of the images where the data have them, `labels`, `class_names` if they are known, and
    `features`, the model's pre_logits, or `logits`: float32, in the order of the data.

    Args:
        what: features, or predictions: of evaluations of the head.
        folder: to write to; made if it does not exist.
        config: with the evaluations.
        program: `Inference`.
        params: on the devices.
        cache: of features of these parameters.

    Raises:
        UserError: no evaluation has predictions; an image cannot be read, or the folder not be written to.
    """
    parts = list_parts(config, program, what)
    if not parts:
        raise UserError("--save=predictions needs an evaluation of the head, for example --evals=classify.")
    for file, batches in parts.items():
        if what == "features":
            arrays = read_features(program.features, params, batches, cache, lambda: None)._asdict()
        else:
            logits, labels = read_outputs(program.logits, params, batches, lambda: None)
            arrays = {"logits": logits, "labels": labels}
        arrays["names"] = np.array([batches.source.example_name(index) for index in range(len(batches.source))])
        if batches.source.class_names:
            arrays["class_names"] = np.array(batches.source.class_names)
        if jax.process_index() == 0:
            with user_errors(f"cannot write to {folder}"):
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_write(folder / file) as temporary, temporary.open("wb") as opened:
                    np.savez(opened, **arrays)


def list_parts(config: ConfigDict, program: Any, what: str) -> dict[str, Any]:
    """Returns the files to write, and the batches of each."""
    parts = {}
    for name in config.evals:
        of_head = "train_split" not in config.evals[name]
        for part in range(1 if of_head else 2) if of_head or what == "features" else ():
            batches = data.eval_batches(config, name, program.batch_sharding, {}, part)
            split = re.sub(r"\W+", "_", "+".join(name for name, _ in batches.source.parts))
            parts[f"{name}.{split}.{what}.npz"] = batches
    return parts
