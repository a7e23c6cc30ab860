"""A tuple of entries of a catalog that prints as a table."""

import html
from typing import Any

from vit_jax.text_tables import align


class Table(tuple[Any, ...]):
    """Entries that print as a table, in notebooks too. `COLUMNS`, of the entries' class, names the attributes shown."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "no published checkpoint has such a name"
        right = [column for column, at_right in enumerate(_right_aligned(self)) if at_right]
        return "\n".join(align([self[0].COLUMNS, *map(_cells, self)], right))

    def _repr_html_(self) -> str:
        sides = ["right" if at_right else "left" for at_right in _right_aligned(self)]

        def row(tag: str, cells: tuple[str, ...]) -> str:
            pairs = zip(cells, sides, strict=True)
            return "".join(f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>' for cell, side in pairs)

        head = row("th", self[0].COLUMNS) if self else ""
        body = "".join(f"<tr>{row('td', _cells(entry))}</tr>" for entry in self)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(entry: Any) -> tuple[str, ...]:
    values = (getattr(entry, key) for key in entry.COLUMNS)
    return tuple("" if value is None else str(value) for value in values)


def _right_aligned(entries: tuple[Any, ...]) -> list[bool]:
    """Returns for each column whether all its cells are numbers or empty. A size such as `393.69 MiB` is a number."""
    columns = zip(*map(_cells, entries), strict=True)
    return [all(cell[:1].isdecimal() or not cell for cell in column) for column in columns]
