"""At which numbers of rows is no row rounded by its place? Tried on made-up rows, at the start."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, Tensors, map_batch

T = TypeVar("T")

# Kernels compute numbers in groups of mostly 8 to 64, and those that are left over in another way.
GROUP = 64
# Multiples of it are tried so long, and at least so often. Other numbers are tried in full, if that costs no more than
# a second, or this share of all passes.
_SECONDS, _TURNS = 0.1, 2
_FULL_SECONDS, _FULL_SHARE = 1.0, 0.1


def sizes_from(rows: int) -> list[int]:
    """Numbers of rows to try instead of `rows`: the next lower multiples of 64, and one row alone at last.

    >>> sizes_from(250), sizes_from(48), sizes_from(1)
    ([192, 128, 64, 1], [48, 1], [1])
    """
    return [*range(rows - rows % GROUP, 0, -GROUP), *([rows] if 1 < rows < GROUP else []), 1]


def alike(
    numbers: Callable[[Batch], Tensors], made_up: Callable[[int], Batch], rows: int, passes: float = math.inf
) -> bool:
    """Whether each of so many made-up rows has the same numbers, to the last bit, wherever it stands among the others.

    The rows, which all differ, go round until each has been at each place. At multiples of 64 they make as many turns
    as there is time for: each turn puts another row at each place, and where rounding goes by place, most rows show it.
    For one shape the order of operations is the same whatever the values are, so rows of any values can show it.
    `passes` of this size will be made, and a check should not cost more than a tenth of them.
    """
    if rows == 1:
        return True
    batch, whole = made_up(rows), rows % GROUP == 0
    first, started = numbers(batch), time.monotonic()
    if not first or not _same(numbers(batch), first, 0):
        return whole  # nothing is shown, or random numbers are drawn, so that of places nothing can be seen
    seconds = time.monotonic() - started
    if not whole and rows * seconds > max(_FULL_SECONDS, _FULL_SHARE * passes * seconds):
        return False
    for tried, turn in enumerate(torch.randperm(rows - 1, generator=torch.Generator().manual_seed(0)).tolist()):
        if whole and tried >= _TURNS and time.monotonic() - started > _SECONDS:
            break
        if not _same(numbers(map_batch(partial(_turned, turn=turn + 1), batch)), first, turn + 1):
            return False
    return True


def _turned(t: Tensor, turn: int) -> Tensor:
    return torch.empty_like(t).copy_(t.roll(turn, 0))  # in the layout that it has


def _same(found: Tensors, first: Tensors, turn: int) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num().roll(turn, 0)) for a, b in zip(found, first, strict=True))


def in_parts(attempt: Callable[[Sequence[int]], T | None], rows: Sequence[int]) -> list[tuple[Sequence[int], T]]:
    """What `attempt` gives for all rows at once, but for those for which it fails and returns None; and which rows.

    To find one takes about log2(rows) attempts. Rows for which it fails together, but not alone, are taken one by one.
    """

    def good(rows: Sequence[int], *, fails: bool) -> list[int]:
        if (not fails or len(rows) == 1) and attempt(rows) is not None:
            return [*rows]
        if len(rows) <= 1:
            return []
        half = len(rows) // 2
        first = good(rows[:half], fails=False)
        return first + good(rows[half:], fails=len(first) == half)

    found = attempt(rows)
    if found is None:
        rows = good(rows, fails=True)
        found = attempt(rows)
    if found is not None:
        return [(rows, found)]
    return [([row], alone) for row in rows if (alone := attempt([row])) is not None]
