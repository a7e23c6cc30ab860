"""Plans of the paper's models on TPU slices that are not here, and what Table 6 says they compute: docs/plans.md.

Example:
  python -m benchmarks.plans --write=docs/plans.md

Hours the first time on two cores; what was compiled once is remembered, so the same command goes on where it stopped.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from vit_jax import UserError, cli, models
from vit_jax.plan import flags, plan
from vit_jax.planning import flops, report
from vit_jax.planning.search import STRATEGIES, needs

# Table 6: model, epochs, exaFLOPs.
TABLE_6 = [
    ("ViT-B/32", 7, 55),
    ("ViT-B/16", 7, 224),
    ("ViT-L/32", 7, 196),
    ("ViT-L/16", 7, 783),
    ("ViT-L/16", 14, 1567),
    ("ViT-H/14", 14, 4262),
    ("R50+ViT-B/32", 7, 106),
    ("R50+ViT-B/16", 7, 274),
    ("R50+ViT-L/32", 7, 246),
    ("R50+ViT-L/16", 7, 859),
    ("R50+ViT-L/16", 14, 1668),
]
JFT_IMAGES, JFT_CLASSES = 303e6, 18_291

# Config -> images a chip.
MODELS = {"vit_b16_jft": 128, "vit_l16_jft": 64, "vit_h14_jft": 16, "r50_vit_b16_jft": 64}
SLICES = ["v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4"]
CHIPS = 8
GROWING = {"v5e:2x4": 8, "v5e:8x8": 64, "v5e:16x16": 256}  # with the recipe's batch on the last
GROWING_IMAGES = 16
LARGEST = {"vit_b16_jft": 512, "vit_l16_jft": 256}  # with how many images the search begins


def exaflops() -> list[str]:
    """The rows of ViTs and hybrids of Table 6."""
    lines = ["| model | epochs | GMACs an image | exaFLOPs, ours | paper | |", "|---|---|---|---|---|---|"]
    for name, epochs, paper in TABLE_6:
        model = models.create(name, num_classes=JFT_CLASSES, pre_logits=True)
        ours, macs = flops.exaflops(model, JFT_IMAGES * epochs), flops.of_image(model)
        lines.append(f"| {name} | {epochs} | {macs / 1e9:.2f} | {ours:,.1f} | {paper:,} | {ours / paper - 1:+.1%} |")
    return lines


def planned(config: str, target: str, strategy: str, batch: int, *more: str) -> dict[str, Any]:
    """A plan of a recipe with another batch."""
    words = [f"--config=configs/{config}.py", f"--config.batch={batch}", *flags(STRATEGIES[strategy]), *more]
    try:
        return plan(words, target)
    except UserError as error:
        return {"error": str(error)}


def cells(found: dict[str, Any]) -> str:
    """The columns of a strategy."""
    if "error" in found:
        return f"{found['error'].partition(' on this program')[0]} | | | "
    if not found["fits"]:
        return f"does not fit: {report.amount(needs(found))} | | | "
    exchange = found["exchange_seconds"] / (found["compute_seconds"] + found["exchange_seconds"])
    return (
        f"{report.amount(found['peak_bytes'])} | {found['cycles_per_image'] / 1e6:.2f} | {exchange:.0%} | "
        f"{found['images_per_second_per_chip']:,.0f}, {found['mfu']:.0%}"
    )


def chips() -> list[str]:
    """Every model on every chip, weights copied or split."""
    names = "peak | Mcycles | exchange | images/s, MFU"
    lines = [f"| model, images a chip | chip | copied: {names} | split: {names} |", f"|{'---|' * 10}"]
    for config, images in MODELS.items():
        for target in SLICES:
            found = [planned(config, target, strategy, images * CHIPS) for strategy in ("replicated", "fsdp")]
            label = f"{config.removesuffix('_jft')}, {images} | {target.partition(':')[0]}"
            lines.append(f"| {label} | {' | '.join(map(cells, found))} |")
    return lines


def growing() -> list[str]:
    """L/16 on ever more chips, the same images on each."""
    names = " | ".join(["peak", "Mcycles", "exchange", "images/s, MFU"])
    lines = [f"| chips | weights | {names} |", f"|{'---|' * 6}"]
    for target, count in GROWING.items():
        for strategy in ("replicated", "fsdp"):
            found = planned("vit_l16_jft", target, strategy, GROWING_IMAGES * count)
            lines.append(f"| {target}, {count} | {strategy} | {cells(found)} |")
    return lines


def first() -> list[str]:
    """The plan of the recipe that the README begins with."""
    return ["```", report.render([plan(["--config=configs/vit_l16_jft.py"], "v5e:16x16")]), "```"]


def misfit() -> list[str]:
    """A plan that does not fit, and what is advised."""
    return ["```", report.render([planned("vit_h14_jft", "v5e:2x4", "replicated", 512)]), "```"]


def fit() -> list[str]:
    """The largest batches of predictions that a chip holds."""
    lines = ["| model | images | do not fit | Mcycles | images/s |", "|---|---|---|---|---|"]
    for config, begin in LARGEST.items():
        words = [f"--config=configs/{config}.py", f"--config.batch={begin}"]
        found = plan(words, "v5e:1x1", inference=True, fit=True)["fit"]
        largest, refused = found["largest"], found["refused_images_per_device"]
        if largest:
            speed = f"{largest['cycles_per_image'] / 1e6:.2f} | {largest['images_per_second_per_chip']:,.0f}"
            lines.append(f"| {largest['model']} | {largest['batch']:,} | {refused:,} | {speed} |")
    return lines


SECTIONS: dict[str, Callable[[], list[str]]] = {
    "exaflops": exaflops,
    "first": first,
    "growing": growing,
    "misfit": misfit,
    "chips": chips,
    "fit": fit,
}


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"sections, of {','.join(SECTIONS)} [all]")
    parser.add_argument("--write", type=Path, help="Markdown file whose sections to replace")
    args = parser.parse_args(argv[1:])
    jax.config.update("jax_platforms", "cpu")  # compilers are asked in processes of their own
    for name in args.only.split(",") if args.only else SECTIONS:
        text = "\n".join(SECTIONS[name]()) + "\n"
        print(text)
        if args.write:
            before, after = re.split(
                rf"(?<=<!-- {name} -->\n).*(?=<!-- /{name} -->)", args.write.read_text(), flags=re.S
            )
            args.write.write_text(before + text + after)


if __name__ == "__main__":
    cli.run(main)
