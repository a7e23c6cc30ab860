"""Searches for a change with which a program fits in memory, and for the largest batch that fits.

Memory is extrapolated from what was compiled before. A change is returned only if compiling with it shows that it fits.
"""

from collections.abc import Callable, Iterator

from vit_jax import UserError
from vit_jax.planning.records import Compilation, ConfigChange

Compile = Callable[[ConfigChange], Compilation]

# How parameters and optimizer are placed on the devices: copied to each, or split over all.
STRATEGIES: dict[str, ConfigChange] = {
    "replicated": {"mesh.data": "-1", "mesh.fsdp": "1"},
    "fsdp": {"mesh.data": "1", "mesh.fsdp": "-1"},
}
# `model.remat` -> the fraction that it still needs of the bytes beside the state, in the order of the speed that it
# costs. The fractions are those of B/16 with 128 images on a v5e chip (docs/speed.md).
REMAT_FRACTIONS = {"none": 1.0, "dots": 0.93, "mlp": 0.61, "attention": 0.30, "full": 0.22}
MAX_CHANGES, MAX_BATCHES, MAX_EVALUATIONS = 5, 8, 2  # compilations
BATCH_STEPS = 16  # the search ends at a batch if one larger by a 16th of it does not fit


def find_fitting_change(first: Compilation, compile: Compile) -> tuple[ConfigChange, Compilation] | None:
    """Searches, among the changes with which a program fits, the one that costs the least speed.

    Only changes that fit by extrapolation are tried, and always the last candidate, which saves the most memory. If
    only the evaluation step does not fit, its batch alone (`batch_eval`) is made smaller.

    Args:
        first: the compilation of the program, whose step or evaluation step does not fit.
        compile: compiles the program with a change.

    Returns:
        The change and the compilation with it; None if no change that was tried makes the program fit.
    """
    if first.step.needed_bytes is None:
        return _find_evaluation_batch({}, first, compile)
    changes = list(candidate_changes(first))
    tried = [change for change, guess in changes if guess <= first.workload.memory_bytes][: MAX_CHANGES - 1]
    tried += [change for change, _ in changes[-1:] if change not in tried]
    for change in tried:
        compilation = compile(change)
        if compilation.fits:
            return change, compilation
        if compilation.step.needed_bytes is None:
            fitting = _find_evaluation_batch(change, compilation, compile)
            if fitting:
                return fitting
    return None


def _find_evaluation_batch(
    change: ConfigChange, compilation: Compilation, compile: Compile
) -> tuple[ConfigChange, Compilation] | None:
    """Adds to a change the largest `batch_eval`, found by halving, with which the evaluation step fits, too.

    Returns the new change and the compilation with it; None if none that was tried fits.
    """
    evaluation, workload = compilation.evaluation, compilation.workload
    assert evaluation
    images, state = evaluation.images_per_device, workload.resident_bytes
    rest = evaluation.required_bytes - state
    copies = evaluation.batch // images
    halves = [images >> n for n in range(1, images.bit_length())]
    fitting = [fewer for fewer in halves if state + rest * fewer / images <= workload.memory_bytes]
    for fewer in fitting[:MAX_EVALUATIONS]:
        more = change | {"batch_eval": str(fewer * copies)}
        candidate = compile(more)
        if candidate.fits:
            return more, candidate
    return None


def candidate_changes(compilation: Compilation) -> Iterator[tuple[ConfigChange, int]]:
    """Yields changes in the order of the speed they cost, each with a guess of the bytes that a device then needs.

    First come larger `accum_steps`. Then parameters and optimizer are split over all devices, alone and with larger
    `accum_steps`. Then more and more activations are computed again in the backward pass (`model.remat`). Then the
    batch becomes smaller. For a prediction a smaller batch takes the place of larger `accum_steps`, and the candidates
    end before `model.remat`.
    """
    workload = compilation.workload
    accum, images = workload.accum_steps, workload.images_per_device
    state = workload.resident_bytes
    rest: float = compilation.step.required_bytes - state
    parts = [n for n in (2**i for i in range(images.bit_length())) if images % (accum * n) == 0]
    mesh = workload.mesh  # parameters are never split over slices
    share = mesh["slice"] * mesh["fsdp"] * mesh["tensor"] / workload.devices
    placed = [({}, 1.0), (STRATEGIES["fsdp"], share)] if share < 1 else [({}, 1.0)]
    for strategy, part in placed:
        for n in parts:
            if workload.inference:
                change, kept = {"batch": str(workload.batch // n)}, state
            else:  # the gradients of the parts are added up beside the state
                change, kept = {"accum_steps": str(accum * n)}, state + (workload.parameter_bytes if n > 1 else 0)
            change = strategy | (change if n > 1 else {})
            if change:
                yield change, int(kept * part + rest / n)
    if workload.inference:
        return
    strategy, part = placed[-1]
    rest /= REMAT_FRACTIONS[workload.remat]
    for remat, fraction in REMAT_FRACTIONS.items():
        if remat in workload.remat_choices and fraction < REMAT_FRACTIONS[workload.remat]:
            yield strategy | {"model.remat": remat}, int(state * part + rest * fraction)
    if workload.remat != "full":
        strategy = strategy | {"model.remat": "full"}
    rest *= REMAT_FRACTIONS["full"]
    if parts[-1] > 1:
        more = strategy | {"accum_steps": str(accum * parts[-1])}
        yield more, int((state + workload.parameter_bytes) * part + rest / parts[-1])
    for n in parts[1:]:
        yield strategy | {"batch": str(workload.batch // n)}, int(state * part + rest / n)


def find_largest_batch(first: Compilation, compile: Compile) -> tuple[Compilation | None, int | None]:
    """Searches the largest batch with which a program fits.

    The memory of a device is taken to grow in proportion to its images, so that few compilations suffice. Near the
    limit compilers recompute more, and batches fit that are larger than this predicts.

    Args:
        first: the compilation of the program with the batch to begin with.
        compile: compiles the program with a change.

    Returns:
        First the compilation with the largest batch that fits, or None if no batch fits. Second the images per device
        of the smallest batch that did not fit or that the configuration does not allow, or None if every batch tried
        fits.
    """
    workload = first.workload
    copies = workload.batch // workload.images_per_device  # devices that hold different images
    step = workload.accum_steps
    compilations = {workload.images_per_device: first}
    unfit = {images for images in compilations if not first.fits}
    for _ in range(MAX_BATCHES):
        low = max((images for images in compilations if images not in unfit), default=0)
        high = min(unfit, default=None)
        least = max(1, low // BATCH_STEPS // step) * step
        if high and high - low <= least:
            break
        guess = max(_fitting_images(compilations, low, high) // step * step, low + least)
        if high and guess >= high:
            guess = max((low + high) // 2 // step * step, low + step)
        try:
            compilations[guess] = compile({"batch": str(guess * copies)})
        except UserError:  # the warm-up, for example, would be longer than the run
            unfit.add(guess)
        else:
            unfit |= set() if compilations[guess].fits else {guess}
    best = max((images for images in compilations if images not in unfit), default=None)
    return (None if best is None else compilations[best]), min(unfit, default=None)


def _fitting_images(compilations: dict[int, Compilation], low: int, high: int | None) -> int:
    """Returns how many images per device fit in memory, by the line through two points (images, bytes).

    The points are those of the largest batch that fits and of the smallest that does not. If there is no batch that
    does not fit, they are those of the two largest batches. The point of 0 images stands in for one that is missing.
    """
    workload = next(iter(compilations.values())).workload
    known = sorted((images, compilation.step.required_bytes) for images, compilation in compilations.items())
    around = [point for point in known if point[0] in (low, high)] if high else []
    (a, less), (b, more) = [(0, workload.resident_bytes), *(around or known)][-2:]
    return int(a + (workload.memory_bytes - less) * (b - a) / (more - less)) if more > less else 2 * b
