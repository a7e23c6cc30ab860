"""Writes a checkpoint in another layout or resolution, as a program for other runtimes, or to the hub.

Examples:
  python -m vit_jax.convert workdirs/digits workdirs/digits.npz --layout=google
  python -m vit_jax.convert deit3_small.safetensors workdirs/deit3 --num-heads=6
  python -m vit_jax.convert workdirs/digits workdirs/digits.onnx --preprocess
  python -m vit_jax.convert workdirs/cifar10 hf-hub:OWNER/NAME --licence=apache-2.0 --dry-run
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from vit_jax import choose, cli, interop, refuse, user_errors
from vit_jax.evals import is_run
from vit_jax.experiments import describe_run, make_record
from vit_jax.model import Model
from vit_jax.storage import filesystem
from vit_jax.text_tables import align

# Layout -> the code on a model card that loads the model by its library; {0}: OWNER/NAME, {1}: the class.
USE = {
    "timm": 'import timm\n\nmodel = timm.create_model("hf-hub:{0}", pretrained=True)',
    "huggingface": 'from transformers import {1}\n\nmodel = {1}.from_pretrained("{0}")',
}


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vit_jax.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", help="a workdir, a checkpoint, a file, a folder or a published name, as in vit_jax.load"
    )
    parser.add_argument(
        "target", help="the .npz, .safetensors, .onnx or .stablehlo file to write, a folder, or hf-hub:OWNER/NAME"
    )
    parser.add_argument(
        "--layout", help=f"one of {', '.join(interop.LAYOUTS)} [timm for .safetensors and hf-hub:, else ours]"
    )
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
    parser.add_argument(
        "--licence", help="of the weights: its name on the hub, or NAME,https://ADDRESS [that which they carry]"
    )
    hub = parser.add_argument_group("of hf-hub:OWNER/NAME")
    hub.add_argument("--licence-text", metavar="FILE", help="the text of the licence, which becomes the file LICENSE")
    hub.add_argument("--dry-run", action="store_true", help="only show the files and the model card; ask nobody")
    hub.add_argument("--private", action="store_true", help="only the owners see the new repository")
    hub.add_argument("--tag", help="of the commit, such as v1")
    hub.add_argument("--update", action="store_true", help="replace the files that the repository has")
    return parser


def main(argv: list[str]) -> None:
    """Runs the command line.

    Raises:
        UserError: the source cannot be loaded or the target not be written, or a flag does not suit the target.
    """
    args = make_parser().parse_args(argv[1:])
    if args.target.startswith(interop.PREFIX):
        publish(args)
        return
    of_hub = args.licence_text or args.dry_run or args.private or args.tag or args.update
    refuse(
        (
            of_hub,
            f"--licence-text, --dry-run, --private, --tag and --update are for hf-hub:OWNER/NAME, not {args.target}.",
        ),
        (
            Path(args.source).resolve() == Path(args.target).resolve(),
            f"{args.target} is the source itself; choose another file.",
        ),
    )
    target = interop.choose_target(args.target, args.layout)
    layout = target.layout
    model, params = load(args)
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


def load(args: argparse.Namespace) -> tuple[Model, dict[str, Any]]:
    """Returns the model and the parameters that the flags ask for.

    Raises:
        UserError: see `interop.load` and `interop.licensed`.
    """
    fields = {
        "resolution": args.resolution or "native",
        "patch_size": args.patch_size,
        "num_heads": args.num_heads,
        "loss": args.loss,
    }
    model, params = interop.load(args.source, resample=args.resample, **fields)
    return interop.licensed(model, args.licence, args.source), params


def publish(args: argparse.Namespace) -> None:
    """Writes the model and its card to a repository on the hub, or shows with --dry-run what would be written.

    Raises:
        UserError: the name or a flag is wrong, the licence is not known, the run is not finished, the layout cannot
            express the model, or see `interop.publish`.
    """
    refuse((args.preprocess or args.blocks, f"--preprocess and --blocks are for files, not for {args.target}."))
    name = interop.check_repository(args.target)
    layout = choose("layout on the hub", args.layout or "timm", interop.LIBRARIES)
    record = make_record(filesystem.absolute_path(args.source), name) if is_run(args.source) else None
    model, params = load(args)
    interop.check_licence(model, args.source, bool(args.licence_text))
    height, width = model.image_size
    changes = [
        *([f"given patches of {args.patch_size}x{args.patch_size} pixels"] if args.patch_size else []),
        *([f"resampled to {height}x{width} pixels"] if args.resolution else []),
        *([f"rounded to {args.dtype}"] if args.dtype != "float32" else []),
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        interop.save(folder, model, params, layout=layout, dtype=args.dtype)
        if args.licence_text:
            with user_errors(f"cannot read {args.licence_text}"):
                shutil.copyfile(args.licence_text, folder / "LICENSE")
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        use = USE[layout].format(name, *stated.get("architectures", ()))
        sections = [f"```python\n{use}\n```"]
        base = ""
        if record:
            base = interop.repository_of(record.config["init_from"] or "")
            sections.append(describe_run(record, name, " and ".join(changes)))
        elif interop.is_download_name(args.source):
            sections.append(f"Converted from `{args.source}`{''.join(f', {change}' for change in changes)}.")
        card = interop.write_card(model, layout, base, "\n\n".join(sections))
        (folder / interop.CARD).write_text(card, encoding="utf-8")
        print(f"{args.target}: {layout} layout, {model.name}, {height}x{width} pixels")
        sizes = [(path.name, f"{path.stat().st_size:,} bytes") for path in sorted(folder.iterdir())]
        print("\n".join(align(sizes, (1,))))
        if args.dry_run:
            print(f"\n{card}", end="")
            return
        print(interop.publish(folder, name, private=args.private, tag=args.tag, update=args.update))


if __name__ == "__main__":
    cli.run_command(main, is_report=True)
