"""A map of feature rows that is made from public rows, and is applied to each private row by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from halfsilver.privacy.pieces import alike, sizes_from

Array = np.ndarray[Any, Any]

# Rows that are mapped at once: one shape for all, because a library may round a row otherwise beside fewer rows.
_MOST_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """Centres a row, turns and scales it, shortens it to norm at most 1, and appends a constant.

    With u = (x - centre) @ axes, the row becomes (u / max(1, |u|), constant) / sqrt(1 + constant^2), which has norm at
    most 1. Guarantee: the result for a row depends on that row and on the map alone, as far as the library's products
    round a row alike at all places of a block. That is tried on made-up rows, bit for bit, and chooses the block.

    Args:
        centre: The public mean, of shape (features,).
        axes: A matrix of shape (features, width), or a number, which scales features without turning them.
        constant: The last entry, whose coefficient is the intercept, in units of the longest row; 0 for none.
    """

    centre: Array
    axes: Array | float
    constant: float

    @property
    def width(self) -> int:
        """The number of entries of a mapped row."""
        turned = len(self.centre) if isinstance(self.axes, float) else self.axes.shape[1]
        return turned + (self.constant > 0)

    def __call__(self, x: Any) -> Array:
        """Map rows, dense or CSR. A row with an entry that is not finite becomes NaN somewhere, without a warning."""
        out = np.zeros((x.shape[0], self.width))
        with np.errstate(all="ignore"):
            for i in range(0, x.shape[0], self._rows):
                block = x[i : i + self._rows]
                # Columns of a matrix in Fortran order, as those of a frame are, would be rounded in another order.
                dense = np.ascontiguousarray(block.toarray() if sparse.issparse(block) else block, dtype=np.float64)
                rows = len(dense)
                if rows < self._rows:
                    dense = np.concatenate([dense, np.zeros((self._rows - rows, dense.shape[1]))])
                out[i : i + rows] = self._map(dense - self.centre)[:rows]
        return out

    @cached_property
    def _rows(self) -> int:
        """As many at once as are all rounded alike, which products of matrices do not do at all numbers of rows."""
        generator = torch.Generator().manual_seed(0)

        def made_up(rows: int) -> Tensor:
            return torch.randn(rows, len(self.centre), generator=generator, dtype=torch.float64)

        def mapped(rows: Tensor) -> list[Tensor]:
            return [torch.from_numpy(self._map(rows.numpy()))]

        return next(rows for rows in sizes_from(_MOST_ROWS) if alike(mapped, made_up, rows))

    def _map(self, centred: Array) -> Array:
        return self.shortened(centred * self.axes if isinstance(self.axes, float) else centred @ self.axes)

    def shortened(self, turned: Array) -> Array:
        """The last two parts of the map, for rows that are in its coordinates already."""
        short = turned / np.maximum(1.0, np.linalg.norm(turned, axis=1))[:, None]
        if self.constant:
            short = np.hstack([short, np.full((len(short), 1), self.constant)])
        scaled: Array = short / np.sqrt(1 + self.constant**2)
        return scaled
