"""Writes a checkpoint in another layout, at another resolution, or as a program for other runtimes.

Examples:
  python -m vit_jax.convert workdirs/digits workdirs/digits.npz --layout=google
  python -m vit_jax.convert deit3_small.safetensors workdirs/deit3 --num-heads=6
  python -m vit_jax.convert workdirs/digits workdirs/digits.onnx --preprocess
"""

import argparse
import sys
from pathlib import Path

from vit_jax import UserError, cli, interop


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", help="a workdir, a checkpoint, a file, a folder or a published name, as in vit_jax.load"
    )
    parser.add_argument("target", help="the .npz, .safetensors, .onnx or .stablehlo file to write, or a folder")
    parser.add_argument("--layout", help=f"one of {', '.join(interop.LAYOUTS)} [timm for .safetensors, else ours]")
    parser.add_argument("--dtype", default="float32", help="of the file: float32, float16 or bfloat16 [float32]")
    parser.add_argument(
        "--preprocess", action="store_true", help="of .onnx and .stablehlo: images are uint8, not in the model's range"
    )
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[], help="of .onnx and .stablehlo: further outputs; the first is 0"
    )
    cli.add_resolution(parser, "that of the positions")
    parser.add_argument("--patch-size", type=int, help="pixels on a side; the kernel is resized as in FlexiViT")
    parser.add_argument(
        "--resample",
        help="how positions are resampled: linear, bicubic, bicubic_no_antialias or flexi [as the library of its "
        "layout does; flexi with --patch-size]",
    )
    parser.add_argument("--num-heads", type=int, help="where the source does not state it: a timm file alone")
    parser.add_argument("--loss", help="that its head was trained with, where the source does not state it: sigmoid")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line."""
    args = make_parser().parse_args(argv[1:])
    if Path(args.source).resolve() == Path(args.target).resolve():
        raise UserError(f"{args.target} is the source itself; choose another file.")
    target = interop.choose_target(args.target, args.layout)
    layout = target.layout
    fields = {
        "resolution": args.resolution or "native",
        "patch_size": args.patch_size,
        "num_heads": args.num_heads,
        "loss": args.loss,
    }
    model, params = interop.load(args.source, resample=args.resample, **fields)
    program = {"preprocess": args.preprocess, "blocks": args.blocks}
    interop.save(args.target, model, params, layout=args.layout, dtype=args.dtype, **program)
    height, width = model.image_size
    if target.is_program:
        export = interop.Export(model, params, args.dtype, **program)
        images = f"images {export.image_dtype} [batch, {height}, {width}, 3]"
        print(f"{args.target}: {model.name}, {images} -> {', '.join(export.outputs)}")
        if target.file.suffix == ".stablehlo":
            print(f"vit_jax: {interop.WINDOW}.", file=sys.stderr)
        return
    print(f"{args.target}: {layout} layout, {model.name}, {height}x{width} pixels")
    if not interop.LAYOUTS[layout].states_classes:
        names = [f"the names of the {len(model.class_names):,} classes"] if model.class_names else []
        loss = [f"that its loss was the {model.loss}"] if model.field("num_classes") else []
        licence = [f"the licence {model.licence}"] if model.licence and not target.is_folder else []  # else on a card
        if lost := " and ".join([*names, *loss, *licence]):
            advice = f"keep {args.source}, or convert it with --layout=ours"
            print(f"vit_jax: the {layout} layout does not store {lost}; {advice}.", file=sys.stderr)


if __name__ == "__main__":
    cli.run_command(main, is_report=True)
