"""Reads the final schedule that libtpu's compiler writes of one operation: its bundles, and what is scalar in them.

A bundle is what a TPU core issues in one cycle. Its text is one line, `0x1f : > { %s3 = sadd.s32 1, %s2 ;; ... }`,
where `%s` are scalars and `%p` predicates. Comments mark the regions to which branches lead.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

BUNDLE = re.compile(r"^(?=[ \t]*(?:0x[0-9a-f]+|0)[ \t]+(?:\w\w)?[ \t]*:)", re.MULTILINE)  # its beginning
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
# All but the vector units' instructions.
INSTRUCTION = re.compile(r" *(?:%(\w+) = )?((?:s|p|int_to_ptr|dma\.)[\w.]*) *(?:\[thread:[^]]*\])?(.*)", re.DOTALL)
PREDICATE = re.compile(r" *\((!?)%(p\w+)(?:, %?(\w+))?\),?")
TARGET = re.compile(r"target = \$region(\d+)")
MATMUL = re.compile(r"vmatmul([\w.]*)(?:\[\d+\])?\.mxu(\d)")  # v7 names the buffer of the result: .mrb[4].mxu0
STORED = re.compile(r"\[smem:\[(#allocation\d+_spill)\]\]")

# Rows of the left operand that a matrix unit takes from one instruction: of elements of two bytes, and of elements of
# four or from its own register (lmr). This count gives large products exactly their multiply-accumulates.
PACKED_ROWS, ROWS = 16, 8

END = "end"  # the region of the last bundle

Operand = int | str  # a constant, or the name of a scalar or a predicate


@dataclasses.dataclass(frozen=True)
class BundleInstruction:
    """An instruction of the scalar unit, or one that starts a transfer.

    Attributes:
        code: `sadd.s32`, `sbr.rel`, ...
        result: the name of its result; None: it has none.
        operands: constants and names.
        predicate: the name of the predicate that must be true for the instruction to be executed; None: it is always
            executed.
        negated: whether the predicate must be false instead.
        otherwise: the result if the instruction is not executed; None: there is none.
        target: the number of the bundle to which it branches; None: it is no branch.
        slot: the slot of memory to which it stores or from which it loads a scalar; None: it does neither.
        core_id: whether it reads which core of a chip this is.
    """

    code: str
    result: str | None
    operands: tuple[Operand, ...]
    predicate: str | None = None
    negated: bool = False
    otherwise: Operand | None = None
    target: int | None = None
    slot: str | None = None
    core_id: bool = False

    @property
    def reads(self) -> Iterable[str]:
        """The names that it depends on."""
        for name in (*self.operands, self.predicate, self.otherwise):
            if isinstance(name, str):
                yield name


@dataclasses.dataclass(frozen=True)
class Bundles:
    """The schedule of an operation. A bundle is given by its number, from 0.

    Attributes:
        count: the number of bundles.
        scalar: bundle -> its branches, transfers and the instructions on which these depend, in the order of their
            effects.
        rows: bundle -> matrix unit -> rows of the left operand that the bundle gives to the unit.
    """

    count: int
    scalar: dict[int, tuple[BundleInstruction, ...]]
    rows: dict[int, Counter[str]]


def parse_bundles(text: str) -> Bundles:
    """Returns the schedule that a dump of libtpu, `...-final_bundles.txt`, describes."""
    lines = BUNDLE.split(text)[1:]  # of several lines where a comment has several
    regions = {region: number for number, line in enumerate(lines) for region in REGION.findall(line)}
    regions[END] = len(lines) - 1  # which carries no mark
    rows: dict[int, Counter[str]] = {}
    parsed: dict[int, list[BundleInstruction]] = {}
    for number, line in enumerate(lines):
        for code, unit in MATMUL.findall(line):
            taken = PACKED_ROWS if ".bf16" in code and ".lmr" not in code else ROWS
            rows.setdefault(number, Counter())[unit] += taken
        parts = line.partition(":")[2].lstrip(" >{").split(";;")
        parsed[number] = [instruction for part in parts if (instruction := _parse_instruction(part, regions))]
    return Bundles(len(lines), _keep_needed(parsed), rows)


def _parse_instruction(part: str, regions: dict[str, int]) -> BundleInstruction | None:
    """Returns a scalar instruction or a transfer; None for all others."""
    match = INSTRUCTION.match(part)
    if match is None:
        return None
    result, code, rest = match.groups()
    rest = COMMENT.sub("", rest).rstrip(" }\n")
    predicate = PREDICATE.match(rest)
    rest = rest[predicate.end() :] if predicate else rest
    target = TARGET.search(rest)
    slot = STORED.search(rest) if code in ("sst", "sld") else None
    rest = rest[: target.start()] if target else rest[slot.end() :] if slot else rest
    return BundleInstruction(
        code,
        result,
        tuple(map(_operand, rest.split(","))),
        predicate[2] if predicate else None,
        bool(predicate and predicate[1]),
        _operand(predicate[3]) if predicate and predicate[3] else None,
        regions.get(target[1], regions[END]) if target else None,
        slot[1] if slot else None,
        code == "sld" and "/* core id */" in part,
    )


def is_transfer(code: str) -> bool:
    """Returns whether an instruction starts a transfer between memories of a chip, without waiting for its end.

    Transfers of scalar memory and of the host do not count.
    """
    return code.startswith("dma.") and not code.startswith(("dma.done", "dma.smem", "dma.host"))


def _operand(text: str) -> Operand:
    """Returns a constant or a name. An address becomes a name that no scalar has, so that its value is unknown."""
    text = text.strip()
    return int(text) if text.lstrip("-").isdecimal() else text.removeprefix("%")


def _keep_needed(parsed: dict[int, list[BundleInstruction]]) -> dict[int, tuple[BundleInstruction, ...]]:
    """Returns bundle -> its branches, transfers and the instructions on which these depend, directly or through others.

    Bundles without such instructions are absent.
    """
    everything = [each for bundle in parsed.values() for each in bundle]
    makers: dict[str, list[BundleInstruction]] = {}
    for each in everything:
        name = each.slot if each.code == "sst" else each.result
        if name:
            makers.setdefault(name, []).append(each)
    wanted = [each for each in everything if each.code == "sbr.rel" or is_transfer(each.code)]
    needed = {id(each) for each in wanted}
    while wanted:
        each = wanted.pop()
        names = [*each.reads, each.slot] if each.code == "sld" else each.reads
        for maker in (maker for name in names if name for maker in makers.get(name, [])):
            if id(maker) not in needed:
                needed.add(id(maker))
                wanted.append(maker)
    kept = {number: [each for each in bundle if id(each) in needed] for number, bundle in parsed.items()}
    # An sphi joins values at the head of a loop. It comes first, since others of its bundle read its result.
    return {
        number: tuple(sorted(bundle, key=lambda each: each.code != "sphi")) for number, bundle in kept.items() if bundle
    }
