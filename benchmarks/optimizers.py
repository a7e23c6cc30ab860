"""Measures the cost of each optimizer's update on a TPU, by the compiler's schedule, and the size of its state.

Example:
  python -m benchmarks.optimizers --write=docs/optimizers.md

Only the update is compiled, from gradients in float32 to new parameters, with the norms and the test for finite values
of a step, for ViT-B/16 on one chip and for ViT-g/14 split over eight chips. Takes some minutes on two cores.
"""

import itertools

import jax

from benchmarks.tpu import table
from benchmarks.tpu_process import Report, write_cases
from configs import base
from vit_jax import cli, optim, tree
from vit_jax.config import OPTIMIZERS
from vit_jax.planning import records, targets
from vit_jax.planning.compiler import Function, compile_function
from vit_jax.program import program_without_data
from vit_jax.step import StepMetrics, TrainState, TrainStep

# Model -> (slice, number of devices over which parameters and state are split).
MODELS = {"ViT-B/16": ("v5e:1x1", 1), "ViT-g/14": ("v5e:2x4", 8)}


def names() -> list[str]:
    return [f"{model} {optimizer}" for model, optimizer in itertools.product(MODELS, OPTIMIZERS)]


def compile_case(name: str) -> Report:
    """Returns the compiler's report on a case, named `<model> <optimizer>`, and `state_bytes`.

    The latter are the bytes of the optimizer's state per parameter.
    """
    model, optimizer = name.split()
    target, fsdp = MODELS[model]
    config = base.get_config()
    config.model.name, config.optim.name, config.optim.weight_decay = model, optimizer, 0.1
    config.mesh.data, config.mesh.fsdp = 1, fsdp
    config.batch, config.total_steps, config.grad_norm_clip = fsdp, 10, 1.0
    config.data.num_classes, config.data.num_examples = 1000, 1_281_167
    config, program = program_without_data(config, targets.find_devices(target, 1))
    chain = optim.make_optimizer(config, program.schedule, optim.make_lr_multipliers(config))
    train_step = TrainStep(program.model, program.task, chain, program.schedule, 0, accum_steps=1, ema_decay=0.0)

    def update(state: TrainState, loss: jax.Array, grads: tree.ArrayTree) -> tuple[TrainState, StepMetrics]:
        return train_step.apply_grads(state, state.params, loss, grads)

    params, places = program.state.params, program.state_shardings
    jitted = jax.jit(update, in_shardings=(places, None, places.params), out_shardings=(places, None), donate_argnums=0)
    arguments = program.state, jax.ShapeDtypeStruct((), jax.numpy.float32), params
    step = compile_function(Function(jitted, arguments, (places, None), {}), program.mesh, target, "schedule")
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.state.opt_state))
    return records.step_to_json(step) | {"state_bytes": size / tree.count(params)}


def line(optimizer: str, report: Report, adamw: Report) -> list[str]:
    """Returns the cells of a row of the table; `adamw` is the report on AdamW for the same model."""
    cycles, beside = cycles_of(report), cycles_of(adamw)
    return [f"`{optimizer}`", f"{report['state_bytes']:.2f}", f"{cycles / 1e6:.1f}", f"{cycles / beside:.2f}"]


def cycles_of(report: Report) -> float:
    """Returns the cycles of the update in a report, by schedule."""
    executable = records.step_from_json(report).executable
    assert executable and executable.schedule
    return executable.schedule.cycles


def sections(found: dict[str, Report]) -> list[tuple[str, list[str]]]:
    """Returns a table for each model."""
    heads = ["`optim.name`", "bytes of state a parameter", "million cycles of an update", "of AdamW's"]
    tables = []
    for model in sorted({name.split()[0] for name in found}):
        reports = {name.split()[1]: report for name, report in found.items() if name.startswith(model)}
        rows = [line(name, report, reports["adamw"]) for name, report in reports.items()]
        tables.append((f"cost of {model}", table(heads, rows)))
    return tables


def main(argv: list[str]) -> None:
    """Runs the command line. If its only argument is a case, prints the compiler's report on that case as JSON."""
    write_cases(
        argv,
        __doc__,
        {name: MODELS[name.split()[0]][0] for name in names()},
        "benchmarks.optimizers",
        compile_case,
        sections,
    )


if __name__ == "__main__":
    cli.run_command(main)
