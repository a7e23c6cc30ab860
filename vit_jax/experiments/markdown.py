"""Tables in Markdown."""

import re
from collections.abc import Sequence


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Returns a table of a head and lines, ended by a line break."""
    head, *rest = [re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines]
    return "\n".join([head, f"|{'---|' * len(lines[0])}", *rest]) + "\n"
