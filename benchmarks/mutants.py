"""Measures how many small faults the tests find: runs the tests of a room on one mutant after the other, in a copy.

python -m benchmarks.mutants --write=benchmarks/mutants.csv
python -m benchmarks.mutants --write=benchmarks/mutants.csv --slow

A mutant changes one operator, constant or condition of one function. A room is a package or a module at the root of
vit_jax. A new file gets a seeded sample of mutants over all rooms, in proportion to their code. The tests of a mutant's
room are run until one fails. If the file exists, only its rows without a result are run. The name of a mutant does not
depend on code around its function, so that a row stays valid. `--slow` runs the slow tests of the room on the mutants
that no default test has found. If these do not find it either, the row has `none`; a reason may be added by hand, as in
`none: attention is square`.
"""

import argparse
import ast
import copy
import csv
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SWAPPED = {
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.And, ast.Or),
}
OTHER = {one: other for pair in SWAPPED for one, other in (pair, pair[::-1])} | {ast.FloorDiv: ast.Mult}
# Room -> names of its tests, for rooms whose tests are not called like the room.
TESTS = {
    "text_tables": ["evaluate", "experiments"],
    "config": ["configs", "cli", "errors", "experiments/test_sweep"],
    "tasks": ["tasks", "masked_patches"],
    "convert": ["interop/test_catalog", "interop/test_layouts", "cli"],
    "describe": ["data/test_describe"],
    "doctor": ["machine", "cli"],
    "doubts": ["experiments/test_cross_validation"],
    "evals": ["evals", "evaluate"],
    "execution": ["models", "kernels", "sharding"],
    "finetune": ["experiments/test_finetune", "experiments/test_finetune_tables"],
    "inference": ["evaluate", "program"],
    "look": ["analysis"],
    "macs": ["planning/test_flops"],
    "main": ["train", "cli"],
    "model": ["models"],
    "pack": ["data/test_shard_writer"],
    "paper": ["experiments"],
    "plan": ["planning"],
    "predict": ["cli", "evaluate", "docs"],
    "record": ["evaluate", "experiments"],
    "report": ["analysis/test_report"],
    "step": ["program", "sharding"],
    "streams": ["train", "program"],
    "sweep": ["experiments/test_sweep"],
    "training": ["training", "train"],
    "tree": ["optim", "program"],
    "unknown_words": ["configs", "cli"],
    "vtab": ["experiments/test_vtab"],
}
SECONDS = 600  # limit for a run of tests; a mutant that exceeds it counts as found
LIVES = "no default test"


def room_of(path: Path) -> str:
    """Returns the room of a module: its folder in the package or, for a module at the root, its own name."""
    parts = path.relative_to(ROOT / "vit_jax").with_suffix("").parts
    return parts[0]


def tests_of(room: str) -> list[str]:
    """Returns the paths of the tests of a room, relative to the root of the project."""
    found = []
    for name in TESTS.get(room, [room]):
        paths = [
            path for path in (f"tests/{name}.py", f"tests/test_{name}.py", f"tests/{name}") if (ROOT / path).exists()
        ]
        assert paths or room not in TESTS, f"there are no tests {name}, which {room} names"
        found += paths
    return found


def changed(node: ast.AST) -> list[ast.expr]:
    """Returns the expressions that mutants have in place of a node; empty if it is not mutated."""
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        return [ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1 and type(new.ops[0]) in OTHER:
        new.ops = [OTHER[type(new.ops[0])]()]
        return [new]
    if isinstance(new, ast.BinOp | ast.BoolOp) and type(new.op) in OTHER:
        new.op = OTHER[type(new.op)]()
        return [new]
    if isinstance(new, ast.IfExp):
        return [ast.IfExp(ast.UnaryOp(ast.Not(), new.test), new.body, new.orelse)]
    return []


def in_bodies(node: ast.AST, name: str = "", inside: bool = False):
    """Yields (name of the function, expression) for every expression inside a function.

    Annotations, decorators, default values and the parts of f-strings are left out.
    """
    if isinstance(node, ast.JoinedStr):
        return
    if inside and isinstance(node, ast.expr):
        yield name, node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                whole = f"{name}.{child.name}".lstrip(".")
                yield from in_bodies(child, whole, inside or isinstance(child, ast.FunctionDef))
            elif isinstance(child, ast.AST):
                yield from in_bodies(child, name, inside)


def mutants_of(path: Path) -> dict[str, str]:
    """Returns name of a mutant -> changed source of the module, for all mutants of a module."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, seen = {}, Counter()
    for function, node in in_bodies(ast.parse(source)):
        for new in changed(node):
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + node.end_col_offset
            words = f"{path.relative_to(ROOT)} {function}: {ast.unparse(node)} -> {ast.unparse(new)}"
            seen[words] += 1
            name = words if seen[words] == 1 else f"{words} ({seen[words]})"
            found[name] = (source[:first] + f"({ast.unparse(new)})".encode() + source[last:]).decode()
    return found


def sample(count: int, seed: int) -> list[str]:
    """Returns the names of `count` random mutants: at least one of each room, the rest in proportion to their code."""
    rooms = defaultdict(list)
    for path in sorted((ROOT / "vit_jax").rglob("*.py")):
        room = room_of(path)
        if tests_of(room):
            rooms[room if (ROOT / "vit_jax" / room).is_dir() else "root"] += mutants_of(path)
    total, chance = sum(map(len, rooms.values())), random.Random(seed)
    spare = count - len(rooms)
    drawn = [name for names in rooms.values() for name in chance.sample(names, 1 + spare * len(names) // total)]
    rest = [name for names in rooms.values() for name in names if name not in drawn]
    return sorted(drawn + chance.sample(rest, count - len(drawn)))


def find(name: str, tree: Path, slow: bool) -> str:
    """Runs the tests of a mutant's room, and returns the name of the first test that fails; empty if none fails.

    Test files that mention the mutant's module or function are run first.

    Args:
        name: the name of the mutant.
        tree: a copy of the project, in which the mutant is written and afterwards removed.
        slow: whether the slow tests are run instead of the default ones.
    """
    path, function = ROOT / name.partition(" ")[0], name.split()[1].rstrip(":").rpartition(".")[2]
    mutants = mutants_of(path)
    if name not in mutants:
        raise SystemExit(f"{name!r} is no longer there; delete its row")
    files = [
        file
        for place in tests_of(room_of(path))
        for file in sorted((ROOT / place).rglob("test_*.py")) or [ROOT / place]
    ]
    near = [file for file in files if re.search(rf"\b({path.stem}|{function})\b", file.read_text() + file.stem[5:])]
    target = tree / path.relative_to(ROOT)
    kind = ["-m", "slow" if slow else "not slow"]
    command = [sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider", "-p", "no:rerunfailures", *kind]
    try:
        target.write_text(mutants[name])
        for some in filter(None, (near, [file for file in files if file not in near])):
            done = subprocess.run(
                [*command, *(str(file.relative_to(ROOT)) for file in some)],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                timeout=SECONDS,
                capture_output=True,
                text=True,
            )
            if done.returncode not in (0, 5):  # 5 means that there are no such tests
                told = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.M)
                return told[1] if told else "import"
        return ""
    except subprocess.TimeoutExpired:
        return "it hangs"
    finally:
        shutil.copy(path, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True, metavar="FILE", help="the table, new or to be run again")
    parser.add_argument("--slow", action="store_true", help="the slow tests, on what the default ones let live")
    parser.add_argument("--sample", type=int, default=120, metavar="N", help="mutants of a new table")
    parser.add_argument("--seed", type=int, default=0, help="of a new table")
    args = parser.parse_args()
    if args.write.exists():
        rows = {row["mutant"]: row["found by"] for row in csv.DictReader(args.write.open())}
    else:
        rows = dict.fromkeys(sample(args.sample, args.seed), "")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info"))
        waiting = [name for name, found in rows.items() if found == (LIVES if args.slow else "")]
        for name in random.Random(args.seed).sample(waiting, len(waiting)):  # a part of them is a fair sample, too
            found = find(name, tree, args.slow)
            rows[name] = (found and f"{'slow: ' if args.slow else ''}{found}") or ("none" if args.slow else LIVES)
            print(name, "|", rows[name], flush=True)
            with args.write.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([("mutant", "found by"), *rows.items()])
    kinds = Counter(
        found.partition(":")[0]
        if found.startswith(("none", "slow: ")) or found == LIVES
        else "default"
        if found
        else "not run"
        for found in rows.values()
    )
    print(", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))


if __name__ == "__main__":
    main()
