"""Writes the table of the packages that an installation without extras consists of, with who requires each.

Example:
  python -m docs.packages --write=CONTRIBUTING.md
"""

import argparse
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.pages import print_sections
from vit_jax import first_names
from vit_jax.text_tables import markdown_table

PROJECT = "vit_jax"
LARGE = 10e6  # bytes; smaller packages share a row


def own_requirements() -> list[str]:
    """Returns what pyproject.toml requires without extras."""
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    return tomllib.loads(text)["project"]["dependencies"]


def find_packages() -> dict[str, set[str]]:
    """Returns name of each package that the project needs, directly or not -> the names of those that require it."""
    found: dict[str, set[str]] = {}
    queue = [(PROJECT, "", text) for text in own_requirements()]
    seen = set(queue)
    while queue:
        requirer, extra, text = queue.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, set()).add(requirer)
        more = metadata.distribution(name).requires or ()
        new = {(name, extra, one) for one in more for extra in ("", *requirement.extras)} - seen
        seen |= new
        queue += sorted(new)
    return found


def count_bytes(name: str) -> int:
    """Returns the bytes of the installed files of a package, without what Python compiles of them."""
    files = [file for file in metadata.distribution(name).files or () if "__pycache__" not in file.parts]
    return sum(Path(path).stat().st_size for path in map(metadata.PackagePath.locate, files) if Path(path).is_file())


def make_table() -> str:
    """Returns the table in Markdown, the largest packages first."""
    packages = find_packages()
    sizes = {name: count_bytes(name) for name in packages}
    large = sorted((name for name in sizes if sizes[name] >= LARGE), key=sizes.__getitem__, reverse=True)
    requirers = {name: sorted(packages[name], key=lambda one: (one != PROJECT, one)) for name in large}
    rows = [(name, f"{sizes[name] / 1e6:.0f}", first_names(requirers[name])) for name in large]
    rest = sum(size for name, size in sizes.items() if name not in large)
    rows.append((f"{len(sizes) - len(large)} others", f"{rest / 1e6:.0f}", ""))
    rows.append((f"all {len(sizes)}", f"{sum(sizes.values()) / 1e6:,.0f}", ""))
    return markdown_table([("package", "MB", "required by"), *rows])


def main(argv: list[str]) -> None:
    """Prints the table, and writes it to the page that --write names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page, whose section `packages` is replaced")
    print_sections([("packages", make_table().splitlines())], parser.parse_args(argv[1:]).write)


if __name__ == "__main__":
    main(sys.argv)
