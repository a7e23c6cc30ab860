"""Every message that a user can meet, as written in the source: tests/golden/messages.txt."""

import ast
import os
from collections.abc import Iterator

from tests.conftest import ROOT

GOLDEN = ROOT / "tests" / "golden" / "messages.txt"
ERRORS = {"UserError", "NoAnswer", "LostHosts", "Preempted", "NonFiniteLoss"}
CALLS = {"warning", "say", "add_note"}  # methods whose first argument is a message


def subclasses(trees) -> set[str]:
    """The names of the errors that are printed as a sentence, those derived from others included."""
    found = set(ERRORS)
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while True:
        more = {node.name for node in classes if found & {ast.unparse(base).rpartition(".")[2] for base in node.bases}}
        if more <= found:
            return found
        found |= more


class Texts:
    """Writes expressions as text, with the strings that are assigned once in place of their names."""

    def __init__(self, *scopes: ast.AST):
        self.values: dict[str, ast.expr | None] = {}
        for scope in scopes:
            nodes = [node for top in scope.body for node in ([top] if isinstance(scope, ast.Module) else ast.walk(top))]
            assigned = {
                node.targets[0].id: node.value
                for node in nodes
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            stored = [one.id for one in ast.walk(scope) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
            self.values |= {name: assigned.get(name) if stored.count(name) == 1 else None for name in stored}

    def write(self, node: ast.expr, inside: tuple[str, ...] = ()) -> str:
        """`{name}` stands for a value, `[a|b]` for one of two texts."""
        if isinstance(node, ast.Constant):
            return str(node.value) if isinstance(node.value, str) else "{...}"
        if isinstance(node, ast.JoinedStr):
            return "".join(self.write(part, inside) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.write(node.value, inside)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.write(node.left, inside) + self.write(node.right, inside)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self.write(node.left, inside)
        if isinstance(node, ast.IfExp):
            texts = [self.write(branch, inside) for branch in (node.body, node.orelse)]
            return f"[{'|'.join(filter(None, texts))}]"
        if isinstance(node, ast.Name):
            value = self.values.get(node.id)
            if isinstance(value, ast.Constant | ast.JoinedStr | ast.IfExp) and node.id not in inside:
                text = self.write(value, (*inside, node.id))
                return text if text.strip("{.}") else f"{{{node.id}}}"
            return f"{{{node.id}}}"
        return f"{{{node.attr}}}" if isinstance(node, ast.Attribute) else "{...}"


def find_messages(tree: ast.Module, errors: set[str]) -> Iterator[str]:
    """The messages of a file in the order of its lines, each with what carries it."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in errors or (name in CALLS and isinstance(node.func, ast.Attribute)):
            messages = [node.args[:1]]
        elif name == "Finding":
            messages = [node.args[1:]]
        elif name == "refuse":
            name, messages = "UserError", [case.elts[1:] for case in node.args if isinstance(case, ast.Tuple)]
        else:
            continue
        around = [one for one in functions if one.lineno <= node.lineno <= (one.end_lineno or 0)]
        texts = Texts(tree, *around)
        for parts in messages:
            text = " -> ".join(map(texts.write, parts))
            place = (parts[0] if parts else node).lineno, node.col_offset
            found += [(*place, f"{name}: {text}")] if len(text.split()) > 1 else []
    return (message for _, _, message in sorted(found))


def collect() -> str:
    paths = [path for folder in ("vit_jax", "launch") for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    errors = subclasses(trees.values())
    lines = []
    for path, tree in trees.items():
        messages = list(dict.fromkeys(" ".join(message.split()) for message in find_messages(tree, errors)))
        if messages:
            lines += [f"{path.relative_to(ROOT)}", *(f"  {message}" for message in messages), ""]
    return "\n".join(lines)


def test_the_messages_are_those_that_were_read():
    """`UPDATE_GOLDEN=1 pytest tests/test_messages.py` writes them anew; read the difference."""
    text = collect()
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_messages_end_with_a_full_stop():
    """Where data and weights are read they may be clauses that a caller continues, as in `{error}; repair it`."""
    readers = ("vit_jax/data/", "vit_jax/interop/", "vit_jax/pack.py", "vit_jax/describe.py")
    files = [file for file in GOLDEN.read_text().split("\n\n") if not file.startswith(readers)]
    errors = [line for file in files for line in file.splitlines() if line.startswith("  UserError: ")]
    assert len(errors) > 250 and not [line for line in errors if not line.endswith((".", "?", "}", "]"))]
