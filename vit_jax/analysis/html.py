"""A page of HTML that needs no other file and no network: its style, pictures inside it, its frame."""

import base64
from collections.abc import Collection, Iterable, Sequence
from html import escape

from vit_jax import printable

TYPES = {b"\x89PNG": "image/png", b"RIFF": "image/webp", b"<?xml": "image/svg+xml"}

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1f2328; --faint: #59636e; --line: #d1d9e0; --bar: #0072b2;
  --darkest: .75 }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --text: #e6edf3; --faint: #9198a1; --line: #3d444d; --bar: #56b4e9;
    --darkest: .5 }
}
body { margin: 0 auto; max-width: 76rem; padding: 1rem 1.5rem 4rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 2.5rem } h3 { font-size: 1rem; margin: 0 0 .4rem }
p { max-width: 46rem } a { color: var(--bar) } .faint, figcaption { color: var(--faint); font-size: .875rem }
img { max-width: 100%; height: auto; vertical-align: top } figure { margin: 0 }
table { border-collapse: collapse; font-size: .875rem } th { text-align: left; font-weight: 600 }
td, th { padding: .1rem .8rem .1rem 0; vertical-align: top } td { overflow-wrap: anywhere }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 33rem), 1fr)); gap: 1.2rem;
  align-items: start }
.pairs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 15rem), 1fr)) }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .8rem; min-width: 0 }
.card h3 { overflow-wrap: anywhere }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); gap: .6rem; margin-bottom: .5rem }
.card .row { grid-template-columns: repeat(auto-fit, minmax(7.2rem, 1fr)) }
.row img { width: 100%; border-radius: 4px } .pixels { image-rendering: pixelated }
.figures { display: grid; margin-top: 2.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 2rem }
.figures h2 { margin-top: 1rem } summary { cursor: pointer; color: var(--bar); font-size: .875rem }
.heads { overflow-x: auto } .heads td { padding: 1px .6rem 1px 0 } .heads img { max-width: none }
meter { width: 7rem } .wide { overflow-x: auto } .wide td { min-width: 9rem }
.wide th { white-space: pre-wrap }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 8px;
  padding: .8rem }
"""


class Html(str):
    """A part of a page, as HTML. Text of any other class is plain: it is escaped where it becomes part of a page."""


def document(title: str, body: str, head: str = "") -> str:
    """Returns a page in English, for light and dark screens.

    Args:
        title: plain text.
        body: HTML.
        head: HTML that is added to the head of the page.
    """
    start = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{head}"
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{start}</head>\n<body>{body}</body>\n</html>\n'


def data_url(file: bytes) -> str:
    """Returns a `data:` URL that contains a picture: PNG, WebP or SVG."""
    kind = next(kind for start, kind in TYPES.items() if file.startswith(start))
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def image(file: bytes, shows: str, attributes: str = "") -> Html:
    """Returns the HTML element of a picture, which contains its file.

    Args:
        file: PNG, WebP or SVG.
        shows: what the picture shows, for readers who do not see it.
        attributes: further attributes of the element, as HTML.
    """
    return Html(f'<img src="{data_url(file)}" alt="{escape(shows)}"{attributes and " " + attributes}>')


def picture(light: bytes, dark: bytes, shows: str) -> str:
    """Returns HTML that shows one of two files of a picture, by the theme of the reader's screen; see `image`."""
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{data_url(dark)}">'
    return f"<picture>{source}{image(light, shows)}</picture>"


def text(value: object) -> str:
    """Returns a value as HTML: `Html` as it is, anything else as plain text without control characters, escaped."""
    return value if isinstance(value, Html) else escape(printable(value))


def row(cells: Iterable[object], numbers: Collection[int] = (), kind: str = "") -> Html:
    """Returns a line of a table.

    Args:
        cells: plain text or HTML; the first names the line.
        numbers: the places of the cells that are numbers, counted from 0.
        kind: a class for the style; empty: none.
    """
    name, *others = map(text, cells)
    lines = (f"<td{_number(place in numbers)}>{cell}</td>" for place, cell in enumerate(others, 1))
    return Html(f'<tr{kind and f" class={kind}"}><th scope="row">{name}</th>{"".join(lines)}</tr>')


def table(rows: Iterable[Html | Sequence[object]], headings: Sequence[str] = (), numbers: Collection[int] = ()) -> Html:
    """Returns a table.

    Args:
        rows: the lines of the table, each as `row` returns it or as the cells that `row` takes.
        headings: the headings of the columns, plain text; empty: there is no line of headings.
        numbers: see `row`.
    """
    names = (
        f'<th scope="col"{_number(place in numbers)}>{text(name)}</th>' if name else "<td></td>"
        for place, name in enumerate(headings)
    )
    head = f"<thead><tr>{''.join(names)}</tr></thead>" if headings else ""
    lines = (line if isinstance(line, Html) else row(line, numbers) for line in rows)
    return Html(f"<table>{head}<tbody>{''.join(lines)}</tbody></table>")


def _number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def columns(names: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Returns a table that compares things side by side, with a column for each thing. All text is plain.

    Args:
        names: the names of the things; empty: there is only one thing, without a name.
        rows: the name of each line, and its value for each thing. A line without values is a heading.
    """
    heading = f'<tr><th scope="colgroup" colspan="{1 + len(names)}">'
    lines = [(name, *values) if values else Html(f"{heading}{text(name)}</th></tr>") for name, values in rows]
    return f'<div class="wide">{table(lines, ["", *names] if names else ())}</div>'


def meter(share: float) -> Html:
    """Returns a bar for a share between 0 and 1."""
    return Html(f'<meter min="0" max="1" value="{share:.4f}">{share:.1%}</meter>')
