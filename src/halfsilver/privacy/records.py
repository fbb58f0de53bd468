"""What every form of private rows offers inside the boundary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from halfsilver._core.tensors import Batch
from halfsilver.privacy.schema import Schema

Indices = Tensor | slice


class Records(Protocol):
    """Private rows inside the boundary.

    `fixed_shape` says that every batch is padded to one shape; without it the backend must compute row by row.
    """

    @property
    def fixed_shape(self) -> bool: ...
    def size(self) -> int: ...
    def schema(self) -> Schema | None: ...
    def fetch(self, indices: Indices, schema: Schema) -> Batch: ...
    def problem(self, index: int, schema: Schema) -> str: ...
