"""Features and predictions of every example as .npz files, and the confusion matrix as CSV."""

import io
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import UserError, data, user_errors
from vit_jax.evals.features import FeatureCache, read_features, read_outputs
from vit_jax.evals.predictions import format_predictions
from vit_jax.storage import atomic_write

OUTPUTS = ("features", "predictions", "confusion")


def save_outputs(what: str, folder: Path, config: ConfigDict, program: Any, params: Any, cache: FeatureCache) -> None:
    """Writes `<evaluation>.<split>.<what>.npz`, or `.csv`, for each split that the evaluations read.

    An .npz file has `names`, those of the images where the data have them, `labels`, `class_names` if they are known,
    and `features`, the model's pre_logits, or `logits`: float32, in the order of the data. The .csv file is
    `scores.format_confusion`'s.

    Args:
        what: features; or predictions or confusion: of evaluations of the head.
        folder: to write to; made if it does not exist.
        config: with the evaluations.
        program: `Inference`.
        params: on the devices.
        cache: of features of these parameters.

    Raises:
        UserError: no evaluation has predictions, or images have several labels; an image cannot be read, or the folder
            not be written to.
    """
    parts = list_parts(config, program, what)
    if not parts:
        raise UserError(f"--save={what} needs an evaluation of the head, for example --evals=classify.")
    for (name, split), batches in parts.items():
        if what == "features":
            arrays = read_features(program.features, params, batches, cache, lambda: None)._asdict()
        else:
            logits, labels = read_outputs(program.logits, params, batches, lambda: None)
            arrays = {"logits": logits, "labels": labels}
        if what == "confusion":
            suffix, content = "csv", format_predictions(config.evals[name], batches.source, logits, labels).encode()
        else:
            suffix, content = "npz", pack_arrays(arrays, batches.source)
        if jax.process_index() == 0:
            with user_errors(f"cannot write to {folder}"):
                folder.mkdir(parents=True, exist_ok=True)
                with atomic_write(folder / f"{name}.{split}.{what}.{suffix}") as temporary:
                    temporary.write_bytes(content)


def pack_arrays(arrays: dict[str, np.ndarray], source: Any) -> bytes:
    """Returns an .npz file of arrays and of the names of the images and classes of their source."""
    named = arrays | {"names": np.array([source.example_name(index) for index in range(len(source))])}
    if source.class_names:
        named["class_names"] = np.array(source.class_names)
    content = io.BytesIO()
    np.savez(content, **named)
    return content.getvalue()


def list_parts(config: ConfigDict, program: Any, what: str) -> dict[tuple[str, str], Any]:
    """Returns the batches to read, by evaluation and split."""
    parts = {}
    for name in config.evals:
        of_head = "train_split" not in config.evals[name]
        for part in range(1 if of_head else 2) if of_head or what == "features" else ():
            batches = data.eval_batches(config, name, program.batch_sharding, {}, part)
            parts[name, re.sub(r"\W+", "_", "+".join(name for name, _ in batches.source.parts))] = batches
    return parts
