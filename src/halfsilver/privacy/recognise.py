"""Whether data that are called public are private rows under another name. Reads addresses, and never a value.

Seen are tensors, arrays and frames that share memory, the same data set object, subsets of one data set with an index
in common, lists with a record in common, and tables with a column in common; on Linux, also what maps the same part of
a file, however often it was opened. Two parts of one tensor, or of one data set, that have no row in common are
different rows. A copy is not seen: for whoever may read both sides, ``halfsilver
overlap`` finds copies. The work grows with the rows of both sides together, and no row is left out to limit it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from halfsilver.privacy.collated import Collated

# Beyond this many candidate solutions NumPy gives up; two arrays that might share memory then count as sharing it.
_MOST_WORK = 1_000_000

_MOST_PAIRS = 10_000  # of arrays that are compared element by element; more of them by the places of their rows

# Numbers that stand for places in files, as addresses do for those in memory: beyond all addresses, 16 TB for each.
_BEYOND, _LONGEST = 1 << 60, 1 << 44
_FILES: dict[tuple[str, str], int] = {}
_MAPS: list[tuple[int, int, int]] = []  # of this process: first byte, the one behind the last, what to add to either

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


@dataclass(frozen=True)
class _Ranges:
    """Single rows, by the addresses of their first byte and the byte behind their last; in rising order, disjoint."""

    runs: Array


_Part = _Some | _Placed | _Ranges | list[Array]


def shares_rows(a: Any, b: Any) -> bool:
    """Whether two data sets, in any form that halfsilver takes, have rows in common that can be recognised."""
    _MAPS[:] = _file_maps()
    ours, theirs = list(_parts(a)), list(_parts(b))
    return _same_objects(ours, theirs) or _same_places(ours, theirs) or _same_memory(ours, theirs)


def _same_objects(ours: list[_Part], theirs: list[_Part]) -> bool:
    known: dict[int, list[_Some]] = {}
    for one in {(id(p.owner), p.index): p for p in ours if isinstance(p, _Some)}.values():
        known.setdefault(id(one.owner), []).append(one)
    return any(
        one.meets(other) for other in theirs if isinstance(other, _Some) for one in known.get(id(other.owner), ())
    )


def _same_places(ours: list[_Part], theirs: list[_Part]) -> bool:
    placed = [[part for part in parts if isinstance(part, _Placed)] for parts in (ours, theirs)]
    return any(one.meets(other) for one in placed[0] for other in placed[1])


def _same_memory(ours: list[_Part], theirs: list[_Part]) -> bool:
    """Arrays by each of their elements, so columns of one matrix differ. Single rows and many arrays by whole rows."""
    arrays = [[array for part in parts if isinstance(part, list) for array in part] for parts in (ours, theirs)]
    rows = [_joined(part.runs for part in parts if isinstance(part, _Ranges)) for parts in (ours, theirs)]
    few = len(arrays[0]) * len(arrays[1]) <= _MOST_PAIRS
    if few and any(_overlap(one, other) for one in arrays[0] for other in arrays[1]):
        return True
    if few and not len(rows[0]) and not len(rows[1]):
        return False
    placed = [_joined(map(_row_ranges, some)) for some in arrays]
    pairs = [(rows[0], rows[1]), (rows[0], placed[1]), (placed[0], rows[1])]
    return any(_runs_meet(*pair) for pair in (pairs if few else [*pairs, (placed[0], placed[1])]))


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
        yield from _of_list(data)
    elif data is not None and not isinstance(data, tuple):  # there is one empty tuple
        yield _Some(data)


def _of_list(data: list[Any]) -> Iterator[_Part]:
    """By its records, and where these are tensors or arrays by their memory."""
    yield from (_Some(record) for record in data if not isinstance(record, int | float | str | bool | None))
    yield _Some(data)
    views = [_row_ranges(array) for array in map(_array, data) if array is not None and array.size > 1]
    if views:
        yield _Ranges(_joined(views))


def _of_subset(data: Any) -> Iterator[_Part]:
    """By the numbers of its rows in the innermost data set."""
    index = [int(i) for i in data.indices]
    while isinstance(data.dataset, Subset):
        data = data.dataset
        index = [int(data.indices[i]) for i in index]
    if hasattr(data.dataset, "__len__") and len(data.dataset):
        index = [i % len(data.dataset) for i in index]  # -1 is the last row
    yield _Some(data.dataset, frozenset(index))
    if isinstance(data.dataset, TensorDataset) and index:
        columns = _columns(list(data.dataset.tensors))
        yield _Ranges(_joined(_row_ranges(column, np.unique(index)) for column in columns if column.ndim))


def _of_table(data: Any) -> Iterator[_Part]:
    """A data set of Hugging Face's: rows of an Arrow table, by the buffers and the places at which its columns lie."""
    yield _Some(data)
    chosen = None if data._indices is None else np.unique(data._indices.column(0).to_numpy())
    runs: dict[int, list[Array]] = {}
    for column in data.data.columns if data.data.num_rows else ():
        first = 0
        for chunk in column.chunks:
            address = next((buffer.address for buffer in reversed(chunk.buffers()) if buffer is not None), None)
            found = np.array([[0, len(chunk)]]) if chosen is None else _runs(chosen, first, first + len(chunk)) - first
            if address is not None and len(chunk):  # a column of nothing but nulls has no buffer
                runs.setdefault(_place(address), []).append(found + chunk.offset)
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


def _row_ranges(array: Array, index: Array | None = None) -> Array:
    """The bytes of each row, or of those at `index`: first and behind the last, in rising order and disjoint."""
    start = array.__array_interface__["data"][0]
    if not array.size:
        return np.empty((0, 2), np.int64)
    if not array.ndim or (index is None and array.flags.c_contiguous):
        return np.array([[start, start + array.nbytes]], np.int64)
    places = np.arange(len(array)) if index is None else np.asarray(index, np.int64)
    reach = [(length - 1) * stride for length, stride in zip(array.shape[1:], array.strides[1:], strict=True)]
    first = start + places * array.strides[0] + sum(min(part, 0) for part in reach)
    extent = sum(abs(part) for part in reach) + array.itemsize
    return _merged(np.stack([first, first + extent], 1))


def _joined(runs: Iterable[Array]) -> Array:
    """Several lists of runs as one."""
    return _merged(np.concatenate([np.empty((0, 2), np.int64), *runs]))


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
    """An array over the same places, in memory of whichever device, or in a file: it is never read."""
    if isinstance(data, np.ndarray):
        memory = {**data.__array_interface__, "data": (_place(data.__array_interface__["data"][0]), True)}
        if memory["data"][0] == data.__array_interface__["data"][0]:
            return data
    elif isinstance(data, Tensor) and data.layout == torch.strided and (data.data_ptr() or not data.numel()):
        data, size = data.detach(), data.element_size()
        memory = {
            "data": (_place(data.data_ptr()), True),
            "shape": tuple(data.shape),
            "strides": tuple(stride * size for stride in data.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }
    else:  # without memory of its own
        return None
    return np.asarray(type("Memory", (), {"__array_interface__": memory})())


def _file_maps() -> list[tuple[int, int, int]]:
    """Which addresses are places in files, by device, inode and offset; empty where the system does not tell."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            span, _, offset, *file, path = [*line.split(maxsplit=5), ""][:6]
            if path.startswith("/") and not path.startswith("/dev/"):  # devices map whatever they like
                first, behind = (int(place, 16) for place in span.split("-"))
                start = _BEYOND + _FILES.setdefault((file[0], file[1]), len(_FILES)) * _LONGEST
                found.append((first, behind, start + int(offset, 16) - first))
    return found


def _place(address: int) -> int:
    """The address or, in a mapped file, a number that is the same for all of its maps."""
    at = bisect_right(_MAPS, address, key=lambda known: known[0]) - 1
    return address + _MAPS[at][2] if at >= 0 and address < _MAPS[at][1] else address
