"""Rows as a table: by rich where it is installed, else plain text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

_COLUMNS = (
    *("model", "contender", "threads", "ratio", "min", "max", "reps", "cpu_ratio", "seconds"),
    *("peak_mb", "peak_ratio", "error", "detail"),
)


def show(title: str, rows: Sequence[Row], columns: Sequence[str] = _COLUMNS) -> None:
    """Print the columns that any row has."""
    used = [c for c in columns if any(r.get(c) not in (None, "") for r in rows)]
    cells = [[_text(r.get(c)) for c in used] for r in rows]
    if rows:
        (_rich if importlib.util.find_spec("rich") else _plain)(title, used, cells)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"
    return str(value)


def _plain(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
    print(f"\n{title}")
    for row in (columns, *cells):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _rich(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, box=SIMPLE)
    for row in cells:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:  # a file has no width
        console = Console(width=160)
    console.print(table)
