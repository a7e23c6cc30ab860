"""Training runs on real TPUs whose speed others published, and the compilation of a step of the same sizes.

The speeds of MaxText are the MFU in its tables, and the settings are those of the scripts beside the tables, at the
same commit. The speeds of Google's recipes are the seconds per step in their log lines.
"""

import dataclasses
import functools
import math
import sys

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from benchmarks.decoder import Decoder, train_step
from benchmarks.tpu_process import Report, answer
from vit_jax.kernels.tpu_kinds import WHOLE_PRODUCTS, Options
from vit_jax.planning import parse_topology, records, targets
from vit_jax.planning.compiler import compile_function

MAXTEXT = "MaxText 632f651, MaxText/configs"  # github.com/AI-Hypercomputer/maxtext, 2023-12-15
# 2026-08-22; its table of v4 is still the one of 2023, but beside a script with smaller batches.
MAXTEXT_2026 = "MaxText e591f30, src/maxtext/configs/tpu"
RECIPES = "tpu-recipes c8cfe2f, training/trillium"  # github.com/AI-Hypercomputer/tpu-recipes, 2026-08-07

# MaxText's default decoder of 2023 (base.yml): a ReLU MLP beside the attention, heads of 256, 32,768 tokens.
default = functools.partial(
    Decoder, head_dim=256, vocabulary=32_768, gated=False, parallel=True, untied=False, length=2048, attention="flash"
)
scale_16 = functools.partial(default, 5120, 32, 32, 32, mlp_dim=32_768)
scale_32 = functools.partial(default, 10_240, 32, 32, 32, mlp_dim=32_768)
scale_64 = functools.partial(default, 10_240, 64, 32, 32, mlp_dim=32_768)
# Decoders as Llama's: a gated MLP after the attention, fewer keys than queries, sequences of 8,192 tokens.
llama = functools.partial(
    Decoder, head_dim=128, kv_heads=8, gated=True, parallel=False, untied=True, length=8192, attention="splash"
)
# The recipes' limit of on-chip memory for one operation, which is large enough for the blocks of 2,048 tokens.
RECIPE_OPTIONS: Options = {"xla_tpu_scoped_vmem_limit_kib": "98304"}


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A run as its source describes it.

    Attributes:
        model: the name of the model in the source.
        source: the file or folder that states the speed.
        target: the slice, such as v5e:16x16.
        sequences: the sequences of a step on each chip.
        decoder: the model.
        mfu: the published MFU, as a fraction; None: the source states seconds.
        seconds: the published seconds of a step; None: the source states MFU.
        tensor: the number of chips over which heads, MLP and vocabulary are split. The sequences and the width of the
            weights are split over all chips divided by this number.
        options: (name, value) of the compiler's options.
    """

    model: str
    source: str
    target: str
    sequences: int
    decoder: Decoder
    mfu: float | None = None
    seconds: float | None = None
    tensor: int = 1
    options: tuple[tuple[str, str | bool], ...] = ()

    @property
    def name(self) -> str:
        """The name of the run, and of the file in which the compiler's report is kept."""
        return f"{self.model}-{self.target}".lower().replace(":", "_").replace(" ", "_")

    @property
    def step_seconds(self) -> float:
        """The seconds of a step, as published or computed from the published MFU."""
        if self.seconds is not None:
            return self.seconds
        assert self.mfu is not None
        return self.decoder.flops(self.sequences) / (self.mfu * parse_topology(self.target).chip.flops)

    @property
    def kernel_share(self) -> float:
        """The fraction of the attention blocks in the schedule that are executed.

        Splash attention looks up at run time which blocks the mask keeps, so that its schedule counts all blocks. The
        schedule of flash attention counts only the blocks that are executed.
        """
        if self.decoder.attention == "flash":
            return 1.0
        blocks = math.ceil(self.decoder.length / 2048)
        return (blocks + 1) / (2 * blocks)


RUNS = (
    PublishedRun(
        "22B", f"{MAXTEXT_2026}/v4", "v4:4x4x4", 13, default(6144, 48, 24, 24, mlp_dim=24_576, remat="full"), 0.567
    ),
    PublishedRun("16B", f"{MAXTEXT}/v5e", "v5e:16x16", 6, scale_16(remat="full"), 0.6110),
    PublishedRun("32B", f"{MAXTEXT}/v5e", "v5e:16x16", 4, scale_32(remat="full"), 0.6686),
    PublishedRun("64B", f"{MAXTEXT}/v5e", "v5e:16x16", 2, scale_64(remat="full"), 0.5990),
    PublishedRun("32B", f"{MAXTEXT}/v5p", "v5p:4x4x4", 8, scale_32(remat="products"), 0.7147, tensor=4),
    PublishedRun("64B", f"{MAXTEXT}/v5p", "v5p:4x4x4", 4, scale_64(remat="products"), 0.7031, tensor=4),
    PublishedRun(
        "Mistral 7B",
        f"{RECIPES}/Mistral-7B-MaxText",
        "v6e:2x4",
        6,
        llama(4096, 32, 32, mlp_dim=14_336, vocabulary=32_000, remat="offload_out"),
        seconds=6.320,
        options=tuple(RECIPE_OPTIONS.items()),
    ),
    PublishedRun(
        "Llama 3.1 8B",
        f"{RECIPES}/Llama3.1-8B-MaxText/v6e-8",
        "v6e:2x4",
        3,
        llama(4096, 32, 32, mlp_dim=14_336, vocabulary=128_256, remat="offload_out"),
        seconds=3.443,
        options=tuple((RECIPE_OPTIONS | WHOLE_PRODUCTS).items()),
    ),
    PublishedRun(
        "Llama 3.1 70B",
        f"{RECIPES}/Llama3.1-70B-MaxText/v6e-32",
        "v6e:4x8",
        2,
        llama(8192, 80, 64, mlp_dim=28_672, vocabulary=128_256, remat="offload", dtype="bfloat16"),
        seconds=17.790,
        options=tuple((RECIPE_OPTIONS | WHOLE_PRODUCTS).items()),
    ),
)


def compile_run(run: PublishedRun) -> Report:
    """Returns the compiler's report on a step of a run."""
    devices = targets.find_devices(run.target, 1)
    shape = len(devices) // run.tensor, run.tensor
    mesh = Mesh(np.asarray(mesh_utils.create_device_mesh(shape, devices)), ("fsdp", "tensor"))
    function = train_step(run.decoder, mesh, run.sequences * len(devices), dict(run.options))
    return records.step_to_json(compile_function(function, mesh, run.target, "schedule"))


def main(argv: list[str]) -> None:
    """Prints as JSON the compiler's report on the run whose name is the first argument."""
    [run] = [run for run in RUNS if run.name == argv[1]]
    answer(lambda: compile_run(run))


if __name__ == "__main__":
    main(sys.argv)
