"""Writes sections of a Markdown page, which stand between `<!-- NAME -->` and `<!-- /NAME -->`."""

import re
from collections.abc import Iterable
from pathlib import Path


def print_sections(sections: Iterable[tuple[str, Iterable[str]]], page: Path | None) -> None:
    """Prints the lines of each section, and writes them to the page if one is given.

    Args:
        sections: (name, lines) of each section; lines have no line breaks.
        page: the page, which must already have these sections; None: nothing is written.

    Raises:
        ValueError: see `replace_section`.
    """
    for name, lines in sections:
        text = "".join(f"{line}\n" for line in lines)
        print(text)
        if page:
            replace_section(page, name, text)


def replace_section(page: Path, name: str, text: str) -> None:
    """Replaces the text of a section in a page. The new text must end with a line break.

    Raises:
        ValueError: the page does not have exactly one such section.
    """
    before, after = re.split(rf"(?<=<!-- {name} -->\n).*(?=<!-- /{name} -->)", page.read_text(), flags=re.S)
    page.write_text(before + text + after)
