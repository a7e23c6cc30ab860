"""Tables of text, and of Markdown."""

import re
from collections.abc import Collection, Iterable, Sequence


def align(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Returns a line for each row of cells, all columns as wide as their widest cell and two spaces apart.

    Args:
        rows: the rows, each with the same number of cells.
        right: the numbers, from 0, of the columns whose cells are aligned on the right.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if column in right else str.ljust for column in range(len(widths))]
    columns = list(zip(pads, widths, strict=True))
    return [
        "  ".join(pad(cell, width) for cell, (pad, width) in zip(row, columns, strict=True)).rstrip() for row in rows
    ]


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown that ends with a line break. The first of `lines` is its head."""
    head, *rest = [re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines]
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *rest]) + "\n"
