"""How a parameter's per-example gradients are held: as they are, or as factors from which norm and sum follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor

from halfsilver.privacy.gradients.base import Adding, at_least_float32, squared_lengths, weighted_rows


@dataclass(frozen=True)
class SquaredNorms:
    """Squared norm per example, in float64, and by how much rounding may have made it too small.

    Where the sum adds the terms of all rows, `steps` terms per row, `terms` is the square of the total length of each
    row's terms before they cancel.
    """

    squared: Tensor
    slack: Tensor
    terms: Tensor | None = None
    steps: int = 1


class ExampleGradients(Protocol):
    """The per-example gradients G_i of one parameter, i = 0 .. rows - 1, in whatever form.

    Guarantee of every implementation: row i of each result depends on row i of the batch alone, and |G_i|^2, measured
    on the numbers that `weighted_sum` adds up, is at most squared_i + slack_i up to the margin of the dtype.
    """

    parts: list[Tensor]  # of which the gradients are made, with the example on dimension 0

    @property
    def rows(self) -> int: ...

    def norms(self) -> SquaredNorms: ...

    def weighted_sum(self, weights: Tensor, adding: Adding) -> Tensor:
        """sum_i weights_i G_i over the first len(weights) rows, in the shape of the parameter; the others are padding.

        Rows of weight zero may hold anything, NaN included.
        """
        ...

    def gradients(self, chosen: slice, dtype: torch.dtype) -> Tensor:
        """The chosen G_i themselves, [chosen, *shape], computed in `dtype`: for rows whose factors cancel."""
        ...


@runtime_checkable
class Addable(Protocol):
    """Gradients that can be added to others of their kind in the form that they have."""

    def plus(self, other: ExampleGradients) -> ExampleGradients | None:
        """The sums G_i + G'_i; None where `other` has another form, or the sum would be too large in this one."""
        ...


def one_by_one(contribution: ExampleGradients, weights: Tensor) -> Tensor:
    """The weighted sum of rows that are multiplied out one at a time, so that terms of different rows do not mix."""
    chosen = weights.nonzero().flatten().tolist()
    total = contribution.gradients(slice(0, 0), torch.float64).sum(0)
    for i in chosen:
        total += weights[i] * contribution.gradients(slice(i, i + 1), torch.float64)[0]
    return total


@final
class Materialised:
    """One gradient per example, [rows, *shape]: norm and sum read the same numbers."""

    def __init__(self, gradients: Tensor) -> None:
        self._gradients = at_least_float32(gradients)
        self.parts = [self._gradients]

    @property
    def rows(self) -> int:
        return len(self._gradients)

    @property
    def flat(self) -> Tensor:
        """[rows, numbers]"""
        return self._gradients.reshape(self.rows, -1)

    def plus(self, other: ExampleGradients) -> Materialised | None:
        return Materialised(self._gradients + other._gradients) if isinstance(other, Materialised) else None

    def norms(self) -> SquaredNorms:
        squared = squared_lengths(self.flat)
        return SquaredNorms(squared, torch.zeros_like(squared))

    def weighted_sum(self, weights: Tensor, adding: Adding) -> Tensor:
        return weighted_rows(weights, self.flat[: len(weights)], adding).reshape(self._gradients.shape[1:])

    def gradients(self, chosen: slice, dtype: torch.dtype) -> Tensor:
        return self._gradients[chosen].to(dtype)
