"""Draws the picture of docs/architecture.md from the imports of the package.

Example:
  python -m docs.architecture --write=docs/architecture.svg

A grey box is a package, and a blue box is a file. An arrow leads from the importer to the imported. An arrow that
follows from others is left out: if a imports b and b imports c, there is no arrow from a to c.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from docs.imports import FACES, FILES, IMPORTS, SOURCES

CAPTIONS = {
    "commands": "main, evaluate, predict, ...",
    "train": "the loop",
    "training": "how a run begins, saves, ends",
    "program": "config to device programs",
    "inference": "functions of the weights",
    "step": "one update",
    "shared_step": "one update for a sweep's runs",
    "tasks": "objectives",
    "optim": "schedule and optimizers",
    "sharding": "mesh and placement tables",
    "config": "fields, checks, command line",
    "models": "the paper's equations",
    "execution": "their forms on devices",
    "model": "create, init, apply",
    "macs": "multiply-accumulates",
    "data": "sources, images, batches",
    "evals": "evaluations",
    "checkpoint": "save and restore",
    "distributed": "the hosts of a run",
    "storage": "files, buckets, cache",
    "monitoring": "metrics, logs, profiles",
    "interop": "weights in and out of files",
    "experiments": "sweeps and records",
    "paper": "the paper's numbers",
    "planning": "compile for absent TPUs",
    "analysis": "figures and pages",
    "cli": "exit codes",
    "text_tables": "tables of text",
    "streams": "output that may be closed",
    "unknown_words": "did you mean ...?",
    "kernels": "for one kind of chip",
    "kernel_trials": "kernels beside the plain form",
    "measurements": "measured beside predicted",
    "machine": "what this computer has",
    "tree": "names of leaves",
    "json_text": "JSON for others",
}
WIDTH, HEIGHT, GAP, ROW = 196, 46, 22, 92  # pixels: width and height of a box, space between boxes, height of a row
THIN = 14  # pixels of width that an arrow takes where it passes a row
STYLE = """
  text { font: 12px system-ui, sans-serif; text-anchor: middle; fill: #57606a }
  .name { font-size: 15px; font-weight: 600; fill: #1f2328 }
  rect { fill: #f6f8fa; stroke: #8c959f }
  .file rect { fill: #ddf4ff; stroke: #54aeff }
  path { fill: none; stroke: #8c959f; stroke-width: 1.3 }
  #head path { fill: #8c959f; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1 }
    .name { fill: #f0f6fc }
    rect { fill: #151b23; stroke: #656c76 }
    .file rect { fill: #121d2f; stroke: #1f6feb }
    path { stroke: #656c76 }
    #head path { fill: #656c76 }
  }
"""
Graph = dict[str, set[str]]
Node = str | tuple[str, str, int]  # a box, or the place (from, to, row) where an arrow passes a row


def find_box(module: str) -> str:
    """Returns the box of a module. All command lines share the box `commands`."""
    parts = module.split(".")
    is_command = len(parts) == 2 and 'if __name__ == "__main__"' in SOURCES[module]
    return "commands" if len(parts) == 1 or is_command else parts[1]


def read_graph() -> Graph:
    """Returns box -> the boxes that it imports. `errors`, which all import, is left out."""
    graph: Graph = {find_box(module): set() for module in FILES}
    for module, found in IMPORTS.items():
        graph[find_box(module)] |= {find_box(definer) for definer in found} - {find_box(module)}
    del graph["errors"]
    return {box: targets - {"errors"} for box, targets in sorted(graph.items())}


def reduce_graph(graph: Graph) -> Graph:
    """Returns the graph without the arrows that follow from others (its transitive reduction)."""

    def reached(box: str) -> set[str]:
        return graph[box].union(*map(reached, graph[box]))

    return {box: targets - set().union(*map(reached, targets)) for box, targets in graph.items()}


def arrange(graph: Graph) -> tuple[list[list[Node]], list[tuple[Node, Node]]]:
    """Returns the rows of nodes from top to bottom, and the arrows as pieces between nodes of adjacent rows.

    The nodes of a row are ordered so that few arrows cross.
    """

    def depth(box: str) -> int:
        return 1 + max(map(depth, graph[box]), default=-1)

    top = max(map(depth, graph))
    rows: list[list[Node]] = [[] for _ in range(top + 1)]
    for box in graph:
        rows[top - depth(box)].append(box)
    pieces: list[tuple[Node, Node]] = []
    for box, targets in graph.items():
        for target in sorted(targets):
            start, end = top - depth(box), top - depth(target)
            through: list[Node] = [(box, target, row) for row in range(start + 1, end)]
            for row, node in zip(range(start + 1, end), through, strict=True):
                rows[row].append(node)
            pieces += zip([box, *through], [*through, target], strict=True)
    for turn in range(24):
        order = rows if turn % 2 else rows[::-1]
        for fixed, moved in itertools.pairwise(order):
            place = {node: (index + 0.5) / len(fixed) for index, node in enumerate(fixed)}
            here = {node: (index + 0.5) / len(moved) for index, node in enumerate(moved)}
            moved.sort(key=lambda node: mean(_beside(node, pieces, place), here[node]))
    return rows, pieces


def _beside(node: Node, pieces: list[tuple[Node, Node]], place: dict[Node, float]) -> list[float]:
    """Returns the places of the nodes that a node is connected with, if `place` has them."""
    others = [b if a == node else a for a, b in pieces if node in (a, b)]
    return [place[other] for other in others if other in place]


def mean(values: Iterable[float], otherwise: float) -> float:
    """Returns the mean of some values, or `otherwise` if there are none."""
    values = list(values)
    return sum(values) / len(values) if values else otherwise


def place_nodes(rows: list[list[Node]], pieces: list[tuple[Node, Node]]) -> dict[Node, float]:
    """Returns node -> horizontal position of its middle, in pixels; positions may be negative."""
    size = {node: WIDTH if isinstance(node, str) else THIN for row in rows for node in row}
    middle: dict[Node, float] = {}
    for row in rows:
        left = -sum(size[node] + GAP for node in row) / 2
        for node in row:
            middle[node] = left + (size[node] + GAP) / 2
            left += size[node] + GAP
    for _ in range(60):  # moves each node towards those that it is connected with, as far as its neighbours allow
        for row in rows:
            wanted = {node: mean(_beside(node, pieces, middle), middle[node]) for node in row}
            for index, node in enumerate(row):
                low = middle[row[index - 1]] + (size[row[index - 1]] + size[node]) / 2 + GAP if index else -1e9
                after = row[index + 1] if index + 1 < len(row) else None
                high = middle[after] - (size[after] + size[node]) / 2 - GAP if after else 1e9
                middle[node] = min(max(wanted[node], low), max(high, low))
    return middle


def draw() -> str:
    """Returns the picture as SVG, readable on a light and on a dark background."""
    rows, pieces = arrange(reduce_graph(read_graph()))
    middle = place_nodes(rows, pieces)
    left = min(middle[node] for row in rows for node in row) - WIDTH / 2 - 8
    width = max(middle.values()) + WIDTH / 2 + 8 - left
    top = {node: ROW * number + 8 for number, row in enumerate(rows) for node in row}
    height = ROW * len(rows) - (ROW - HEIGHT) + 16
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">']
    lines += [f"<style>{STYLE}</style>", "<title>The files and packages of vit_jax, and which imports which</title>"]
    lines.append(
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    for start, end in pieces:
        x, y = middle[start] - left, top[start] + HEIGHT
        to, low = middle[end] - left, top[end] - 1
        if not isinstance(start, str):
            lines.append(f'<path d="M{x:.0f} {y - HEIGHT}V{y}"/>')
        head = ' marker-end="url(#head)"' if isinstance(end, str) else ""
        bend = (y + low) / 2
        lines.append(f'<path d="M{x:.0f} {y}C{x:.0f} {bend:.0f} {to:.0f} {bend:.0f} {to:.0f} {low}"{head}/>')
    for box in filter(lambda node: isinstance(node, str), middle):
        x, y = middle[box] - left, top[box]
        lines += [
            f'<g class="{"package" if f"vit_jax.{box}" in FACES else "file"}">',
            f'<rect x="{x - WIDTH / 2:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
            f'<text class="name" x="{x:.0f}" y="{y + 19}">{box}</text>',
            f'<text x="{x:.0f}" y="{y + 36}">{CAPTIONS[str(box)]}</text></g>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main(argv: list[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.architecture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", type=Path, default=Path("docs/architecture.svg"), help="[docs/architecture.svg]")
    parser.parse_args(argv[1:]).write.write_text(draw())


if __name__ == "__main__":
    main(sys.argv)
