"""Errors that a user can cause, told in one sentence."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Wrong usage: command lines print the sentence and exit with code 2."""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the nearest option, or the list of options if none is near."""
    options = sorted(options)
    near = difflib.get_close_matches(word, options, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; choose from {', '.join(options)}."


def choose(what: str, word: str, options: Iterable[str]) -> str:
    """Returns `word` if it is one of `options`.

    Raises:
        UserError: `word` is none of them; names the nearest.
    """
    options = list(options)
    if word not in options:
        raise UserError(f"unknown {what} {word!r}{did_you_mean(word, options)}")
    return word


class NonFiniteLoss(Exception):
    """Training met more non-finite losses in a row than allowed: command lines print the sentence and exit with 1."""
