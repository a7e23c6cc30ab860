"""Sections of a Markdown page that a command writes, between `<!-- NAME -->` and `<!-- /NAME -->`."""

import re
from pathlib import Path


def replace_section(page: Path, name: str, text: str) -> None:
    """Writes the page with another text, which ends with a line break, in a section.

    Raises:
        ValueError: the page does not have exactly one such section.
    """
    before, after = re.split(rf"(?<=<!-- {name} -->\n).*(?=<!-- /{name} -->)", page.read_text(), flags=re.S)
    page.write_text(before + text + after)
