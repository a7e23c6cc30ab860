"""TPU chips and slices of them, by the names that clouds and libtpu give: `v5e:16x16` is 256 chips of a v5e."""

import dataclasses
import math
import re

from vit_jax import UserError, choose


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one chip can do; speeds are Google's published figures (cloud.google.com/tpu/docs, one page per chip).

    Attributes:
        flops: per second, in bfloat16.
        hbm: bytes of memory that programs can use, as libtpu's compiler counts them.
        ici_bandwidth: bytes per second that it can send to its neighbours, two along each dimension.
        clock: cycles per second, of which the compiler counts: `flops` by those of a cycle of all matrix units.
        dimensions: of a slice.
        chips_per_host: in a slice of several hosts.
    """

    flops: float
    hbm: int
    ici_bandwidth: float
    clock: float
    dimensions: int
    chips_per_host: int = 4


CHIPS = {
    "v4": Chip(275e12, int(30.75 * 2**30), 2400e9 / 8, 1.05e9, dimensions=3),
    "v5e": Chip(197e12, int(15.75 * 2**30), 1600e9 / 8, 1.5e9, dimensions=2),
    "v5p": Chip(459e12, int(95.74 * 2**30), 4800e9 / 8, 1.75e9, dimensions=3),
    "v6e": Chip(918e12, int(31.25 * 2**30), 3584e9 / 8, 1.75e9, dimensions=2),
}


FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # shapes of two dimensions that clouds have
RING = {2: 16, 3: 4}  # dimensions -> along one of so many chips, or in three a multiple, the last neighbours the first


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are wired to each other, in a torus or a part of one.

    Attributes:
        kind: a key of `CHIPS`.
        shape: chips along each dimension.
    """

    kind: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def chip(self) -> Chip:
        """What each of them can do."""
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def ici_bandwidth(self) -> float:
        """Bytes per second that the chip with the fewest neighbours can send to them."""
        ring = RING[len(self.shape)]
        whole = all(size % ring == 0 for size in self.shape)
        neighbours = sum(
            2 if (whole if len(self.shape) == 3 else size == ring) else int(size > 1) for size in self.shape
        )
        return self.chip.ici_bandwidth * neighbours / (2 * len(self.shape))


def parse(text: str) -> Slice:
    """Reads a slice as it is written, `v5e:16x16` or `v4:4x4x8`.

    Raises:
        UserError: no such chip, or no shape in which it comes.
    """
    kind, _, shape = text.partition(":")
    chip = CHIPS[choose("TPU", kind, CHIPS)]
    example = "x".join(["4"] * chip.dimensions)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) or shape.count("x") != chip.dimensions - 1:
        words = f"a slice of {kind} has {chip.dimensions} dimensions"
        raise UserError(f"topology {text!r} is not understood; {words}: --topology={kind}:{example}.")
    found = Slice(kind, tuple(map(int, shape.split("x"))))
    if chip.dimensions == 2 and shape not in FLAT:
        raise UserError(f"no cloud has a {kind} of {shape}; choose from {', '.join(FLAT)}.")
    if chip.dimensions == 3 and found.chips % chip.chips_per_host:
        raise UserError(f"no cloud has a {kind} of {shape}: the smallest is 2x2x1, one machine.")
    return found
