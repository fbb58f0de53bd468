"""Whether data that are called public are private rows under another name. Reads addresses, and never a value.

Seen are tensors, arrays and frames that share memory, the same data set object, and subsets of one data set with an
index in common. Two parts of one tensor, or of one data set, that have no row in common are different rows. A copy is
not seen: for whoever may read both sides, ``halfsilver overlap`` finds copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from halfsilver.privacy.collated import Collated

# Beyond this many candidate solutions NumPy gives up; two arrays that might share memory then count as sharing it.
_MOST_WORK = 1_000_000

_MOST_RUNS = 1000  # of rows that follow each other in a subset of tensors

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Some:
    """Rows of an object that is known by its identity; `index` None is all of them."""

    owner: Any
    index: frozenset[Any] | None = None

    def meets(self, other: _Some) -> bool:
        if self.owner is not other.owner:
            return False
        return self.index is None or other.index is None or not self.index.isdisjoint(other.index)


@dataclass(frozen=True)
class _Placed:
    """Rows in buffers of Arrow: of each buffer, by its address, runs of places as rows (first, behind the last).

    The runs of a buffer are in rising order and have no place in common.
    """

    runs: Mapping[int, Array]

    def meets(self, other: _Placed) -> bool:
        return any(_runs_meet(self.runs[address], other.runs[address]) for address in self.runs.keys() & other.runs)


def _runs_meet(a: Array, b: Array) -> bool:
    """Whether two lists of runs have a place in common: of `b`, the first run that ends behind the start of one."""
    next_one = np.searchsorted(b[:, 1], a[:, 0], side="right")
    inside = next_one < len(b)
    return bool((b[next_one[inside], 0] < a[inside, 1]).any())


_Part = _Some | _Placed | list[Array]


def shares_rows(a: Any, b: Any) -> bool:
    """Whether two data sets, in any form that halfsilver takes, have rows in common that can be recognised."""
    ours, theirs = list(_parts(a)), list(_parts(b))
    if len(ours) * len(theirs) > _MOST_WORK:
        ours, theirs = ours[:_MOST_RUNS], theirs[:_MOST_RUNS]
    return any(_meet(one, other) for one in ours for other in theirs)


def _meet(a: _Part, b: _Part) -> bool:
    if isinstance(a, _Some) and isinstance(b, _Some):
        return a.meets(b)
    if isinstance(a, _Placed) and isinstance(b, _Placed):
        return a.meets(b)
    if isinstance(a, list) and isinstance(b, list):
        return any(_overlap(x, y) for x in a for y in b)
    return False


def _overlap(a: Array, b: Array) -> bool:
    try:
        return bool(np.shares_memory(a, b, _MOST_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _parts(data: Any) -> Iterator[_Part]:
    if isinstance(data, DataLoader | Collated):
        yield from _parts(data.dataset)
    elif isinstance(data, ConcatDataset):
        for inner in data.datasets:
            yield from _parts(inner)
    elif isinstance(data, Subset):
        yield from _of_subset(data)
    elif isinstance(data, TensorDataset):
        yield _columns(list(data.tensors))
        yield _Some(data)
    elif hasattr(data, "_indices") and hasattr(data, "data") and hasattr(data.data, "column"):
        yield from _of_table(data)
    elif (arrays := _arrays(data)) is not None:
        yield _columns(arrays)
    elif isinstance(data, list):
        yield from (_Some(record) for record in data if not isinstance(record, int | float | str | bool | None))
        yield _Some(data)
    elif data is not None and not isinstance(data, tuple):  # there is one empty tuple
        yield _Some(data)


def _of_subset(data: Any) -> Iterator[_Part]:
    """By the numbers of its rows in the innermost data set."""
    index = [int(i) for i in data.indices]
    while isinstance(data.dataset, Subset):
        data = data.dataset
        index = [int(data.indices[i]) for i in index]
    yield _Some(data.dataset, frozenset(index))
    if isinstance(data.dataset, TensorDataset):
        runs = np.split(chosen := np.unique(index), np.flatnonzero(np.diff(chosen) > 1) + 1)
        for run in runs[:_MOST_RUNS] if len(chosen) else ():
            yield _columns([t[int(run[0]) : int(run[-1]) + 1] for t in data.dataset.tensors])


def _of_table(data: Any) -> Iterator[_Part]:
    """A data set of Hugging Face's: rows of an Arrow table, by the buffer and the place at which they lie."""
    yield _Some(data)
    chosen = None if data._indices is None else np.unique(data._indices.column(0).to_numpy())
    runs: dict[int, list[Array]] = {}
    first = 0
    for chunk in data.data.column(0).chunks if data.data.num_rows else ():
        address = next((buffer.address for buffer in reversed(chunk.buffers()) if buffer is not None), 0)
        found = np.array([[0, len(chunk)]]) if chosen is None else _runs(chosen, first, first + len(chunk)) - first
        runs.setdefault(address, []).append(found + chunk.offset)
        first += len(chunk)
    yield _Placed({address: _merged(np.concatenate(parts)) for address, parts in runs.items()})


def _runs(chosen: Array, start: int, stop: int) -> Array:
    """The runs of those of some rising numbers that are at least `start` and below `stop`.

    >>> _runs(np.array([1, 2, 3, 7, 9]), 2, 9).tolist()
    [[2, 4], [7, 8]]
    """
    inside = chosen[np.searchsorted(chosen, start) : np.searchsorted(chosen, stop)].astype(np.int64)
    cuts = np.flatnonzero(np.diff(inside) > 1) + 1
    firsts, lasts = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(inside)]]) - 1
    return np.stack([inside[firsts], inside[lasts] + 1], 1) if len(inside) else np.empty((0, 2), np.int64)


def _merged(runs: Array) -> Array:
    """Runs in rising order, those that touch or overlap as one.

    >>> _merged(np.array([[5, 7], [0, 2], [1, 3]])).tolist()
    [[0, 3], [5, 7]]
    """
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = np.maximum.accumulate(runs[:, 1]) if len(runs) else runs[:, 1]
    begins = np.concatenate([[True], runs[1:, 0] > ends[:-1]]) if len(runs) else np.empty(0, bool)
    firsts = np.flatnonzero(begins)
    return np.stack([runs[firsts, 0], np.append(ends[firsts[1:] - 1], ends[-1:])], 1)


def _columns(tensors: list[Any]) -> list[Array]:
    """Those that tell rows apart: a column of one number per row, labels say, may be shared by different rows."""
    arrays = [array for array in map(_array, tensors) if array is not None and array.size]
    arrays = [array for array in arrays if not array.ndim or len(array) == 1 or array.strides[0]]  # else a constant
    wide = [array for array in arrays if array.ndim and array.size > len(array)]
    return wide or arrays


def _arrays(data: Any) -> list[Any] | None:
    """The columns of data that are one table in memory; None for anything else."""
    if isinstance(data, Tensor | np.ndarray):
        return [data]
    if hasattr(data, "iloc"):  # a data frame, or one column of it
        return [data[name].to_numpy() for name in data] if hasattr(data, "columns") else [data.to_numpy()]
    if all(hasattr(data, name) for name in ("indptr", "indices", "data")):  # SciPy's compressed rows
        return [data.data]
    if isinstance(data, tuple | Mapping):
        inner = [_arrays(part) for part in (data.values() if isinstance(data, Mapping) else data)]
        return None if not inner or any(part is None for part in inner) else [t for part in inner for t in part or ()]
    return None


def _array(data: Any) -> Array | None:
    """An array over the same addresses, on whichever device they are: it is never read."""
    if not isinstance(data, Tensor):
        return data if isinstance(data, np.ndarray) else None
    if data.layout != torch.strided or (data.numel() and not data.data_ptr()):  # without memory of its own
        return None
    data, size = data.detach(), data.element_size()
    memory = {
        "data": (data.data_ptr(), True),
        "shape": tuple(data.shape),
        "strides": tuple(stride * size for stride in data.stride()),
        "typestr": f"|V{size}",
        "version": 3,
    }
    return np.asarray(type("Memory", (), {"__array_interface__": memory})())
