"""The modules of the package and their imports, read from the sources, for tests/test_layout.py and the picture."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = {
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__"): path
    for path in sorted((ROOT / "vit_jax").rglob("*.py"))
}
SOURCES = {module: path.read_text() for module, path in FILES.items()}
TREES = {module: ast.parse(source) for module, source in SOURCES.items()}


def imported(tree: ast.AST) -> set[tuple[str, str]]:
    """Returns (module, imported name, or "" for `import module`) for all imports of a source, in functions too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {(node.module, alias.name) for alias in node.names}
    return names


def read_face(path) -> dict[str, str]:
    """Returns name -> module for the names in the face (`__init__.pyi`) of a package.

    The module is the one that defines the name, or the submodule that the name stands for.
    """
    package = ".".join(path.parent.relative_to(ROOT).parts)
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: f"{package}.{node.module or alias.name}"
        for node in nodes
        for alias in node.names
        if node.level == 1
    }


FACES = {
    ".".join(path.parent.relative_to(ROOT).parts): read_face(path)
    for path in sorted((ROOT / "vit_jax").rglob("__init__.pyi"))
}


def defined(module: str) -> set[str]:
    """Returns the names that a module defines at its top level."""
    names = set()
    for node in ast.iter_child_nodes(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def internal(module: str) -> dict[str, str]:
    """Returns defining module -> module that is imported from, for the imports of a module from this package.

    The two differ if a name is imported through the face of a package. Names that `vit_jax/__init__.py` provides, such
    as UserError, are left out.
    """
    found = {}
    for source, name in imported(TREES[module]):
        if source in FACES and f"{source}.{name}" not in FILES:
            assert name in FACES[source], f"{module}: {name} is not in the face of {source}"
            found[FACES[source][name]] = source
        elif f"{source}.{name}" in FILES and source in FACES and name in FACES[source]:
            found[f"{source}.{name}"] = source if not module.startswith(f"{source}.") else f"{source}.{name}"
        elif f"{source}.{name}" in FILES:
            found[f"{source}.{name}"] = f"{source}.{name}"
        elif source in FILES and source != "vit_jax":
            assert name in defined(source), f"{module}: {source} does not define {name}"
            found[source] = source
    return {definer: counted for definer, counted in found.items() if definer != module}


IMPORTS = {module: internal(module) for module in FILES}
