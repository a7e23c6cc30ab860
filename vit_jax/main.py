"""Trains a model.

Example:
  python -m vit_jax.main --config=configs/digits.py --config.base_lr=0.001 --workdir=workdirs/mine

  --config   file that defines get_config(); what follows a colon, FILE.py:TEXT, is its argument
  --config.KEY=VALUE   overrides a field; configs/base.py lists them all
  --workdir  the run's folder [workdirs/<config name>]; the same command resumes the run in it

Exit codes: 0 done, 1 a bug or a non-finite loss, 2 wrong usage.
"""

import sys
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from vit_jax import UserError, choose, cli, settings
from vit_jax.train import train


def main(argv: list[str]) -> None:
    """Runs a command line, given with the program's name first.

    Raises:
        UserError: see `parse` and `train`.
        NonFiniteLoss: see `train`.
    """
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__)
        return
    config, workdir = parse(argv)
    cli.join_pod()
    cli.use_compilation_cache()
    train(config, workdir)


def parse(argv: list[str]) -> tuple[ConfigDict, str]:
    """Returns the configuration and the workdir that a command line asks for.

    Raises:
        UserError: no config file, an unknown flag or key, or a value of the wrong type.
    """
    overrides = [word for word in argv if word.startswith("--config.")]
    values = _parse_flags([word for word in argv if word not in overrides])
    keys = settings.flatten(values.config)
    given = {choose("config field", word[len("--config.") :].partition("=")[0], keys) for word in overrides}
    values = _parse_flags(argv)
    settings.unset_rivals(values.config, given)
    return values.config, values.workdir or f"workdirs/{_config_file(argv).stem}"


def _parse_flags(argv: list[str]) -> flags.FlagValues:
    file = _config_file(argv)
    # Configs find `configs.base` from whatever directory they are run.
    sys.path.insert(0, str(file.resolve().parent.parent))
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        first, *_, last = [line for line in str(error).splitlines() if line.strip(" .")] * 2
        raise UserError(f"{first.rstrip(':.')}{'' if first == last else f': {last}'}.") from error
    finally:
        sys.path.pop(0)
    if rest:
        raise UserError(f"{rest[0]!r} stands alone; flags are written --workdir=FOLDER and --config.KEY=VALUE.")
    return values


def _config_file(argv: list[str]) -> Path:
    words = [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    if not words:
        raise UserError("say what to train with --config=FILE, for example --config=configs/digits.py.")
    file = Path(words[-1].partition(":")[0])
    if not file.is_file():
        raise UserError(f"there is no config file {file}.")
    return file


if __name__ == "__main__":
    cli.run(main)
