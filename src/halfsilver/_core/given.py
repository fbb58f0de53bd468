"""Data as people have them: NumPy arrays, pandas frames and loaders become tensors and data sets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from halfsilver.errors import ConfigError

Array = np.ndarray[Any, Any]

_log = logging.getLogger("halfsilver")
_TOLD: WeakSet[DataLoader[Any]] = WeakSet()  # loaders of which it was said that their data set is used


def as_data(given: Any, loose: Callable[[Array], Tensor] | None = None) -> Any:
    """Arrays, frames and their columns as tensors, also inside a tuple or dict; a loader as its data set.

    Floating-point numbers get torch's default dtype, which is that of a new model. Anything else stays as it is. No
    value decides what happens. `loose` makes tensors of frames, and of arrays of Python objects, which are refused
    without it.
    """
    if isinstance(given, DataLoader):
        return as_data(_dataset_of(given), loose)
    if isinstance(given, np.ma.MaskedArray):
        raise ConfigError("Expected an array without a mask. Fill it, by NaN say: array.filled(numpy.nan).")
    if isinstance(given, np.ndarray):
        return loose(given) if loose and given.dtype == object else _tensor(given)
    if hasattr(given, "iloc") and hasattr(given, "to_numpy"):
        return (loose or _tensor)(_frame(given, "biufO" if loose else "biuf"))
    if type(given) is tuple and any(_is_array(part) for part in given):
        return tuple(as_data(part, loose) for part in given)
    if type(given) is dict and any(_is_array(part) for part in given.values()):
        return {name: as_data(part, loose) for name, part in given.items()}
    return given


def _is_array(part: Any) -> bool:
    return isinstance(part, np.ndarray) or hasattr(part, "iloc")


def _tensor(array: Array) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"Expected an array of numbers, got one of dtype {array.dtype}. Turn it into numbers.")
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(native if native.flags.writeable else native.copy())
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def _frame(frame: Any, usable: str) -> Array:
    """A frame as a matrix, or one column of it as a vector."""
    kinds = dict(frame.dtypes) if hasattr(frame, "columns") else {frame.name: frame.dtype}
    # pandas's own dtypes become another one if a value is missing, so a single row would decide for all.
    others = [f"{name!r} ({k})" for name, k in kinds.items() if not isinstance(k, np.dtype) or k.kind not in usable]
    if others or not kinds:
        raise ConfigError(
            f"Expected columns of numbers in NumPy's dtypes, got {', '.join(others) or 'none'}. Turn them into numbers "
            "(astype(float)), or leave them out."
        )
    array: Array = frame.to_numpy(dtype=np.result_type(*kinds.values()))
    return array


def _dataset_of(loader: DataLoader[Any]) -> Any:
    """The data set of a loader that gives all of its rows as they are."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    if loader.collate_fn is not default_collate:
        raise ConfigError(
            "Expected a DataLoader without a collate_fn of its own: its batches are not used. Bring the rows to one "
            "shape in the data set (pad to one length), and give that."
        )
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    usual = type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler)
    if not usual or type(batches) not in (BatchSampler, type(None)):
        kind = type(sampler if not usual and sampler is not None else batches).__name__
        raise ConfigError(
            f"Expected a DataLoader over all rows of its data set, got one with a {kind}. Give the rows that you mean: "
            "torch.utils.data.Subset(dataset, indices)."
        )
    if loader not in _TOLD:
        _TOLD.add(loader)
        _log.warning("A DataLoader was given: its data set is used. Batches and their order are drawn by halfsilver.")
    return loader.dataset
