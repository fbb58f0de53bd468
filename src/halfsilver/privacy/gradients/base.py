"""What every gradient backend returns, and the arithmetic of clipping that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from halfsilver._tensors import Batch, Tensors
from halfsilver.errors import UnsupportedLayer

# Rows that a kernel may sum in its own precision before the sum moves to float64: n rows cost n^2 u C of rounding.
_ROWS = {torch.float64: 1 << 16, torch.float32: 128, torch.float16: 4, torch.bfloat16: 1}

_MARGIN = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class ClippedSum:
    """Sum of clipped gradients, in float64, that knows how much one unit can move it (in Euclidean norm)."""

    tensors: Tensors
    sensitivity: float

    @classmethod
    def zeros(cls, params: Sequence[Tensor], sensitivity: float) -> ClippedSum:
        return cls([torch.zeros_like(p, dtype=torch.float64) for p in params], sensitivity)

    def add_(self, other: ClippedSum) -> None:
        """Take in the sum over other units. Each unit is in one of them only, so the sensitivity stays."""
        torch._foreach_add_(self.tensors, other.tensors)


class GradientBackend(Protocol):
    """One way to compute clipped gradient sums.

    Guarantee of every implementation: adding or removing one example changes the sum by at most `max_grad_norm`; an
    example whose gradient is NaN, infinite or too large to measure contributes zero; no state is kept between calls.
    """

    name: str

    def clipped_sum(self, batch: Batch, max_grad_norm: float) -> ClippedSum: ...


def summable_rows(dtype: torch.dtype) -> int:
    """How many rows a backend may let kernels of this dtype sum up."""
    return _ROWS.get(dtype, 1)


def margin(dtype: torch.dtype, rows: int = 0) -> float:
    """How far below the clip norm to aim, so that rounding cannot push a contribution above it.

    `rows` is for backends whose kernels sum over rows: n additions of vectors of norm C are off by at most n^2 u C.
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


def clip_factors(norms: Tensor, max_grad_norm: float, tau: float) -> Tensor:
    """Weights that bring each gradient to norm at most C / (1 + tau), and zero for a norm that is not a number."""
    factors = (max_grad_norm / (1 + tau) / norms.double()).clamp_(max=1.0)
    return torch.where(torch.isfinite(norms), factors, 0.0)


def row_norms(per_example: Sequence[Tensor]) -> Tensor:
    """Norm of each example's gradient over all parameters, in float64 (float32 squares overflow at 1e19)."""
    parts = [torch.linalg.vector_norm(g.reshape(len(g), -1).double(), dim=1) for g in per_example]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return norms


def weighted_sum(factors: Tensor, per_example: Tensor) -> Tensor:
    """sum_i factors_i * g_i in float64. `where` removes bad rows, because 0 * NaN is NaN."""
    rows = per_example.reshape(len(per_example), -1).double()
    rows = torch.where(factors[:, None] > 0, rows, 0.0)
    return (factors @ rows).reshape(per_example.shape[1:])


def clip_and_sum(per_example: Sequence[Tensor], max_grad_norm: float) -> ClippedSum:
    """Clip materialised per-example gradients; norm and sum read the same tensors."""
    factors = clip_factors(row_norms(per_example), max_grad_norm, margin(per_example[0].dtype))
    return ClippedSum([weighted_sum(factors, g) for g in per_example], max_grad_norm)
