"""A map of feature rows that is made from public rows, and is applied to each private row by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

Array = np.ndarray[Any, Any]

# Rows that are mapped at once: one shape for all, because a library may round a row otherwise beside fewer rows.
_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """Centres a row, turns and scales it, shortens it to norm at most 1, and appends a constant.

    With u = (x - centre) @ axes, the row becomes (u / max(1, |u|), constant) / sqrt(1 + constant^2), which has norm at
    most 1. Guarantee: the result for a row depends on that row and on the map alone, up to rounding in float64.

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
            for i in range(0, x.shape[0], _BLOCK):
                block = x[i : i + _BLOCK]
                dense = (block.toarray() if sparse.issparse(block) else np.asarray(block)).astype(np.float64)
                rows = len(dense)
                if rows < _BLOCK:
                    dense = np.concatenate([dense, np.zeros((_BLOCK - rows, dense.shape[1]))])
                out[i : i + rows] = self._map(dense - self.centre)[:rows]
        return out

    def _map(self, centred: Array) -> Array:
        return self.shortened(centred * self.axes if isinstance(self.axes, float) else centred @ self.axes)

    def shortened(self, turned: Array) -> Array:
        """The last two parts of the map, for rows that are in its coordinates already."""
        short = turned / np.maximum(1.0, np.linalg.norm(turned, axis=1))[:, None]
        if self.constant:
            short = np.hstack([short, np.full((len(short), 1), self.constant)])
        scaled: Array = short / np.sqrt(1 + self.constant**2)
        return scaled
