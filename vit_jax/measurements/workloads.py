"""The training steps that are measured: those whose schedules for TPUs are kept in schedules.csv.

On slow devices they have fewer images. The work is that of big_vision's recipe for ImageNet-21k, as in docs/speed.md.
"""

import csv
import dataclasses
from pathlib import Path

from ml_collections import ConfigDict

from vit_jax.macs import macs_per_image, training_flops
from vit_jax.measurements.bench import Bench
from vit_jax.measurements.published import find_slice
from vit_jax.model import Model
from vit_jax.planning import parse_topology
from vit_jax.program import model_without_data

SCHEDULES = Path(__file__).parent / "schedules.csv"
MODELS = ("ViT-S/16", "ViT-B/16", "ViT-L/16")
IMAGES_PER_DEVICE = {
    "ViT-S/16": 256,
    "ViT-B/16": 128,
    "ViT-L/16": 64,
}  # on a device; other models have as many as the largest of these
FIELDS = {
    "total_steps": 100_000,
    "warmup_steps": 10_000,
    "grad_norm_clip": 1.0,
    "model.pooling": "gap",
    "data.num_classes": 1000,
    "data.num_examples": 1_281_167,
    "task.loss": "sigmoid",
    "optim.weight_decay": 1e-4,
    "optim.moment_dtype": "bfloat16",
}
STEP_NEUTRAL_PREFIXES = ("data.", "checkpoint.")  # beginnings of the names of fields that change no step
SHRINK = 4  # from one number of images to the next smaller one


@dataclasses.dataclass(frozen=True)
class CompiledStepCycles:
    """The schedule of a step by the compiler for TPUs; a row of schedules.csv, which `benchmarks.tpu` compiled.

    Attributes:
        topology: the slice.
        model: name of the model.
        images: images of a step on a chip.
        cycles: cycles of a step by schedule, the exchange included.
        exchange: those of these cycles in which a chip waits for other chips.
        estimated: cycles of a step by the compiler's own estimate, without the exchange.
    """

    topology: str
    model: str
    images: int
    cycles: int
    exchange: int
    estimated: int

    @property
    def clock(self) -> float:
        """The cycles of a chip per second."""
        return parse_topology(self.topology).chip.clock


def read_schedules() -> list[CompiledStepCycles]:
    """Returns the schedules that are kept, those of slices with fewer chips first."""
    _, *rows = csv.reader(SCHEDULES.read_text().splitlines())
    kept = [CompiledStepCycles(topology, model, *map(int, numbers)) for topology, model, *numbers in rows]
    return sorted(kept, key=lambda row: parse_topology(row.topology).chips)


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A training step of a model.

    Attributes:
        model: the name of the model.
        images: images of a step on a device.
        config: the configuration, its durations in steps.
        macs: multiply-accumulates of an image's forward pass.
    """

    model: str
    images: int
    config: ConfigDict
    macs: int

    def __str__(self) -> str:
        return f"{self.model}, {self.images} images of {self.config.resolution} pixels a device"

    @classmethod
    def of(cls, bench: Bench, name: str, images: int | None = None) -> "MeasuredStep":
        """Returns the step of a model with `images` images on a device.

        None: those of the batch that the command line gives, or else as many as the model's kept schedules have.

        Raises:
            UserError: the configuration is wrong.
        """
        parts = bench.mesh.devices.size // bench.mesh.shape["tensor"]
        if "batch" in bench.given:
            images = bench.config.batch // parts
        images = images or IMAGES_PER_DEVICE.get(name, min(IMAGES_PER_DEVICE.values()))
        config = bench.config.copy_and_resolve_references()
        config.model.name, config.batch = name, images * parts
        return cls(name, images, config, macs_per_image(model_without_data(config)))

    @classmethod
    def choose(cls, bench: Bench, name: str) -> "MeasuredStep":
        """Returns the step of a model with as many images as `bench.step_seconds` allow, by the rate of products.

        They are at most as many as its kept schedules have, and at least one. A batch that the command line gives is
        not made smaller.
        """
        workload = cls.of(bench, name)
        if "batch" in bench.given:
            return workload
        images, rate = workload.images, bench.product_flops
        while images > 1 and rate and training_flops(workload.macs) * images / rate > bench.step_seconds:
            images = max(1, images // SHRINK)
        return cls.of(bench, name, images)

    @property
    def flops(self) -> float:
        """Returns the operations of a step on a device."""
        return float(training_flops(self.macs) * self.images)

    def device_model(self, bench: Bench) -> Model:
        """Returns the model with the dtype of the activations and the attention that a run on these devices chooses."""
        model = model_without_data(self.config, bench.dtype)
        return model.for_device(bench.device.device_kind, self.images, bench.mesh.shape["tensor"])

    def find_schedule(self, bench: Bench) -> CompiledStepCycles | None:
        """Returns the schedule of this step on such devices; None: none is kept, or the command line changes the step.

        If none is kept for the slice of the devices, the schedule is that of another slice of the same kind of chip.
        Only the exchange differs between them, by a few percent of the step.
        """
        if not all(name.startswith(STEP_NEUTRAL_PREFIXES) for name in bench.given):
            return None
        here = find_slice(list(bench.mesh.devices.flat))
        rows = [row for row in read_schedules() if (row.model, row.images) == (self.model, self.images)]
        rows = [row for row in rows if here and parse_topology(row.topology).kind == here.kind]
        return next((row for row in rows if row.topology == str(here)), rows[0] if rows else None)
