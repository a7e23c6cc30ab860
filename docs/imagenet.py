"""Compares our ImageNet recipes with recipes that others have run, and plans runs of ours, for docs/imagenet.md.

Example:
  python -m docs.imagenet --write=docs/imagenet.md
  python -m docs.imagenet --write=docs/imagenet.md --plan
  python -m docs.imagenet --read=big_vision_s16 --checkout=../big_vision

docs/recipes/NAME.json has the settings of a source, as `--read` finds them in a checkout of its code.
docs/recipes/NAME.csv has the corresponding fields of ours. A row is for one setting, or for several that match a
pattern such as `evals.*.log_steps`, and has the name and value of our field. Its `relation` is `same`, `differs`, or
`run` for settings that do not affect what is learnt. A setting that exists only in the code of the source has its value
in the column `theirs`. tests/configs/test_other_recipes.py compares these files with our recipes.
"""

import argparse
import ast
import csv
import dataclasses
import fnmatch
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_collections

from docs.pages import replace_section
from docs.plans import plan_recipe
from vit_jax.config import parse_command_line, set_optimizer_fields
from vit_jax.text_tables import markdown_table

FOLDER = Path(__file__).with_name("recipes")
RELATIONS = ("same", "differs", "run")


def read_big_vision(checkout: Path) -> dict[str, Any]:
    """Returns dotted name -> value of the settings in big_vision's vit_s16_i1k.py."""
    config = runpy.run_path(str(checkout / "big_vision/configs/vit_s16_i1k.py"))["get_config"]()
    return dict(_flatten(config.to_dict()))


def _flatten(tree: dict[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{start}{key}.")
        else:
            yield f"{start}{key}", value


def read_mup_vit(checkout: Path) -> dict[str, Any]:
    """Returns flag -> default of mup-vit's command line, with the batch size of the run that its README describes."""
    settings = {}
    for node in ast.walk(ast.parse((checkout / "main.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [ast.literal_eval(arg) for arg in node.args]
            keywords = {word.arg: word.value for word in node.keywords}
            default = keywords.get("default", ast.Constant(False if "action" in keywords else None))
            settings[max(names, key=len).lstrip("-")] = ast.literal_eval(default)
    return settings | {"batch-size": 1024}


def read_jax_toolbox(file: str) -> Callable[[Path], dict[str, Any]]:
    """Returns a function that reads one of JAX-Toolbox's gin files from a checkout; see `read_gin`."""

    def read(checkout: Path) -> dict[str, Any]:
        return read_gin(checkout / "rosetta", f"rosetta/projects/vit/configs/{file}")

    return read


def read_gin(root: Path, file: str) -> dict[str, Any]:
    """Returns `name.parameter` -> value for the bindings of a gin file and of the files that it includes.

    References to macros are replaced by their values. Other references stay as text.

    Args:
        root: the folder that the paths of included files are relative to.
        file: the path of the gin file, relative to `root`.
    """
    bindings: dict[str, str] = {}

    def collect(path: str) -> None:
        scope = ""
        for line in (root / path).read_text().splitlines():
            text = re.sub(r"\s*#.*", "", line)
            if found := re.fullmatch(r"include '(.*)'", text):
                collect(found[1])
            elif found := re.fullmatch(r"(\S+):", text):
                scope = found[1] + "."
            elif found := re.fullmatch(r"(\s*)(\S+)\s*=\s*(.*\S)\s*", text):
                bindings[(scope if found[1] else "") + found[2]] = found[3]

    collect(file)
    values = {key: _gin_value(bindings, value) for key, value in bindings.items()}
    return {key: value for key, value in values.items() if "." in key}


def _gin_value(bindings: dict[str, str], text: str) -> Any:
    while text.startswith("%") and text[1:] in bindings:
        text = bindings[text[1:]]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


@dataclasses.dataclass(frozen=True)
class Source:
    """A recipe that somebody else has run.

    Attributes:
        name: the name of its two files in docs/recipes, without suffix.
        ours: the flags of `vit_jax.main` for our recipe.
        repository: the repository on GitHub, OWNER/NAME.
        commit: the commit whose settings are compared.
        files: the files that state the settings.
        read: folder of a checkout at that commit -> {setting: value}.
    """

    name: str
    ours: str
    repository: str
    commit: str
    files: str
    read: Callable[[Path], dict[str, Any]]

    def settings(self) -> dict[str, Any]:
        """Returns setting -> value, as `--read` stored them."""
        return json.loads((FOLDER / f"{self.name}.json").read_text())

    def rows(self) -> list[dict[str, str]]:
        """Returns the rows of its CSV file, each as column -> text."""
        with (FOLDER / f"{self.name}.csv").open() as file:
            return list(csv.DictReader(file))

    def config(self) -> ml_collections.ConfigDict:
        """Returns the configuration of our recipe, with all fields of its optimizer set."""
        config, _ = parse_command_line(["main", *shlex.split(self.ours)])
        set_optimizer_fields(config.optim)
        return config


SOURCES = (
    Source(
        "big_vision_s16",
        "--config=configs/vit_s16_imagenet2012_90ep.py",
        "google-research/big_vision",
        "0127fb6b337ee2a27bf4e54dea79cff176527356",
        "big_vision/configs/vit_s16_i1k.py",
        read_big_vision,
    ),
    Source(
        "mup_vit_s16_linear",
        "--config=configs/vit_s16_imagenet2012_90ep_linear.py",
        "EIFY/mup-vit",
        "ee4c63c3b0deca5f8d8bd5e91d64b805f6ffce38",
        "main.py, transforms.py, simple_vit.py",
        read_mup_vit,
    ),
    Source(
        "jax_toolbox_b16",
        "--config=configs/vit_b16_imagenet2012_autoaugment.py",
        "NVIDIA/JAX-Toolbox",
        "1a3febb377a5a0d7ff3344b3d7844ae6f56dacc7",
        "rosetta/rosetta/projects/vit/configs/base_pretrain_imagenet.gin",
        read_jax_toolbox("base_pretrain_imagenet.gin"),
    ),
    Source(
        "jax_toolbox_b16_finetune",
        "--config=configs/finetune_autoaugment.py --config.init_from=PRETRAINED",
        "NVIDIA/JAX-Toolbox",
        "1a3febb377a5a0d7ff3344b3d7844ae6f56dacc7",
        "rosetta/rosetta/projects/vit/configs/base_finetune_imagenet.gin",
        read_jax_toolbox("base_finetune_imagenet.gin"),
    ),
)


# (recipe, slice) of the prepared runs.
RUNS = (
    ("vit_s16_imagenet2012_90ep", "v5e:2x2"),
    ("vit_b16_imagenet2012_autoaugment", "v5e:4x4"),
)
PRICE = 1.2  # dollars for a chip-hour of a TPU v5e, assumed


def theirs(source: Source, row: dict[str, str]) -> str:
    """Returns the value of a row's setting in the source, or the different values of several settings."""
    if row["theirs"]:
        return row["theirs"]
    values = [value for key, value in source.settings().items() if fnmatch.fnmatchcase(key, row["setting"])]
    return "; ".join(dict.fromkeys(str(value) for value in values))


def short(setting: str) -> str:
    """Returns the last two parts of a setting's name, or a pattern as it is."""
    return setting if set(setting) & set(" *") else ".".join(setting.split(".")[-2:])


def write_table(source: Source) -> str:
    """Returns the section of a source in Markdown: a table of the settings that differ, and lists of the others."""
    rows = source.rows()
    lines = [("setting", "there", "here", "")]
    for row in rows:
        if row["relation"] == "differs":
            ours = " = ".join(filter(None, (row["field"], row["ours"])))
            lines.append((short(row["setting"]), theirs(source, row), ours, row["why"]))
    text = [
        f"{source.repository}, `{source.files}` at {source.commit[:8]}; differs:",
        "",
        markdown_table(escape(lines)),
    ]
    same = {short(row["setting"]): theirs(source, row) for row in rows if row["relation"] == "same"}
    told = [f"`{name}`" + (f" {value}" if len(value) < 20 else "") for name, value in same.items()]
    runs = dict.fromkeys(f"`{short(row['setting'])}`" for row in rows if row["relation"] == "run")
    text += [f"The same: {', '.join(told)}.", "", f"Of the run only: {', '.join(runs)}.", ""]
    return "\n".join(text)


def plan_runs() -> str:
    """Returns a Markdown table of the prepared runs with the prediction of each plan.

    A run is compiled, unless its compilation is remembered from an earlier call.
    """
    heads = ("recipe", "slice, chips", "steps", "memory of a chip", "step", "hours", "chip-hours", "dollars")
    lines: list[tuple[str, ...]] = [(*heads, "images/s a host", "cores for it, without augmentation")]
    for recipe, target in RUNS:
        plan = plan_recipe(recipe, target)
        run, workload = plan.estimate.run, plan.compilation.workload
        lines.append(
            (
                recipe,
                f"{target}, {workload.chips}",
                f"{workload.steps:,}",
                f"{plan.compilation.step.required_bytes / 2**30:.1f} GiB",
                f"{1e3 * (plan.estimate.compute_seconds + plan.estimate.exchange_seconds):.0f} ms",
                f"{run.hours:.1f}",
                f"{run.chip_hours:.0f}",
                f"{PRICE * run.chip_hours:.0f}",
                f"{run.images_per_second_per_host:,.0f}",
                f"{run.input_cores:.0f} of {run.host_cores}",
            )
        )
    return markdown_table(lines)


def escape(lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns the cells with | and * escaped for a Markdown table."""
    return [tuple(cell.replace("|", r"\|").replace("*", r"\*") for cell in line) for line in lines]


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page with a section for each source")
    parser.add_argument("--plan", action="store_true", help="plan the prepared runs, too, which takes minutes")
    parser.add_argument("--read", choices=[source.name for source in SOURCES], help="source to read anew")
    parser.add_argument("--checkout", type=Path, help="of the source's code, at its commit")
    args = parser.parse_args(argv[1:])
    for source in SOURCES:
        if source.name == args.read:
            text = json.dumps(source.read(args.checkout), indent=1)
            (FOLDER / f"{source.name}.json").write_text(text + "\n")
        if args.write:
            replace_section(args.write, source.name, write_table(source))
    if args.plan:
        jax.config.update("jax_platforms", "cpu")  # the compilers run in processes of their own
        replace_section(args.write, "runs", plan_runs())


if __name__ == "__main__":
    main(sys.argv)
