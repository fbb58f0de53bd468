"""Coordinates for the rows of a classifier, from public features alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halfsilver.privacy.row_map import RowMap

Array = np.ndarray[Any, Any]

# The constant feature of the intercept, in units of the longest row.
_CONSTANT = 0.3
# The length that rows are cut to is this quantile of the lengths of public rows.
_QUANTILE = 0.5
# The least share of a row's whitened length that counts as explained by other rows.
_LEAST_OTHERS = 0.02


@dataclass(frozen=True, kw_only=True)
class PublicAxes:
    """Mean and principal axes of public features.

    Whitened coordinates are u_j = v_j^T (x - mean) / sqrt(e_j + damping * mean eigenvalue) for the leading axes, with
    e_j the variance along axis v_j.

    Args:
        mean: Of shape (features,).
        variances: Along the axes, from the largest.
        vectors: One axis per column.
        projected: The public rows along the axes.
        unit: The mean variance of all axes with any, the unit of damping.
    """

    mean: Array
    variances: Array
    vectors: Array
    projected: Array
    unit: float

    @classmethod
    def of(cls, x: Array, most: int | None = None, unit: float | None = None) -> PublicAxes:
        """The axes of these rows, by the smaller of the two Gram matrices.

        Args:
            x: Public rows of shape (rows, features).
            most: How many axes to keep (default: all).
            unit: The unit of damping (default: the mean variance of all axes with any).
        """
        x = x.astype(np.float64)
        mean = x.mean(axis=0)
        centred, rows = x - mean, len(x)
        wide = centred.shape[1] > rows
        gram = (centred @ centred.T if wide else centred.T @ centred) / rows
        values, vectors = np.linalg.eigh(gram)
        some = np.flatnonzero(values > 1e-12 * max(values[-1], 1e-300))[::-1]
        unit = float(values[some].mean()) if unit is None and len(some) else unit or 1.0
        keep = some[:most]
        values, vectors = values[keep], vectors[:, keep]
        if wide:
            vectors = centred.T @ (vectors / np.sqrt(rows * values))
        return cls(mean=mean, variances=values, vectors=vectors, projected=centred @ vectors, unit=unit)

    @property
    def rank(self) -> int:
        return len(self.variances)

    def whitened(self, *, damping: float, rank: int, constant: bool = True) -> Coordinates:
        """The leading whitened coordinates, with rows cut to the median length of fresh public rows.

        In coordinates that a public row helped to make, it is too short. With q = |u|^2 and m rows, the square of its
        length in the coordinates of the others is q / (1 - q / m) (Sherman and Morrison). So the public rows here are
        stretched to that.

        Args:
            damping: In units of the mean variance, at least 0.
            rank: How many axes.
            constant: Whether to append the constant feature.
        """
        scales = 1 / np.sqrt(self.variances[:rank] + damping * self.unit)
        own = self.projected[:, :rank] * scales
        stretch = 1 / np.sqrt(np.maximum(1 - np.square(own).sum(axis=1) / len(own), _LEAST_OTHERS))
        fresh = own * stretch[:, None]
        length = _typical(fresh)
        row_map = RowMap(
            centre=self.mean, axes=self.vectors[:, :rank] * (scales / length), constant=_CONSTANT * constant
        )
        return Coordinates(row_map=row_map, rows=row_map.shortened(fresh / length))

    def plain(self, x: Array, *, constant: bool = True) -> Coordinates:
        """Centred features, scaled by one number.

        Args:
            x: The public rows.
            constant: Whether to append the constant feature.
        """
        row_map = RowMap(centre=self.mean, axes=1 / _typical(x - self.mean), constant=_CONSTANT * constant)
        return Coordinates(row_map=row_map, rows=row_map(x))


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """A map for all rows, and the public rows in it, as long as fresh rows would be.

    Args:
        row_map: The map.
        rows: The public rows, mapped.
    """

    row_map: RowMap
    rows: Array

    @property
    def steepest(self) -> float:
        """The largest second moment along a coordinate."""
        return max(float(np.square(self.rows).mean(axis=0).max()), 1e-12)


def _typical(rows: Array) -> float:
    return max(float(np.quantile(np.linalg.norm(rows, axis=1), _QUANTILE)), 1e-12)
