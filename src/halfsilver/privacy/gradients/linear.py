"""Closed form for linear models: no per-example gradient is ever made.

The gradient of example i is r_i x_i^T, with r_i the derivative of its loss by its predictions, one for each output. Its
norm is ||r_i|| * ||x_i||, and ||x_i|| does not change from step to step: it travels with the row as a third column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, csr_tensor
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.base import (
    Adding,
    ClippedSum,
    clip_factors,
    lengths_from,
    measurable,
    require_weighable,
    weighted_rows,
)
from halfsilver.privacy.records import Indices
from halfsilver.privacy.schema import Schema

# Rows whose predictions are computed at once.
_BLOCK = 128

Link = Literal["squared", "logistic"]


def with_row_norms(features: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The private records (x, y, ||x||) that `LinearModel` reads.

    A norm is never too small, even where squares underflow. The derivative of the loss has no bound, so a row whose
    norm came out as 0 would not be clipped.
    """
    norms = torch.linalg.vector_norm(features, dim=1, dtype=torch.float64)
    return features, target, lengths_from(norms.square(), torch.float64, features.shape[1])


@final
class LinearModel:
    """Clipped gradient sums of ``torch.nn.Linear(p, outputs, bias=False)`` under squared loss, added up over outputs.

    The logistic loss has one output. `x` is dense or a sparse CSR tensor; a sparse one must be float64, because its
    product sums over all rows at once. Targets have shape (rows,), or (rows, outputs).

    A row is clipped as a whole. Each output's part of the sum is added up by itself, and the error of the whole is no
    larger than `Adding` says: if part j is off by at most a share s of sum_i |c_ij|, the whole is off by at most s
    times the norm over j of these sums, which is at most s sum_i |c_i|.
    """

    name = "linear"
    any_shape = True

    def __init__(self, model: torch.nn.Linear, link: Link = "squared") -> None:
        if not isinstance(model, torch.nn.Linear) or model.bias is not None:
            raise UnsupportedLayer(
                "The closed form needs torch.nn.Linear(p, outputs, bias=False); add a column of ones instead of a bias."
            )
        if link == "logistic" and model.out_features != 1:
            raise UnsupportedLayer("The closed form of the logistic loss has one output. Use SoftmaxModel for classes.")
        require_weighable(model.weight.dtype, self.name)
        self._model: torch.nn.Linear = model
        self._link: Link = link

    @torch.no_grad()
    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        x, y, norms = batch
        adding = adding or Adding.once(len(x))
        outputs = zip(self._model.weight, y[None] if y.ndim == 1 else y.T, strict=True)
        residuals = torch.stack([self._residual(predictions(x, weight), target) for weight, target in outputs]).double()
        lengths = lengths_from(residuals.square().sum(0), torch.float64, len(residuals))
        tau = adding.margin(x.dtype)
        factors = clip_factors(measurable(measurable(norms) * measurable(lengths)), max_grad_norm, tau, counted)
        weights = torch.where(factors > 0, residuals * factors, 0.0)
        return ClippedSum([torch.stack([_sum_of_rows(w, x, adding) for w in weights])], max_grad_norm)

    def _residual(self, prediction: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(prediction) if self._link == "logistic" else prediction) - y


def predictions(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight. A sparse row is added up by itself, in its own order, whatever the other rows are.

    Dense rows go in blocks of one shape, the last one filled up: how a library rounds a row may depend on the number of
    rows beside it. So the batch itself needs no padding, which for a full batch would be a copy of its last part.
    """
    if x.layout != torch.sparse_csr:
        out = x.new_empty(_BLOCK * math.ceil(len(x) / _BLOCK))
        for i in range(0, len(x), _BLOCK):
            block = x[i : i + _BLOCK].contiguous()  # columns of a Fortran-ordered matrix round in another order
            if len(block) < _BLOCK:
                block = torch.cat([block, x.new_zeros(_BLOCK - len(block), x.shape[1])])
            torch.mv(block, weight, out=out[i : i + _BLOCK])
        return out[: len(x)]
    row = torch.repeat_interleave(torch.arange(len(x)), x.crow_indices().diff())
    return torch.zeros(len(x), dtype=x.dtype).index_add_(0, row, x.values() * weight[x.col_indices()])


def _sum_of_rows(weights: Tensor, x: Tensor, adding: Adding) -> Tensor:
    if x.layout != torch.sparse_csr:
        return weighted_rows(weights, x, adding)
    spread = torch.repeat_interleave(weights, x.crow_indices().diff())
    return torch.zeros(x.shape[1], dtype=torch.float64).index_add_(0, x.col_indices(), x.values() * spread)


@dataclass(frozen=True)
class SparseRecords:
    """Private rows of a SciPy CSR matrix, with targets and row norms; for `PrivateData.of`.

    A row with a NaN or an infinite entry becomes empty with an infinite norm, so that it contributes zero. Entries that
    name one column twice are added up first: their sum is what the norm measures, and what the clip bounds.
    """

    matrix: Any
    columns: tuple[Tensor, Tensor]
    fixed_shape: ClassVar[bool] = False

    @classmethod
    def make(cls, matrix: Any, target: Tensor) -> SparseRecords:
        matrix = matrix.tocsr().astype(np.float64, copy=True)
        matrix.sum_duplicates()
        with np.errstate(all="ignore"):  # a warning would tell of a row
            squares = torch.from_numpy(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
        norms = lengths_from(squares, torch.float64, matrix.shape[1])
        matrix.data[~np.isfinite(matrix.data)] = 0.0
        return cls(matrix, (target, torch.where(torch.isfinite(norms), norms, torch.inf)))

    def size(self) -> int:
        return int(self.matrix.shape[0])

    def schema(self) -> Schema:
        target = torch.zeros(self.columns[0].shape[1:], dtype=torch.float64)
        return Schema.of_record((torch.zeros(self.matrix.shape[1], dtype=torch.float64), target, 0.0))

    def fetch(self, indices: Indices, schema: Schema) -> Batch:
        everything = isinstance(indices, slice) and indices == slice(0, self.size())
        rows = self.matrix if everything else self.matrix[indices if isinstance(indices, slice) else indices.numpy()]
        starts, columns, values = (torch.from_numpy(part) for part in (rows.indptr, rows.indices, rows.data))
        return (csr_tensor(starts, columns, values, rows.shape), *(c[indices] for c in self.columns))

    def problem(self, index: int, schema: Schema) -> str:
        return "" if torch.isfinite(self.columns[1][index]) else "not finite"
