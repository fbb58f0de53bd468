"""Closed form for softmax regression: clipped gradient sums by two matrix products, and no per-example gradient.

With p_i the predicted probabilities of row i, e_i its label as a unit vector and w_i its weight, the gradient is
w_i (p_i - e_i) x_i^T, a matrix of rank one. Its norm is w_i |p_i - e_i| |x_i|, and |x_i| travels with the row.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.base import Adding, ClippedSum, clip_factors, lengths_from, measurable, measuring

# Rows whose products are computed at once: they stay in the cache from the first product to the second.
_BLOCK = 256

SoftmaxRecords = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def softmax_records(features: Tensor, labels: Tensor, weights: Tensor, offsets: Tensor) -> SoftmaxRecords:
    """The private records (x, label, |x|, weight, offsets) that `SoftmaxModel` reads.

    Args:
        features: Rows in float64, of shape (rows, width).
        labels: The number of each row's class; -1 for a label that is none of them.
        weights: What multiplies each row's loss, at least 0.
        offsets: Logits that are added to the model's, of shape (rows, classes), or (rows, 0) for none.
    """
    norms = torch.linalg.vector_norm(features, dim=1)
    return features, labels, lengths_from(norms.square(), torch.float64, features.shape[1]), weights, offsets


@final
class SoftmaxModel:
    """Clipped gradient sums of ``torch.nn.Linear(width, classes, bias=False)`` under cross-entropy, in float64.

    Guarantee: that of `GradientBackend`. A row contributes f_i w_i (p_i - e_i) x_i^T with f_i = min(1, C' / norm), so
    at most C', whatever its weight is: the weight multiplies the gradient *before* the clip, and enters no sensitivity.
    A row with an unknown label, a weight that is negative, NaN or infinite, or a number that is not finite contributes
    zero. All products are in float64, so how a row is rounded beside other rows is within the margin of `Adding`.
    """

    name = "softmax"
    any_shape = True

    def __init__(self, model: torch.nn.Linear) -> None:
        linear = isinstance(model, torch.nn.Linear) and model.bias is None
        if not linear or model.out_features < 2 or model.weight.dtype != torch.float64:
            raise UnsupportedLayer(
                "The closed form needs torch.nn.Linear(width, classes, bias=False, dtype=torch.float64) with at least "
                "2 classes; add a constant column instead of a bias."
            )
        self._model: torch.nn.Linear = model

    @torch.no_grad()
    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        adding = adding or Adding.once(len(batch[0]))
        tau = measuring(torch.float64) + adding.in_float64
        weight = self._model.weight
        by_column = weight.T.contiguous()
        total = torch.zeros_like(weight)
        counted = torch.ones(len(batch[0]), dtype=torch.bool) if counted is None else counted
        for i in range(0, len(counted), _BLOCK):
            x, labels, norms, weights, offsets, here = (column[i : i + _BLOCK] for column in (*batch, counted))
            residual = residuals(x @ by_column, labels, offsets)
            usable = (labels >= 0) & (labels < len(weight)) & (weights >= 0) & (weights < torch.inf)
            weights = torch.where(usable, weights, 0.0)
            lengths = measurable(norms) * torch.linalg.vector_norm(residual, dim=1) * weights
            factors = clip_factors(measurable(lengths), max_grad_norm, tau, here) * weights
            if not bool(factors.all()):  # such rows may hold anything, and 0 * NaN is NaN
                kept = (factors > 0)[:, None]
                residual, x = residual.where(kept, 0.0), x.where(kept, 0.0)
            total.addmm_((residual * factors[:, None]).T, x)
        return ClippedSum([total], max_grad_norm)


def residuals(logits: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
    """Softmax of the logits minus the label as a unit vector; a label out of range is taken as the nearest class."""
    logits = logits + offsets if offsets.shape[1] else logits
    residual = torch.softmax(logits, dim=1)
    place = labels.clamp(0, logits.shape[1] - 1)[:, None]
    return residual.scatter_add_(1, place, residual.new_full((len(labels), 1), -1.0))
