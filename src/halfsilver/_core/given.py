"""Data as people have them: NumPy arrays, pandas frames and loaders become tensors and data sets."""

from __future__ import annotations

import logging
from typing import Any

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

_log = logging.getLogger("halfsilver")


def as_data(given: Any) -> Any:
    """Arrays, frames and their columns as tensors, also inside a tuple or dict; a loader as its data set.

    Floating-point numbers get torch's default dtype, which is that of a new model. Anything else stays as it is. No
    value decides what happens.
    """
    if isinstance(given, DataLoader):
        return as_data(_dataset_of(given))
    if isinstance(given, np.ndarray):
        return _tensor(given)
    if hasattr(given, "iloc") and hasattr(given, "to_numpy"):
        return _frame(given)
    if type(given) is tuple and any(_is_array(part) for part in given):
        return tuple(map(as_data, given))
    if type(given) is dict and any(_is_array(part) for part in given.values()):
        return {name: as_data(part) for name, part in given.items()}
    return given


def _is_array(part: Any) -> bool:
    return isinstance(part, np.ndarray) or hasattr(part, "iloc")


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise ConfigError(f"Expected an array of numbers, got one of dtype {array.dtype}. Turn it into numbers.")
    native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    tensor = torch.from_numpy(native if native.flags.writeable else native.copy())
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def _frame(frame: Any) -> Tensor:
    """A frame as a matrix, or one column of it as a vector."""
    kinds = dict(frame.dtypes) if hasattr(frame, "columns") else {frame.name: frame.dtype}
    others = [f"{name!r} ({kind})" for name, kind in kinds.items() if getattr(kind, "kind", "O") not in "biuf"]
    if others:
        raise ConfigError(
            f"Expected columns of numbers, got {', '.join(others)}. Turn them into numbers, or leave them out."
        )
    return _tensor(frame.to_numpy())


def _dataset_of(loader: DataLoader[Any]) -> Any:
    """The data set of a loader that gives all of its rows as they are."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    if loader.collate_fn is not default_collate:
        raise ConfigError(
            "Expected a DataLoader without a collate_fn of its own: its batches are not used. Bring the rows to one "
            "shape in the data set (pad to one length), and give that."
        )
    sampler = loader.sampler
    usual = isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler)
    if not usual or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        kind = type(loader.batch_sampler if usual else sampler).__name__
        raise ConfigError(
            f"Expected a DataLoader over all rows of its data set, got one with a {kind}. Give the rows that you mean: "
            "torch.utils.data.Subset(dataset, indices)."
        )
    _log.warning("A DataLoader was given: its data set is used. Batches and their order are drawn by halfsilver.")
    return loader.dataset
