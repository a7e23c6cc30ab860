"""Digests of the programs that are compiled, for a proof that code which was moved still makes the same ones.

Examples:
  python -m benchmarks.programs --out=before.json
  python -m benchmarks.programs --out=after.json --text=after --only='B/16.*v5e'
  python -m benchmarks.programs --compare before.json after.json

The training step, the evaluation step and the captured attention (for a ResNet, its features) of each case of `CASES`
are lowered, not compiled: for CPUs, for an H100 and for four kinds of TPU, none of which need be here, on 1 and on 8
devices. A program is written as its results in terms of its arguments: each operation once, in the order in which the
results need it, with called functions in place of their calls. Names of functions, source locations and operations
that no result needs are left out, also those of TPU kernels.

`--compare` names the programs that differ, and ends with exit code 1 if there is one. Beside them, it counts those that
have the same operations, but in another order or divided into other functions. `--text` writes the programs, so that
`diff` shows what differs; the kernels are files of their own.
"""

import argparse
import base64
import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
from jax._src.lib import tpu
from jax.interpreters import mlir
from jaxlib.mlir import ir
from ml_collections import ConfigDict

from configs import base, masked_patches
from vit_jax import UserError, cli, data, models, sharding
from vit_jax.analysis import observe
from vit_jax.config import check_config, resolve_config
from vit_jax.model import Model, create
from vit_jax.planning import records, targets
from vit_jax.program import Program, make_program

ROOT = Path(__file__).resolve().parents[1]

# Platform -> slices of 1 device, of which the first is taken, and of 8; "cpu" stands for CPUs here. The slowest first.
PLATFORMS = {
    "v5e": ("v5e:2x2", "v5e:2x4"),
    "v6e": ("v6e:2x2", "v6e:2x4"),
    "v5p": ("v5p:2x2x1", "v5p:2x2x2"),
    "v4": ("v4:2x2x1", "v4:2x2x2"),
    "cuda": ("cpu", "cpu"),
    "cpu": ("cpu", "cpu"),
}
DEVICES = (1, 8)
NVIDIA = "NVIDIA H100 80GB HBM3"

GAP = {"model.pooling": "gap"}
SPLIT = {"mesh.data": 1, "mesh.fsdp": -1}
TENSOR = {"mesh.tensor": 4}  # 1 on a single device
DROPPED = {"model.dropout_rate": 0.1, "model.stochastic_depth": 0.1}
SCANNED = {"model.scan": True}
# Name -> fields of the configuration. All models but the ResNets have 2 blocks.
CASES: dict[str, dict[str, Any]] = {
    "B/16": GAP,
    "B/16, class token, tanh layer, dropout": {"model.pre_logits": True, "optim.ema_decay": 0.99, **DROPPED},
    "B/16, float32, positions in blocks": {"model.dtype": "float32", "model.position_place": "blocks"},
    "B/16, norms and rotation of queries and keys, SwiGLU": {
        "model.qk_norm": True,
        "model.rotary": "axial",
        "model.activation": "swiglu",
        **GAP,
    },
    "B/16, relative positions": {"model.position": "relative", "model.relative_tables": "head", **GAP},
    "B/16, adapters": {"adapt.rank": 8, **DROPPED},
    "B/16, adapters, scanned, remat=full": {"adapt.rank": 8, "model.remat": "full", **SCANNED},
    "B/16, sparse attention": {"model.attention_pattern": "strided"},
    "B/16, masked patches": {"task.kind": "masked_patches", "model.registers": 1},
    "S/16, local attention in blocks": {
        "model.attention_pattern": "local2d",
        "model.attention_window": 8,
        "resolution": 512,
        "model.name": "ViT-S/16",
        **GAP,
    },
    "S/16, taught": {"task.kind": "distill", "task.teacher": "teacher.npz", "model.name": "ViT-S/16"},
    "S/14, registers, LayerScale": {
        "model.name": "ViT-S/14",
        "model.registers": 4,
        "model.layer_scale": 1e-5,
        "model.activation": "gelu",
        "model.position_rows": "class",
        "model.pooling": "token_gap",
        **DROPPED,
    },
    "L/16, scanned, remat=dots, split, in parts": {
        "model.name": "ViT-L/16",
        "model.remat": "dots",
        "accum_steps": 2,
        **SCANNED,
        **SPLIT,
    },
    "L/16, remat=attention, split heads": {"model.name": "ViT-L/16", "model.remat": "attention", **GAP, **TENSOR},
    "H/14, MAP, remat=mlp": {"model.name": "ViT-H/14", "model.pooling": "map", "model.remat": "mlp"},
    "Axial-B/16": {"model.name": "Axial-ViT-B/16", **GAP, **DROPPED},
    "R50+B/16": {"model.name": "R50+ViT-B/16", "model.stages": (1, 1, 1), **DROPPED},
    "BiT-R50x1": {"model.name": "BiT-R50x1", "model.stages": (1, 1, 1, 1), "model.remat": "full"},
    "AxialResNet": {"model.name": "AxialResNet-50", "model.stages": (1, 1, 1, 1)},
    "stand-alone attention": {"model.name": "SASA-ResNet-26", "model.stages": (1, 1), "model.root": "attention"},
}
IMAGES = 16  # a device

Digests: TypeAlias = dict[str, dict[str, str]]  # program -> `graph`, without order and functions; `text`, with them
Scope: TypeAlias = collections.ChainMap["Node", int]  # node -> the line on which it was written


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the program or of a region.

    Attributes:
        level: how many regions are around it; 0: it is one of the program.
        index: its place among the arguments.
    """

    level: int
    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An operation, of which there is one object for equal operations of equal operands.

    Attributes:
        text: its name, attributes and types.
        operands: what it takes.
        regions: the functions that it calls, such as the body of a loop.
        takes: the operands, and what the regions take from outside.
        level: how many regions are around it at least.
    """

    text: str
    operands: tuple["Value", ...]
    regions: tuple["Region", ...]
    takes: tuple["Value", ...]
    level: int

    @functools.cached_property
    def needs(self) -> tuple["Node", ...]:
        """The nodes of what it takes."""
        return tuple(nodes_of(self.takes))


@dataclasses.dataclass(frozen=True)
class Result:
    """One of the results of a node."""

    node: Node
    index: int

    @property
    def level(self) -> int:
        """The level of the node."""
        return self.node.level


Value: TypeAlias = Argument | Result


@dataclasses.dataclass(frozen=True)
class Region:
    """A function inside an operation.

    Attributes:
        level: the level of its arguments.
        types: the types of its arguments.
        values: what it returns.
        taken: what it takes from outside.
    """

    level: int
    types: str
    values: tuple[Value, ...]
    taken: tuple[Value, ...]


class Kernels:
    """The kernels for TPUs as text without locations, which their bytes contain.

    Attributes:
        texts: digest -> text.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.parse = functools.lru_cache(self._parse)

    def _parse(self, body: str) -> str:
        context = mlir.make_ir_context()
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        with context, ir.Location.unknown():
            text = ir.Module.parse(base64.b64decode(body)).operation.get_asm(enable_debug_info=False)
        text = re.sub(r'^module @\S+|sym_name = "\w+"', "", text)
        self.texts[digest := digest_of(text)] = text
        return digest

    def replace(self, text: str) -> str:
        """Returns a text with the digests of kernels in place of their bytes, and without addresses in memory."""
        text = re.sub(r'(backend_config = ")\d+"', r'\1"', text)  # of the Python function that splits a cuDNN call
        text = re.sub(r", \\22debug_locations\\22: \\22[\w+/=]*\\22", "", text)  # of jax 0.12
        text = re.sub(r"(\\22body\\22: \\22)([\w+/=]+)", lambda found: found[1] + self.parse(found[2]), text)
        return re.sub(r'kernel_name = "\w+"', "", text)


class Graph:
    """The results of a program in terms of its arguments."""

    def __init__(self, module: ir.Module, kernels: Kernels) -> None:
        self._functions = {
            ir.StringAttr(each.operation.attributes["sym_name"]).value: each.operation
            for each in module.body.operations
            if each.operation.name == "func.func"
        }
        self._kernels, self._nodes, self._barriers = kernels, dict[Any, Node](), itertools.count()
        main = self._functions["main"]
        self._values = self._call(
            main, [Argument(0, index) for index in range(len(main.regions[0].blocks[0].arguments))], 0
        )
        shown = [name for name in main.attributes if name != "sym_name"]
        self._head = "\n".join(f"{name}: {main.attributes[name]}" for name in sorted(shown))

    def lines(self) -> Iterator[str]:
        """Yields the lines of the text of the program."""
        yield self._head
        yield from self._write(self._values, collections.ChainMap(), itertools.count(), "")

    def _call(self, function: ir.Operation, operands: Iterable[Value], level: int) -> tuple[Value, ...]:
        block = function.regions[0].blocks[0]
        return self._evaluate(block, dict(zip(block.arguments, operands, strict=True)), level)

    def _evaluate(self, block: ir.Block, values: dict[ir.Value, Value], level: int) -> tuple[Value, ...]:
        """Returns what a block returns, and last what has an effect but no result.

        Args:
            block: the block.
            values: the values that it may take; its own are added.
            level: how many regions are around it.
        """
        effects: list[Value] = []
        for each in block.operations:
            operation = each.operation
            operands = tuple(values[operand] for operand in operation.operands)
            if operation.name.endswith(".return"):
                return (*operands, *effects)
            if operation.name == "func.call":
                name = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                found = self._call(self._functions[name], operands, level)
            else:
                node = self._node(operation, operands, [self._region(r, values, level) for r in operation.regions])
                found = tuple(Result(node, index) for index in range(len(operation.results)))
                effects += [] if found else [Result(node, 0)]
            values.update(zip(operation.results, found, strict=True))
        raise ValueError("a block without a return")

    def _region(self, region: ir.Region, values: dict[ir.Value, Value], level: int) -> Region:
        [block] = region.blocks
        own = [Argument(level + 1, index) for index in range(len(block.arguments))]
        types = ", ".join(str(each.type) for each in block.arguments)
        values.update(zip(block.arguments, own, strict=True))
        results = self._evaluate(block, values, level + 1)
        inside = in_order(nodes_of(results), lambda node: node.level <= level)
        taken = [*(each for node in inside for each in node.takes), *results]
        return Region(level + 1, types, results, tuple(dict.fromkeys(each for each in taken if each.level <= level)))

    def _node(self, operation: ir.Operation, operands: tuple[Value, ...], regions: list[Region]) -> Node:
        text = self._text(operation)
        # Two barriers of the same values are two: what follows each is computed by itself.
        barrier = next(self._barriers) if operation.name == "stablehlo.optimization_barrier" else None
        key = text, operands, tuple(regions), barrier
        if key not in self._nodes:
            takes = (*operands, *(each for region in regions for each in region.taken))
            level = max((each.level for each in takes), default=0)
            self._nodes[key] = Node(text, operands, tuple(regions), takes, level)
        return self._nodes[key]

    def _text(self, operation: ir.Operation) -> str:
        attributes = [
            f"{name} = {self._attribute(operation.attributes[name])}" for name in sorted(operation.attributes)
        ]
        types = (", ".join(str(each.type) for each in side) for side in (operation.operands, operation.results))
        return self._kernels.replace(f"{operation.name} {{{', '.join(attributes)}}} : {' -> '.join(types)}")

    def _attribute(self, attribute: ir.Attribute) -> str:
        text = str(attribute)
        function = self._functions.get(text.removeprefix("@")) if text.startswith("@") else None
        return text if function is None else digest_of(strip_names(str(function)))

    def _write(self, values: tuple[Value, ...], scope: Scope, numbers: Iterator[int], indent: str) -> Iterator[str]:
        """Yields the lines of the nodes that values need and that are not yet in the scope, and of a return.

        A line names a node by how many lines before it that stands, so that few lines change where one is added.
        """
        for node in in_order(nodes_of(values), scope.__contains__):
            number = scope[node] = next(numbers)
            yield f"{indent}{node.text} ({self._names(node.operands, scope, number)})"
            for region in node.regions:
                yield f"{indent}  region({region.types})"
                yield from self._write(region.values, scope.new_child(), numbers, indent + "  ")
        yield f"{indent}return {self._names(values, scope, next(numbers))}"

    def _names(self, values: Iterable[Value], scope: Scope, number: int) -> str:
        return ", ".join(
            f"argument {each.level}.{each.index}"
            if isinstance(each, Argument)
            else f"{scope[each.node] - number}.{each.index}"
            for each in values
        )


def nodes_of(values: Iterable[Value]) -> list[Node]:
    """Returns the nodes of values, each once."""
    return [*dict.fromkeys(each.node for each in values if isinstance(each, Result))]


def in_order(nodes: Iterable[Node], is_known: Callable[[Node], bool]) -> list[Node]:
    """Returns nodes and all that they need, each after what it needs, without the known ones."""
    found: dict[Node, None] = {}
    pending = [*nodes][::-1]
    while pending:
        node = pending[-1]
        missing = (
            [] if node in found or is_known(node) else [n for n in node.needs if n not in found and not is_known(n)]
        )
        if missing:
            pending += missing[::-1]
            continue
        pending.pop()
        if not is_known(node):
            found[node] = None
    return [*found]


def digest_of(text: str) -> str:
    """Returns the first 16 digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def strip_names(text: str) -> str:
    """Returns the text of a module with numbers in place of the names of its functions, in order of appearance."""
    private = set(re.findall(r"func\.func private @([\w.$-]+|\"[^\"]*\")", text))
    numbers: dict[str, int] = {}

    def rename(found: re.Match[str]) -> str:
        return f"@{numbers.setdefault(found[1], len(numbers))}" if found[1] in private else found[0]

    return re.sub(r"@([\w.$-]+|\"[^\"]*\")", rename, re.sub(r"^module @\S+", "module", text))


def configure(fields: dict[str, Any], devices: int) -> ConfigDict:
    """Returns the configuration of a case."""
    config = base.get_config()
    config.model.name = "ViT-B/16"
    config.total_steps, config.grad_norm_clip, config.base_lr = 1000, 1.0, 1e-3
    config.data.num_classes, config.data.num_examples = 1000, 10_000
    config.optim.weight_decay = 0.1
    if fields.get("task.kind") == "masked_patches":
        config = masked_patches.mask(config, "mean_color")
    config.update_from_flattened_dict(fields)
    config.mesh.tensor = min(config.mesh.tensor, devices)
    config.batch = IMAGES * devices * config.accum_steps
    if "ViT" in config.model.name:
        config.model.depth = 2
    return config


def build(config: ConfigDict, platform: str, devices: list[jax.Device]) -> Program:
    """Returns the program of a configuration.

    There is no device of CUDA to make a mesh of: its programs have the forms that are chosen for NVIDIA's, on a mesh
    of CPUs.
    """

    def choose(model: Model, device: jax.Device, tensor: int) -> Model:
        fields = {"dtype": config.model.dtype if config.model.dtype != "auto" else "bfloat16"}
        fields |= {name: config.model[name] for name in ("attention", "mlp") if model.field(name)}
        return model.with_fields(**fields).for_device(NVIDIA, IMAGES, tensor)

    check_config(config)
    spec = data.spec(config)
    config = resolve_config(config)
    teacher = create("ViT-B/16", depth=2, num_classes=1000) if config.task.kind == "distill" else None
    mesh = sharding.make_mesh(config, devices)
    return make_program(config, mesh, spec, choose if platform == "cuda" else None, teacher)


def lower(program: Program, platform: str) -> Iterator[tuple[str, ir.Module]]:
    """Yields the functions of a program by name, lowered for a platform."""
    teacher = [program.teacher.params] if program.teacher else []
    functions: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "train": (program.train_step, (program.state, program.batch, *teacher)),
        "eval": (program.eval_step, (program.params, program.eval_batch)),
    }
    if isinstance(program.model.spec, models.ModelSpec):
        functions["capture"] = observe.make_observer(program, 4, False), (program.params, program.batch["image"])
    else:
        functions["features"] = program.features, (program.params, program.eval_batch)
    for name, (function, arguments) in functions.items():
        traced = function.trace(*arguments)
        lowered = traced.lower(lowering_platforms=("cuda",)) if platform == "cuda" else traced.lower()
        yield name, lowered.compiler_ir("stablehlo")


def digest_programs(platform: str, only: str, folder: Path | None) -> Digests:
    """Returns the digests of the programs of a platform, and writes their texts to a folder if there is one.

    Args:
        platform: one of `PLATFORMS`.
        only: a regular expression that is found in the names of the programs.
        folder: the folder; None: nothing is written.
    """
    if platform == "cuda":  # JAX asks the cuDNN and the GPU that are here; none is
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        cudnn.check_cudnn_version, cudnn.check_compute_capability = lambda: 91000, lambda capability: True
    found, kernels = Digests(), Kernels()
    for (case, fields), (count, target) in itertools.product(
        CASES.items(), zip(DEVICES, PLATFORMS[platform], strict=True)
    ):
        name = f"{case}; {platform}, {count}"
        if not re.search(only, name):
            continue
        program = build(configure(fields, count), platform, targets.find_devices(target, 1)[:count])
        for function, module in lower(program, platform):
            found[f"{name}; {function}"], text = digest_module(module, kernels)
            if folder:
                file = re.sub(r"[^\w.=-]+", "_", f"{name}; {function}")
                (folder / f"{file}.txt").write_text(text)
        print(name, file=sys.stderr)
    for digest, text in kernels.texts.items() if folder else ():
        (folder / f"kernel_{digest}.txt").write_text(text)
    return found


def digest_module(module: ir.Module, kernels: Kernels) -> tuple[dict[str, str], str]:
    """Returns the digests of a lowered program, and its text, of which `graph` is the digest."""
    graph = "".join(f"{line}\n" for line in Graph(module, kernels).lines())
    text = kernels.replace(strip_names(module.operation.get_asm(enable_debug_info=False)))
    return {"graph": digest_of(graph), "text": digest_of(text)}, graph


def digest_in_process(platform: str, only: str, folder: Path | None) -> Digests:
    """Returns the same as `digest_programs`, from a process of its own."""
    environment = targets.compiler_environment(records.PlanRequest((), PLATFORMS[platform][1]))
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={max(DEVICES)}"}
    with tempfile.NamedTemporaryFile(suffix=".json") as answer:
        words = [f"--platforms={platform}", f"--only={only}", f"--out={answer.name}", "--here"]
        words += [f"--text={folder}"] if folder else []
        subprocess.run([sys.executable, "-m", "benchmarks.programs", *words], cwd=ROOT, env=environment, check=True)
        return json.loads(Path(answer.name).read_text())


def compare(before: Digests, after: Digests) -> int:
    """Prints which programs differ, and returns the exit code: 1 if there is one, else 0."""
    both = [name for name in before if name in after]
    different = [name for name in both if before[name]["graph"] != after[name]["graph"]]
    other_order = [name for name in both if name not in different and before[name] != after[name]]
    alone = [name for name in {**before, **after} if name not in both]
    for word, names in (("differs", different), ("only in one", alone), ("other order or functions", other_order)):
        for name in names:
            print(f"{word}: {name}")
    equal = len(both) - len(different)
    print(f"{equal} of {len({**before, **after})} programs are equal, {len(other_order)} of them in another order")
    return int(bool(different or alone))


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write the digests to")
    parser.add_argument("--text", type=Path, metavar="DIR", help="folder to write the programs to")
    parser.add_argument("--only", default="", help="regular expression of the programs, as in 'B/16.*v5e, 8' [all]")
    parser.add_argument("--platforms", default=",".join(PLATFORMS), help=f"some of {', '.join(PLATFORMS)} [all]")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two such files to compare")
    args = parser.parse_args(argv[1:])
    if args.compare:
        before, after = (json.loads(path.read_text()) for path in args.compare)
        sys.exit(compare(before, after))
    if args.out is None:
        raise UserError("give --out=FILE.json, or --compare with two such files.")
    folder = args.text and args.text.resolve()
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    platforms = args.platforms.split(",")
    if args.here:
        found = [digest_programs(platform, args.only, folder) for platform in platforms]
    else:
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            found = [*pool.map(lambda platform: digest_in_process(platform, args.only, folder), platforms)]
    args.out.write_text(json.dumps({name: each for part in found for name, each in part.items()}, indent=1) + "\n")


if __name__ == "__main__":
    cli.run_command(main)
