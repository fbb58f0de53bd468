"""Public rows by index, and seeds for the public branch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset, default_collate

from halfsilver._core.given import as_data
from halfsilver._core.tensors import Batch, as_column, batch_leaves, batch_rows, map_batch
from halfsilver.errors import ConfigError, require

_log = logging.getLogger("halfsilver")


class PublicRows:
    """A public data set seen as a table from which batches are taken by index tensor or slice.

    Takes a tensor, NumPy array or pandas frame, a tuple or dict of them, a loader, whose data set is taken, or any data
    set with `__len__` and `__getitem__`. Tensors are indexed directly; other data sets are read row by row and
    collated. In rows that are dicts, as those of Hugging Face's data sets are, a list of numbers is one tensor.
    """

    def __init__(self, dataset: Any) -> None:
        self._given, dataset = dataset, as_data(dataset)
        data = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
        self._tensors = data if isinstance(data, Tensor | tuple | dict) else None
        self._dataset = data
        if self._tensors is not None:
            self._length = _common_rows(self._tensors)
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            self._length = len(data)
        else:
            raise ConfigError(
                f"Expected a public data set with __len__ and __getitem__, or tensors, got {type(data).__name__}."
            )
        require(self._length > 0, "public rows", self._length, "at least 1")

    @property
    def source(self) -> Any:
        """The data set as it was given."""
        return self._given

    def __len__(self) -> int:
        return self._length

    def batch(self, index: slice | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
        """The rows at `index` on `device`, floating ones as `dtype` if given."""

        def moved(leaf: Any) -> Any:
            return floating(leaf.to(device), dtype) if isinstance(leaf, Tensor) else leaf

        return map_batch(moved, self._take(index))

    def batches(self, size: int = 1024) -> Iterator[Batch]:
        """All rows in their order, `size` at once, where they lie."""
        return (self._take(slice(i, min(i + size, len(self)))) for i in range(0, len(self), size))

    def example(self) -> Any:
        """One record as the data set gives it, for its shapes."""
        return self._dataset[0] if self._tensors is None else map_batch(lambda t: t[0], self._tensors)

    def warn_if_many(self, population: float) -> None:
        """Say so if there are as many public rows as private ones are declared: somebody may have swapped the two."""
        if len(self) >= population:
            _log.warning(
                "Expected fewer public rows than private ones, got %d and, as declared, %.6g. Have the two changed "
                "places? Public rows get no protection.", len(self), population,
            )  # fmt: skip

    def kind(self) -> str:
        """Shapes and dtypes of one row, for people."""
        return ", ".join(f"{tuple(t.shape[1:])} {t.dtype}" for t in batch_leaves(self._take(slice(0, 1))))

    def not_finite(self) -> list[int]:
        """Numbers of the rows that hold NaN or infinity."""
        found: list[int] = []
        for start, batch in zip(range(0, len(self), 1024), self.batches(1024), strict=True):
            finite = [torch.isfinite(t.reshape(len(t), -1)).all(1) for t in batch_leaves(batch)]
            found += [start + i for i, good in enumerate(torch.stack(finite).all(0).tolist()) if not good]
        return found

    def _take(self, index: slice | Tensor) -> Batch:
        if self._tensors is not None:
            return map_batch(lambda t: t[index.to(t.device) if isinstance(index, Tensor) else index], self._tensors)
        numbers = index.tolist() if isinstance(index, Tensor) else range(self._length)[index]
        return default_collate([_row(self._dataset[i]) for i in numbers])


def _row(record: Any) -> Any:
    """Numbers as tensors, in the dtypes that they have in private rows; `default_collate` would make floats double."""
    if _is_mapping(record):
        return {name: _row(as_column(value)) for name, value in record.items()}
    return pytree.tree_map(lambda x: _row(x) if _is_mapping(x) else as_column(x), record, is_leaf=_is_mapping)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def floating(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`tensor` as `dtype` if it holds floating-point numbers and a dtype is asked for."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _common_rows(tensors: Batch) -> int:
    leaves = pytree.tree_leaves(tensors)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        raise ConfigError("Expected a public data set of tensors with one row per example on dimension 0.")
    lengths = sorted({leaf.shape[0] for leaf in leaves})
    require(len(lengths) == 1, "rows of the public tensors", lengths, "to be equal")
    return batch_rows(tensors)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on `parts` alone.

    >>> derive_seed(0, 1) == derive_seed(0, 1) != derive_seed(0, 2)
    True
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
