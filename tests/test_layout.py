"""The house rules of CONTRIBUTING.md: who imports what, how large files are, no cycles."""

import ast
import re
from graphlib import TopologicalSorter

import pytest

from tests.conftest import ROOT

FILES = {
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__"): path
    for path in sorted((ROOT / "vit_jax").rglob("*.py"))
}
SOURCES = {module: path.read_text() for module, path in FILES.items()}


def imports(source: str) -> set[str]:
    """Names of the modules (and of what is taken from them) that a source imports, wherever it does."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def internal(module: str) -> set[str]:
    """The modules of the package that a module imports; a package only if nothing inside it is meant."""
    found = {name for name in imports(SOURCES[module]) if name in FILES and name not in (module, "vit_jax")}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


GRAPH = {module: internal(module) for module in FILES}

# Library -> where alone it may be imported.
OWNERS = {
    "flax": r"vit_jax\.models(\..*)?",
    "grain": r"vit_jax\.data(\..*)?",
    "tensorflow_datasets": r"vit_jax\.data(\..*)?",
    "cv2": r"vit_jax\.data(\..*)?",
    "PIL": r"vit_jax\.data(\..*)?",
    "simplejpeg": r"vit_jax\.data(\..*)?",
    "sklearn": r"vit_jax\.data(\..*)?",
    "array_record": r"vit_jax\.data\.shards",
    "google.protobuf": r"vit_jax\.data\.example",
    "google.colab": r"vit_jax\.analysis\.notebook",
    "jax._src": r"vit_jax\.pod",
    "orbax": r"vit_jax\.checkpoint",
    "tensorboardX": r"vit_jax\.log",
    "tqdm": r"vit_jax\.(log|pack|interop\.download)",
    "argparse": r"vit_jax\.(convert|doctor|evaluate|pack|plan|predict)",
    "matplotlib": r"vit_jax\.analysis\.plot",
    "configs": "nothing",
    "tensorflow": "nothing",
    "torch": "nothing",
}


@pytest.mark.parametrize("module", FILES)
def test_libraries_stay_with_their_owner(module):
    for name in imports(SOURCES[module]):
        for library, owner in OWNERS.items():
            if f"{name}.".startswith(f"{library}."):
                assert re.fullmatch(owner, module), f"{module} imports {library}"


def test_only_command_lines_read_flags():
    for module, source in SOURCES.items():
        if "flags.DEFINE" in source or "sys.argv" in source:
            assert module in ("vit_jax.main", "vit_jax.cli", "vit_jax.doctor"), module


def test_configs_import_ml_collections_and_themselves():
    for path in (ROOT / "configs").glob("*.py"):
        roots = {name.split(".")[0] for name in imports(path.read_text())}
        assert roots <= {"ml_collections", "configs"}, path


def test_no_cycles():
    list(TopologicalSorter(GRAPH).static_order())  # raises CycleError


def test_the_graph_is_small():
    assert sum(map(len, GRAPH.values())) / len(GRAPH) <= 2
    assert max(map(len, GRAPH.values())) <= 8


def test_files_fit_in_a_head():
    for module, source in SOURCES.items():
        assert source.count("\n") <= 400, module
        assert "utils" not in module


def test_no_hidden_defaults():
    for module, source in SOURCES.items():
        assert not re.search(r"\b(config|cfg)(\.\w+)*\.get\(", source), module
