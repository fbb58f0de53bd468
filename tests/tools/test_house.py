"""How long functions and files may be: rules of the house that only a count keeps."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.house import functions, house, length, measured, typed


def test_the_package_keeps_to_the_rules() -> None:
    everything = house()["rows"][0]
    assert everything["function median"] <= 12
    assert everything["function p90"] <= 40
    assert everything["file median"] <= 200
    assert everything["file longest"] <= 450
    assert everything["typed"] == 1


def test_what_is_counted(tmp_path: Path) -> None:
    text = "def f(a: int) -> int:\n    def g(b):\n        return b\n\n    return g(a)\n"
    outer, inner = functions(ast.parse(text))
    assert (length(outer), length(inner), typed(outer), typed(inner)) == (5, 2, True, False)
    (tmp_path / "one.py").write_text(text, encoding="utf-8")
    row = measured("here", [tmp_path / "one.py"])
    assert (row["lines"], row["function median"], row["function longest"], row["typed"]) == (5, 2, 5, 0.5)
