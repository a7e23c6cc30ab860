"""The part of a report on where the time of a run went."""

from html import escape

from vit_jax.analysis.run_cost import show_seconds
from vit_jax.monitoring import RunFolder, goodput, total_seconds

WORDS = (
    "Every second from the start of the first process to the last that is known of the run, restarts included, as the "
    "first host spent it. Goodput is the share in which steps were made that count."
)


def time_part(run: RunFolder) -> str:
    """Returns the HTML for where the time of a run went."""
    total = total_seconds(run.starts)
    whole = sum(total.values())
    if not whole:
        return "<p>Not known: an earlier version trained the run.</p>"
    lines = [
        f'<tr><th scope="row">{category}</th><td class="number">{show_seconds(spent)}</td>'
        f'<td class="number">{spent / whole:.1%}</td>'
        f'<td><meter min="0" max="1" value="{spent / whole:.4f}">{spent / whole:.1%}</meter></td></tr>'
        for category, spent in total.items()
        if spent
    ]
    head = "".join(f'<th scope="col" class="number">{name}</th>' for name in ("time", "share"))
    table = f"<table><thead><tr><td></td>{head}<td></td></tr></thead><tbody>{''.join(lines)}</tbody></table>"
    starts = f"{len(run.starts):,} starts" if len(run.starts) > 1 else "1 start"
    first = run.starts[0].first
    since = f", since step {first:,}: what was before is not known" if first else ""
    words = f"Goodput {goodput(total):.1%} of {show_seconds(whole)}, {starts}{since}."
    return f"<p><strong>{escape(words)}</strong></p>{table}"
