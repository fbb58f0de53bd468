"""Numbers of the house: how much code there is, and how long its functions and files are.

    python -m tools.house [--json]

Lines are those of the files as they stand, blank ones and comments included. A function's length runs from its `def` to
its last line, without decorators; nested functions count on their own too.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.show import show

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = "src/halfsilver", "tests"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def typed(function: Function) -> bool:
    """Whether all arguments but self and cls, and the result, have a type."""
    a = function.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
    return function.returns is not None and all(x.annotation for x in named if x.arg not in ("self", "cls"))


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of them do not exceed.

    >>> percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0.9)
    9
    """
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def measured(name: str, files: Sequence[Path]) -> dict[str, Any]:
    """One row: the Python files of a folder, whatever their depth."""
    texts = [path.read_text(encoding="utf-8") for path in files]
    lines = [len(text.splitlines()) for text in texts]
    found = [f for text in texts for f in functions(ast.parse(text))]
    lengths = [length(f) for f in found] or [0]
    return {
        "folder": name,
        "files": len(files),
        "lines": sum(lines),
        "file median": statistics.median_low(lines),
        "file longest": max(lines),
        "function median": statistics.median_low(lengths),
        "function p90": percentile(lengths, 0.9),
        "function longest": max(lengths),
        "typed": sum(map(typed, found)) / max(1, len(found)),
    }


def house(root: Path = ROOT) -> dict[str, Any]:
    source = sorted((root / SOURCE).rglob("*.py"))
    tops = sorted({path.relative_to(root / SOURCE).parts[0] for path in source})
    folders = [top for top in tops if (root / SOURCE / top).is_dir()]
    rows = [measured("halfsilver, all", source)]
    rows += [measured(f"halfsilver/{top}", sorted((root / SOURCE / top).rglob("*.py"))) for top in folders]
    rows += [measured(name, sorted((root / name).rglob("*.py"))) for name in (TESTS, "benchmarks", "examples")]
    lines = {row["folder"]: row["lines"] for row in rows}
    return {"rows": rows, "tests over source": lines[TESTS] / lines["halfsilver, all"], "public names": _public(root)}


def _public(root: Path) -> int:
    """Names in `halfsilver.__all__`, read from the file."""
    tree = ast.parse((root / SOURCE / "__init__.py").read_text(encoding="utf-8"))
    (names,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    return len(ast.literal_eval(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    found = house()
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    show("Numbers of the house", found["rows"], list(found["rows"][0]))
    print(f"tests over source {found['tests over source']:.2f}, public names {found['public names']}")


if __name__ == "__main__":
    main()
