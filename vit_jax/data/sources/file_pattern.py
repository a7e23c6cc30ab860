"""Files named by a folder or a pattern, divided into splits by their names."""

import glob
import itertools
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

from vit_jax import UserError
from vit_jax.data.sources.splits import SPLIT_WORDS
from vit_jax.storage import Version, filesystem

WILDCARD = re.compile(r"[*?\[{]")
BRACES = re.compile(r"\{([^{}]*)\}")
NUMBERS = re.compile(r"(\d+)\.\.(\d+)")
OPTION = re.compile(r",([a-z]+)=([^,{}]*)$")
OF_TOTAL = re.compile(r"(?:.*/)?([\w.-]+?)-\d{5,}-of-\d{5,}\b")


class FoundFile(NamedTuple):
    """A file that a pattern matches.

    Attributes:
        path: local or remote.
        name: the path relative to the folder of the pattern.
        size: in bytes; None: not known.
        version: the version of a remote file when it was listed; None for a local file.
    """

    path: str
    name: str
    size: int | None
    version: Version | None


def read_options(pattern: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Returns a pattern without the options at its end, and the options: of `FOLDER,label=kind`, FOLDER and
    {"label": "kind"}.

    Raises:
        UserError: an option is not among the `known` ones, is given twice, or has no value.
    """
    options: dict[str, str] = {}
    while match := OPTION.search(pattern):
        pattern = pattern[: match.start()]
        if match[1] in options:
            raise UserError(f"the option {match[1]} of the data source {pattern} is given twice; give it once")
        options[match[1]] = match[2]
    for name, value in options.items():
        if name not in known or not value:
            words = " or ".join(f",{one}=NAME" for one in known)
            raise UserError(
                f"{name}={value} is no option of the data source {pattern}; write {words} after the pattern"
            )
    return pattern, options


def expand_braces(pattern: str) -> list[str]:
    """Returns the patterns without braces that a pattern stands for: `{000..127}` is each of these numbers, `{a,b}` is
    a or b.
    """
    parts = BRACES.split(pattern)  # text and contents of braces in turn
    choices = [_choices(part) if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _choices(inside: str) -> list[str]:
    if not (match := NUMBERS.fullmatch(inside)):
        return inside.split(",")
    first, last = match[1], match[2]
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]


def find_folder(pattern: str, suffix: str) -> tuple[str, str]:
    """Returns the folder of a pattern, and the rest of the pattern, which is empty if the pattern is a folder itself.

    A pattern is a folder if it has no wildcards and does not end with `suffix`. In a local path, the characters of
    wildcards mean themselves as far as the path exists.
    """
    pattern = filesystem.absolute_path(pattern)
    existing = "" if filesystem.is_remote(pattern) else pattern
    while existing and not os.path.exists(existing):
        existing = existing.rpartition("/")[0]
    if wildcard := WILDCARD.search(pattern, len(existing)):
        folder = pattern[: wildcard.start()].rpartition("/")[0]
    elif pattern.endswith(suffix):
        folder = pattern.rpartition("/")[0]
    else:
        return pattern.rstrip("/"), ""
    return folder, pattern[len(folder) + 1 :]


def find_files(pattern: str, suffix: str) -> list[FoundFile]:
    """Lists the files of a pattern in the order of its braces, and else in the order of their names.

    Args:
        pattern: a folder, with files in it or in its folders, or a path with `*`, `?`, `[...]`, `{000..127}`, `{a,b}`.
        suffix: the suffix of the files that are looked for in a folder.

    Raises:
        UserError: there are no files, a file that the pattern names is missing or is a link to nothing, or the store
            cannot be read.
    """
    folder, rest = find_folder(pattern, suffix)
    is_file = bool(rest) and not filesystem.is_remote(folder) and os.path.exists(filesystem.join_path(folder, rest))
    if is_file:
        wanted, patterns = [rest], [glob.escape(rest)]
    else:
        wanted = expand_braces(rest) if rest else [f"*{suffix}", f"*/*{suffix}"]
        patterns = [BRACES.sub("*", rest)] if rest else wanted
    versions: dict[str, Version | None] = {}  # of each file that is here
    for listed in patterns:
        for path, version in filesystem.expand_pattern(filesystem.join_path(glob.escape(folder), listed)).items():
            versions["/".join(path.split("/")[-1 - listed.count("/") :])] = version
    if not versions:
        raise UserError(f"there are no files {filesystem.join_path(folder, rest or f'*{suffix}')}")
    if missing := [one for one in wanted if not WILDCARD.search(one) and one not in versions]:
        raise UserError(
            f"{len(missing)} of the {len(wanted)} files of {pattern} are missing in {folder}, such as {missing[0]}"
        )
    matched = [
        name for one in wanted for name in ([one] if one in versions else [x for x in versions if fnmatchcase(x, one)])
    ]
    return [_found_file(filesystem.join_path(folder, name), name, versions[name]) for name in dict.fromkeys(matched)]


def _found_file(path: str, name: str, version: Version | None) -> FoundFile:
    """Returns a file that was listed, with its size; raises UserError if it is a link to nothing."""
    try:
        return FoundFile(path, name, version.size if version else os.path.getsize(path), version)
    except FileNotFoundError:
        raise UserError(f"{path} is a link to a file that is missing; restore that file, or remove the link") from None


def files_of_splits(
    files: list[FoundFile], stated: Mapping[str, str] = MappingProxyType({})
) -> Mapping[str, list[FoundFile]]:
    """Returns split -> its files, in the order of `found`.

    The split of a file is what `stated` has for its name. If that has nothing, the split is the part of the name before
    `-00000-of-00016`; or else what the first word of the name that stands for a split means (`SPLIT_WORDS`); or else
    train.

    Args:
        found: the files.
        stated: name of a file -> its split.
    """
    splits: dict[str, list[FoundFile]] = {}
    for file in files:
        splits.setdefault(stated.get(file.name) or split_in_name(file.name), []).append(file)
    return splits


def split_in_name(name: str) -> str:
    """Returns the split that the name of a file states, see `files_of_splits`; train if it states none."""
    if match := OF_TOTAL.match(name):
        return match[1]
    return next((SPLIT_WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLIT_WORDS), "train")
