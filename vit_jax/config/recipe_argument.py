"""The argument of a recipe: the text after the colon in `--config=FILE.py:KEY=VALUE,KEY=VALUE`."""

from collections.abc import Collection

SHORT = 3  # values that a message names where it shows the form of an argument


def parse_argument(arg: str, **keys: str | Collection[str]) -> dict[str, str]:
    """Returns the value of each key of a recipe's argument.

    Args:
        arg: `KEY=VALUE,KEY=VALUE`; a key that is left out has its default.
        keys: key -> the values that it may have, the default first; or, where any value will do, the default as text.

    Raises:
        ValueError: a key is unknown, or its value is missing or not one of those that it may have.
    """
    given = dict(part.partition("=")[::2] for part in arg.split(",") if part)
    if not given.keys() <= keys.keys() or not all(given.values()):
        form = ",".join(f"{key}={_show_values(key, values)}" for key, values in keys.items())
        raise ValueError(f"the argument {arg!r} is not {form}, of which any part may be left out")
    for key, value in given.items():
        if not isinstance(keys[key], str) and value not in keys[key]:
            raise ValueError(f"{key}={value} must be {key}=VALUE with one of the values {', '.join(keys[key])}")
    return {key: values if isinstance(values, str) else next(iter(values)) for key, values in keys.items()} | given


def _show_values(key: str, values: str | Collection[str]) -> str:
    """Returns the values of a key if they are few, and otherwise the key in capitals, which stands for a value."""
    return key.upper() if isinstance(values, str) or len(values) > SHORT else "|".join(values)
