"""Writes a checkpoint in another layout, or at another resolution.

Example:
  python -m vit_jax.convert workdirs/digits digits.npz --layout=google
"""

import argparse

from vit_jax import cli, interop


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="whatever vit_jax.load reads: a workdir, a checkpoint, an npz, a published name")
    parser.add_argument("target", help="the npz to write")
    parser.add_argument("--layout", default="ours", help=f"one of {', '.join(interop.LAYOUTS)} [ours]")
    parser.add_argument("--resolution", type=int, help="pixels on a side; learned positions are resampled")
    parser.add_argument("--resample", default="linear", help="how: linear, as published, or bicubic [linear]")
    args = parser.parse_args(argv[1:])
    model, params = interop.load(args.source, resolution=args.resolution, resample=args.resample)
    interop.save(args.target, model, params, layout=args.layout)
    print(f"{args.target}: {model.name}, {args.layout} layout")


if __name__ == "__main__":
    cli.run(main)
