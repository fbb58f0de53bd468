"""Closed form for linear models with one output: no per-example gradient is ever made.

The gradient of example i is r_i * x_i, with r_i the derivative of its loss by its prediction. Its norm is
|r_i| * ||x_i||, and ||x_i|| does not change from step to step: it travels with the row as a third column.
"""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor

from halfsilver._tensors import Batch
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.base import (
    ClippedSum,
    clip_factors,
    margin,
    measurable,
    require_weighable,
    summable_rows,
)

Link = Literal["squared", "logistic"]


def with_row_norms(features: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The private records (x, y, ||x||) that `LinearModel` reads."""
    return features, target, torch.linalg.vector_norm(features, dim=1, dtype=torch.float64)


@final
class LinearModel:
    """Clipped gradient sums of ``torch.nn.Linear(p, 1, bias=False)`` under squared or logistic loss."""

    name = "linear"

    def __init__(self, model: torch.nn.Linear, link: Link = "squared") -> None:
        if not isinstance(model, torch.nn.Linear) or model.bias is not None or model.out_features != 1:
            raise UnsupportedLayer(
                "The closed form needs torch.nn.Linear(p, 1, bias=False); add a column of ones instead."
            )
        require_weighable(model.weight.dtype, self.name)
        self._model: torch.nn.Linear = model
        self._link: Link = link

    def clipped_sum(self, batch: Batch, max_grad_norm: float) -> ClippedSum:
        x, y, norms = batch
        total = ClippedSum.zeros([self._model.weight], max_grad_norm)
        rows = summable_rows(x.dtype)
        tau = margin(x.dtype, rows)
        for i in range(0, len(x), rows):
            part = slice(i, i + rows)
            total.tensors[0].add_(self._part(x[part], y[part], norms[part], max_grad_norm, tau))
        return total

    @torch.no_grad()
    def _part(self, x: Tensor, y: Tensor, norms: Tensor, max_grad_norm: float, tau: float) -> Tensor:
        residual = self._residual((x @ self._model.weight.T).squeeze(1), y)
        factors = clip_factors(measurable(measurable(norms) * residual.double().abs()), max_grad_norm, tau)
        good = factors > 0
        weights = torch.where(good, residual.double() * factors, 0.0).to(x.dtype)
        if not good.all():  # 0 * NaN is NaN, also inside a matrix product
            x = torch.where(good[:, None], x, 0.0)
        return (weights @ x).double()[None]

    def _residual(self, prediction: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(prediction) if self._link == "logistic" else prediction) - y
