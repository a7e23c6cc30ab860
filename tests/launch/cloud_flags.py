"""The flags of gcloud and kubectl, from tests/fixtures/cloud_flags.yaml, so that a launcher cannot make one up."""

from collections.abc import Sequence

import yaml

from tests.conftest import ROOT

TABLE = yaml.safe_load((ROOT / "tests" / "fixtures" / "cloud_flags.yaml").read_text())
# In a stand-in written for bash: ends like gcloud if a word is no flag of the command. $PLAY/flags has a line for each.
CHECK = r"""
name=${0##*/} command=${0##*/} flags=$'\n'$(< "$PLAY/flags")$'\n'
for word; do
  [[ $flags == *$'\n'"$command $word "* ]] || break
  command="$command $word"
done
for word; do
  flag=${word%%=*}
  if [[ $word == --* && $flags != *$'\n'"$command $flag"$'\n'* && $flags != *$'\n'"$name $flag"$'\n'* ]]; then
    echo "ERROR: ($name) unrecognized arguments: $word" >&2
    exit 2
  fi
done
"""


def list_flags(command: str) -> list[str]:
    """The flags that the pages of a command list."""
    return [*TABLE[command]["flags"].split(), *TABLE[command].get("newer", ())]


def flag_lines() -> str:
    """Each command with each of its flags, a line each, for `CHECK`."""
    return "".join(f"{command} {flag}\n" for command in TABLE for flag in list_flags(command))


def unknown_words(argv: Sequence[str]) -> list[str]:
    """What no reference page lists, of the words of a command: flags, values of flags, or the command itself."""
    names = [" ".join(argv[:count]) for count in range(len(argv), 1, -1)]
    command = next((name for name in names if name in TABLE), None)
    if command is None:
        return [" ".join(argv)]
    flags, unknown = {*list_flags(command), *list_flags(argv[0])}, []
    for word in argv:
        flag, _, value = word.partition("=")
        listed = [choice for kind in ("values", "newer") for choice in TABLE[command].get(kind, {}).get(flag, ())]
        if flag.startswith("--") and (flag not in flags or (listed and value not in listed)):
            unknown.append(word)
    return unknown
