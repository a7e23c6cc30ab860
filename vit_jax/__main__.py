"""One entry point for all commands: `vit-jax NAME ...` or `python -m vit_jax NAME ...` runs the module of a command."""

import ast
import os
import runpy
import sys
from pathlib import Path

from vit_jax import UserError, choose, ignore_closed_stdout, tell

# Name of a command -> its module in vit_jax, in the order in which they are shown.
COMMANDS = {
    "train": "main",
    "evaluate": "evaluate",
    "predict": "predict",
    "embed": "embed",
    "finetune": "finetune",
    "vtab": "vtab",
    "sweep": "sweep",
    "doubts": "doubts",
    "report": "report",
    "look": "look",
    "record": "record",
    "pack": "pack",
    "describe": "describe",
    "convert": "convert",
    "plan": "plan",
    "measure": "measure",
    "doctor": "doctor",
}
USAGE = "usage: vit-jax COMMAND ...; vit-jax COMMAND --help says more"


def main() -> None:
    """Runs the command that the command line names, or lists all commands if it names none."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h"):
        with ignore_closed_stdout():
            print("\n".join([USAGE, "", *(f"  {name:10}{summary(module)}" for name, module in COMMANDS.items())]))
        return
    try:
        module = COMMANDS[choose("command", name, COMMANDS)]
    except UserError as error:
        tell(f"vit_jax: {error}")
        sys.exit(2)
    del sys.argv[1]
    if not sys.flags.safe_path:  # as with python -m, so that a recipe finds the modules beside this folder's files
        sys.path.insert(0, os.getcwd())
    runpy.run_module(f"vit_jax.{module}", run_name="__main__", alter_sys=True)


def summary(module: str) -> str:
    """Returns the first paragraph of a module's docstring as one line, without importing the module."""
    text = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")))
    return (text or "").partition("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    main()
