"""Compiles what a run would execute and answers with the compiler's report.

It runs in a process of its own, since libtpu may end the process. It is given a `PlanRequest` in JSON as its
argument, and answers with lines of JSON: `{"compiling": WHAT}` before each function, and at the end
`{"compiled": COMPILATION}`.
"""

import dataclasses
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import jax
from ml_collections import ConfigDict

from vit_jax import cli, data, machine
from vit_jax.config import parse_command_line
from vit_jax.macs import macs_per_image
from vit_jax.planning import targets, time_estimate
from vit_jax.planning.compiler import CompileDetail, Function, compile_function, device_bytes
from vit_jax.planning.records import (
    Compilation,
    EvaluationReport,
    PlanRequest,
    StepReport,
    Workload,
    compilation_to_json,
)
from vit_jax.program import Program, program_without_data
from vit_jax.training import load_teacher, take_model

Report = TypeVar("Report", StepReport, EvaluationReport)


def main(argv: list[str]) -> None:
    """Answers the request in the first argument."""
    given = json.loads(argv[1])
    request = PlanRequest(**given | {"words": tuple(given["words"])})
    threading.Thread(target=end_with_parent, args=[os.getppid()], daemon=True).start()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what recipes and libraries print is not part of the answer
        for each in compile_request(request):
            answer = {"compiling": each} if isinstance(each, str) else {"compiled": compilation_to_json(each)}
            print(json.dumps(answer), file=answers, flush=True)


def end_with_parent(parent: int, period: float = 1.0) -> None:
    """Ends this process when its parent has ended, however it was killed: a compilation may take an hour.

    Args:
        parent: process id of the parent.
        period: seconds between two checks.
    """
    while os.getppid() == parent:
        time.sleep(period)
    os._exit(1)


def compile_request(request: PlanRequest) -> Iterator[str | Compilation]:
    """Yields, before each function is compiled, a text that says which one it is, and at the end the compilation.

    Raises:
        UserError: the flags are wrong, or the compiler refuses the program for another reason than its size.
    """
    config = take_model(parse_command_line(["plan", *request.words])[0])
    devices = targets.find_devices(request.target, config.mesh.slice)
    teacher = None if request.inference else load_teacher(config)
    config, program = program_without_data(config, devices, teacher.model if teacher else None)
    workload = describe_workload(config, program, request, targets.device_memory(request.target, devices))
    state, shardings, options = program.state, program.state_shardings, program.compiler_options
    measure: CompileDetail = "schedule" if request.reads_schedules else "estimate"
    yield _progress(workload, "prediction" if request.inference else "train step")
    if request.inference:
        function = Function(program.predict, (state.params, program.batch["image"]), shardings.params, options)
        yield Compilation(
            workload, _limit(compile_function(function, program.mesh, request.target, measure), workload), None
        )
        return
    teacher_params = [program.teacher.params] if program.teacher else []
    function = Function(program.train_step, (state, program.batch, *teacher_params), shardings, options)
    step = _limit(compile_function(function, program.mesh, request.target, measure), workload)
    yield f"the evaluation step of {workload.model}, {workload.target}, {workload.mesh_axes}"
    evaluation = compile_evaluation(program, request.target, workload.resident_bytes - workload.parameter_bytes)
    yield Compilation(workload, step, _limit(evaluation, workload))


def _progress(workload: Workload, function: str) -> str:
    parts = f" in {workload.accum_steps} parts" if workload.accum_steps > 1 else ""
    remat = f", remat={workload.remat}" if workload.remat != "none" else ""
    images = f"{workload.images_per_device} images per device{parts}{remat}"
    return f"the {function} of {workload.model}, {images}, {workload.target}, {workload.mesh_axes}"


def _limit(report: Report, workload: Workload) -> Report:
    """Returns the report, with `needed_bytes` if the program needs more memory than a device has.

    Not every compiler compares the two: the compiler for CPUs does not.
    """
    if report.needed_bytes is None and report.required_bytes > workload.memory_bytes:
        return dataclasses.replace(report, needed_bytes=report.required_bytes)
    return report


def describe_workload(config: ConfigDict, program: Program, request: PlanRequest, memory_bytes: int) -> Workload:
    """Returns the workload of a request: what is known before anything is compiled."""
    state, shardings, images = program.state, program.state_shardings, program.batch["image"]
    spec, teacher = program.model.spec, program.teacher
    pixels = math.prod(program.batch_sharding.shard_shape(images.shape))
    return Workload(
        target=request.target,
        inference=request.inference,
        memory_bytes=memory_bytes,
        model=program.model.name,
        mesh=dict(program.mesh.shape),
        devices=program.mesh.devices.size,
        chips=machine.count_chips(list(program.mesh.devices.flat)),
        device_kind=program.mesh.devices.flat[0].device_kind,
        batch=config.batch,
        images_per_device=program.batch_sharding.shard_shape((config.batch,))[0],
        images_per_host=targets.images_per_host(request.target, program.batch_sharding, config.batch),
        # The next batch as bytes and as numbers of the step, and the batches behind it as bytes.
        waiting_bytes=pixels * (images.dtype.itemsize + 1 + data.TRANSFERRED_AHEAD),
        source=config.data.source,
        data_dir=config.data.data_dir,
        fast=config.data.fast,
        resolution=config.resolution,
        accum_steps=config.accum_steps,
        remat=spec.remat,
        remat_choices=list(program.model.choices("remat")),
        dtype=spec.dtype,
        steps=config.total_steps,
        save_steps=min([config.checkpoint_every, *(one.every or config.eval_every for one in config.evals.values())]),
        save_minutes=config.checkpoint_every_minutes,
        epochs=config.total_steps * config.batch / config.data.num_examples,
        num_examples=config.data.num_examples,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        parameter_bytes=device_bytes(state.params, shardings.params),
        state_bytes=device_bytes(state, shardings),
        macs_per_image=macs_per_image(program.model),
        passes=time_estimate.count_passes(config),
        readers=data.planned_readers(config, targets.count_hosts(request.target, config.mesh.slice)),
        window=config.data.window,
        teacher_bytes=device_bytes(teacher.params, teacher.params_shardings) if teacher else 0,
        teacher_macs=macs_per_image(teacher.model) if teacher else 0,
    )


def compile_evaluation(program: Program, target: str, kept_bytes: int) -> EvaluationReport:
    """Returns the compiler's report of the evaluation step.

    Args:
        program: the program of the run.
        target: see `PlanRequest`.
        kept_bytes: bytes of what stays on a device during evaluation but is no argument of the evaluation step. They
            are added to what the step needs.
    """
    batch, params_shardings = program.eval_batch, program.state_shardings.params
    function = Function(program.eval_step, (program.state.params, batch), params_shardings, program.compiler_options)
    step = compile_function(function, program.mesh, target, "memory")
    rows = batch["image"].shape[0]
    return EvaluationReport(
        batch=rows,
        images_per_device=program.batch_sharding.shard_shape((rows,))[0],
        peak_bytes=step.executable.peak_bytes + kept_bytes if step.executable else None,
        needed_bytes=None if step.needed_bytes is None else step.needed_bytes + kept_bytes,
        compile_seconds=step.compile_seconds,
        remembered=step.remembered,
    )


if __name__ == "__main__":
    cli.run_command(main)
