"""What the files state that run a model without this package: StableHLO and ONNX.

Both have one input, `images`, and outputs by name: `logits` and `probabilities` if the model has a classifier (only
logits with head=patches), `features`, and the `block_N` that are asked for. The batch is any number of images above 0.
"""

from typing import Any, NamedTuple

from vit_jax import UserError, data, models, refuse
from vit_jax.model import Model


class Export(NamedTuple):
    """A model to write as a program.

    Attributes:
        model: the model.
        params: its parameters as NumPy arrays, adapters merged.
        dtype: the dtype of the weights and of the computation.
        preprocess: whether the images are uint8 [batch, height, width, 3], which the program maps to the range of
            values that the model's preprocessing states; else they are float32 in this range, as in `Model.apply`.
        blocks: the numbers of the blocks whose tokens are outputs; the first block is 0.
    """

    model: Model
    params: dict[str, Any]
    dtype: str = "float32"
    preprocess: bool = False
    blocks: tuple[int, ...] = ()

    def check(self) -> None:
        """Raises UserError if the model does not state how its images are preprocessed, or lacks a block."""
        count = models.count_blocks(self.params)
        absent = [str(block) for block in self.blocks if not 0 <= block < count]
        refuse(
            (
                self.preprocess and self.model.preprocess is None,
                f"{self.model.name} does not state how images are preprocessed; give preprocess= to vit_jax.load, or "
                "write it without --preprocess.",
            ),
            (
                absent,
                f"{self.model.name} has {count} blocks, numbered from 0; there is no block {', '.join(absent)}.",
            ),
        )

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        """What to multiply a pixel's level, 0 to 255, with and what to add then; 1 and 0 for images in float32.

        Raises:
            UserError: the preprocessing does not end with value_range.
        """
        if not self.preprocess or self.model.preprocess is None:
            return 1.0, 0.0
        low, high = data.value_range_of(self.model.preprocess)
        return (high - low) / 255, low

    @property
    def shape(self) -> tuple[str, int, int, int]:
        """The shape of the images."""
        return ("batch", *self.model.image_size, 3)

    @property
    def image_dtype(self) -> str:
        """The dtype of the images."""
        return "uint8" if self.preprocess else "float32"

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        names = ["features", *(f"block_{number}" for number in self.blocks)]
        if not self.model.field("num_classes"):
            return names
        has_probabilities = self.model.field("head") != "patches" and not self.model.is_regression
        return ["logits", *(["probabilities"] if has_probabilities else []), *names]


def choose_dtype(suffix: str, dtype: str, accepted: tuple[str, ...]) -> None:
    """Raises UserError if files with this suffix do not have this dtype."""
    if dtype not in accepted:
        raise UserError(f"a {suffix} file has the dtype {' or '.join(accepted)}, not {dtype}.")
