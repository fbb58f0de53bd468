"""What every gradient backend returns, and the arithmetic of clipping that they share."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, Tensors
from halfsilver.errors import ConfigError, UnsupportedLayer

# Entries whose squares are summed in the dtype of the gradient.
_BLOCK = 1024

# In float32, squares of 1024 numbers are summed with at most 1025 roundings, and two such norms may be multiplied.
_MEASURING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}

# Weights fall to zero towards this norm. Squares of float32 overflow at 2^64 only, and C / norm is far from subnormal.
_LONGEST = 2.0**62
# What is taken off all weights, so that they fall to zero before they are subnormal in float32 and so not accurate.
_LEAST_WEIGHT = 2.0**-100

# Unit roundoffs.
_U32, _U64 = 2.0**-24, 2.0**-53

# What rounding in sums may come to, in clip norms: of float32 blocks, and of terms that cancel within a row.
_OF_BLOCKS, _OF_TERMS = 2.0**-8, 2.0**-15
# Rows of a float32 block: beyond the most, speed gains nothing; with less than the least, float64 is as fast.
_MOST_TOGETHER, _LEAST_TOGETHER = 32, 6
# A sum in float64 may have so many rows whatever was announced; one that is made by a single call, so many in float32.
_ROWS_ANYHOW, _ROWS_AT_ONCE = 2**18, 512
# Numbers that are converted to float64 at once: they stay in the cache.
_CONVERTED = 2**16


@dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped gradients in float64, with its sensitivity: how far one unit can move it in Euclidean norm."""

    tensors: Tensors
    sensitivity: float

    @classmethod
    def zeros(cls, params: Sequence[Tensor], sensitivity: float) -> ClippedSum:
        return cls([torch.zeros_like(p, dtype=torch.float64) for p in params], sensitivity)

    def add_(self, other: ClippedSum) -> None:
        """Add the sum over other units. Each unit is in only one of the two, so the sensitivity stays."""
        if other.sensitivity != self.sensitivity:
            raise ValueError(f"sums of sensitivity {self.sensitivity} and {other.sensitivity} do not add up")
        for i, t in enumerate(other.tensors):
            self.tensors[i] = self.tensors[i].double().add_(t)


@dataclass(frozen=True, kw_only=True)
class Adding:
    """How the rows of one sum are added up, over all the calls that it takes, and the clipping margin that follows.

    Why gradients are clipped to C' = C / (1 + margin) instead of the clip norm C:

    1. Let c_i be the clipped gradient of row i, a function of that row alone with |c_i| <= C', and S = sum_i c_i + e
       the computed sum. A neighbour without row j computes S' = sum_i c_i - c_j + e', so |S - S'| <= C' + |e| + |e'|.
       The roundings e and e' differ in every block, because removing one row shifts all later rows by one place.
       That c_i does not depend on that place is an assumption about the library's kernels. `alike` in
       ``privacy/pieces.py`` checks it on made-up rows for the number of rows that a batch has; it is not proved.
    2. A sum of m rows takes m - 1 additions, each off by at most u times its result, and the k-th partial sum is at
       most k C' long. So |e| <= (2 + ... + m) u C' = (m (m + 1) / 2 - 1) u C', in any order.
    3. The product with the clip factor, the factor itself and terms of second order add one rounding each. So N rows in
       float32 blocks of m rows are off by N (m + 6) / 2 u C' with u = 2^-24, and the float64 sum of N rows by N (N + 1)
       / 2 u' C' with u' = 2^-53.
    4. Rows that are sums of terms, added in float64 together with the terms of other rows, are off by n u' times the
       length of all terms, with n additions between a term and the total. `share_of_terms` keeps that length bounded.
    5. `margin` is twice the sum of 3 and 4, once per neighbour, plus the relative error with which norms are measured.
       Hence |S - S'| <= C' (1 + margin) = C: the noise is scaled to C, and it covers rounding too.

    Of sums with more than `rows` *and* more than 2^18 rows, the float64 rounding is not covered in full. It is 10^-5 C
    at 2^18 rows and grows as the square.

    Args:
        rows: A public bound on how many rows are added in the usual way.
        exact: Whether each row is added by itself, in float64 all the way. Rows beyond `rows` come this way. They are
            clipped as the others are. Default False.

    References:
        - Higham 2002, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM, chapter 4, for the error of
          sums.
        - Casacuberta, Shoemate, Vadhan and Wagaman 2022, Widespread Underestimation of Sensitivity in Differentially
          Private Libraries and How to Fix It, arXiv:2207.10635, for attacks on sums that ignore rounding.
    """

    rows: int
    exact: bool = False

    @classmethod
    def of(cls, expected: float, sampling_rate: float, ranks: int = 1) -> Adding:
        """For Poisson samples of this expected size, of which each rank has a share.

        `rows` is the mean plus four standard deviations, so few samples are larger.

        Args:
            expected: The expected number of rows per sample.
            sampling_rate: The probability of a row to be in a sample, in (0, 1].
            ranks: The number of processes. Default 1.

        Example:
            >>> Adding.of(500, 0.01).rows, Adding.of(500, 1.0).rows
            (590, 501)
        """
        return cls(rows=ranks * (math.ceil((expected + 4 * math.sqrt(expected * (1 - sampling_rate))) / ranks) + 1))

    @classmethod
    def once(cls, rows: int) -> Adding:
        """For a sum that one call computes. Its margin does not depend on the number of rows, which is private."""
        return cls(rows=_ROWS_AT_ONCE, exact=rows > _ROWS_AT_ONCE)

    @property
    def together(self) -> int:
        """How many rows may be added in float32 before the sum moves on to float64; 1 if none.

        Example:
            >>> [Adding(rows=n).together for n in (500, 1_000, 2_000, 5_000, 10_000)]
            [32, 32, 26, 7, 1]
        """
        most = min(_MOST_TOGETHER, int(_OF_BLOCKS / (self.rows * _U32)) - 6)
        return most if most >= _LEAST_TOGETHER else 1

    def margin(self, dtype: torch.dtype) -> float:
        """How far below the clip norm to clip, so that rounding cannot push the influence of a row above it.

        Args:
            dtype: The dtype of the gradients.

        Returns:
            The relative margin: gradients are clipped to C / (1 + margin).

        Example:
            >>> [round(Adding(rows=n).margin(torch.float32), 4) for n in (1, 500, 2_000, 10_000, 2**21)]
            [0.0001, 0.0013, 0.004, 0.0001, 0.0006]
        """
        blocks = 0.0 if dtype == torch.float64 or self.together == 1 else self.rows * (self.together + 6) * _U32
        return measuring(dtype) + blocks + self.in_float64

    @property
    def in_float64(self) -> float:
        """The most that rounding of sums in float64 can amount to, in clip norms."""
        return float(max(self.rows + 1, _ROWS_ANYHOW)) ** 2 * _U64 + _OF_TERMS

    def share_of_terms(self, additions: int) -> float:
        """The length of a row's terms, times this, counts as a part of its norm.

        So the terms of all rows, each of which takes part in `additions` within one call, round by at most a share of
        the clip norm. It matters only to rows whose terms nearly cancel.
        """
        return 2 * self.rows * (additions + self.rows) * _U64 / _OF_TERMS


class GradientBackend(Protocol):
    """One way to compute clipped gradient sums.

    Guarantee of every implementation: adding or removing one example changes the sum by at most `max_grad_norm`, the
    rounding of all others included. An example whose gradient is NaN, infinite or longer than 2^62 contributes
    zero. No state is kept between calls. `adding` describes the sum over all calls; without it, this call is the whole
    sum.

    Only examples for which `counted`, one boolean each, is true count (all by default); the others are padding. The
    mechanism gives every batch the same shape, because library kernels may round a row differently depending on how
    many rows are beside it. A backend that handles this by itself says so with ``any_shape = True``.

    References:
        - Abadi et al. 2016, Deep Learning with Differential Privacy, arXiv:1607.00133, for clipping per example.
    """

    name: str

    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum: ...


@runtime_checkable
class Tunable(Protocol):
    """A backend that measures which of its ways is fastest, on made-up rows of the shape to come."""

    def tune(self, batch: Batch, adding: Adding) -> None: ...


@runtime_checkable
class Traced(Protocol):
    """A backend that shows the numbers of which row i's contribution is made, row i of each tensor."""

    def per_example(self, batch: Batch) -> Tensors: ...


def clock(device: torch.device) -> float:
    """Seconds for comparing ways to compute on `device`, once it has done what was asked of it.

    On the CPU, time of this thread if torch has one, since others may share its core.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def measuring(dtype: torch.dtype) -> float:
    """How much too small the computed norm of a gradient of this dtype may be, relative to the norm."""
    return _MEASURING.get(dtype, 1e-2)


def measurable(norms: Tensor) -> Tensor:
    """Norms n as 1 / (1 / n - 2^-62), and infinite from 2^62 on: as they are, but for huge ones.

    So the weight of a row, C / norm, falls to zero without a jump before anything overflows: the clipped gradient has
    the length C (1 - n / 2^62), which a relative error of n changes by no more than that share of C. With a jump, an
    error in the last bit of n would decide whether the row counts with C or not at all.
    """
    norms = norms.double()
    return norms / (1 - norms / _LONGEST).clamp_(min=0.0)


def lengths_from(squares: Tensor, dtype: torch.dtype, entries: int) -> Tensor:
    """Lengths from sums of squares, none of them too small: it adds what squares lose below the range of `dtype`."""
    return (squares.double() + entries * torch.finfo(dtype).tiny).sqrt()


def check_clip_norm(max_grad_norm: float, dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a clip norm for which squares and products of numbers of its size leave the range of the dtype."""
    least = max(torch.finfo(torch.promote_types(dtype, torch.float32)).tiny for dtype in dtypes) ** 0.25
    if not least <= max_grad_norm <= 1 / least:
        raise ConfigError(
            f"Expected max_grad_norm={max_grad_norm:g} in [{least:.3g}, {1 / least:.3g}]: beyond, gradients of that "
            "length cannot be measured in the precision of the parameters. Scale the loss, and max_grad_norm with it."
        )


def require_weighable(dtype: torch.dtype, name: str) -> None:
    """Backends that multiply by C / norm before they sum need its exponent range; half precision lacks it."""
    if dtype not in (torch.float32, torch.float64):
        raise UnsupportedLayer(
            f"backend={name!r} needs float32 or float64 parameters, not {dtype}. Use backend='hooks'."
        )


def clip_factors(norms: Tensor, max_grad_norm: float, tau: float, counted: Tensor | None = None) -> Tensor:
    """Weights min(1, C / ((1 + tau) norm)) - 2^-100 that bring each gradient to norm at most C / (1 + tau).

    The weight is zero for padding and for norms that are not finite. Both ends are reached without a jump: `norms` come
    from `measurable`, and weights below 2^-100, which no plan in float32 has, are zero.

    References:
        - Abadi et al. 2016, Deep Learning with Differential Privacy, arXiv:1607.00133, Algorithm 1, for tau = 0.
    """
    factors = (max_grad_norm / (1 + tau) / norms.double()).clamp_(max=1.0).sub_(_LEAST_WEIGHT).clamp_(min=0.0)
    factors = torch.where(torch.isfinite(norms), factors, 0.0)
    return factors if counted is None else factors * counted.to(factors.device)


def reach(counted: Tensor | None) -> int | None:
    """How many of the first rows contain all that count; None if all may."""
    return None if counted is None else int(counted.nonzero().max()) + 1 if counted.any() else 0


def row_norms(per_example: Sequence[Tensor]) -> Tensor:
    """Norm of each example's gradient over all parameters, in float64; infinite where it cannot be measured."""
    squares = [squared_lengths(g.reshape(len(g), -1)) for g in per_example]
    return measurable((squares[0] if len(squares) == 1 else torch.stack(squares).sum(0)).sqrt())


def squared_lengths(rows: Tensor) -> Tensor:
    """Squared norm of each row, in float64; infinite or NaN where it cannot be measured.

    Blocks of a row are squared and summed in the dtype of the gradient, which is accurate for so few terms, and the
    blocks are added in float64.
    """
    rows, width = at_least_float32(rows), rows.shape[1]
    whole = width // _BLOCK * _BLOCK
    if width <= _BLOCK:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.double().square_()
    blocks: Tensor = torch.linalg.vector_norm(rows[:, :whole].reshape(len(rows), -1, _BLOCK), dim=2)
    squared = blocks.double().square_().sum(1)
    return squared if whole == width else squared.add_(squared_lengths(rows[:, whole:]))


def weighted_rows(weights: Tensor, rows: Tensor, adding: Adding) -> Tensor:
    """sum_i weights_i rows_i in float64, in blocks small enough to be summed in the dtype of the rows, or row by row.

    Rows of weight zero may hold anything. They are taken out first, because 0 * NaN is NaN.
    """
    rows = at_least_float32(rows)
    if not weights.all():
        rows = torch.where(weights[:, None] != 0, rows, 0.0)
    size = 1 if adding.exact else adding.together
    if rows.dtype == torch.float64 or size == 1:
        return _in_float64(weights, rows)
    weights = weights.to(rows.dtype)
    if len(rows) <= size:
        return (weights @ rows).double()
    whole = len(rows) // size * size
    blocks = torch.bmm(weights[:whole].view(-1, 1, size), rows[:whole].view(-1, size, rows.shape[1]))
    return blocks.squeeze(1).sum(0, dtype=torch.float64).add_(weights[whole:] @ rows[whole:])


def _in_float64(weights: Tensor, rows: Tensor) -> Tensor:
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    size = max(1, _CONVERTED // max(1, rows.shape[1])) if rows.dtype != torch.float64 else max(1, len(rows))
    for i in range(0, len(rows), size):
        total.addmv_(rows[i : i + size].double().T, weights[i : i + size])
    return total


def at_least_float32(t: Tensor) -> Tensor:
    """Half precision has too small a range for squares and for weights C / norm."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def clip_and_sum(
    per_example: Sequence[Tensor], max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
) -> ClippedSum:
    """Clip materialised per-example gradients; norm and sum read the same tensors."""
    adding = adding or Adding.once(len(per_example[0]))
    tau = max(adding.margin(dtype) for dtype in {g.dtype for g in per_example})
    factors, rows = clip_factors(row_norms(per_example), max_grad_norm, tau, counted), reach(counted)
    flat = [g.reshape(len(g), -1)[:rows] for g in per_example]
    sums = [weighted_rows(factors[:rows], f, adding).view(g.shape[1:]) for f, g in zip(flat, per_example, strict=True)]
    return ClippedSum(sums, max_grad_norm)
