"""Speed and largest batch of predictions over models and image sizes: both halves of the paper's Figure 12.

Two batches are compiled for each model and size. The speed is that of the smaller batch, which has about `TOKENS`
tokens. The largest batch is extrapolated from the line through the memory of both batches. It is a guess: near the
limit compilers recompute more, so that larger batches fit.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from vit_jax.model import create
from vit_jax.planning.records import Compilation, PlanRequest
from vit_jax.planning.time_estimate import estimate_schedule, estimate_step
from vit_jax.text_tables import markdown_table

SIZES = (64, 128, 224, 384, 512)  # pixels, those of the figure
MODELS = (
    "ViT-B/32",
    "ViT-B/16",
    "ViT-L/32",
    "ViT-L/16",
    "ViT-H/14",
    "R50+ViT-B/32",
    "R50+ViT-B/16",
    "R50+ViT-L/32",
    "R50+ViT-L/16",
    "BiT-R50x1",
    "BiT-R50x2",
    "BiT-R152x4",
)
TOKENS = 128 * 196  # a chip: 128 images of ViT-B/16 at 224 pixels
LARGER = 8  # the second batch has so many times the images of the first: the memory of small batches grows in steps


@dataclasses.dataclass(frozen=True)
class InferencePoint:
    """A model at an image size, on one chip.

    Attributes:
        model: the name of the model.
        size: the image size that was asked for, in pixels.
        resolution: the nearest size that the model's patches tile, in pixels. It is the size that was compiled.
        images: the batch for which `images_per_second` holds.
        images_per_second: the speed; None if it is unknown, or if a batch of `images` does not fit.
        largest_batch: the largest batch that fits, in images; 0 if not even one image fits.
        by_schedule: whether the speed follows from the schedules of all operations, not from the compiler's estimate.
    """

    model: str
    size: int
    resolution: int
    images: int
    images_per_second: float | None
    largest_batch: int
    by_schedule: bool


@dataclasses.dataclass(frozen=True)
class InferenceFigure:
    """Models and sizes on one kind of chip.

    Attributes:
        target: a slice of one chip.
        points: the points, model by model, with the sizes in the same order for each model.
    """

    target: str
    points: tuple[InferencePoint, ...]

    def render(self) -> str:
        """Returns both halves of the figure as one table: a row for each model, columns for the sizes."""
        sizes = dict.fromkeys(point.size for point in self.points)
        by_schedule = any(point.by_schedule for point in self.points)
        words = [
            f"Predictions on one chip of {self.target}: images/s at about {TOKENS:,} tokens, by the "
            + ("schedules, which are optimistic;" if by_schedule else "compiler's estimate;"),
            f"largest batch, on the line through the memory of that batch and of {LARGER} times it; in brackets, the",
            "nearest size that patches tile.",
            "",
        ]
        names = dict.fromkeys(point.model for point in self.points)
        lines = [["model", *(f"{size} px: images/s, batch" for size in sizes)]]
        lines += [[name, *(_cell(point) for point in self.points if point.model == name)] for name in names]
        return "\n".join([*words, markdown_table(lines).rstrip()])


def plan_inference(
    request: PlanRequest,
    compile: Callable[[PlanRequest], Compilation],
    names: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
) -> InferenceFigure:
    """Compiles predictions of each model at each size, and returns the figure.

    Args:
        request: a prediction of any model, on a slice of one chip. Its model, resolution and batch are replaced.
        compile: compiles a request.
        names: names of models; by default `MODELS`, those of the paper.
        sizes: image sizes in pixels; by default `SIZES`, those of the paper's figure.

    Raises:
        UserError: no model has such a name, or nothing compiles.
    """
    for name in names or ():  # before anything is compiled
        create(name)
    return InferenceFigure(
        request.target,
        tuple(_plan_point(request, compile, name, size) for name in names or MODELS for size in sizes or SIZES),
    )


def nearest_resolution(name: str, size: int) -> int:
    """Returns the image size nearest to `size` that a model's patches tile; the larger one if two are equally near."""
    patch = create(name).spec.tile
    return max(1, math.floor(size / patch + 0.5)) * patch


def _plan_point(
    request: PlanRequest, compile: Callable[[PlanRequest], Compilation], name: str, size: int
) -> InferencePoint:
    resolution = nearest_resolution(name, size)
    rows, columns = create(name, resolution=resolution).spec.grid
    images = max(2, 2 ** round(math.log2(TOKENS / (rows * columns))))

    def compile_images(count: int, reads_schedules: bool) -> Compilation:
        change = {"model.name": name, "resolution": str(resolution), "accum_steps": "1"}
        changed = request.with_change(change | {"batch": str(count)})
        return compile(dataclasses.replace(changed, reads_schedules=reads_schedules))

    small, large = compile_images(images, request.reads_schedules), compile_images(LARGER * images, False)
    less, more = small.step.required_bytes, large.step.required_bytes
    each = (more - less) / (LARGER * images - images)
    largest = images + (small.workload.memory_bytes - less) / each if each > 0 else 0
    by_schedule = estimate_schedule(small)
    estimate = by_schedule or estimate_step(small)
    return InferencePoint(
        model=name,
        size=size,
        resolution=resolution,
        images=images,
        images_per_second=estimate.images_per_second_per_chip if estimate else None,
        largest_batch=max(0, int(largest)),
        by_schedule=by_schedule is not None,
    )


def _cell(point: InferencePoint) -> str:
    rate = "-" if point.images_per_second is None else f"{point.images_per_second:,.0f}"
    other = f" ({point.resolution})" if point.resolution != point.size else ""
    return f"{rate}, {point.largest_batch:,}{other}"
