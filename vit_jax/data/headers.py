"""Check of the headers of an evaluation's images before training, so that unreadable images are reported in time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax import UserError
from vit_jax.data.thread_pool import open_thread_pool

THREADS = 16  # more than the cores, since shared disks are slow to answer
CHUNK = 256  # files that a thread reads at a time
SHOWN = 3  # faults in the message


def check_headers(
    read_header: Callable[[int], Any],
    why_too_small: Callable[[int, int], str | None],
    indices: Sequence[int],
    name: str,
) -> None:
    """Checks the headers of some images. For 50,000 local files this takes 2 to 3 seconds on two cores.

    Args:
        read_header: index of an image -> its `images.ImageHeader`.
        why_too_small: (height, width) -> why an image of this size is too small, or None if it is not.
        indices: the indices of the images to check.
        name: the name of the evaluation, for the message.

    Raises:
        UserError: some images are unreadable or too small; the message counts them and names the first.
    """
    why_too_small = functools.cache(why_too_small)

    def find_fault(index: int) -> str:
        try:
            header = read_header(index)
        except UserError as error:
            return str(error)
        reason = why_too_small(header.height, header.width)
        # EXIF data may turn the image, so one that fits in either orientation passes.
        small = reason and why_too_small(header.width, header.height)
        return f"the image {header.name} is too small: {reason}" if small else ""

    with open_thread_pool(THREADS) as pool:
        faults = list(filter(None, pool.imap(find_fault, indices, CHUNK)))
    if faults:
        more = f"; and {len(faults) - SHOWN:,} more" if len(faults) > SHOWN else ""
        raise UserError(
            f"{len(faults):,} of {len(indices):,} images of evals.{name} cannot be evaluated: "
            f"{'; '.join(faults[:SHOWN])}{more}. Repair or remove them: an evaluation skips no image."
        )
