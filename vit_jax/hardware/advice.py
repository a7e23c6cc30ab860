"""Advice for a quantity that is off: the flags of `vit_jax.main`, or the command, that avoid it."""

from collections.abc import Mapping

ADVICE: Mapping[str, str] = {
    "products": "another program uses the devices, or they are too hot: python -m vit_jax.doctor",
    "memory": "another program uses the devices, or they are too hot: python -m vit_jax.doctor",
    "transfer": "fewer bytes a step: --config.resolution",
    "collective": "split over fewer devices of the slow axis: --config.mesh.fsdp, --config.mesh.tensor; if hosts carry "
    "it, --config.mesh.slice",
    "kernel values": "--config.model.attention=tokens_first, or --config.model.mlp=jit for that of the MLP; a run "
    "replaces the kernel by itself",
    "kernel time": "--config.model.attention=tokens_first; a run with auto that starts here with "
    "--config.use_measured_times=True chooses it",
    "step": "--config.profile_steps=5 shows where the time goes; then --config.model.attention=tokens_first, "
    "--config.mesh.fsdp, or --config.compiler_options=NAME= to omit an option",
    "compile": "--config.model.scan=True compiles one block",
    "device memory": "--config.model.remat=mlp or --config.accum_steps=2",
    "loader": "--config.data.workers=N for N worker processes, --config.data.fast=True, or pack the images "
    "(python -m vit_jax.pack)",
    "together": "--config.data.workers=N, so that reading leaves the thread that trains alone",
    "checkpoint": "save more seldom: --config.checkpoint_every, --config.checkpoint_every_minutes",
    "curve": "no result of these devices is to be trusted: --config.model.dtype=float32 and "
    "--config.model.attention=tokens_first tell which part is wrong",
}
