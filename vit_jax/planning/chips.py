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
        cores: (virtual ones) of Google's machine with so many chips.
        chips_per_host: in a slice of several hosts.
    """

    flops: float
    hbm: int
    ici_bandwidth: float
    clock: float
    dimensions: int
    cores: dict[int, int]
    chips_per_host: int = 4


CHIPS = {
    "v4": Chip(275e12, int(30.75 * 2**30), 2400e9 / 8, 1.05e9, dimensions=3, cores={4: 240}),
    "v5e": Chip(197e12, int(15.75 * 2**30), 1600e9 / 8, 1.5e9, dimensions=2, cores={1: 24, 4: 112, 8: 224}),
    "v5p": Chip(459e12, int(95.74 * 2**30), 4800e9 / 8, 1.75e9, dimensions=3, cores={4: 208}),
    "v6e": Chip(918e12, int(31.25 * 2**30), 3584e9 / 8, 1.75e9, dimensions=2, cores={1: 44, 4: 180, 8: 180}),
}


FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # shapes of two dimensions that clouds have
ALONE = 8  # chips of a flat slice, at most, that one machine holds
# Shapes of three dimensions that clouds choose for a number of chips.
DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
# Other ways to write a slice: v5litepod-8, TPU-v4-32, v5e-2x4; how clouds and people call a kind of chip.
OTHERWISE = re.compile(r"(?:tpu[-_ ]?)?(v5-?lite(?:pod)?|v\d+[a-z]*)[-_: ]*([1-9][\dx]*)", re.IGNORECASE)
ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5-lite": "v5e", "v5-litepod": "v5e"}
CORES = 2  # of a chip of v4 and v5p, which clouds count in a name
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
    def link_bandwidth(self) -> float:
        """Bytes per second that a chip can send to one neighbour."""
        return self.chip.ici_bandwidth / (2 * len(self.shape))

    @property
    def ring(self) -> tuple[bool, ...]:
        """Whether the last chip along each dimension is a neighbour of the first."""
        ring = RING[len(self.shape)]
        whole = all(size % ring == 0 for size in self.shape)
        return tuple(whole if len(self.shape) == 3 else size == ring for size in self.shape)

    @property
    def hosts(self) -> int:
        """How many machines hold it."""
        alone = len(self.shape) == 2 and self.chips <= ALONE
        return 1 if alone else self.chips // self.chip.chips_per_host


def parse_topology(text: str) -> Slice:
    """Reads a slice as it is written, `v5e:16x16` or `v4:4x4x8`.

    Raises:
        UserError: no such chip, or no shape in which it comes; of names that clouds give, `v5litepod-8`, it tells what
            they are here. They are not accepted: the number counts chips of some kinds and cores of others.
    """
    kind, _, shape = text.partition(":")
    _check_name(text)
    chip = CHIPS[choose("TPU", kind, CHIPS)]
    example = "x".join(["4"] * chip.dimensions)
    if not _is_shape(shape, chip):
        words = f"a slice of {kind} has {chip.dimensions} dimensions"
        raise UserError(f"topology {text!r} is not understood; {words}: --topology={kind}:{example}.")
    found = Slice(kind, tuple(map(int, shape.split("x"))))
    if chip.dimensions == 2 and shape not in FLAT:
        raise UserError(f"no cloud has a {kind} of {shape}; choose from {', '.join(FLAT)}.")
    if chip.dimensions == 3 and found.chips % chip.chips_per_host:
        raise UserError(f"no cloud has a {kind} of {shape}: the smallest is 2x2x1, one machine.")
    return found


def _is_shape(text: str, chip: Chip) -> bool:
    return bool(re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text)) and text.count("x") == chip.dimensions - 1


def _check_name(text: str) -> None:
    """Raises UserError for another way to write a slice."""
    found = OTHERWISE.fullmatch(text)
    kind = ALIASES.get(found[1].lower(), found[1].lower()) if found else ""
    if found is None or kind not in CHIPS or (text == f"{kind}:{found[2]}" and "x" in found[2]):
        return
    chip, shape, told = CHIPS[kind], found[2], ""
    if shape.isdecimal():
        chips = int(shape) / (CORES if chip.dimensions == 3 else 1)
        shapes = FLAT if chip.dimensions == 2 else DEEP
        told = f"{chips:g} chips" if chip.dimensions == 2 else f"{shape} cores, {chips:g} chips"
        shape = next((each for each in shapes if math.prod(map(int, each.split("x"))) == chips), "")
        if not shape:
            raise UserError(
                f"no cloud has a {kind} of {told}; choose from {', '.join(shapes)}: --topology={kind}:SHAPE."
            )
    if _is_shape(shape, chip):
        told = f" ({told})" if told else ""
        raise UserError(f"topology {text!r}{told} is written with its shape here: --topology={kind}:{shape}.")
