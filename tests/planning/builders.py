"""Records for the tests of planning: a workload of eight chips, whose memory is 1,000 bytes unless stated."""

import dataclasses

from vit_jax.planning.records import Compilation, Executable, StepReport, Workload

WORKLOAD = Workload(
    target="v5e:2x4",
    inference=False,
    memory_bytes=1000,
    model="ViT-B/16",
    mesh={"slice": 1, "data": 8, "fsdp": 1, "tensor": 1},
    devices=8,
    chips=8,
    device_kind="TPU v5 lite",
    batch=128,
    images_per_device=16,
    images_per_host=128,
    waiting_bytes=0,
    source="array_record:jft300m",
    data_dir=None,
    fast=False,
    resolution=224,
    accum_steps=1,
    remat="none",
    remat_choices=["none", "dots", "mlp", "attention", "full"],
    dtype="bfloat16",
    steps=7000,
    save_steps=1000,
    save_minutes=15.0,
    epochs=1.0,
    num_examples=896_000,
    parameters=50,
    parameter_bytes=200,
    state_bytes=600,
    macs_per_image=1,
    readers=64,
    window=4,
)
EXECUTABLE = Executable(
    temp_bytes=0, code_bytes=0, peak_bytes=0, compiler_flops=None, collectives={}, cycles=None, kernels=0
)


def make_compilation(required, evaluation=None, executable=EXECUTABLE, **fields):
    """The compilation of a program that needs so many bytes; `fields` are those of its workload."""
    workload = dataclasses.replace(WORKLOAD, **fields)
    fits = required <= workload.memory_bytes
    step = StepReport(
        executable=dataclasses.replace(executable, peak_bytes=required) if fits else None,
        needed_bytes=None if fits else required,
        flops=1.0,
        compile_seconds=1.0,
        versions={"jax": "0.10"},
        remembered=False,
    )
    return Compilation(workload, step, evaluation)
