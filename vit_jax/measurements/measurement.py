"""One measured quantity, beside what it should be, and advice for one that is off."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

MARGIN = 0.15  # by which a quantity may differ from its prediction
# What is off -> the flags of `vit_jax.main`, or the command, that avoid it.
ADVICE: Mapping[str, str] = {
    "products": "another program uses the devices, or they are too hot: python -m vit_jax.doctor",
    "memory": "another program uses the devices, or they are too hot: python -m vit_jax.doctor",
    "transfer": "fewer bytes a step: --config.resolution",
    "collective": "split over fewer devices of the slow axis: --config.mesh.fsdp, --config.mesh.tensor; if hosts carry "
    "it, --config.mesh.slice",
    "kernel values": "--config.model.attention=tokens_first, or --config.model.mlp=jit for that of the MLP; a run "
    "replaces the kernel by itself",
    "kernel time": "--config.model.attention=tokens_first; a run with auto that starts here with "
    "--config.use_measured_times=True chooses it",
    "step": "--config.profile_steps=5 shows where the time goes; then --config.model.attention=tokens_first, "
    "--config.mesh.fsdp, or --config.compiler_options=NAME= to omit an option",
    "compile": "--config.model.scan=True compiles one block",
    "device memory": "--config.model.remat=mlp or --config.accum_steps=2",
    "loader": "--config.data.workers=N for N worker processes, --config.data.fast=True, or pack the images "
    "(python -m vit_jax.pack)",
    "together": "--config.data.workers=N, so that reading leaves the thread that trains alone",
    "checkpoint": "save more seldom: --config.checkpoint_every, --config.checkpoint_every_minutes",
    "curve": "no result of these devices is to be trusted: --config.model.dtype=float32 and "
    "--config.model.attention=tokens_first tell which part is wrong",
}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One measured quantity: a line of a record.

    Attributes:
        name: the name of the quantity.
        unit: the unit. A quantity with a unit per second, such as GB/s, is better if it is larger; any other is better
            if it is smaller.
        measured: the measured value; None: it was not measured, and `note` says why.
        spread: the interquartile range of the measured value.
        predicted: the predicted value; None: there is no prediction.
        source: where the prediction comes from.
        kind: what the prediction is: `near` (the quantity should be as large), `limit` (it may be better), or `bound`
            (it cannot be better).
        margin: the relative difference from which the quantity is off.
        advice: a key of `ADVICE`. A quantity that has one although it was not measured has failed.
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

    def to_json(self) -> dict[str, str | float | None]:
        """Returns the fields that differ from their defaults, numbers rounded to six significant digits.

        `Measurement(**fields)` rebuilds it from them.
        """
        given = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        told = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in given.items()}
        return {name: value for name, value in told.items() if value != DEFAULTS.get(name, dataclasses.MISSING)}

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
        """Returns how the quantity is off, or an empty text if it is not.

        The part of a difference that `spread` explains does not count. A quantity that was not measured has failed if
        it has `advice`.
        """
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


DEFAULTS = {each.name: each.default for each in dataclasses.fields(Measurement)}


def merge_hosts(hosts: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Returns one row for each quantity: that of the host where it is worst.

    A note names that host if another one is better by more than `MARGIN`. A host that has the row but could not measure
    it is worse than any other. Hosts without the row do not count.
    """
    names = dict.fromkeys(row.name for rows in hosts for row in rows)
    by_name = [{row.name: row for row in rows} for rows in hosts]
    return [_worst({host: rows[name] for host, rows in enumerate(by_name) if name in rows}) for name in names]


def _worst(rows: Mapping[int, Measurement]) -> Measurement:
    missing = [host for host, row in rows.items() if row.measured is None]
    if missing:
        row = rows[missing[0]]
        only_some_failed = len(missing) < len(rows)
        return dataclasses.replace(row, note=f"host {missing[0]}: {row.note}") if only_some_failed else row
    values = {host: row.measured or 0.0 for host, row in rows.items()}
    host, best = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    if not rows[host].is_rate:
        host, best = best, host
    row = rows[host]
    if dataclasses.replace(row, predicted=values[best], kind="limit").verdict == "":
        return row
    words = f"host {host} is the slowest; the fastest, host {best}: {values[best]:.4g} {row.unit}"
    return dataclasses.replace(row, note="; ".join(filter(None, (words, row.note))))
