"""What every gradient backend returns, and the arithmetic of clipping that they share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from halfsilver._tensors import Batch, Tensors
from halfsilver.errors import UnsupportedLayer

# Rows that a kernel may sum in its own precision before the sum moves to float64: n rows cost n^2 u C of rounding.
_ROWS = {torch.float64: 1 << 16, torch.float32: 128, torch.float16: 4, torch.bfloat16: 1}

# Entries whose squares are summed in the dtype of the gradient.
_BLOCK = 1024

_MARGIN = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class ClippedSum:
    """Sum of clipped gradients that knows how much one unit can move it (in Euclidean norm).

    In float64, except for the sum of a single block of rows, which may be in the dtype that its kernels add in.
    """

    tensors: Tensors
    sensitivity: float

    @classmethod
    def zeros(cls, params: Sequence[Tensor], sensitivity: float) -> ClippedSum:
        return cls([torch.zeros_like(p, dtype=torch.float64) for p in params], sensitivity)

    def add_(self, other: ClippedSum) -> None:
        """Take in the sum over other units. Each unit is in one of them only, so the sensitivity stays."""
        if other.sensitivity != self.sensitivity:
            raise ValueError(f"sums of sensitivity {self.sensitivity} and {other.sensitivity} do not add up")
        for i, t in enumerate(other.tensors):
            self.tensors[i] = self.tensors[i].double().add_(t)


class GradientBackend(Protocol):
    """One way to compute clipped gradient sums.

    Guarantee of every implementation: adding or removing one example changes the sum by at most `max_grad_norm`; an
    example whose gradient is NaN, infinite or too large to measure contributes zero; no state is kept between calls.

    Only the first `rows` examples count (all by default); the others are padding. The mechanism gives every batch the
    same shape, because library kernels may round a row differently depending on how many stand beside it; a backend
    that sees to this by itself says so with ``any_shape = True``.
    """

    name: str

    def clipped_sum(self, batch: Batch, max_grad_norm: float, rows: int | None = None) -> ClippedSum: ...


@runtime_checkable
class Tunable(Protocol):
    """A backend that measures, on made-up rows of the shape to come, which of its ways is fastest."""

    def tune(self, batch: Batch) -> None: ...


def clock() -> float:
    """Seconds to compare ways of computing by. Of this thread if it works alone: others may share its core."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def summable_rows(dtype: torch.dtype) -> int:
    """How many rows a backend may let kernels of this dtype sum up."""
    return _ROWS.get(dtype, 1)


def margin(dtype: torch.dtype, rows: int = 0) -> float:
    """How far below the clip norm to aim, so that rounding cannot push a contribution above it.

    `rows` is for backends whose kernels sum over rows: n additions of vectors of norm C are off by at most n^2 u C.
    That covers the block which holds the example. Blocks that only shift round anew as well; their errors are random
    and were measured at 1e-5 C for thousands of blocks, but are not bounded by a proof.
    """
    return _MARGIN.get(dtype, 1e-2) + rows**2 * torch.finfo(dtype).eps / 2


def measurable(norms: Tensor) -> Tensor:
    """Norms as they are, infinite above 2^100: there C / norm is subnormal in float32 and no longer accurate."""
    return torch.where(norms < 2.0**100, norms, torch.inf)


def require_weighable(dtype: torch.dtype, name: str) -> None:
    """Backends that multiply by C / norm before they sum need its exponent range; half precision lacks it."""
    if dtype not in (torch.float32, torch.float64):
        raise UnsupportedLayer(
            f"backend={name!r} needs float32 or float64 parameters, not {dtype}. Use backend='hooks'."
        )


def clip_factors(norms: Tensor, max_grad_norm: float, tau: float, rows: int | None = None) -> Tensor:
    """Weights that bring each gradient to norm at most C / (1 + tau); zero for padding and for norms not finite."""
    factors = (max_grad_norm / (1 + tau) / norms.double()).clamp_(max=1.0)
    factors = torch.where(torch.isfinite(norms), factors, 0.0)
    if rows is not None:
        factors[rows:] = 0.0
    return factors


def row_norms(per_example: Sequence[Tensor]) -> Tensor:
    """Norm of each example's gradient over all parameters, in float64; infinite where it cannot be measured.

    Blocks of a row are squared and summed in the dtype of the gradient, which is accurate for so few terms, and the
    blocks are added in float64.
    """
    parts = [block for g in per_example for block in _block_norms(at_least_float32(g.reshape(len(g), -1)))]
    return measurable(torch.linalg.vector_norm(torch.cat(parts, dim=1), dim=1))


def _block_norms(rows: Tensor) -> list[Tensor]:
    whole = rows.shape[1] // _BLOCK * _BLOCK
    norms = []
    if whole:
        blocks = rows[:, :whole].reshape(len(rows), whole // _BLOCK, _BLOCK)
        norms.append(torch.linalg.vector_norm(blocks, dim=2).double())
    if whole < rows.shape[1] or not whole:
        norms.append(torch.linalg.vector_norm(rows[:, whole:], dim=1)[:, None].double())
    return norms


def weighted_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """sum_i weights_i rows_i in float64, of blocks small enough to be summed in the dtype of the rows.

    Rows of weight zero may hold anything: they are taken out first, because 0 * NaN is NaN.
    """
    rows = at_least_float32(rows)
    if not weights.all():
        rows = torch.where(weights[:, None] != 0, rows, 0.0)
    size = summable_rows(rows.dtype)
    whole = len(rows) // size * size
    weights = weights.to(rows.dtype)
    blocks = torch.bmm(weights[:whole].view(-1, 1, size), rows[:whole].view(-1, size, rows.shape[1]))
    return blocks.squeeze(1).double().sum(0) + (weights[whole:] @ rows[whole:]).double()


def at_least_float32(t: Tensor) -> Tensor:
    """Half precision has too small a range for squares and for weights C / norm."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def clip_and_sum(per_example: Sequence[Tensor], max_grad_norm: float, rows: int | None = None) -> ClippedSum:
    """Clip materialised per-example gradients; norm and sum read the same tensors."""
    tau = max(margin(dtype, summable_rows(dtype)) for dtype in {g.dtype for g in per_example})
    factors = clip_factors(row_norms(per_example), max_grad_norm, tau, rows)
    sums = [weighted_rows(factors[:rows], g.reshape(len(g), -1)[:rows]).reshape(g.shape[1:]) for g in per_example]
    return ClippedSum(sums, max_grad_norm)
