"""A record in words, and as a page."""

from collections.abc import Iterable
from html import escape

from vit_jax.analysis import html
from vit_jax.hardware.advice import ADVICE
from vit_jax.hardware.machine_record import Record
from vit_jax.hardware.row import Row

HEADINGS = ("", "predicted", "measured", "ratio", "", "predicted by", "note")
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
# A bar that ends at the middle: as predicted.
STYLE = """
.off td, .off th { color: var(--off) } :root { --off: #b42318 }
@media (prefers-color-scheme: dark) { :root { --off: #ff8f85 } }
.ratio div { position: relative; height: .7rem; margin-top: .4rem; border-right: 1px solid var(--line);
  background: linear-gradient(var(--faint), var(--faint)) 50% 0 / 1px 100% no-repeat }
.ratio span { position: absolute; inset: .1rem auto .1rem 0; background: var(--bar) }
.off .ratio span { background: var(--off) }
.wide table { width: 100%; min-width: 56rem; table-layout: fixed } .wide td { min-width: 0 }
.wide th[scope=row] { font-weight: 400 } .wide thead th { width: 13% }
.wide thead th:first-child, .wide thead th:last-child { width: 22% } .wide thead th:nth-child(3) { width: 17% }
.wide thead th:nth-child(4), .wide thead th:nth-child(5) { width: 6.5% }
"""


def format_row(section: str, row: Row) -> str:
    """Returns a row as a line."""
    measured = f"not measured: {row.note}" if row.measured is None else _quantity(row.measured, row)
    if row.measured is not None and row.spread:
        measured += f" ± {_number(row.spread)}"
    if row.predicted is not None:
        ratio = "" if row.ratio is None else f", ratio {row.ratio:.3g}"
        measured += f" ({row.source} {_quantity(row.predicted, row)}{ratio})"
    note = f"; {row.note}" if row.note and row.measured is not None else ""
    mark = f" [{VERDICTS[row.verdict]}]" if row.verdict else ""
    return f"{section}: {row.name}: {measured}{note}{mark}"


def format_off(record: Record) -> list[str]:
    """Returns a line for each row that is off, with what to do about it."""
    return [f"{section}: {row.name}: {_describe_off(row)}" for section, row in record.off()]


def _describe_off(row: Row) -> str:
    if row.verdict == "better":
        advice = "the prediction is wrong; please report it"
    else:
        advice = ADVICE[row.advice]
    if row.measured is None:
        return f"failed: {row.note}; {advice}."
    assert row.predicted is not None
    instead = f"{_quantity(row.measured, row)} instead of {_quantity(row.predicted, row)} ({row.source})"
    return f"{instead}; {advice}."


def _quantity(value: float, row: Row) -> str:
    return f"{value:.2g}" if row.unit == "relative" else f"{_number(value)} {row.unit}"


def _number(value: float) -> str:
    """Returns a number with four digits, or as many as it has before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def hardware_page(record: Record) -> str:
    """Returns the page of a record."""
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


def _section(title: str, rows: Iterable[Row]) -> str:
    head = "".join(
        f'<th scope="col"{" class=number" if name in HEADINGS[1:4] else ""}>{name}</th>' for name in HEADINGS
    )
    lines = "".join(_line(row) for row in rows)
    return f'<h2>{escape(title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>{lines}</table></div>'


def _line(row: Row) -> str:
    measured = "" if row.measured is None else _quantity(row.measured, row)
    measured += f" ± {_number(row.spread)}" if row.spread else ""
    bound = ("at most " if row.is_rate else "at least ") if row.kind == "bound" else ""
    predicted = "" if row.predicted is None else bound + _quantity(row.predicted, row)
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    numbers = "".join(f'<td class="number">{escape(text)}</td>' for text in (predicted, measured, ratio))
    words = f'<td>{escape(row.source)}</td><td class="note">{escape(row.note)}</td>'
    name = f'<th scope="row">{escape(row.name)}</th>'
    return f"<tr{' class=off' if row.verdict else ''}>{name}{numbers}<td class=ratio>{_bar(row.ratio)}</td>{words}</tr>"


def _bar(ratio: float | None) -> str:
    """Returns a bar as long as the ratio, at most 2."""
    return "" if ratio is None else f'<div><span style="width: {min(ratio, 2) / 2:.1%}"></span></div>'
