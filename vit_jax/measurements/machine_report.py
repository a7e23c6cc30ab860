"""A record of a machine as lines of text, and as an HTML page."""

from collections.abc import Iterable
from html import escape

from vit_jax.analysis import html
from vit_jax.measurements.machine_record import MachineRecord
from vit_jax.measurements.measurement import ADVICE, Measurement

HEADINGS = ("", "predicted", "measured", "ratio", "", "predicted by", "note")
NUMBERS = range(1, 4)  # places of the columns that are numbers
SECTIONS = {
    "products": "Matrix products",
    "memory": "Memory of the devices",
    "collectives": "Collectives over each axis of the mesh",
    "attention": "Attention beside the plain form",
    "steps": "Training steps",
    "loading": "Loader and step",
    "saving": "Checkpoints",
    "curve": "A curve beside the one recorded on a CPU",
}
VERDICTS = {"worse": "worse than predicted", "better": "better than predicted", "failed": "failed"}
# A bar that ends in the middle of its cell: the quantity is as predicted.
STYLE = """
.off td, .off th { color: var(--off) } :root { --off: #b42318 }
@media (prefers-color-scheme: dark) { :root { --off: #ff8f85 } }
.ratio { position: relative; height: .7rem; margin-top: .4rem; border-right: 1px solid var(--line);
  background: linear-gradient(var(--faint), var(--faint)) 50% 0 / 1px 100% no-repeat }
.ratio span { position: absolute; inset: .1rem auto .1rem 0; background: var(--bar) }
.off .ratio span { background: var(--off) }
.wide table { width: 100%; min-width: 56rem; table-layout: fixed } .wide td { min-width: 0 }
.wide th[scope=row] { font-weight: 400 } .wide thead tr > * { width: 13% }
.wide thead tr > :first-child, .wide thead tr > :last-child { width: 22% }
.wide thead tr > :nth-child(3) { width: 17% }
.wide thead tr > :nth-child(4), .wide thead tr > :nth-child(5) { width: 6.5% }
"""


def format_row(section: str, row: Measurement) -> str:
    """Returns a row as a line."""
    measured = _measured(row) or f"not measured: {row.note}"
    if row.predicted is not None:
        ratio = "" if row.ratio is None else f", ratio {row.ratio:.3g}"
        measured += f" ({row.source} {_quantity(row.predicted, row)}{ratio})"
    note = f"; {row.note}" if row.note and row.measured is not None else ""
    mark = f" [{VERDICTS[row.verdict]}]" if row.verdict else ""
    return f"{section}: {row.name}: {measured}{note}{mark}"


def format_off(record: MachineRecord) -> list[str]:
    """Returns a line for each row that is off, with what to do about it."""
    return [f"{section}: {row.name}: {_describe_off(row)}" for section, row in record.off()]


def _describe_off(row: Measurement) -> str:
    advice = "the prediction is wrong; please report it" if row.verdict == "better" else ADVICE[row.advice]
    if row.measured is None:
        return f"failed: {row.note}; {advice}."
    assert row.predicted is not None
    instead = f"{_quantity(row.measured, row)} instead of {_quantity(row.predicted, row)} ({row.source})"
    return f"{instead}; {advice}."


def _measured(row: Measurement) -> str:
    """Returns the measured value with its spread as text, which is empty if nothing was measured."""
    spread = f" ± {_number(row.spread)}" if row.spread else ""
    return "" if row.measured is None else _quantity(row.measured, row) + spread


def _quantity(value: float, row: Measurement) -> str:
    return f"{value:.2g}" if row.unit == "relative" else f"{_number(value)} {row.unit}"


def _number(value: float) -> str:
    """Returns a number with four digits, or as many as it has before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def hardware_page(record: MachineRecord) -> str:
    """Returns the HTML page of a record."""
    key, off = record.key, format_off(record)
    versions = ", ".join(f"{name} {version}" for name, version in key["versions"].items())
    facts = [
        ("devices", key["hardware"]),
        ("mesh", " x ".join(f"{axis} {size}" for axis, size in key["mesh"].items())),
        ("arguments", " ".join(key["arguments"])),
        ("measured in", f"{sum(section.seconds for section in record.sections.values()) / 60:.1f} minutes"),
        ("versions", f"vit_jax {key['vit_jax']} ({key['source']}), {versions}"),
    ]
    listed = "".join(f"<li>{escape(line)}</li>" for line in off)
    summary = f"<ul>{listed}</ul>" if off else "<p>Nothing is off.</p>"
    missing = [title for name, title in SECTIONS.items() if name not in record.sections]
    left = f"<p>Not measured yet: {escape(', '.join(missing))}.</p>" if missing else ""
    parts = [
        f"<h1>{escape(record.name)}</h1>",
        html.table((name, value) for name, value in facts if value),
        f"<h2>What is off by more than 15 %</h2>{summary}{left}",
        *(_section(SECTIONS[name], section.rows) for name, section in record.sections.items()),
    ]
    return html.document(f"Hardware: {record.name}", "\n".join(parts), f"<style>{STYLE}</style>")


def _section(title: str, rows: Iterable[Measurement]) -> str:
    return f'<h2>{escape(title)}</h2><div class="wide">{html.table(map(_line, rows), HEADINGS, NUMBERS)}</div>'


def _line(row: Measurement) -> html.Html:
    bound = ("at most " if row.is_rate else "at least ") if row.kind == "bound" else ""
    predicted = "" if row.predicted is None else bound + _quantity(row.predicted, row)
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    cells = (row.name, predicted, _measured(row), ratio, _bar(row.ratio), row.source, row.note)
    return html.row(cells, NUMBERS, "off" if row.verdict else "")


def _bar(ratio: float | None) -> html.Html:
    """Returns a bar that is as long as the ratio, up to a ratio of 2; empty: there is no ratio."""
    bar = "" if ratio is None else f'<div class="ratio"><span style="width: {min(ratio, 2) / 2:.1%}"></span></div>'
    return html.Html(bar)
