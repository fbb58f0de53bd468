"""Rows of tables: equal cell by cell, or in most of their cells."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import partial
from math import ceil

from halfsilver.errors import require
from halfsilver.overlap.match import Overlap, overlap

CELLS = 0.9
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_DIGITS = 25
_BETWEEN = "\x1f"  # stands between the cells of a row; that is what ASCII has it for

Row = Sequence[str]


def overlap_of_rows(
    private: Sequence[Row], public: Sequence[Row], *, similarity: float = CELLS, columns: Sequence[str] = ()
) -> Overlap:
    """Find rows of tables that are in both sets, equal or nearly.

    Cells are equal if they have the same text apart from spaces at the ends, or if they are the same number: 1.50 is
    1.5. Two rows are near if at least `similarity` of their cells are equal. No such pair is missed.

    Args:
        private: The private rows, each a list of cells. Rows without any text are left aside.
        public: The public rows, with as many cells per row.
        similarity: The least share of equal cells, in (0, 1]. Default 0.9.
        columns: The names of the cells, for the report. Default ().

    Returns:
        The overlap, which is not private.

    Raises:
        ConfigError: If `similarity` is out of range, or if rows differ in their number of cells.

    Example:
        >>> overlap_of_rows([["ann", "1.50"], ["bob", "2"]], [["ann", "1.5"]]).private.figures()["exact"]
        1
    """
    require(0 < similarity <= 1, "similarity", similarity, "in (0, 1]")
    widths = {len(row) for side in (private, public) for row in side}
    require(len(widths) <= 1, "cells of a row", sorted(widths), "to be as many in all rows of both tables")
    own, shown = ([_key(row) for row in side] for side in (private, public))
    near = partial(_near, similarity=similarity)
    return replace(overlap("tables", own, shown, near, "rows with text in them"), columns=tuple(columns))


def is_number(cell: str) -> bool:
    """Whether a cell is a number that `Decimal` keeps to its last digit.

    Args:
        cell: The text of the cell.

    Returns:
        True or False.

    Example:
        >>> is_number(" -1.50 "), is_number("9" * 40), is_number("nan")
        (True, False, False)
    """
    text = cell.strip()
    return len(text) <= _DIGITS and _NUMBER.fullmatch(text) is not None


def _key(row: Row) -> str | None:
    cells = [_cell(cell) for cell in row]
    return _BETWEEN.join(cells) if any(cells) else None


def _cell(cell: str) -> str:
    text = cell.strip()
    return str(Decimal(text).normalize() + 0) if is_number(text) else text.replace(_BETWEEN, " ")


def _near(private: list[str], public: list[str], similarity: float) -> Iterator[tuple[int, int, float]]:
    """Rows that differ in at most k cells agree in one of k + 1 groups of columns: only those are compared."""
    own, shown = ([key.split(_BETWEEN) for key in side] for side in (private, public))
    width = len(own[0])
    needed = ceil(similarity * width - 1e-9)
    groups = [slice(start, None, width - needed + 1) for start in range(width - needed + 1)]
    indices = [_by_cells(shown, group) for group in groups]
    for i, row in enumerate(own):
        proposed = {j for group, index in zip(groups, indices, strict=True) for j in index[tuple(row[group])]}
        for j in sorted(proposed):
            equal = sum(a == b for a, b in zip(row, shown[j], strict=True))
            if equal >= needed:
                yield i, j, equal / width


def _by_cells(rows: Sequence[Row], group: slice) -> defaultdict[tuple[str, ...], list[int]]:
    found: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for j, row in enumerate(rows):
        found[tuple(row[group])].append(j)
    return found
