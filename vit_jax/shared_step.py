"""One compiled training step for the runs of a sweep: it takes as arguments what only scales their updates.

The step of a run alone contains all numbers of its configuration as constants, so that another learning rate makes
another program. With `step_numbers=arguments` a step takes the numbers `ARGUMENTS` and the learning rates of all steps
as arguments, and runs that differ in nothing else use one program. Losses differ by rounding only.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from vit_jax import UserError, sharding
from vit_jax.config import flatten_config
from vit_jax.model import Model
from vit_jax.optim import Decay, LearningRate, make_schedule
from vit_jax.program import Program, make_train_step
from vit_jax.step import StepMetrics, TrainState
from vit_jax.tasks import Batch, Classify, Task
from vit_jax.tree import ArrayTree

# What a step reads of the configuration, besides the fields of the schedule.
READ = ("seed", "base_lr", "grad_norm_clip", "accum_steps", "adapt", "optim")
DECAYS = ("optim.beta1", "optim.beta2", "optim.momentum", "optim.ema_decay")
SMOOTHING = "task.label_smoothing"
ALWAYS = ("seed", "base_lr")  # are arguments whatever they are; a 0 of the others leaves a part of the program out
MOST_STEPS = 2**26  # whose learning rates take 256 MB on each device
ARGUMENTS = (*ALWAYS, *DECAYS, "optim.eps", "optim.weight_decay", SMOOTHING)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepArguments:
    """The arguments of a shared step, besides state and batch.

    Attributes:
        numbers: field of `ARGUMENTS` -> its value. Python's floats become scalars of no fixed dtype, like constants.
        complements: field of `DECAYS` -> 1 - its value.
        relative_lr: the learning rate of each step divided by `base_lr`, float32 [steps]. These are more steps than the
            run has, a power of 2: runs of similar lengths have one program.
    """

    numbers: dict[str, ArrayTree]
    complements: dict[str, ArrayTree]
    relative_lr: ArrayTree

    @property
    def rate(self) -> LearningRate:
        """The learning rate as a function of the step."""
        return LearningRate(self.numbers["base_lr"], lambda step: self.relative_lr[step])

    @property
    def values(self) -> dict[str, Any]:
        """Field -> what a step reads in place of its value."""
        decays = {name: Decay(self.numbers[name], other) for name, other in self.complements.items()}
        return self.numbers | decays


def make_arguments(config: ConfigDict, final_steps: tuple[int, int] | None = None) -> StepArguments:
    """Returns the arguments of a run whose durations are in steps; see `make_schedule` on `final_steps`."""
    steps = jnp.arange(1 << (config.total_steps + 1).bit_length())  # some optimizers ask for the rate after the last
    relative = jnp.broadcast_to(make_schedule(config, final_steps).relative(steps), steps.shape)
    fields = flatten_config(config)
    names = [name for name in ARGUMENTS if fields[name] or name in ALWAYS]
    if config.optim.name == "adafactor":
        names.remove("optim.beta2")  # a limit, which it compares with the decay of a step
    numbers = {name: float(fields[name]) for name in names}
    complements = {name: 1 - numbers[name] for name in DECAYS if name in numbers}
    return StepArguments(numbers | {"seed": np.uint32(config.seed)}, complements, np.asarray(relative))


@dataclasses.dataclass(frozen=True)
class StepDefinition:
    """All that a shared step depends on, except for its arguments. Equal definitions have one program.

    Attributes:
        config: the fields `READ`; those that are arguments are unset. A step can read no other field.
        mesh: the devices.
        model: the network.
        task: the objective; its label smoothing is 0 if it is an argument.
        teacher: the frozen model from which this one learns, or None.
        shardings: of the state, the batch and, with a teacher, its parameters.
        compiler_options: the options under which the step is compiled.
    """

    config: ConfigDict = dataclasses.field(hash=False)
    mesh: Mesh
    model: Model
    task: Task
    teacher: Model | None
    shardings: tuple[ArrayTree, ...] = dataclasses.field(hash=False)
    compiler_options: tuple[tuple[str, str | bool], ...]


def share_step(program: Program, config: ConfigDict) -> Program:
    """Returns the program with steps that it shares with the run before it in this process, if both are equal.

    Args:
        program: the program of a run.
        config: the configuration of the run, whose durations are in steps.

    Raises:
        UserError: the run has too many steps to keep their learning rates.
    """
    if config.total_steps > MOST_STEPS:
        raise UserError(
            f"total_steps={config.total_steps} is too many for step_numbers=arguments, which keeps the learning rate "
            f"of each step; choose at most {MOST_STEPS:,}, or set --config.step_numbers=constants."
        )
    teacher, own = program.teacher, make_arguments(config)
    constants = ConfigDict({name: config[name] for name in READ}).copy_and_resolve_references()
    definition = StepDefinition(
        config=_replace_fields(constants, dict.fromkeys(own.numbers)),
        mesh=program.mesh,
        model=program.model,
        task=_smooth(program.task, 0.0) if SMOOTHING in own.numbers else program.task,
        teacher=teacher.model if teacher else None,
        shardings=(program.state_shardings, program.batch_sharding, *([teacher.params_shardings] if teacher else [])),
        compiler_options=tuple(sorted(program.compiler_options.items())),
    )
    step, replicated = _compile_once(definition), NamedSharding(program.mesh, P())

    def bind(arguments: StepArguments) -> Callable[..., tuple[TrainState, StepMetrics]]:
        placed = jax.jit(_same, out_shardings=replicated)(arguments)
        return lambda state, batch, *teacher_params: step(state, batch, placed, *teacher_params)

    @functools.cache
    def final_step(begin: int, end: int) -> Callable[..., tuple[TrainState, StepMetrics]]:
        return bind(make_arguments(config, (begin, end)))

    return dataclasses.replace(program, train_step=bind(own), final_step=final_step)


def _smooth(task: Task, label_smoothing: jax.typing.ArrayLike) -> Task:
    return dataclasses.replace(task, label_smoothing=label_smoothing) if isinstance(task, Classify) else task


def _same(arguments: StepArguments) -> StepArguments:
    return arguments


@functools.lru_cache(maxsize=1)  # a device need not keep the programs of all models of a sweep
def _compile_once(definition: StepDefinition) -> Callable[..., tuple[TrainState, StepMetrics]]:
    """Returns the jitted step (state, batch, arguments, parameters of the teacher) -> (state, metrics).

    It is compiled when it is first called, and again for other shapes. The state is donated.
    """
    replicated = NamedSharding(definition.mesh, P())
    state_shardings, batch_sharding, *teacher_shardings = definition.shardings

    def train_step(
        state: TrainState, batch: Batch, arguments: StepArguments, *teacher_params: ArrayTree
    ) -> tuple[TrainState, StepMetrics]:
        values, task = arguments.values, definition.task
        if SMOOTHING in values:
            task = _smooth(task, values[SMOOTHING])
        config = _replace_fields(definition.config, values)
        step = make_train_step(config, definition.model, task, definition.teacher, arguments.rate)
        with sharding.use_mesh(definition.mesh):
            return step(state, batch, *teacher_params)

    return jax.jit(
        train_step,
        in_shardings=(state_shardings, batch_sharding, replicated, *teacher_shardings),
        out_shardings=(state_shardings, replicated),
        donate_argnums=0,
        compiler_options=dict(definition.compiler_options),
    )


def _replace_fields(config: ConfigDict, values: dict[str, Any]) -> ConfigDict:
    """Returns a copy of a configuration of the fields `READ`, with other values, which may be arrays."""
    config = config.copy_and_resolve_references()
    with config.unlocked(), config.ignore_type():
        config.update_from_flattened_dict({name: value for name, value in values.items() if name != SMOOTHING})
    return config
