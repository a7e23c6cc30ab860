"""Writes the page of all fields of a configuration, and the table of the kinds of evaluations.

Example:
  python -m docs.fields --write=docs/fields.md
"""

import argparse
import itertools
import math
import re
import sys
from pathlib import Path

from docs.pages import replace_section
from vit_jax.config import EVAL_KINDS, FIELDS, Affects, Field
from vit_jax.config.fields import rule_of
from vit_jax.models import BitSpec, ModelSpec, field_words

INTRODUCTION = """# Fields of a configuration

All fields, as [vit_jax/config/fields.py](../vit_jax/config/fields.py) declares them. A recipe or a flag
sets a field: `--config.base_lr=0.01`. Where the default is `unset`, the value `None` removes a value that the recipe
sets. `--print` shows the fields of a recipe. What a resumed run may change is in [checkpoints.md](checkpoints.md). This
command writes the page:

```bash
python -m docs.fields --write=docs/fields.md
```
"""
GROUPS = {
    "": "The run",
    "model": "The model",
    "data": "The data",
    "task": "The task",
    "optim": "The optimizer",
    "adapt": "Adapters",
    "mesh": "The devices",
    "evals": "Each evaluation, `evals.NAME`",
    "checkpoint": "The checkpoints",
}

# The words that the specs of the models accept, by the last part of a field's name. A BiT accepts some of a ViT's.
WORDS = field_words(BitSpec()) | field_words(ModelSpec())


def accepted(field: Field) -> str:
    """Returns the cell `accepts` of a field: its words or bounds, and its rules that are not those of its group."""
    words = [" ".join(field.choices or WORDS.get(field.name.removeprefix("model."), ()))]
    bounded = field.minimum > -math.inf, field.maximum < math.inf
    if any(bounded):
        words.append(f"{field.minimum} to {field.maximum}" if all(bounded) else f"{field.minimum} or more")
    words += ["auto"] if field.auto else []
    words += [f"of {', '.join(field.kinds)}"] if field.kinds else []
    words += ["execution"] if field.affects is Affects.EXECUTION else []
    words += [f"on resume: {field.rule.value}"] if field.rule is not rule_of(field.name, field.affects) else []
    return "; ".join(filter(None, words))


def page() -> str:
    """Returns the page in Markdown."""
    lines = [INTRODUCTION]
    for group, fields in itertools.groupby(FIELDS.values(), lambda field: field.name.rpartition(".")[0].split(".")[0]):
        lines += [f"## {GROUPS[group]}", "", "| field | default | meaning | accepts |", "| --- | --- | --- | --- |"]
        for field in fields:
            default = "unset" if field.default is None else str(field.default) or "''"
            meaning, default = (text.replace("|", r"\|").replace("<", r"\<") for text in (field.meaning, default))
            lines.append(f"| `{field.name}` | `{default}` | {meaning} | {accepted(field)} |")
        lines.append("")
    return "\n".join(lines)


def kinds() -> str:
    """Returns the table of the kinds of evaluations in Markdown."""
    lines = ["| kind | what it does | metrics | fields of its own |", "|---|---|---|---|"]
    for kind, rules in EVAL_KINDS.items():
        metrics = [re.sub(r"{(\w+):g}", r"<\1>", metric) for metric in (*rules.best, *rules.others)]
        metrics, own = (", ".join(f"`{name}`" for name in names) for names in (metrics, rules.fields))
        lines.append(f"| `{kind}` | {rules.meaning} | {metrics} | {own} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=Path("docs/fields.md"), help="[docs/fields.md]")
    parser.add_argument("--kinds", type=Path, default=Path("docs/evaluation.md"), help="[docs/evaluation.md]")
    args = parser.parse_args(argv[1:])
    args.write.write_text(page())
    replace_section(args.kinds, "kinds", kinds())


if __name__ == "__main__":
    main(sys.argv)
