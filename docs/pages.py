"""Sections of a Markdown page that a command writes, between `<!-- NAME -->` and `<!-- /NAME -->`."""

import re
from collections.abc import Iterable
from pathlib import Path


def print_sections(sections: Iterable[tuple[str, Iterable[str]]], page: Path | None) -> None:
    """Prints the lines of one section after the other, and writes them to the page, if one is given.

    Raises:
        ValueError: see `replace_section`.
    """
    for name, lines in sections:
        text = "".join(f"{line}\n" for line in lines)
        print(text)
        if page:
            replace_section(page, name, text)


def replace_section(page: Path, name: str, text: str) -> None:
    """Writes the page with another text, which ends with a line break, in a section.

    Raises:
        ValueError: the page does not have exactly one such section.
    """
    before, after = re.split(rf"(?<=<!-- {name} -->\n).*(?=<!-- /{name} -->)", page.read_text(), flags=re.S)
    page.write_text(before + text + after)
