"""The programs that `benchmarks.tpu` compiles for TPUs that are not here, each in a process of its own.

The settings are those of big_vision's recipe for ImageNet-21k, but with 1,000 classes: sigmoid loss, Adam with its
first moment in bfloat16, decay 1e-4, clipping at 1.0, warm-up and cosine, no dropout, activations in bfloat16, 224
pixels.
"""

import dataclasses
import json
import re
import sys
from typing import Any

from benchmarks import tpu_big_vision
from benchmarks.tpu_process import answer
from configs import base
from vit_jax.macs import macs_per_image
from vit_jax.planning import records, targets
from vit_jax.planning.compiler import CompileDetail, Function, compile_function
from vit_jax.program import program_without_data

CLASSES, EXAMPLES, RESOLUTION = 1000, 1_281_167, 224
STEPS, WARMUP_STEPS = 100_000, 10_000
DECAY, CLIP = 1e-4, 1.0


@dataclasses.dataclass(frozen=True)
class Row:
    """A training step to compile.

    Attributes:
        code: whose step it is: `vit_jax` or `big_vision`.
        model: the model: `B/16`, `R50+B/16`, `BiT-R50x1`, ...
        target: the slice, such as v5e:2x2.
        images: the images of a step on each chip.
        pooling: `gap`, or `token` with a class token; a BiT has neither.
        fields: (name, value) of further fields of the configuration.
    """

    code: str
    model: str
    target: str
    images: int
    pooling: str = "gap"
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The name of the row, and of the file in which its report is kept."""
        words = [self.code, self.model, self.target, str(self.images), self.pooling]
        words += [f"{key.rpartition('.')[2]}{value}" for key, value in self.fields]
        return "-".join(re.sub(r"[^a-z0-9]+", "_", word.lower()) for word in words)

    @property
    def measure(self) -> CompileDetail:
        """What is asked of the compiler. With schedules, libtpu 0.0.42 compiles for TPU7x six times as long or more."""
        return "estimate" if self.target.startswith("tpu7x") else "schedule"


def full_name(model: str) -> str:
    """Returns the whole name of a row's model: `ViT-B/16`, `R50+ViT-B/16`, `BiT-R50x1`."""
    stem, plus, vit = model.rpartition("+")
    return model if model.startswith("BiT") else f"{stem}{plus}ViT-{vit}"


def compile_row(row: Row, checkout: str | None) -> dict[str, Any]:
    """Returns the compiler's report on a row, and `macs_per_image`, the multiply-accumulates of its forward pass.

    Args:
        row: the program.
        checkout: the folder of big_vision's code; needed for its rows only.
    """
    devices = targets.find_devices(row.target, 1)
    config = base.get_config()
    config.batch, config.resolution = row.images * len(devices), RESOLUTION
    config.total_steps, config.warmup_steps, config.grad_norm_clip = STEPS, WARMUP_STEPS, CLIP
    config.model.name = full_name(row.model)
    if not config.model.name.startswith("BiT"):
        config.model.pooling = row.pooling
    config.data.num_classes, config.data.num_examples = CLASSES, EXAMPLES
    config.task.loss = "sigmoid"
    config.optim.weight_decay, config.optim.moment_dtype = DECAY, "bfloat16"
    config.update_from_flattened_dict(dict(row.fields))
    config, program = program_without_data(config, devices)
    function = Function(
        program.train_step, (program.state, program.batch), program.state_shardings, program.compiler_options
    )
    if row.code == "big_vision":
        assert checkout
        function = tpu_big_vision.train_step(checkout, row.model, program.mesh, config, row.pooling)
    step = compile_function(function, program.mesh, row.target, row.measure)
    return records.step_to_json(step) | {"macs_per_image": macs_per_image(program.model)}


def main(argv: list[str]) -> None:
    """Prints as JSON the compiler's report on the row that the first argument gives as JSON."""
    given = json.loads(argv[1])
    row = Row(**given | {"fields": tuple((key, value) for key, value in given["fields"])})
    answer(lambda: compile_row(row, argv[2] or None))


if __name__ == "__main__":
    main(sys.argv)
