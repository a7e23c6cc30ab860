"""One measured quantity, beside what it should be."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

MARGIN = 0.15  # by which a quantity may differ from its prediction


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a record.

    Attributes:
        name: of the quantity.
        unit: a rate, such as GB/s, is better the larger it is; anything else, the smaller it is.
        measured: None: it was not measured; `note` says why.
        spread: its interquartile range.
        predicted: None: nothing is known.
        source: of the prediction.
        kind: what the prediction is: `near` (the quantity should be as large), `limit` (it may be better), or `bound`
            (it cannot be better).
        margin: the relative difference from which the quantity is off.
        advice: a key of `advice.ADVICE`. A quantity that has one although it was not measured has failed.
        note: more words.
    """

    name: str
    unit: str
    measured: float | None
    spread: float = 0.0
    predicted: float | None = None
    source: str = ""
    kind: Literal["near", "limit", "bound"] = "near"
    margin: float = MARGIN
    advice: str = ""
    note: str = ""

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit.endswith("/s")

    @property
    def ratio(self) -> float | None:
        """Returns measured / predicted; None without one of them."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    @property
    def verdict(self) -> Literal["", "worse", "better", "failed"]:
        """Returns how the quantity is off, if it is; the difference that its spread explains does not count."""
        if self.measured is None:
            return "failed" if self.advice else ""
        if self.predicted is None:
            return ""
        difference = self.measured - self.predicted
        gain = difference if self.is_rate else -difference
        allowed = self.margin * min(self.measured, self.predicted) + self.spread
        if not -allowed <= gain and self.kind != "bound":  # what is not a number is worse
            return "worse"
        return "better" if gain > allowed and self.kind != "limit" else ""


def worst_of_hosts(rows: Sequence[Row]) -> Row:
    """Returns the worst of the hosts' rows of one quantity, with a note that names the host if the others differ."""
    values = [row.measured for row in rows]
    missing = [host for host, value in enumerate(values) if value is None]
    if missing or len(rows) == 1:
        host = missing[0] if missing else 0
        note = f"host {host}: {rows[host].note}" if missing and len(missing) < len(rows) else rows[host].note
        return dataclasses.replace(rows[host], note=note)
    known = [value for value in values if value is not None]
    pick = min if rows[0].is_rate else max
    host = pick(range(len(rows)), key=known.__getitem__)
    best = max(known) if rows[0].is_rate else min(known)
    if abs(best - known[host]) <= MARGIN * min(map(abs, (best, known[host]))) + rows[host].spread:
        return rows[host]
    words = f"host {host} is the slowest; the fastest host: {best:.4g} {rows[0].unit}"
    return dataclasses.replace(rows[host], note="; ".join(filter(None, (words, rows[host].note))))
