"""The teacher of distillation: a frozen model that a student learns from besides its labels.

Its weights are loaded, compared with those of an earlier start of the run, placed on the devices, and evaluated once.
"""

import dataclasses
import functools

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import UserError, data, errors_of, evals, interop, printable, tree
from vit_jax.config import check_config
from vit_jax.distributed import Supervisor, check_equal
from vit_jax.inference import Inference
from vit_jax.macs import macs_per_image
from vit_jax.model import Model
from vit_jax.monitoring import Category, MetricWriter, format_value
from vit_jax.program import Program, image_size_without_data
from vit_jax.training.initial_weights import check_range
from vit_jax.tree import ArrayTree


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher in the memory of this host.

    Attributes:
        source: the value of `task.teacher`.
        model: the teacher's model, for images of the student's size.
        params: its parameters as NumPy arrays.
        resample: how its position embeddings were resampled to that size.
    """

    source: str
    model: Model
    params: ArrayTree
    resample: str

    @functools.cached_property
    def identity(self) -> dict[str, str]:
        """A digest of the weights, and `resample`. Equal for copies of the weights in other places."""
        return {"weights": interop.digest_weights(self.source), "resample": self.resample}

    @functools.cached_property
    def macs_per_image(self) -> int:
        """The multiply-accumulates of the forward pass on an image."""
        return macs_per_image(self.model)

    def place(self, inference: Inference) -> ArrayTree:
        """Returns the parameters as global arrays on the devices, sharded as `inference` needs them."""
        return jax.tree.map(
            lambda leaf, sharding: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]),
            jax.tree.map(np.asarray, self.params),
            inference.params_shardings,
        )

    def describe(self) -> str:
        """Returns a line for the summary of a run."""
        model, weights = self.model, self.identity["weights"]
        licence = f", licence {printable(model.licence, 200)}" if model.licence else ""
        count = f"{tree.count(self.params):,} parameters"
        return f"Teacher: {self.source}, {model.name}, {count}, weights {weights}{licence}"


def load_teacher(config: ConfigDict) -> Teacher | None:
    """Returns the teacher in `config.task.teacher`, or None if that is unset.

    Its position embeddings are resampled to the size of the student's images.

    Raises:
        UserError: the configuration is wrong, or the weights cannot be loaded.
    """
    source, resample = config.task.teacher, None if config.resample == "auto" else config.resample
    if source is None:
        return None
    check_config(config)  # before anything is loaded
    size = image_size_without_data(config)
    with errors_of(f"task.teacher={source}"):
        model, params = interop.load(source, resolution=size, resample=resample)
        check_range(model, config, uses_head=True)
    return Teacher(source, model, params, resample or model.resample)


def check_teacher(teacher: Teacher, identity: dict[str, str] | None, location: str) -> None:
    """Compares the teacher of a resumed run with the teacher in its checkpoint.

    Args:
        teacher: the present teacher.
        identity: the `Teacher.identity` in the checkpoint, and its `source`; None: there was no teacher.
        location: the workdir, for the message.

    Raises:
        UserError: the teachers differ.
    """
    before = dict(identity or {})
    source = before.pop("source", "no teacher")
    if before != teacher.identity:
        old, new = _in_words(source, before), _in_words(teacher.source, teacher.identity)
        raise UserError(
            f"the run in {location} has learnt from {old}, not from {new}; set --config.task.teacher and "
            "--config.resample as they were, or choose a new --workdir."
        )


def _in_words(source: str, identity: dict[str, str]) -> str:
    words = ", ".join(f"{name} {value}" for name, value in identity.items())
    return f"{source} ({words})" if words else source


def place_teacher(
    teacher: Teacher | None,
    config: ConfigDict,
    program: Program,
    info: data.DataInfo,
    start: int,
    log: MetricWriter,
    supervisor: Supervisor,
) -> tuple[ArrayTree, ...]:
    """Returns the further arguments of `Program.train_step`: the teacher's parameters on the devices, or ().

    The log names the teacher. At the first start of a run, it also has the metrics of the teacher, from those of the
    run's evaluations that suit its task.

    Args:
        teacher: the teacher; None: there is none.
        config: the configuration of the run.
        program: the program of the run.
        info: the data of the run.
        start: the number of steps that the run has made.
        log: the log of the run.
        supervisor: the supervisor of the run.

    Raises:
        UserError: the hosts have different teachers, the devices have too little memory, or the classes of the teacher
            and of the data differ.
    """
    if teacher is None or program.teacher is None:
        return ()
    check_equal(supervisor, {f"the {name} of the teacher": value for name, value in teacher.identity.items()})
    with errors_of(f"task.teacher={teacher.source}"):
        interop.check_class_order(teacher.model.class_names, info.class_names)
    params, line = teacher.place(program.teacher), teacher.describe()
    if start == 0:
        with supervisor.phase("evaluating the teacher", Category.EVALUATING):
            evals.check_fits(config, program.teacher, program.eval_batch, params)
            evaluators = evals.make_head_evaluators(config, program.teacher, info.opened)
            metrics = evals.run_evaluators(evaluators, params, supervisor.count_step)
        line += "".join(f", {name} {format_value(name, value)}" for name, value in metrics.items())
    log.write_text(line)
    return (params,)
