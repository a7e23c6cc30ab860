"""TPU chips and slices of them. A slice is named as libtpu names it: `v5e:16x16` is a slice of 256 v5e chips."""

import dataclasses
import math
import re

from vit_jax import UserError, choose

SHAPES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # all that clouds offer
MAX_CHIPS_PER_HOST = 8  # the largest slice of two dimensions that one machine holds
# The shapes of three dimensions that clouds choose for a number of chips.
SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
# Other spellings of a slice: v5litepod-8, TPU-v4-32, v5e-2x4; and what clouds and people call a kind of chip.
OTHER_NAME = re.compile(r"(?:tpu[-_ ]?)?(v5-?lite(?:pod)?|v?7x|ironwood|v\d+[a-z]*)[-_: ]*([1-9][\dx]*)", re.IGNORECASE)
KIND_ALIASES = {
    **dict.fromkeys(("v5litepod", "v5lite", "v5-lite", "v5-litepod"), "v5e"),
    **dict.fromkeys(("7x", "v7x", "ironwood", "v7"), "tpu7x"),
}
CORES_PER_CHIP = 2  # of the chips with slices of three dimensions, whose cores are counted in the names of clouds
# Number of dimensions of a slice -> chips along a dimension with which the torus closes. In two dimensions it closes
# along a dimension of exactly 16 chips. In three dimensions it closes along all of them if each has a multiple of 4.
TORUS_SIZE = {2: 16, 3: 4}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of chip: sizes, and speeds as Google publishes them (cloud.google.com/tpu/docs, one page per chip).

    Attributes:
        flops: peak operations per second, in bfloat16.
        hbm: bytes of memory that programs can use on a device, as libtpu's compiler counts them.
        ici_bandwidth: bytes per second that the chip can send to all of its neighbours together. It has two along each
            dimension.
        clock: the cycles per second that the compiler counts. They are `flops` divided by the operations that all
            matrix units together execute in a cycle.
        dimensions: the number of dimensions of a slice.
        cores: number of chips on a machine -> virtual CPU cores of that machine.
        hbm_bandwidth: bytes per second that the chip can read and write.
        pod_chips_per_host: chips on each machine, in a slice that has several machines.
        tensor_cores: the number of TensorCores of a device, which share the operations of a program.
        matrix_rows: rows of the left operand that a matrix unit takes in a cycle.
        granule_bytes: the unit, in bytes, in which libtpu's schedules state the sizes of transfers.
        devices: devices, as JAX counts them, of a chip. Each has its own memory and an equal part of `flops` and
            `hbm_bandwidth`; they share the links to other chips.
    """

    flops: float
    hbm: int
    ici_bandwidth: float
    clock: float
    dimensions: int
    cores: dict[int, int]
    hbm_bandwidth: float
    pod_chips_per_host: int = 4
    tensor_cores: int = 1
    matrix_rows: int = 1
    granule_bytes: int = 32
    devices: int = 1

    @property
    def device_flops(self) -> float:
        """Peak operations per second of a device, in bfloat16."""
        return self.flops / self.devices

    @property
    def device_hbm_bandwidth(self) -> float:
        """Bytes per second that a device can read and write."""
        return self.hbm_bandwidth / self.devices


CHIPS = {
    "v4": Chip(
        275e12,
        int(30.75 * 2**30),
        2400e9 / 8,
        1.05e9,
        dimensions=3,
        cores={4: 240},
        hbm_bandwidth=1228e9,
        tensor_cores=2,
        granule_bytes=512,
    ),
    "v5e": Chip(
        197e12,
        int(15.75 * 2**30),
        1600e9 / 8,
        1.5e9,
        dimensions=2,
        cores={1: 24, 4: 112, 8: 224},
        hbm_bandwidth=819e9,
    ),
    "v5p": Chip(
        459e12,
        int(95.74 * 2**30),
        4800e9 / 8,
        1.75e9,
        dimensions=3,
        cores={4: 208},
        hbm_bandwidth=2765e9,
        tensor_cores=2,
    ),
    "v6e": Chip(
        918e12,
        int(31.25 * 2**30),
        3584e9 / 8,
        1.75e9,
        dimensions=2,
        cores={1: 44, 4: 180, 8: 180},
        hbm_bandwidth=1638e9,
        matrix_rows=2,
    ),
    "tpu7x": Chip(
        2307e12,
        int(94.75 * 2**30),
        9600e9 / 2 / 8,  # 1,200 GB/s in both directions together
        2.2e9,
        dimensions=3,
        cores={4: 224},
        hbm_bandwidth=7380e9,
        matrix_rows=2,
        devices=2,
    ),
}


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
        """The kind of all chips of the slice."""
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        """The number of chips."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """The number of devices, as JAX counts them."""
        return self.chips * self.chip.devices

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second that a chip can send to one neighbour."""
        return self.chip.ici_bandwidth / (2 * len(self.shape))

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether the last chip along each dimension is a neighbour of the first."""
        size = TORUS_SIZE[len(self.shape)]
        if len(self.shape) == 3:
            return (all(chips % size == 0 for chips in self.shape),) * 3
        return tuple(chips == size for chips in self.shape)

    @property
    def hosts(self) -> int:
        """The number of machines."""
        single = len(self.shape) == 2 and self.chips <= MAX_CHIPS_PER_HOST
        return 1 if single else self.chips // self.chip.pod_chips_per_host

    @property
    def chips_per_host(self) -> int:
        """The number of chips on each machine."""
        return self.chips // self.hosts


def is_topology(target: str) -> bool:
    """Returns whether a target is a TPU slice, and not this machine's devices."""
    return ":" in target


def parse_topology(text: str) -> Slice:
    """Returns the slice that is written as `v5e:16x16` or `v4:4x4x8`.

    Names that clouds give, such as `v5litepod-8`, are not accepted, since their number counts chips of some kinds and
    cores of others; the error says how to write them here.

    Raises:
        UserError: there is no such chip, or it does not come in that shape.
    """
    kind, _, shape = text.partition(":")
    _check_other_name(text)
    chip = CHIPS[choose("TPU", kind, CHIPS)]
    example = "x".join(["4"] * chip.dimensions)
    if not _is_shape(shape, chip):
        reason = f"a slice of {kind} has {chip.dimensions} dimensions"
        raise UserError(f"cannot read the topology {text!r}: {reason}; write --topology={kind}:{example}.")
    tpu = Slice(kind, tuple(map(int, shape.split("x"))))
    if chip.dimensions == 2 and shape not in SHAPES_2D:
        raise UserError(f"no cloud offers a {kind} slice of {shape}; choose from {', '.join(SHAPES_2D)}.")
    if chip.dimensions == 3 and tpu.chips % chip.pod_chips_per_host:
        machine = f"whole machines of {chip.pod_chips_per_host} chips, at least 2x2x1"
        raise UserError(f"no cloud offers a {kind} slice of {shape}; choose a shape of {machine}.")
    return tpu


def _is_shape(text: str, chip: Chip) -> bool:
    return bool(re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text)) and text.count("x") == chip.dimensions - 1


def _check_other_name(text: str) -> None:
    """Raises UserError if the text is a spelling of a slice that others use, such as `v5litepod-8` or `v5e-2x4`."""
    match = OTHER_NAME.fullmatch(text)
    kind = KIND_ALIASES.get(match[1].lower(), match[1].lower()) if match else ""
    if match is None or kind not in CHIPS or (text == f"{kind}:{match[2]}" and "x" in match[2]):
        return
    chip, shape, count = CHIPS[kind], match[2], ""
    if shape.isdecimal():
        chips = int(shape) / (CORES_PER_CHIP if chip.dimensions == 3 else 1)
        shapes = SHAPES_2D if chip.dimensions == 2 else SHAPES_3D
        count = f"{chips:g} chips" if chip.dimensions == 2 else f"{shape} cores, {chips:g} chips"
        shape = next((each for each in shapes if math.prod(map(int, each.split("x"))) == chips), "")
        if not shape:
            choices = f"choose from {', '.join(shapes)}: --topology={kind}:SHAPE"
            raise UserError(f"no cloud offers a {kind} slice of {count}; {choices}.")
    if _is_shape(shape, chip):
        count = f" ({count})" if count else ""
        raise UserError(f"write the topology {text!r}{count} as a shape: --topology={kind}:{shape}.")
