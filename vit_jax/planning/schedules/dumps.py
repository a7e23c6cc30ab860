"""The final schedules that libtpu writes while it compiles, one file for each operation of a program."""

import os
import re
from pathlib import Path

from vit_jax.planning.schedules.scalar_unit import OperationCost, read_schedule

VARIABLE = "LIBTPU_INIT_ARGS"  # libtpu reads it once, when it is loaded
FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=(^final_bundles|deduplication-map)"
)
FOLDER = re.compile(re.escape(FLAGS).replace(r"\{folder\}", r"(\S+)"))
FILE = re.compile(r"\d+-(.+?)-\d+-final_bundles\.txt")


def dump_environment(folder: str) -> dict[str, str]:
    """Returns the variable with which a process writes schedules into a folder; compiling then takes twice as long."""
    return {VARIABLE: f"{other_flags()} {FLAGS.format(folder=folder)}".strip()}


def dump_folder() -> Path | None:
    """Returns the folder into which this process writes schedules; None: it writes none."""
    match = FOLDER.search(os.environ.get(VARIABLE, ""))
    return Path(match[1]) if match else None


def other_flags() -> str:
    """Returns libtpu's flags from the environment without those that ask for schedules."""
    return FOLDER.sub("", os.environ.get(VARIABLE, "")).strip()


def delete_dumps(folder: Path) -> None:
    """Deletes the schedules of what was compiled before."""
    for path in folder.iterdir():
        path.unlink()


class Dumps:
    """The schedules of the program that was compiled last."""

    def __init__(self, folder: Path) -> None:
        self._read: dict[Path, OperationCost | None] = {}
        paths = sorted(folder.glob("*.txt"))
        self._files = {name[1]: path for path in paths if (name := FILE.fullmatch(path.name))}
        for path in paths:
            if path.name.endswith("-deduplication-map.txt"):
                self._add_equal_operations(path.read_text())

    def _add_equal_operations(self, text: str) -> None:
        """Adds the operations without a file of their own, which libtpu found equal to an operation with a file.

        Args:
            text: the text of a deduplication map.
        """
        for group in text.split("key:"):
            names = re.findall(r"^  (.+)$", group, re.MULTILINE)
            one = next((self._files[name] for name in names if name in self._files), None)
            if one:
                self._files = dict.fromkeys(names, one) | self._files

    def read(self, name: str) -> OperationCost | None:
        """Returns the schedule of the operation with this name in the program; None: there is none that can be read."""
        path = self._files.get(name)
        if path is None:
            return None
        if path not in self._read:
            try:
                self._read[path] = read_schedule(path.read_text())
            except ValueError:
                self._read[path] = None
        return self._read[path]
