"""The tests."""

from typing import Any


def typechecked(decorated: Any) -> Any:
    """Checks types and shapes at run time; pyproject.toml names the packages. An int may be given for a float."""
    from beartype import BeartypeConf, beartype  # only here: benchmarks run some tests where it is not installed

    return beartype(decorated, conf=BeartypeConf(is_pep484_tower=True))
