"""The sentence that follows a word or a path that does not exist, with the nearest one that does."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from vit_jax.errors import UserError

NO_SYNONYMS: Mapping[str, str] = MappingProxyType({})


def choose(
    what: str, word: str, options: Iterable[str], where: str = "", synonyms: Mapping[str, str] = NO_SYNONYMS
) -> str:
    """Returns `word` if it is one of `options`; `where` says where they are listed, if there are many.

    Raises:
        UserError: `word` is not among them. The sentence names the nearest; if none is near, it names `where` or all.
    """
    options = list(options)
    if word in options:
        return word
    otherwise = f"{where} lists them." if where else f"choose from {', '.join(sorted(options))}."
    raise UserError(f"unknown {what} {word!r}; {hint(word, options, otherwise, synonyms)}")


def hint(
    word: str,
    options: Collection[str],
    otherwise: str,
    synonyms: Mapping[str, str] = NO_SYNONYMS,
    written: str = "{!r}",
) -> str:
    """Returns advice on what to write instead of an unknown word, as the end of a sentence.

    Args:
        word: as typed.
        options: the known words.
        otherwise: the advice if no known word is near.
        synonyms: see `nearest`.
        written: how an option is written, with {}.
    """
    near = nearest(word, options, synonyms)
    if near is None:
        return otherwise
    return f"did you mean {written.format(near)}?" if near in options else near


def nearest(word: str, options: Iterable[str], synonyms: Mapping[str, str] = NO_SYNONYMS) -> str | None:
    """Returns the option that an unknown word probably stands for, or None.

    Args:
        word: as typed; in GROUP.NAME, the name counts if the group is wrong.
        options: the known words.
        synonyms: name used elsewhere -> an option, or a sentence to return instead.
    """
    folded = {**synonyms, **{option.lower(): option for option in options}}
    word = str(word).lower()
    name = word.rpartition(".")[2].replace("-", "_")
    same = [one for one in folded if name and one.rpartition(".")[2] == name]
    near = [word] if word in folded else difflib.get_close_matches(word, same, n=1, cutoff=0.0)
    near = near or difflib.get_close_matches(word, folded, n=1)
    return folded[near[0]] if near else None


def nearest_path(path: Path) -> Path | None:
    """Returns the existing path that `path`, which does not exist, was probably meant to be, or None."""
    existing, suffix = Path(path.anchor), path.suffix
    for part in path.relative_to(path.anchor).parts:
        try:
            names = [part] if (existing / part).exists() else [entry.name for entry in existing.iterdir()]
        except OSError:
            return None
        if part not in names:
            # Compared without suffixes, which most files share; a file with the same suffix is preferred.
            stems = {Path(name).stem.lower(): name for name in sorted(names, key=lambda n: Path(n).suffix == suffix)}
            names = [stems[one] for one in difflib.get_close_matches(Path(part).stem.lower(), stems, n=1)]
            if not names:
                return None
            part = names[0]
        existing /= part
    return existing
