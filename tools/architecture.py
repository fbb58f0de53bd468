"""The picture of docs/architecture.md, made from the imports in the source.

    python -m tools.architecture [--json]

Boxes stand one below the other, so that imports point down only. From each box a line leads to the right; a dot on it
is an import, by any module in the box and at any depth of its code, and the line through the dot leads down to the box
that is imported. `halfsilver/__init__.py` is left out: it collects names and has no code.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "halfsilver"
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"


@dataclass(frozen=True)
class Box:
    """Some modules, by their path below the package or that of their folder; `layer` is said where one begins."""

    name: str
    about: str
    modules: tuple[str, ...]
    layer: str = ""


BOXES = (
    Box("cli/", "the command line", ("__main__", "cli"), "ways in"),
    Box("federated/", "names, and the Flower engine", ("federated",)),
    Box("tracking.py", "TensorBoard and MLflow", ("tracking",)),
    Box("auditing/", "canaries in every loop", ("audit", "auditing"), "proof"),
    Box("overlap/", "private rows in public data", ("overlap",)),
    Box("theory.py", "the paper's bounds", ("theory",)),
    Box("linear_model/", "scikit-learn's conventions", ("linear_model",), "further ways in, which are audited"),
    Box("probing.py", "a last layer, then all", ("probing",)),
    Box("selection.py", "the best of several runs", ("selection",)),
    Box("opacus, huggingface", "other libraries' loops and losses", ("opacus", "huggingface")),
    Box("report/", "pages and figures", ("report",), "studies"),
    Box("tasks/", "benchmarks, studies by name", ("tasks",)),
    Box("study/", "methods side by side", ("study",)),
    Box("trainer.py", "the loop", ("trainer",), "the loop"),
    Box("runs/", "one run on disk", ("runs",)),
    Box("mirror/", "public data, released tensors", ("mirror",), "two sides: neither imports the other"),
    Box("privacy/", "all that sees private records", ("privacy",)),
    Box("features/", "features from public rows", ("features",), "helpers"),
    Box("errors, _core/", "tensors, processes, locks", ("errors", "_core")),
)
Imports = Mapping[str, frozenset[str]]  # from the name of a box to those of others


# ---- what is imported


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """Absolute dotted names of all that `module` imports, at any depth, by statement or by call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node.module or "", node.level, module)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from _called_import(node, module)


def _absolute(name: str, level: int, module: str) -> str:
    if level == 0:
        return name
    parents = module.split(".")[:-level]
    return ".".join([*parents, name] if name else parents)


def _called_import(call: ast.Call, module: str) -> Iterator[str]:
    """The name in ``import_module("x")``; one that is computed at run time could be anything below its fixed part."""
    first = call.args[0] if call.args else None
    rest = ""
    if isinstance(first, ast.JoinedStr):
        first, rest = first.values[0], "<computed at run time>"
    if not (isinstance(first, ast.Constant) and isinstance(first.value, str)) or (rest and first.value[-1] != "."):
        yield "halfsilver.<computed at run time>"
    else:
        name = first.value.lstrip(".")
        yield _absolute(name + rest, len(first.value) - len(name), module)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def modules(folder: Path = PACKAGE) -> Iterator[tuple[str, ast.AST]]:
    """Each module below a folder of the package with its syntax tree; a package is named x.__init__."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts), ast.parse(path.read_text(encoding="utf-8"))


# ---- which box imports which


def box_of(module: str) -> str:
    """The first box that holds the part of the package which `module`, or a name in it, belongs to."""
    part = module.split(".")[1:2]
    for box in BOXES:
        if part and any(fnmatchcase(part[0], known) for known in box.modules):
            return box.name
    raise LookupError(f"{module} is in no box: put it in one of BOXES, or import a name from where it lives.")


def imports_of_boxes(found: Iterable[tuple[str, ast.AST]]) -> Imports:
    """Which boxes import which others; `LookupError` for a module that is in none, and for an import that points up."""
    graph: dict[str, set[str]] = {box.name: set() for box in BOXES}
    order = list(graph)
    for module, tree in found:
        if module == "halfsilver.__init__":
            continue
        own = box_of(module)
        for name in imports(tree, module):
            other = box_of(name) if name.split(".")[0] == "halfsilver" else own
            if order.index(other) < order.index(own):
                raise LookupError(f"{module} imports {name}, of {other}, which stands above {own}.")
            graph[own].add(other)
    return {name: frozenset(others - {name}) for name, others in graph.items()}


# ---- the drawing: plain SVG, so that a changed import is a changed line

ROW, GAP, LANE, LEFT, WIDTH, HEIGHT = 52, 34, 25, 16, 262, 44  # rows, gaps above layers, lanes, boxes
INK, FAINT, EDGE = "#14233b", "#53657f", "#8494aa"
FILLS = {"privacy/": "#16233b", "mirror/": "#d3f1ec"}
LINES = {"privacy/": "#c9781a", "mirror/": "#12a594", "errors, _*.py": "#c1ccdb", "runs, checkpoint": "#c1ccdb"}
FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def draw(graph: Imports) -> str:
    """The picture of `graph`, the same text for the same graph."""
    tops = _tops()
    lanes = [box.name for box in BOXES if any(box.name in others for others in graph.values())]
    x = {name: LEFT + WIDTH + 30 + i * LANE for i, name in enumerate(lanes)}
    right, bottom = max(x.values()) + 24, tops[BOXES[-1].name] + HEIGHT + 20
    body = [
        *(_lane(name, [n for n, others in graph.items() if name in others], tops, x[name]) for name in lanes),
        *(_dots(name, sorted(others, key=lanes.index), tops[name], x) for name, others in graph.items() if others),
        *(_box(box, tops[box.name]) for box in BOXES),
    ]
    words = "; ".join(f"{n} imports {', '.join(sorted(o, key=lanes.index))}" for n, o in graph.items() if o)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom}" role="img" '
        f'aria-labelledby="title desc" font-family="{FONT}">\n'
        f'<title id="title">Who imports whom in halfsilver</title>\n<desc id="desc">{escape(words)}.</desc>\n'
        f'<rect x="1" y="1" width="{right - 2}" height="{bottom - 2}" rx="14" fill="#f8fafd" stroke="{EDGE}" '
        'stroke-width="2"/>'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"


def _tops() -> dict[str, int]:
    y, tops = -ROW + 16, {}
    for box in BOXES:
        y += ROW + (GAP if box.layer else 0)
        tops[box.name] = y
    return tops


def _lane(name: str, importers: list[str], tops: Mapping[str, int], x: int) -> str:
    """From the first box that imports `name` down to it, with an arrow."""
    start, end, colour = tops[importers[0]] + 30, tops[name] + 14, LINES.get(name, EDGE)
    tip = LEFT + WIDTH + 3
    return (
        f'<path d="M{x} {start}V{end}H{tip + 6}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        f'<path d="M{tip} {end}l9 -5.5v11z" fill="{colour}"/>'
    )


def _dots(name: str, others: list[str], top: int, x: Mapping[str, int]) -> str:
    """The line out of a box, and a dot for each box that it imports."""
    y = top + 30
    line = f'<path d="M{LEFT + WIDTH} {y}H{x[others[-1]]}" stroke="{EDGE}" stroke-width="1.2" stroke-dasharray="3 3"/>'
    dots = (
        f'<circle cx="{x[other]}" cy="{y}" r="5.5" fill="{LINES.get(other, EDGE)}">'
        f"<title>{escape(name)} imports {escape(other)}</title></circle>"
        for other in others
    )
    return "\n".join([line, *dots])


def _box(box: Box, top: int) -> str:
    ink, faint = ("#ffffff", "#a9b8ce") if box.name == "privacy/" else (INK, FAINT)
    fill, x = FILLS.get(box.name, "#ffffff"), LEFT + 12
    parts = [
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{fill}" stroke="{EDGE}"/>',
        f'<text x="{x}" y="{top + 19}" font-size="18" font-weight="700" fill="{ink}">{escape(box.name)}</text>',
        f'<text x="{x}" y="{top + 37}" font-size="15" fill="{faint}">{escape(box.about)}</text>',
    ]
    if box.layer:
        parts.insert(0, f'<text x="{LEFT}" y="{top - 8}" font-size="15" fill="{FAINT}">{escape(box.layer)}</text>')
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the imports, and draw nothing")
    graph = imports_of_boxes(modules())
    if parser.parse_args().json:
        print(json.dumps({name: sorted(others) for name, others in graph.items()}))
        return
    PICTURE.write_text(draw(graph), encoding="utf-8")
    print(PICTURE)


if __name__ == "__main__":
    main()
