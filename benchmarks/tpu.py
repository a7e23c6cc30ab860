"""Compiles training steps, ours and big_vision's, for TPUs that are not here, and compares them, for docs/speed.md.

Example:
  python -m benchmarks.tpu --write=docs/speed.md

Takes hours the first time on two cores. Results are kept in benchmarks/tpu_results, so the same command compiles only
what is missing, and gives a row up after an hour; to compile a row again, delete its file. Rows of big_vision need
--big-vision, a checkout of its code.
"""

import argparse
import dataclasses
import fnmatch
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.tpu_process import ROOT, Report, compile_in_process
from benchmarks.tpu_rows import Row
from docs.pages import print_sections
from vit_jax import cli
from vit_jax.planning import parse_topology, plan_table, records
from vit_jax.planning.records import step_from_json

KEPT = ROOT / "benchmarks" / "tpu_results"

CODES = ("vit_jax", "big_vision")
POOLINGS = {"gap": 0, "token": 1}  # pooling -> tokens beside the patches
IMAGES = {  # model -> images a chip
    "S/16": 256,
    "B/16": 128,
    "B/32": 512,
    "L/16": 64,
    "H/14": 32,
    "R50+B/16": 64,
    "BiT-R50x1": 64,
}
PATCHES = {"S/16": 196, "B/16": 196, "B/32": 49, "L/16": 196, "H/14": 256, "R50+B/16": 196}
OTHER_CHIPS = ("v4:2x2x1", "v5p:2x2x1", "v6e:2x2")
GROWING = ("v5e:2x4", "v5e:8x8", "v5e:16x16")
SPLIT = {
    "copied": (),
    "split": (("mesh.data", 1), ("mesh.fsdp", -1)),
    "split over 8": (("mesh.data", -1), ("mesh.fsdp", 8)),
    "tensor": (("mesh.data", -1), ("mesh.tensor", 4)),
}
Fields: TypeAlias = tuple[tuple[str, Any], ...]
FORMS: dict[str, Fields] = {
    "none": (),
    "`qk_norm`": (("model.qk_norm", True),),
    "`rotary`": (("model.rotary", "axial"),),
    "`qk_norm` and `rotary`": (("model.qk_norm", True), ("model.rotary", "axial")),
    "`position=relative`": (("model.position", "relative"),),
    "`position=relative`, a table for each head": (("model.position", "relative"), ("model.relative_tables", "head")),
    "`position=relative`, plain form": (("model.position", "relative"), ("model.attention", "tokens_first")),
}
# The forms in which others publish B/16: arXiv 2508.10104 and 2303.11331 (here with 16-pixel patches).
PUBLISHED_FORMS: dict[str, Fields] = {
    "the paper's": (),
    "DINOv3's": (
        ("model.position", "none"),
        ("model.rotary", "centred"),
        ("model.registers", 4),
        ("model.layer_scale", 1e-5),
        ("model.qkv_bias", "query_value"),
        ("model.activation", "gelu"),
    ),
    "EVA-02's": (
        ("model.rotary", "axial"),
        ("model.qkv_bias", "query_value"),
        ("model.activation", "swiglu"),
        ("model.mlp_dim", 2048),
        ("model.mlp_norm", True),
    ),
}
REMAT = ("dots", "mlp", "attention", "full")  # from the most memory to the least
TWO_BLOCKS = ("model.depth", 2)
# The steps that a test compiles again.
CHECKED = (
    Row("vit_jax", "B/16", "v5e:2x2", IMAGES["B/16"], fields=(TWO_BLOCKS,)),
    Row("vit_jax", "L/16", "v5e:2x4", IMAGES["L/16"], fields=(TWO_BLOCKS, *SPLIT["split"])),
)
KINDS = ("matmul", "kernel", "reduction", "layout", "elementwise", "other")

Cells = list[str]


@dataclasses.dataclass(frozen=True)
class Result:
    """The compiler's report on a row.

    Attributes:
        row: the program.
        step: the report on the step; None: it was not compiled, or the compiler failed.
        macs: the multiply-accumulates of an image's forward pass.
        error: the error of the compiler; None: there was none, or the step was not compiled.
    """

    row: Row
    step: records.StepReport | None = None
    macs: int = 0
    error: str | None = None

    @property
    def schedule(self) -> records.StepSchedule | None:
        return self.step.executable.schedule if self.step and self.step.executable else None

    @property
    def cycles(self) -> int | None:
        """The cycles of a step by schedule, with the exchange that is not hidden; None without a schedule."""
        return self.schedule.cycles + self.schedule.exchange_exposed if self.schedule else None

    @property
    def estimate(self) -> int:
        """The cycles of a step by the compiler's estimate; kernels, for which there is none, by their schedules."""
        executable = self.step.executable if self.step else None
        return (executable.cycles or 0) + (executable.kernel_cycles or 0) if executable else 0

    @property
    def mfu(self) -> float:
        """The model FLOPs utilization by schedule, without the exchange, as a fraction."""
        assert self.schedule
        chip = parse_topology(self.row.target).chip
        return 6 * self.macs * self.row.images / (self.schedule.cycles / chip.clock * chip.device_flops)

    def cells(self) -> Cells:
        """Returns the cells of `CELLS`: estimate, schedule, exchange (exposed + hidden), peak memory and MFU.

        Estimate, schedule and exchange are in millions of cycles. An error stands in the first cell.
        """
        if self.step is None:
            return [self.error or "", "", "", "", ""]
        executable, schedule = self.step.executable, self.schedule
        if executable is None or schedule is None:
            return ["", "", "", f"does not fit: {plan_table.format_bytes(self.step.required_bytes)}", ""]
        return [
            f"{self.estimate / 1e6:.0f}",
            f"{schedule.cycles / 1e6:.1f}",
            f"{schedule.exchange_exposed / 1e6:.1f} + {schedule.exchange_hidden / 1e6:.1f}",
            plan_table.format_bytes(executable.peak_bytes),
            f"{self.mfu:.0%}",
        ]


CELLS = ("estimate", "schedule", "exchange", "peak", "MFU")


class Results:
    """Row -> result. A row without a kept report is compiled if its name matches a pattern, and its report is kept.

    Attributes:
        asked: the rows that were looked up so far.
    """

    def __init__(self, pattern: str, checkout: Path | None) -> None:
        self._pattern, self._checkout = pattern, checkout
        self.asked: dict[Row, None] = {}

    def __getitem__(self, row: Row) -> Result:
        self.asked[row] = None
        chosen = fnmatch.fnmatch(row.name, self._pattern) and (row.code == "vit_jax" or self._checkout is not None)
        kept = read_report(row)
        if kept is None and not chosen:
            return Result(row)
        if kept is None:
            kept = compile_row(row, self._checkout)
            report_path(row).parent.mkdir(exist_ok=True)
            report_path(row).write_text(json.dumps(kept, indent=1) + "\n")
        if "error" in kept:
            return Result(row, error=kept["error"])
        return Result(row, step_from_json(kept), kept["macs_per_image"])


def report_path(row: Row) -> Path:
    """Returns the file in which the compiler's report of a row is kept."""
    return KEPT / f"{row.name}.json"


def read_report(row: Row) -> Report | None:
    """Returns the kept report on a row; None: it was not compiled."""
    return json.loads(report_path(row).read_text()) if report_path(row).exists() else None


def compile_row(row: Row, checkout: Path | None) -> Report:
    """Compiles a row, and returns the compiler's report, or `error` if it does not compile."""
    words = json.dumps(dataclasses.asdict(row)), str(checkout or "")
    schedules = row.measure == "schedule"
    return compile_in_process(row.name, row.target, "benchmarks.tpu_rows", *words, schedules=schedules)


def table(labels: Iterable[str], rows: Iterable[Cells]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    labels = list(labels)
    return [f"| {' | '.join(cells)} |" for cells in (labels, ["---"] * len(labels), *rows)]


def has_theirs(model: str) -> bool:
    """Returns whether big_vision's step is compiled beside ours: for the plain Vision Transformers."""
    return "R50" not in model


def side_by_side(results: Results, rows: Iterable[Row]) -> list[str]:
    """Returns a table of our rows, with the results of big_vision beside ours."""
    lines = []
    for row in rows:
        ours = results[row]
        theirs = results[dataclasses.replace(row, code="big_vision")] if has_theirs(row.model) else None
        both = ours.schedule and theirs and theirs.schedule
        ratio = f"{theirs.schedule.cycles / ours.schedule.cycles:.2f}" if both else ""
        tokens = str(PATCHES[row.model] + POOLINGS[row.pooling]) if row.model in PATCHES else ""
        cells = theirs.cells() if theirs else [""] * len(CELLS)
        lines.append([f"{row.model}, {row.images}", row.target, tokens, *ours.cells(), *cells, ratio])
    names = [f"{code}: {CELLS[0]}" if not i else name for code in CODES for i, name in enumerate(CELLS)]
    return table(["model, images a chip", "chips", "tokens", *names, "theirs / ours, fetched again"], lines)


def every_model(targets: Iterable[str]) -> list[Row]:
    """Returns the rows of all models on some kinds of chips; plain Vision Transformers with a class token, too."""
    cases = itertools.product(IMAGES.items(), POOLINGS, targets)
    rows = [Row("vit_jax", model, target, images, pooling) for (model, images), pooling, target in cases]
    return [row for row in rows if has_theirs(row.model) or row.pooling == "gap"]


def models(results: Results) -> list[str]:
    """Returns the table of all models on v5e."""
    return side_by_side(results, every_model(["v5e:2x2"]))


def operations(results: Results) -> list[str]:
    """Returns the table of the cycles by kind of operation, for the models on v5e."""
    lines = []
    for (model, images), code in itertools.product(IMAGES.items(), CODES):
        found = results[Row(code, model, "v5e:2x2", images)] if code == "vit_jax" or has_theirs(model) else None
        if found and found.schedule:
            cycles = [f"{found.schedule.kinds.get(kind, 0) / 1e6:.1f}" for kind in KINDS]
            moved, copies = found.schedule.hbm_bytes / 1e9, found.schedule.copies_exposed / 1e6
            lines.append([f"{model}, {images}", code, *cycles, f"{copies:.1f}", f"{moved:.1f}"])
    return table(["model, images a chip", "code", *KINDS, "waits for copies", "GB moved"], lines)


def weights(results: Results) -> list[str]:
    """Returns the table of copied and split weights on eight chips."""
    lines = []
    for model, ways in (("B/16", ("copied", "split")), ("L/16", ("copied", "split", "tensor"))):
        copied = results[Row("vit_jax", model, "v5e:2x4", IMAGES[model])]
        for way in ways:
            # Chips that split the heads share their images.
            images = IMAGES[model]
            found = results[Row("vit_jax", model, "v5e:2x4", images, fields=SPLIT[way])]
            ratio = f"{found.cycles / copied.cycles:.2f}" if found.cycles and copied.cycles else ""
            lines.append([f"{model}, {images}", way, *found.cells(), ratio])
    return table(["model, images a chip", "weights", *CELLS, "step / copied"], lines)


def chips(results: Results) -> list[str]:
    """Returns the table of the models on the other kinds of chips."""
    return side_by_side(results, every_model(OTHER_CHIPS))


def tpu7x(results: Results) -> list[str]:
    """Returns the table of TPU7x, by the compiler's estimate alone, beside two chips whose schedules are known."""
    lines = []
    for model, target in itertools.product(("S/16", "B/16"), ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")):
        ours, theirs = (results[Row(code, model, target, IMAGES[model])] for code in CODES)
        cells = [model, str(IMAGES[model]), target]
        for each in (ours, theirs):
            known = each.step and each.step.executable
            cells += [f"{each.estimate / 1e6:.0f}", plan_table.format_bytes(known.peak_bytes)] if known else ["", ""]
        cells.append(f"{theirs.estimate / ours.estimate:.2f}" if ours.estimate and theirs.estimate else "")
        both = ours.schedule and theirs.schedule
        cells.append(f"{theirs.schedule.cycles / ours.schedule.cycles:.2f}" if both else "")
        lines.append(cells)
    names = [f"{code}: {name}" for code in CODES for name in ("estimate", "peak")]
    return table(["model", "images a device", "chips", *names, "theirs / ours by estimate", "by schedule"], lines)


def batches(results: Results) -> list[str]:
    """Returns the table of the usual and of twice as many images a chip, on the other kinds of chips."""
    lines = []
    for model, target, times in itertools.product(("B/16", "L/16"), OTHER_CHIPS, (1, 2)):
        images = times * IMAGES[model]
        found = results[Row("vit_jax", model, target, images)]
        of_image = f"{found.schedule.cycles / images / 1e6:.3f}" if found.schedule else ""
        lines.append([f"{model}, {images}", target, *found.cells(), of_image])
    return table(["model, images a chip", "chips", *CELLS, "schedule of an image"], lines)


def mlp(results: Results) -> list[str]:
    """Returns the table of the MLP by the compiler and by the kernel, on v6e."""
    lines = []
    for model in ("B/16", "L/16"):
        forms = {"the compiler": (("model.mlp", "jit"),), "the kernel": ()}
        found = [results[Row("vit_jax", model, "v6e:2x2", IMAGES[model], fields=fields)] for fields in forms.values()]
        for form, each in zip(forms, found, strict=True):
            both = each.schedule and found[0].schedule
            ratio = f"{each.schedule.cycles / found[0].schedule.cycles:.2f}" if both else ""
            moved = f"{each.schedule.hbm_bytes / 1e9:.1f}" if each.schedule else ""
            lines.append([f"{model}, {IMAGES[model]}", form, *each.cells(), moved, ratio])
    return table(["model, images a chip", "MLP by", *CELLS, "GB moved", "schedule / the compiler's"], lines)


def growing(results: Results) -> list[str]:
    """Returns the table of B/16 on more and more chips."""
    lines = []
    images = IMAGES["B/16"]
    cases = [*itertools.product(("copied", "split"), GROWING), *(("split over 8", each) for each in GROWING[1:])]
    for way, target in cases:
        on_eight = SPLIT["copied" if way == "copied" else "split"]
        first = results[Row("vit_jax", "B/16", GROWING[0], images, fields=on_eight)]
        found = results[Row("vit_jax", "B/16", target, images, fields=SPLIT[way])]
        ratio = f"{found.cycles / first.cycles:.2f}" if found.cycles and first.cycles else ""
        lines.append([way, f"{target}, {parse_topology(target).chips}", *found.cells(), ratio])
    return table(["weights", "chips", *CELLS, "step / 8 chips"], lines)


def forms(results: Results) -> list[str]:
    """Returns the table of B/16 with normalised and rotated queries and keys, and with relative positions."""
    return _forms_table(results, FORMS, "gap")


def published_forms(results: Results) -> list[str]:
    """Returns the table of B/16 with a class token in the forms of the weights that others publish."""
    return _forms_table(results, PUBLISHED_FORMS, "token")


def _forms_table(results: Results, forms: Mapping[str, Fields], pooling: str) -> list[str]:
    """Returns the table of B/16 in several forms, of which the first is the one that others are compared with."""
    lines, first = [], next(iter(forms))
    plain, *_ = found = [
        results[Row("vit_jax", "B/16", "v5e:2x2", IMAGES["B/16"], pooling, fields)] for fields in forms.values()
    ]
    for form, each in zip(forms, found, strict=True):
        ratio = f"{each.schedule.cycles / plain.schedule.cycles:.2f}" if each.schedule and plain.schedule else ""
        lines.append([form, *each.cells(), ratio])
    return table(["form", *CELLS, f"schedule / {first}"], lines)


def checked(results: Results) -> list[str]:
    """Returns the table of the steps whose cycles and memory must not grow, as a test checks."""
    lines = []
    for row in CHECKED:
        blocks = "2" if TWO_BLOCKS in row.fields else "all"
        weights = "split" if {*SPLIT["split"]} <= {*row.fields} else "copied"
        lines.append([f"{row.model}, {row.images}", blocks, row.target, weights, *results[row].cells()])
    return table(["model, images a chip", "blocks", "chips", "weights", *CELLS], lines)


def memory(results: Results) -> list[str]:
    """Returns the table of B/16 with fewer and more images a chip, and with rematerialization."""
    lines, usual = [], IMAGES["B/16"]
    cases = [(images, "none") for images in (usual // 2, usual, 2 * usual)] + [(usual, policy) for policy in REMAT]
    for images, policy in cases:
        fields = () if policy == "none" else (("model.remat", policy),)
        found = results[Row("vit_jax", "B/16", "v5e:2x2", images, fields=fields)]
        of_image = f"{found.schedule.cycles / images / 1e6:.3f}" if found.schedule else ""
        lines.append([str(images), policy, *found.cells(), of_image])
    return table(["images a chip", "remat", *CELLS, "schedule of an image"], lines)


SECTIONS: dict[str, Callable[[Results], list[str]]] = {
    "models": models,
    "operations": operations,
    "weights": weights,
    "chips": chips,
    "tpu7x": tpu7x,
    "mlp": mlp,
    "batches": batches,
    "growing": growing,
    "memory": memory,
    "forms": forms,
    "published_forms": published_forms,
    "checked": checked,
}


def kept_rows() -> list[Row]:
    """Returns the rows of all tables that have a kept report."""
    results = Results("none", None)
    for section in SECTIONS.values():
        section(results)
    return [row for row in results.asked if report_path(row).exists()]


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="*", help="rows to compile, as in 'vit_jax-b_16-v5e_2x2-*'; none: no row [all]"
    )
    parser.add_argument("--big-vision", type=Path, help="a checkout of big_vision; omitted: its rows are not compiled")
    parser.add_argument("--write", type=Path, help="Markdown file in which to replace the tables")
    args = parser.parse_args(argv[1:])
    results = Results(args.only, args.big_vision.resolve() if args.big_vision else None)
    print_sections(((name, section(results)) for name, section in SECTIONS.items()), args.write)


if __name__ == "__main__":
    cli.run_command(main)
