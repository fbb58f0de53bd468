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

# Beyond this many candidate solutions NumPy gives up; two arrays that might share memory then count as sharing it.
_MOST_WORK = 1_000_000

_MOST_RUNS = 1000  # of rows that follow each other in a subset of tensors

_TABLES = object()  # the owner of all rows in Arrow's buffers

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


def shares_rows(a: Any, b: Any) -> bool:
    """Whether two data sets, in any form that halfsilver takes, have rows in common that can be recognised."""
    ours, theirs = list(_parts(a)), list(_parts(b))
    if len(ours) * len(theirs) > _MOST_WORK:
        ours, theirs = ours[:_MOST_RUNS], theirs[:_MOST_RUNS]
    return any(_meet(one, other) for one in ours for other in theirs)


def _meet(a: _Some | list[Array], b: _Some | list[Array]) -> bool:
    if isinstance(a, _Some) and isinstance(b, _Some):
        return a.meets(b)
    if isinstance(a, _Some) or isinstance(b, _Some):
        return False
    return any(_overlap(x, y) for x in a for y in b)


def _overlap(a: Array, b: Array) -> bool:
    try:
        return bool(np.shares_memory(a, b, _MOST_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _parts(data: Any) -> Iterator[_Some | list[Array]]:
    if isinstance(data, DataLoader):
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


def _of_subset(data: Any) -> Iterator[_Some | list[Array]]:
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


def _of_table(data: Any) -> Iterator[_Some]:
    """A data set of Hugging Face's: rows of an Arrow table, by the buffer and the place at which they lie."""
    yield _Some(data)
    if 0 < data.data.num_rows <= _MOST_WORK:
        places: list[tuple[int, int]] = []
        for chunk in data.data.column(0).chunks:
            address = next((buffer.address for buffer in reversed(chunk.buffers()) if buffer is not None), 0)
            places += [(address, chunk.offset + i) for i in range(len(chunk))]
        chosen = None if data._indices is None else data._indices.column(0).to_pylist()
        yield _Some(_TABLES, frozenset(places if chosen is None else (places[i] for i in chosen)))


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
