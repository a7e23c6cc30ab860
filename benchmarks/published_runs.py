"""Training runs on real TPUs whose speed others published, and the compilation of a step of the same sizes.

The speeds are the MFU in MaxText's tables, and the settings are those of the scripts beside the tables, at the same
commit.
"""

import dataclasses
import sys

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from benchmarks.decoder import Decoder, train_step
from benchmarks.tpu_process import Report, answer
from vit_jax.planning import parse_topology, records, targets
from vit_jax.planning.compiler import compile_function

MAXTEXT = "MaxText 632f651, MaxText/configs"  # github.com/AI-Hypercomputer/maxtext, 2023-12-15
# 2026-08-22; its table of v4 is still the one of 2023, but beside a script with smaller batches.
MAXTEXT_2026 = "MaxText e591f30, src/maxtext/configs/tpu"


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A run as its source describes it.

    Attributes:
        model: the name of the model in the source.
        source: the file or folder that states the speed.
        target: the slice, such as v5e:16x16.
        sequences: the sequences of a step on each chip.
        decoder: the model.
        mfu: the published MFU, as a fraction.
    """

    model: str
    source: str
    target: str
    sequences: int
    decoder: Decoder
    mfu: float

    @property
    def name(self) -> str:
        """The name of the run, and of the file in which the compiler's report is kept."""
        return f"{self.model}-{self.target}".lower().replace(":", "_").replace(" ", "_")

    @property
    def step_seconds(self) -> float:
        """The seconds of a step, from the published MFU."""
        return self.decoder.flops(self.sequences) / (self.mfu * parse_topology(self.target).chip.flops)


RUNS = (
    PublishedRun("22B", f"{MAXTEXT_2026}/v4", "v4:4x4x4", 13, Decoder(6144, 48, 24, mlp_dim=24_576), 0.567),
    PublishedRun("16B", f"{MAXTEXT}/v5e", "v5e:16x16", 6, Decoder(5120, 32, 32, mlp_dim=32_768), 0.6110),
    PublishedRun("32B", f"{MAXTEXT}/v5e", "v5e:16x16", 4, Decoder(10_240, 32, 32, mlp_dim=32_768), 0.6686),
)


def compile_run(run: PublishedRun) -> Report:
    """Returns the compiler's report on a step of a run."""
    devices = targets.find_devices(run.target, 1)
    mesh = Mesh(np.asarray(mesh_utils.create_device_mesh((len(devices),), devices)), ("fsdp",))
    function = train_step(run.decoder, mesh, run.sequences * len(devices))
    return records.step_to_json(compile_function(function, mesh, run.target, "schedule"))


def main(argv: list[str]) -> None:
    """Prints as JSON the compiler's report on the run whose name is the first argument."""
    [run] = [run for run in RUNS if run.name == argv[1]]
    answer(lambda: compile_run(run))


if __name__ == "__main__":
    main(sys.argv)
