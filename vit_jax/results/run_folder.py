"""Where the folders of runs lie."""

import posixpath
from pathlib import Path

from vit_jax import UserError
from vit_jax.storage import filesystem

CONFIG = "config.json"


def find_runs(folder: str) -> dict[str, str]:
    """Returns name -> folder of the run in a folder, local or remote, or of all runs below it.

    Raises:
        UserError: there is none.
    """
    top = filesystem.absolute_path(folder).rstrip("/")
    if filesystem.exists(filesystem.join_path(top, CONFIG)):
        return {posixpath.basename(top): top}
    remote = filesystem.is_remote(top)
    files = filesystem.list_files(top) if remote else [str(path.relative_to(top)) for path in Path(top).rglob(CONFIG)]
    found = sorted(posixpath.dirname(file) for file in files if posixpath.basename(file) == CONFIG)
    if not found:
        raise UserError(f"there is no run in {folder}: no folder there contains a {CONFIG}.")
    return {f"{posixpath.basename(top)}-{run.replace('/', '-')}": filesystem.join_path(top, run) for run in found}
