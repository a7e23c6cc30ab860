"""The headers of the images to evaluate, looked at before training, so that the unreadable are named in time."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vit_jax import UserError

AT_ONCE = 16  # files; shared disks take their time
PART = 256  # files that a thread takes at once
NAMED = 3


def check_headers(
    read: Callable[[int], Any], fault: Callable[[int, int], str | None], rows: Sequence[int], name: str
) -> None:
    """Looks at the headers of some images; at 50,000 local files on two cores for 2 to 3 seconds.

    Args:
        read: number of an image -> its `decode.ImageHeader`.
        fault: height, width -> why an image of this size is too small, or None.
        rows: numbers of the images.
        name: of the evaluation.

    Raises:
        UserError: some are no images that can be read, or are too small; it counts them and names the first.
    """
    fault = functools.cache(fault)

    def look(part: Sequence[int]) -> list[str]:
        found = []
        for index in part:
            try:
                header = read(index)
            except UserError as error:
                found.append(str(error))
                continue
            # Its EXIF data may turn it: what fits neither way is too small.
            if (small := fault(header.height, header.width)) and fault(header.width, header.height):
                found.append(f"the image {header.name} is too small: {small}")
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        parts = [rows[begin : begin + PART] for begin in range(0, len(rows), PART)]
        faults = [fault for found in pool.map(look, parts) for fault in found]
    if faults:
        more = f"; and {len(faults) - NAMED:,} more" if len(faults) > NAMED else ""
        raise UserError(
            f"{len(faults):,} of {len(rows):,} images of evals.{name} cannot be evaluated: {'; '.join(faults[:NAMED])}"
            f"{more}. Repair or remove them: an evaluation leaves nothing out."
        )
