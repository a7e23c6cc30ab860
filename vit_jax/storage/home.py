"""The home folder of the user, which containers may lack."""

from pathlib import Path

from vit_jax import UserError
from vit_jax.storage.file_names import check_names


def expand_home(path: str | Path, advice: str = "set HOME to a folder.") -> Path:
    """Returns a local path with `~` at its start replaced by the home folder.

    Raises:
        UserError: there is no such folder, and the message ends with `advice`; or see `check_names`.
    """
    check_names(path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"there is no home folder for {path}; {advice}") from None
