"""What to change so that a program fits, and how large a batch does: guessed by proportion, confirmed by compiling."""

from collections.abc import Callable, Iterator

from vit_jax import UserError
from vit_jax.planning.client import Facts, held, needs

Change = dict[str, str]  # config field -> value
Compile = Callable[[Change], Facts]

# How weights and optimizer lie on the devices: copied, or a part on each.
STRATEGIES: dict[str, Change] = {
    "replicated": {"mesh.data": "-1", "mesh.fsdp": "1"},
    "fsdp": {"mesh.data": "1", "mesh.fsdp": "-1"},
}
KEPT = 0.2  # of what a step needs besides its state, with remat=full; a guess
MOST_ADVICE, MOST_FIT, MOST_EVAL = 5, 8, 2  # compilations
CLOSE = 16  # a batch is the largest if one larger by a part in so many does not fit


def advise(facts: Facts, hbm: int, compile: Compile) -> tuple[Change, Facts] | None:
    """Returns the first change, of those that cost the least speed, with which a program fits, and what it then needs;
    None if none of those tried does, the last of all among them. An evaluation step that does not fit gets a smaller
    batch of its own.

    Args:
        facts: of the program, of which the step or the evaluation step does not fit.
        hbm: bytes of a device.
        compile: tells of the program with a change.
    """
    if "needed_bytes" not in facts:
        return _with_smaller_evaluation({}, facts, hbm, compile)
    changes = list(candidates(facts))
    tried = [change for change, guess in changes if guess <= hbm][: MOST_ADVICE - 1]
    tried += [change for change, _ in changes[-1:] if change not in tried]
    for change in tried:
        found = compile(change)
        if found["fits"]:
            return change, found
        if "needed_bytes" not in found and (more := _with_smaller_evaluation(change, found, hbm, compile)):
            return more
    return None


def _with_smaller_evaluation(change: Change, facts: Facts, hbm: int, compile: Compile) -> tuple[Change, Facts] | None:
    """Returns a change with the largest `batch_eval`, by halves, with which the evaluation step fits too."""
    evaluation, state = facts["evaluation"], facts["state_bytes"]
    images, rest = evaluation["images_per_device"], needs(evaluation) - state
    copies = evaluation["batch"] // images
    halves = [images >> n for n in range(1, images.bit_length())]
    for fewer in [fewer for fewer in halves if state + rest * fewer / images <= hbm][:MOST_EVAL]:
        more = change | {"batch_eval": str(fewer * copies)}
        found = compile(more)
        if found["fits"]:
            return more, found
    return None


def candidates(facts: Facts) -> Iterator[tuple[Change, int]]:
    """Yields changes, those first that cost the least speed, and the bytes that a device may then need.

    First the batch in more parts; then weights and optimizer split over all devices, in parts if need be; then all
    activations computed again in the backward pass; then a smaller batch. A prediction has neither parts nor backward
    pass.
    """
    accum, images = facts["accum_steps"], facts["images_per_device"]
    state = held(facts)
    rest: float = needs(facts) - state
    parts = [n for n in (2**i for i in range(images.bit_length())) if images % (accum * n) == 0]
    mesh = facts["mesh"]  # weights are never split over slices
    share = mesh["slice"] * mesh["fsdp"] * mesh["tensor"] / facts["devices"]
    placed = [({}, 1.0), (STRATEGIES["fsdp"], share)] if share < 1 else [({}, 1.0)]
    for strategy, part in placed:
        for n in parts:
            if facts["inference"]:
                change, kept = {"batch": str(facts["batch"] // n)}, state
            else:  # parts add up their gradients beside the state
                change, kept = {"accum_steps": str(accum * n)}, state + (facts["parameter_bytes"] if n > 1 else 0)
            change = strategy | (change if n > 1 else {})
            if change:
                yield change, int(kept * part + rest / n)
    if facts["inference"]:
        return
    strategy, part = placed[-1]
    if facts["remat"] != "full":
        strategy = strategy | {"model.remat": "full"}
        rest *= KEPT
        yield strategy, int(state * part + rest)
    if parts[-1] > 1:
        more = strategy | {"accum_steps": str(accum * parts[-1])}
        yield more, int((state + facts["parameter_bytes"]) * part + rest / parts[-1])
    for n in parts[1:]:
        yield strategy | {"batch": str(facts["batch"] // n)}, int(state * part + rest / n)


def largest_batch(facts: Facts, hbm: int, compile: Compile) -> tuple[Facts | None, int | None]:
    """Searches the largest batch with which a program fits.

    What a device needs is taken to grow in proportion to its images, so few compilations do; near the limit compilers
    compute more anew, and larger batches fit than that says.

    Args:
        facts: of the program with the batch to begin with.
        hbm: bytes of a device.
        compile: tells of the program with a change.

    Returns:
        What is known of the program with the largest batch found, None if none fits; and the images per device of the
        smallest batch that was seen not to fit, or for which the configuration does not do.
    """
    copies = facts["batch"] // facts["images_per_device"]  # devices that hold different images
    step = facts["accum_steps"]
    points = {facts["images_per_device"]: facts}
    unfit = {images for images in points if not facts["fits"]}
    for _ in range(MOST_FIT):
        low = max((images for images in points if images not in unfit), default=0)
        high = min(unfit, default=None)
        least = max(1, low // CLOSE // step) * step
        if high and high - low <= least:
            break
        guess = max(_at(points, low, high, hbm) // step * step, low + least)
        if high and guess >= high:
            guess = max((low + high) // 2 // step * step, low + step)
        try:
            points[guess] = compile({"batch": str(guess * copies)})
        except UserError:  # the warm-up, say, would be longer than the run
            unfit.add(guess)
        else:
            unfit |= set() if points[guess]["fits"] else {guess}
    best = max((images for images in points if images not in unfit), default=None)
    return points.get(best), min(unfit, default=None)


def _at(points: dict[int, Facts], low: int, high: int | None, hbm: int) -> int:
    """Returns for how many images the memory would do, by the line through two points of (images, bytes): those around
    the limit, or else the last ones.
    """
    known = sorted((images, needs(facts)) for images, facts in points.items())
    around = [point for point in known if point[0] in (low, high)] if high else []
    (a, less), (b, more) = [(0, held(next(iter(points.values())))), *(around or known)][-2:]
    return int(a + (hbm - less) * (b - a) / (more - less)) if more > less else 2 * b
