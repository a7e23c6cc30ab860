"""Trains a model.

Example:
  python -m vit_jax.main --config=configs/digits.py --config.base_lr=0.001 --workdir=workdirs/mine

  --config   file that defines get_config(); text after a colon, FILE.py:TEXT, is its argument; a recipe that comes
             with the package is found as configs/NAME.py from any folder
  --config.KEY=VALUE   overrides a field; None unsets an optional one; docs/fields.md lists all fields
  --print    print all fields, one a line, with value, origin and meaning, and exit
  --workdir  the run's folder [workdirs/<config name>]; the same command resumes the run in it

Common fields: data.source (the images), model.name, resolution, batch (over all devices), base_lr (after the warm-up),
total_steps or total_epochs, init_from (weights to fine-tune).

Exit codes: 0 done, 1 internal error or non-finite loss, 2 wrong usage, 42 preempted and saved, 130 Ctrl-C, 134 a lost
or stuck host; see docs/reliability.md.
"""

from vit_jax import cli, ignore_closed_stdout
from vit_jax.config import parse_command_line
from vit_jax.train import train
from vit_jax.training import print_config


def main(argv: list[str]) -> None:
    """Runs a command line, given with the program's name first.

    Raises:
        UserError: see `parse_command_line` and `train`.
        NonFiniteLoss: see `train`.
    """
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__)
        return
    if "--print" in argv:
        with ignore_closed_stdout():
            print_config([word for word in argv if word != "--print"])
        return
    with cli.supervised() as supervisor:
        config, workdir = parse_command_line(argv)
        train(config, workdir, supervisor=supervisor)


if __name__ == "__main__":
    cli.run_command(main, rerun_advice=cli.RESUME_ADVICE)
