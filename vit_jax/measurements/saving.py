"""A checkpoint, saved and restored as a run does it."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import jax

from vit_jax import checkpoint
from vit_jax.measurements.bench import Bench
from vit_jax.measurements.measurement import Measurement
from vit_jax.measurements.workloads import MeasuredStep
from vit_jax.program import program_without_data


def measure_saving(bench: Bench) -> Iterator[Measurement]:
    """Yields how fast the state of the first model is saved, with its fingerprints, and restored."""
    workload = MeasuredStep.of(bench, bench.models[0])
    _, program = program_without_data(workload.config, list(bench.mesh.devices.flat))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.state)) / 1e6
    name = f"the state of {workload.model}, {size:,.0f} MB"
    folder = bench.folder
    if folder is None:
        yield Measurement(name, "MB/s", None, note="the hosts share no folder; add --out=gs://BUCKET/FOLDER")
        return
    state = jax.block_until_ready(program.init(jax.random.key(0), {}))
    with tempfile.TemporaryDirectory(prefix="vit_jax_measure_") as staging:

        def open_checkpoints() -> checkpoint.Checkpoints:
            return checkpoint.Checkpoints(workload.config, folder, Path(staging), bench.coordinator)

        with closing(open_checkpoints()) as checkpoints:
            checkpoints.open()
            began = time.perf_counter()
            checkpoints.save(state, 1, {"evaluated": True})
            blocked = time.perf_counter() - began
            checkpoints.wait()
            saved = time.perf_counter() - began
        yield Measurement(
            f"{name}: saved", "MB/s", size / saved, advice="checkpoint", note=f"training waits {blocked:.2f} s"
        )
        del state
        began = time.perf_counter()
        checkpoints = open_checkpoints()
        restored = checkpoints.restore(next(checkpoints.candidates()), program.state, program.state_shardings)
        assert restored
        jax.block_until_ready(restored.state)
        seconds = time.perf_counter() - began
    yield Measurement(f"{name}: restored", "MB/s", size / seconds, advice="checkpoint", note="fingerprints compared")
