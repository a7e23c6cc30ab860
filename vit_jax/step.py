"""The training state and its update: pure functions."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from vit_jax import tree
from vit_jax.model import Model
from vit_jax.models import is_adapted, merge_adapters
from vit_jax.optim import (
    UNSCALED,
    WHOLE,
    Adapters,
    Decay,
    GradientRule,
    LossAndGrads,
    LrMultipliers,
    TrainedPart,
    averaged_params,
    has_average,
    one_pass,
)
from vit_jax.tasks import Batch, Task
from vit_jax.tree import ArrayTree

StepMetrics = dict[str, Array]  # still on the devices


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that an update reads and writes: arrays, their shapes or their shardings.

    Attributes:
        step: int32, the number of updates, skipped ones included.
        params: float32 parameters.
        opt_state: the state of the optimizer, for the trained part of the parameters.
        ema: the moving average of the parameters, or None if it is off.
        skips: int32, how many of the latest updates in a row were skipped because a loss, a gradient or a rate was
            not finite.
    """

    step: ArrayTree
    params: ArrayTree
    opt_state: ArrayTree
    ema: ArrayTree | None
    skips: ArrayTree

    @property
    def eval_params(self) -> ArrayTree:
        """The parameters to evaluate and export: schedule-free AdamW's average, or the moving average, or `params`."""
        if has_average(tree.flatten(self.opt_state)):
            return averaged_params(self.params, self.opt_state.z, self.opt_state.b1)
        return self.params if self.ema is None else self.ema

    @property
    def merged_params(self) -> ArrayTree:
        """`eval_params` without adapters: each adapter is added to its kernel."""
        return jax.jit(merge_adapters)(self.eval_params) if is_adapted(self.eval_params) else self.eval_params

    @property
    def adapters(self) -> ArrayTree:
        """The factors of the adapters, and the head, of `eval_params`."""
        return Adapters().select(self.eval_params)


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """One update of the state by a batch.

    Attributes:
        model: maps parameters and inputs to outputs.
        task: makes inputs and targets of a batch, and losses of outputs and targets.
        optimizer: maps gradients to parameter updates.
        schedule: the learning rate of each step, for the metrics.
        seed: the seed of dropout, stochastic depth and what the task draws.
        accum_steps: the number of parts into which a batch is split.
        ema_decay: the decay of the moving average; 0 for none.
        trained_part: which parameters have gradients and a state of the optimizer.
        lr_multipliers: what the learning rate of each parameter is multiplied by. Where that is 0, the gradient is 0;
            for an array that is frozen as a whole, it is not computed.
        sharpness: makes the gradient to follow, from one pass over the batch or from two.
        teacher: a frozen model whose logits of the same inputs belong to the targets; None: there is none.
    """

    model: Model
    task: Task
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    seed: jax.typing.ArrayLike
    accum_steps: int
    ema_decay: float | Decay
    trained_part: TrainedPart = WHOLE
    lr_multipliers: LrMultipliers = UNSCALED
    sharpness: GradientRule = one_pass
    teacher: Model | None = None

    def init(self, params: ArrayTree, given: dict[str, Any] | None = None) -> TrainState:
        """Returns the state before the first step; parameters in `given`, by name, replace those in `params`."""
        params = tree.unflatten(tree.flatten(params) | given) if given else params
        zero = jnp.zeros((), jnp.int32)
        ema = jax.tree.map(jnp.copy, params) if self.ema_decay else None
        opt_state = self.optimizer.init(self.trained_part.select(params))
        return TrainState(step=zero, params=params, opt_state=opt_state, ema=ema, skips=zero)

    def __call__(
        self, state: TrainState, batch: Batch, teacher_params: ArrayTree | None = None
    ) -> tuple[TrainState, StepMetrics]:
        """Returns the state after one step on `image` [batch, height, width, 3] and `label` [batch], and its metrics.

        A teacher needs its `teacher_params`.
        """
        task_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), state.step))
        inputs, targets = self.task.train_examples(task_key, batch)
        if self.teacher:
            targets = targets, self._teach(teacher_params, inputs)
        trained = self.trained_part.select(state.params)

        def loss_and_grads_of(trained: ArrayTree) -> LossAndGrads:
            return self.loss_and_grads(state.params, trained, inputs, targets, dropout_key)

        return self.apply_grads(state, trained, *self.sharpness(loss_and_grads_of, trained, state.step))

    def apply_grads(
        self, state: TrainState, before: ArrayTree, loss: Float[Array, ""], grads: ArrayTree
    ) -> tuple[TrainState, StepMetrics]:
        """Returns the state after the optimizer's update, and the metrics of the step.

        If the loss, the gradient or the learning rate is not finite, only the counters change. Otherwise parameters
        whose update is not finite keep their values. The metric `norm/updates` is the norm of what the parameters have
        changed by.

        Args:
            state: the state before the step.
            before: the trained part of its parameters.
            loss: the loss of the batch.
            grads: the gradient, of the trained part.
        """
        grad_norm = optax.tree.norm(grads)
        rate = self.schedule(state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(rate)

        changes, opt_state = self.optimizer.update(grads, state.opt_state, before)
        trained = optax.apply_updates(before, changes)
        # Element by element: a test of all updates at once would have to write them to memory first.
        trained = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(new), new, old), trained, before)
        # Integer counters advance even in a skipped step, so that the schedule stays aligned with the step.
        trained, opt_state = jax.tree.map(
            lambda new, old: _select(finite, new, old) if jnp.issubdtype(new.dtype, jnp.floating) else new,
            (trained, opt_state),
            (before, state.opt_state),
        )
        # The compiler sums the squares while it writes the parameters; those of `changes` would take another pass.
        update_norm = optax.tree.norm(optax.tree.sub(trained, before))
        params = self.trained_part.replace(state.params, trained)
        ema = state.ema
        if self.ema_decay:
            share = jnp.where(finite, 1 - self.ema_decay, 0.0)
            averaged = optax.incremental_update(trained, self.trained_part.select(ema), share)
            ema = self.trained_part.replace(ema, averaged)
        skips = jnp.where(finite, 0, state.skips + 1)
        metrics = {
            "train/loss": loss,
            "train/lr": rate,
            "train/skips": skips,
            "norm/grads": grad_norm,
            "norm/params": optax.tree.norm(params),
            "norm/updates": update_norm,
        }
        return TrainState(state.step + 1, params, opt_state, ema, skips), metrics

    def loss_and_grads(
        self,
        params: ArrayTree,
        trained: ArrayTree,
        inputs: dict[str, Array],
        targets: ArrayTree,
        dropout_key: PRNGKeyArray,
    ) -> LossAndGrads:
        """Returns the mean loss of a batch and its gradient, accumulated over `accum_steps` equal parts.

        Args:
            params: the parameters, of which the frozen ones are read.
            trained: their trained part, or what takes its place; the gradient is of it.
            inputs: the inputs of the model, as `Task.train_examples` returns them.
            targets: the targets for `Task.losses`.
            dropout_key: the random key of dropout and stochastic depth.
        """

        def loss_of(trained: ArrayTree, inputs: dict[str, Array], targets: ArrayTree, key: PRNGKeyArray) -> Array:
            whole = self.trained_part.complete(params, self.lr_multipliers.freeze(trained))
            logits, out = self.model.apply(whole, **inputs, dropout_key=key)
            return self.task.losses((out | {"logits": logits})[self.task.output], targets).mean()

        grad_of = jax.value_and_grad(loss_of)
        if self.accum_steps == 1:
            return grad_of(trained, inputs, targets, dropout_key)

        parts = _split_batch((inputs, targets), self.accum_steps)
        keys = jax.random.split(dropout_key, self.accum_steps)

        def add(total: LossAndGrads, part: tuple[ArrayTree, ArrayTree, Array]) -> tuple[LossAndGrads, None]:
            return jax.tree.map(jnp.add, total, grad_of(trained, *part)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained))
        total, _ = jax.lax.scan(add, zero, (*parts, keys))
        return jax.tree.map(lambda x: x / self.accum_steps, total)

    def _teach(self, teacher_params: ArrayTree, inputs: dict[str, Array]) -> Array:
        """Returns the teacher's logits [batch, classes], computed in as many parts as the student's gradient."""
        assert self.teacher
        apply = functools.partial(self.teacher.apply, teacher_params)
        if self.accum_steps == 1:
            return apply(**inputs)[0]
        logits = jax.lax.map(lambda part: apply(**part)[0], _split_batch(inputs, self.accum_steps))
        return jnp.moveaxis(logits, 0, 1).reshape(-1, logits.shape[-1])


def _split_batch(arrays: ArrayTree, parts: int) -> ArrayTree:
    """Returns the arrays of a batch with a new leading axis of `parts` parts.

    Part i has rows i, i + parts, ... So each device splits its own rows, and none moves between devices.
    """
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), arrays)


def _select(condition: Array, new: Array, old: Array) -> Array:
    """Returns `new` where the condition is true, otherwise `old`.

    The choice is made in float32: on TPUs, a choice in bfloat16 becomes another pass over memory.
    """
    chosen = jnp.where(condition, new.astype(jnp.float32), old.astype(jnp.float32))
    return chosen.astype(new.dtype)
