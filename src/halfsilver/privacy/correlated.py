"""Correlated noise: what a step adds cancels a part of what earlier steps added, and needs no secret sampling.

With independent noise, the noise of all steps adds up in the model. Here step t releases

    x_t + w_t,   w = C^-1 z,   z_t independent normal noise,

where x_t is the clipped sum of the units that take part, and C is lower triangular with ones on the diagonal. Whoever
sees all releases y can compute C y = C x + z, and nothing else follows from them. So the privacy is that of one
Gaussian mechanism on C x, whatever the model does with y, and its noise is scaled to the sensitivity of C x: how far
one unit can move it. That depends on how often, and how closely after each other, one unit may take part, and on
nothing else: who takes part need not be secret.

What the model sees is the sum of all releases up to each step, whose noise is B z with B = A C^-1, where A sums up. A
strategy is a matrix C for which sensitivity times the rows of B is small.

References:
    - Denisov, McMahan, Rush, Smith and Thakurta 2022, Improved Differential Privacy for SGD via Optimal Private Linear
      Operators on Adaptive Streams, arXiv:2202.08312, for the mechanism and its proof for adaptive inputs.
    - Choquette-Choo et al. 2023, (Amplified) Banded Matrix Factorization, arXiv:2306.08153, for bands and a minimum
      separation.
    - Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024, Efficient and Near-Optimal Noise Generation for Streaming
      Differential Privacy, arXiv:2404.16706, for buffered linear Toeplitz matrices (BLT).
    - McMahan, Xu and Zhang 2024, A Hassle-free Algorithm for Strong Differential Privacy in Federated Learning Systems,
      arXiv:2408.08868, for BLT under a minimum separation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from halfsilver.errors import require
from halfsilver.privacy.strategies import MOST_BUFFERS, Banded, Buffered, Participation, blt_column

Error = Literal["mean", "max"]

_STEPS, _TOLERANCE = 400, 1e-10
_NO_BUFFER = 1e-9  # a scale below which a buffer changes nothing


def sensitivity(column: Tensor, participation: Participation) -> Tensor:
    """How far one unit can move C x in Euclidean norm, where each of its contributions has norm at most 1.

    Let c_0 >= c_1 >= ... >= 0 be the first column, C_i the column of round i, and n the number of rounds. For i <= j,

        <C_i, C_j> = sum_{s=0}^{n-1-j} c_s c_(s + j - i)

    is at least 0, and does not rise if j grows at a fixed distance j - i (fewer terms), or if the distance grows at a
    fixed j (smaller terms). A unit that contributes x_i in rounds i of a set P moves C x by sum_P C_i x_i^T, and

        |sum_P C_i x_i^T|^2 = sum_{i,j in P} <C_i, C_j> <x_i, x_j>  <=  sum_{i,j in P} <C_i, C_j>.

    The m-th of these rounds (from 0) is m b or later, where b is the separation, and the m-th and the l-th are (m - l)
    b or more apart. So each term is at most that of the rounds 0, b, 2b, ..., of which as many as allowed give the
    maximum. Equality holds if all contributions are the same unit vector, so no smaller number will do.

    Args:
        column: The first column, which does not rise and is not negative, [rounds].
        participation: How often a unit takes part.

    Returns:
        A scalar.

    References:
        - Kalinin and Lampert 2024, Banded Square Root Matrix Factorization for Differentially Private Model Training,
          arXiv:2405.13763, Theorem 2.

    >>> column = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    >>> float(sensitivity(column, Participation(rounds=3, separation=2))) ** 2  # (1, 0.5, 1)
    2.25
    """
    moved: Tensor = torch.linalg.vector_norm(_together(column, participation))
    return moved


def _together(column: Tensor, participation: Participation) -> Tensor:
    """sum_m C_(m b) over the rounds 0, b, 2b, ... in which a unit takes part."""
    rounds, apart = len(column), participation.separation
    blocks = math.ceil(rounds / apart)
    padded = torch.nn.functional.pad(column, (0, blocks * apart - rounds)).view(blocks, apart)
    total = padded.cumsum(0)
    late = blocks - participation.times
    if late > 0:  # so many blocks see fewer rounds than there are before them
        total = total - torch.cat([torch.zeros_like(total[:-late]), total[:late]])
    return total.view(-1)[:rounds]


def inverse(column: Tensor) -> Tensor:
    """The first column of C^-1, as a power series: r <- r (2 - c r) doubles the number of right terms each time.

    >>> inverse(torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=torch.float64))
    tensor([ 1.0000, -0.5000,  0.2500, -0.1250], dtype=torch.float64)
    """
    found = column[:1] * 0 + 1
    while len(found) < len(column):
        size = min(2 * len(found), len(column))
        rest = -product(column[:size], found, size)
        found = product(found, torch.cat([rest[:1] + 2, rest[1:]]), size)
    return found


def product(a: Tensor, b: Tensor, size: int) -> Tensor:
    """The first `size` terms of the product of two power series."""
    length = len(a) + len(b)
    out: Tensor = torch.fft.irfft(torch.fft.rfft(a, length) * torch.fft.rfft(b, length), length)
    return out[:size]


def prefix_error(column: Tensor, participation: Participation, error: Error = "mean") -> Tensor:
    """Standard deviation of the noise in the released prefix sums, at a noise multiplier of 1: sensitivity times rows.

    The squared length of row t of B = A C^-1 is the sum of the squares of the first t + 1 numbers of its first column.

    Args:
        column: The first column of C.
        participation: How often a unit takes part.
        error: "mean", the root of the mean over all prefixes of the variance; or "max", that of the last one.

    >>> alone = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)  # independent noise: 1, 2 and 3 in the three sums
    >>> round(float(prefix_error(alone, Participation(rounds=3, separation=3))) ** 2, 6)
    2.0
    """
    return sensitivity(column, participation) * sum_lengths(inverse(column), error)


def sum_lengths(inverted: Tensor, error: Error = "mean") -> Tensor:
    """Lengths of the rows of B = A C^-1, from the first column of C^-1: their root mean square, or that of the last."""
    lengths = inverted.cumsum(0).square().cumsum(0)
    return (lengths.mean() if error == "mean" else lengths[-1]).sqrt()


@lru_cache(maxsize=64)
def buffered(participation: Participation, *, buffers: int = 4, error: Error = "mean") -> Buffered:
    """The BLT with the least `prefix_error`.

    Decays d_1 > e_1 > d_2 > e_2 > ... in (0, 1) give the power series c(z) = prod_i (1 - e_i z) / prod_i (1 - d_i z),
    and its inverse with d and e exchanged, both in closed form by partial fractions. All scales are positive then, and
    their sum is sum_i d_i - e_i < 1, so that the column falls.

    Args:
        participation: How often a unit takes part.
        buffers: Number of decays, from 1 to 8.
        error: See `prefix_error`.

    Returns:
        The strategy.

    Raises:
        ConfigError: `buffers` is out of its range.

    Example:
        >>> once = Participation(rounds=100, separation=100)
        >>> plain = prefix_error(torch.eye(100, dtype=torch.float64)[0], once)
        >>> bool(prefix_error(buffered(once, buffers=2).column(100), once) < 0.5 * plain)
        True
    """
    require(1 <= buffers <= MOST_BUFFERS, "buffers", buffers, f"in [1, {MOST_BUFFERS}]")
    best: tuple[float, Tensor] | None = None
    for span, rate in itertools.product({participation.rounds, participation.separation}, (2.0, 4.0, 8.0)):
        # Starts: decays whose distance from 1 begins with 1 / 4 span, and grows by this factor.
        gaps = rate ** torch.arange(2 * buffers, dtype=torch.float64) / (4 * span)
        first = torch.logit((1 - gaps.clamp(max=0.9)).clamp(min=0.05))
        start = torch.cat([first[:1], torch.logit((first[1:].sigmoid() / first[:-1].sigmoid()).clamp(max=1 - 1e-6))])

        def loss(free: Tensor) -> Tensor:
            decays, inverse_decays = _interlaced(free)
            column = blt_column(decays, _scales(decays, inverse_decays), participation.rounds)
            inverted = blt_column(inverse_decays, _scales(inverse_decays, decays), participation.rounds)
            return (sensitivity(column, participation) * sum_lengths(inverted, error)).log()

        found, value = _minimised(loss, start)
        if best is None or value < best[0]:
            best = value, found
    assert best is not None
    decays, inverse_decays = _interlaced(best[1])
    scales = _scales(decays, inverse_decays)
    used = scales > _NO_BUFFER
    return Buffered(tuple(decays[used].tolist()), tuple(scales[used].tolist()))


@lru_cache(maxsize=64)
def banded(participation: Participation, *, bands: int, error: Error = "mean") -> Banded:
    """The banded strategy with the least `prefix_error` among those whose coefficients fall.

    Args:
        participation: How often a unit takes part.
        bands: Number of coefficients, at least 1 and at most the number of rounds. As many as the separation are best.
        error: See `prefix_error`.

    Returns:
        The strategy.

    Raises:
        ConfigError: `bands` is out of its range.

    Example:
        >>> twice = Participation(rounds=20, separation=10)
        >>> banded(twice, bands=2).coefficients[1] > 0.3
        True
    """
    require(1 <= bands <= participation.rounds, "bands", bands, f"in [1, {participation.rounds}]")
    root = _root_of_prefix_sums(bands)
    start = torch.logit((root[1:] / root[:-1]).clamp(max=1 - 1e-6))

    def column(free: Tensor) -> Tensor:
        ratios = torch.cat([free.new_ones(1), free.sigmoid()])
        return torch.nn.functional.pad(ratios.cumprod(0), (0, participation.rounds - bands))

    found, _ = _minimised(lambda free: prefix_error(column(free), participation, error).log(), start)
    return Banded(tuple(column(found)[:bands].tolist()))


def _root_of_prefix_sums(size: int) -> Tensor:
    """The first column of the square root of A: 1, 1/2, 3/8, ...; c_t = c_(t-1) (2t - 1) / 2t."""
    t = torch.arange(1, size, dtype=torch.float64)
    return torch.cat([t.new_ones(1), ((2 * t - 1) / (2 * t)).cumprod(0)])


def _interlaced(free: Tensor) -> tuple[Tensor, Tensor]:
    """d_1 > e_1 > d_2 > e_2 > ... in (0, 1) from as many free numbers."""
    falling = free.sigmoid().cumprod(0)
    return falling[0::2], falling[1::2]


def _scales(decays: Tensor, others: Tensor) -> Tensor:
    """Scales for which 1 + sum_i scales_i z / (1 - decays_i z) is prod_i (1 - others_i z) / prod_i (1 - decays_i z)."""
    apart = (decays[:, None] - decays[None, :]) + torch.eye(len(decays), dtype=decays.dtype)
    return (decays[:, None] - others[None, :]).prod(1) / apart.prod(1)


def _minimised(loss: Callable[[Tensor], Tensor], start: Tensor) -> tuple[Tensor, float]:
    """A local minimum by L-BFGS, and its value."""
    free = start.detach().clone().requires_grad_()
    if not len(free):
        return free.detach(), float(loss(free))
    optimizer = torch.optim.LBFGS(
        [free],
        max_iter=_STEPS,
        tolerance_grad=_TOLERANCE,
        tolerance_change=_TOLERANCE,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimizer.zero_grad()
        value = loss(free)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return free.detach(), float(loss(free.detach()))
