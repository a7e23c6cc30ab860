"""The house rules: who imports what, no cycles, and what is done in one place only."""

import ast
import json
import math
import re
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

from docs.imports import FACES, FILES, IMPORTS, SOURCES, TREES, defined, imported
from tests.conftest import ROOT
from vit_jax.json_text import to_json

# From the bottom to the top: a file imports from its own room and from layers below. A room is a package, or a file of
# the root; the command lines are the last.
LAYERS = (
    "errors",
    "streams unknown_words tree text_tables json_text kernels storage paper",
    "config machine sharding",
    "data monitoring models",
    "execution",
    "model",
    "macs optim",
    "tasks",
    "distributed inference step",
    "checkpoint program cli",
    "interop kernel_trials shared_step",
    "analysis",
    "evals",
    "training",
    "planning",
    "measurements",
    "train",
    "experiments",
    "doors",
)


def room_of(module: str) -> str:
    """The room of a module: a package or a file of the root; `doors` for the package's front and the command lines."""
    parts = module.split(".")
    is_door = len(parts) == 2 and 'if __name__ == "__main__"' in SOURCES[module]
    return "doors" if len(parts) == 1 or is_door else parts[1]


# What their processes print is read by this package.
PIPES = ("vit_jax.planning.worker", "vit_jax.planning.schedules.kernel_cycles", "vit_jax.machine.accelerators")

# Library -> the only modules that may import it.
OWNERS = {
    "flax": r"vit_jax\.(models(\..*)?|model)",
    "grain": r"vit_jax\.data(\..*)?",
    "tensorflow_datasets": r"vit_jax\.data(\..*)?",
    "cv2": r"vit_jax\.data(\..*)?",
    "PIL": r"vit_jax\.data(\..*)?",
    "simplejpeg": r"vit_jax\.data\.images\.jpeg",
    "array_record": r"vit_jax\.data\.shards\.array_record_file",
    "google_crc32c": r"vit_jax\.data\.shards\.tfrecord_file",
    "pyarrow": r"vit_jax\.data\.shards\.parquet_file",
    "google.protobuf": r"vit_jax\.data\.shards\.tf_example",
    "google.colab": r"vit_jax\.analysis\.notebook",
    "jax._src": r"vit_jax\.distributed\.coordination",
    "orbax": r"vit_jax\.checkpoint(\..*)?",
    "safetensors": r"vit_jax\.interop\.archives",
    "tensorboardX": r"vit_jax\.monitoring\.events",
    "tqdm": r"vit_jax\.(monitoring\.metric_writer|describe|embed|pack|interop\.download)",
    "argparse": r"vit_jax\.(cli|convert|describe|doctor|doubts|embed|evaluate|look|measure|pack|plan|predict)|"
    r"vit_jax\.(record|report|vtab)",
    "bokeh": r"vit_jax\.analysis\.curves",
    "matplotlib": r"vit_jax\.analysis\.plot",
    "onnx_ir": r"vit_jax\.interop\.onnx_model",
    "benchmarks": "nothing",
    "configs": "nothing",
    "sklearn": "nothing",
    "docs": "nothing",
    "tensorflow": "nothing",
    "torch": "nothing",
}


# What is imported by a string: `vit_jax.train`, a library that may be absent, a recipe by its path.
IMPORTED_BY_STRING = {
    ("vit_jax", "importlib.import_module"),
    ("vit_jax.interop.hub", "importlib.import_module"),
    ("vit_jax.config.recipes", "importlib.util.spec_from_file_location"),
}


def test_libraries_stay_with_their_owner():
    for module in FILES:
        for source, name in imported(TREES[module]):
            for library, owner in OWNERS.items():
                if f"{source}.{name}.".startswith(f"{library}."):
                    assert re.fullmatch(owner, module), f"{module} imports {library}"


def test_packages_are_entered_by_their_face():
    for module in FILES:
        for definer, counted in IMPORTS[module].items():
            parts = definer.split(".")
            packages = [".".join(parts[:length]) for length in range(2, len(parts))]
            for package in packages:
                inside = module == package or module.startswith(f"{package}.")
                assert inside or counted == package or (counted.startswith(f"{package}.") and counted in FACES), (
                    f"{module} reaches into {package} for {definer}"
                )


def test_faces_name_what_their_packages_define():
    for package, names in FACES.items():
        for name, definer in names.items():
            assert definer == f"{package}.{name}" or name in defined(definer), f"{definer} does not define {name}"


def test_only_command_lines_read_flags():
    for module, source in SOURCES.items():
        if "flags.DEFINE" in source or "sys.argv" in source:
            assert module in ("vit_jax.config.flags", "vit_jax.cli", "vit_jax.doctor", "vit_jax.__main__"), module


def test_configs_import_ml_collections_the_fields_and_themselves():
    for path in (ROOT / "configs").rglob("*.py"):
        for source, _ in imported(ast.parse(path.read_text())):
            assert source.partition(".")[0] in ("ml_collections", "configs") or source == "vit_jax.config", path


def test_nothing_is_imported_that_cannot_be_seen_here():
    found = set()
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            words = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if words in ("importlib.import_module", "importlib.util.spec_from_file_location"):
                found.add((module, words))
        assert "sys.modules[" not in SOURCES[module], module
    assert found == IMPORTED_BY_STRING


def test_rooms_import_from_layers_below():
    order = {room: height for height, layer in enumerate(LAYERS) for room in layer.split()}
    for module, found in IMPORTS.items():
        for definer in found:
            above, below = order[room_of(module)], order[room_of(definer)]
            assert below < above or room_of(module) == room_of(definer), f"{module} imports {definer}"


def test_no_cycles():
    list(TopologicalSorter(IMPORTS).static_order())  # raises CycleError


def test_no_module_is_named_for_whatever_is_useful():
    assert not [module for module in FILES if "utils" in module]


def test_files_are_replaced_in_one_place():
    for module, source in SOURCES.items():
        if module != "vit_jax.storage.atomic":
            assert not re.search(r"(partial|temporary)\.(replace|rename)\(|os\.(replace|rename|fsync)\(", source), (
                module
            )


def test_shapes_are_checked_wherever_they_are_stated():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    checked = re.search(r"--jaxtyping-packages=(\S+)", options)[1].split(",")[:-1]
    stating = [module for module, tree in TREES.items() if "jaxtyping" in {name for name, _ in imported(tree)}]
    assert [one for one in stating if not f"{one}.".startswith(tuple(f"{package}." for package in checked))] == []


def test_no_hidden_defaults():
    for module, source in SOURCES.items():
        assert not re.search(r"\b(config|cfg)(\.\w+)*\.get\(", source), module


def test_the_keys_of_what_is_kept_cover_the_package():
    """The keys in planning/ are left out: they have the whole program besides its own source."""
    for module, source in SOURCES.items():
        for folder in re.findall(r"source_digest\((Path\(__file__\).*?)\)", source):
            covered = eval(folder, {"Path": Path, "__file__": str(FILES[module])})
            assert covered in (ROOT / "vit_jax", ROOT / "vit_jax" / "planning"), module
            assert covered.name == "vit_jax" or module.startswith("vit_jax.planning."), module


# Functions that give the same whatever the order of what they take, and those that keep it.
WITHOUT_ORDER = {"sorted", "set", "frozenset", "any", "all", "sum", "len", "min", "max"}
IN_ORDER = {"list", "tuple", "iter", "enumerate", "zip", "map", "join", "fromkeys"}
SETS = (ast.Set, ast.SetComp)


def called(node: ast.AST) -> str:
    """The name of the function or method that a node calls; empty if it is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", ""))


def is_set(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is a set, as far as its form and `names`, those of variables that are sets, tell."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor | ast.Sub):
        return any(is_set(side, names) or called(side) == "keys" for side in (node.left, node.right))
    return isinstance(node, SETS) or called(node) in ("set", "frozenset") or getattr(node, "id", None) in names


def loops_over_sets(function: ast.AST) -> list[str]:
    """The sets whose elements a function takes in the order in which they are stored, which differs in each process."""
    nodes = list(ast.walk(function))
    names, loops = set[str](), list[tuple[ast.AST, ast.AST]]()
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value and is_set(node.value, set()):
            names |= {one.id for one in getattr(node, "targets", [getattr(node, "target", None)]) if hasattr(one, "id")}
    for node in nodes:
        taken = node.args if called(node) in IN_ORDER else [getattr(node, "iter", None)]
        taken = [node.value] if isinstance(node, ast.Starred) else taken
        loops += [(node, each) for each in taken if each and is_set(each, names)]
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)} if loops else {}
    found = []
    for node, each in loops:
        above = [node]
        while not isinstance(above[-1], ast.stmt):
            above.append(parents[above[-1]])
        if not any(isinstance(one, SETS) or called(one) in WITHOUT_ORDER for one in above):
            found.append(ast.unparse(each))
    return found


def test_no_order_of_a_set_is_used():
    """It depends on PYTHONHASHSEED, so hosts would differ in what they read, name or exchange."""
    assert loops_over_sets(ast.parse("a = {*b}\nc = [d for d in a], sorted(d for d in a), [*{e}]")) == ["a", "{e}"]
    for module, tree in TREES.items():
        classes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        functions = [node for one in classes for node in one.body if isinstance(node, ast.FunctionDef)]
        assert not [found for function in functions for found in loops_over_sets(function)], module


def test_json_for_other_programs_is_json():
    assert json.loads(to_json({"a": [math.nan, (math.inf, 1.5)], "b": "NaN"})) == {"a": [None, [None, 1.5]], "b": "NaN"}
    assert not [module for module, source in SOURCES.items() if "print(json.dumps(" in source and module not in PIPES]
