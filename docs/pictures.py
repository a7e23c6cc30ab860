"""Draws the pictures of the README from a run on CIFAR-10 whose model has a class token and learned positions.

Example:
  python -m docs.pictures workdirs/cifar10_look --data-dir=data/tensorflow_datasets --write=docs/look

docs/look.md has the command that trains the run.
"""

import argparse
from pathlib import Path
from typing import get_args

from configs import cifar10
from vit_jax import cli, data, look
from vit_jax.analysis import captioned_figures, plot

IMAGES = 128  # test images over which distances are averaged; the first few are shown
SHOWN = ("rollout", "position_similarity", "attention_distance")


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", help="of the run")
    parser.add_argument("--data-dir", help="folder of CIFAR-10 as TFDS prepares it")
    parser.add_argument("--write", type=Path, required=True, metavar="DIR", help="folder of the pictures")
    args = parser.parse_args(argv[1:])
    config = cifar10.get_config()
    config.data.data_dir = args.data_dir
    images, _ = data.sample_images(config, "test", IMAGES)
    model, params, seen = look.examine(args.workdir, images)
    args.write.mkdir(parents=True, exist_ok=True)
    for drawing in captioned_figures.list_drawings(model.vit, params, seen):
        for theme in get_args(plot.Theme) if drawing.draw and drawing.name in SHOWN else ():
            with plot.theme(theme):
                content = plot.encode_figure(drawing.draw(), "svg")
            path = args.write / f"{drawing.name}-{theme}.svg"
            path.write_bytes(content)
            print(f"{path}  {len(content) / 1e3:.0f} kB  {drawing.text}")


if __name__ == "__main__":
    cli.run_command(main)
