"""The frozen model from which a student learns besides its labels: how it is loaded, checked, placed and named."""

import dataclasses

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import UserError, interop, models, tree
from vit_jax.config import check_config
from vit_jax.inference import Inference
from vit_jax.initial_weights import check_range
from vit_jax.program import image_size_without_data
from vit_jax.tree import ArrayTree


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher in the memory of this host.

    Attributes:
        source: what `task.teacher` names.
        model: for images of the size that the student is given.
        params: NumPy arrays.
        digest: `interop.digest_weights` of them, by which a run that goes on knows the same teacher.
    """

    source: str
    model: models.Model
    params: ArrayTree
    digest: str

    def place(self, inference: Inference) -> ArrayTree:
        """Returns the parameters on the devices."""
        return jax.tree.map(
            lambda leaf, sharding: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]),
            jax.tree.map(np.asarray, self.params),
            inference.params_shardings,
        )

    def describe(self) -> str:
        """Returns a line for the summary of a run."""
        model = self.model
        return f"Teacher: {self.source}, {model.name}, {tree.count(self.params):,} parameters, weights {self.digest}"


def load_teacher(config: ConfigDict) -> Teacher | None:
    """Returns the teacher that a configuration names, its positions resampled to the student's images; None: it names
    none.

    Raises:
        UserError: the configuration is wrong, or the weights cannot be loaded.
    """
    check_config(config)
    source = config.task.teacher
    if source is None:
        return None
    try:
        model, params = interop.load(source, resolution=image_size_without_data(config), resample=config.resample)
        check_range(model, config, uses_head=True)
        return Teacher(source, model, params, interop.digest_weights(source))
    except UserError as error:
        raise UserError(f"task.teacher={source}: {str(error).removeprefix(f'{source}: ')}") from error
