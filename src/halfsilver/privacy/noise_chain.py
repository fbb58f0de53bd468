"""Correlated noise step by step: fresh noise, less what the strategy carries over from earlier steps.

The rows of C w = z say w_t = z_t - r_t, where r_t is a linear function of w_0 .. w_(t-1) that a state of constant size
gives. All numbers are in units of the grid of `noise`, where sums and releases are whole.

Why whole numbers, and what rounding costs:

1. Let X_t be the sum on the grid, Z_t = round(N_t) the fresh noise, and R_t the whole number that is carried over. The
   release Y_t = X_t + Z_t - R_t is round(X_t - R_t + N_t), because X_t and R_t are whole. So it is post-processing of a
   Gaussian mechanism with mean X_t - R_t.
2. R_t = r_t(w) + e_t with |e_t| <= 1/2 + h in each coordinate, where h bounds the error of arithmetic. As r is linear
   and w = Y - X, the mean is (C X)_t - e_t - r_t(Y), and r_t(Y) is known to whoever sees Y.
3. So the means of two neighbouring data sets differ, over all n steps and whatever the history, by at most |C (X - X')|
   + |e - e'|, and |e - e'| <= (1 + 2h) sqrt(n d) units for d coordinates. A unit of the grid is at most 1e-6 L /
   sqrt(d) for the clip norm L, hence |e - e'| <= (1 + 2h) 1e-6 sqrt(n) L. With h <= 1/2, `rounding` pays for all of it.
4. h follows from the size of the numbers, see `arithmetic`.

Why a run may begin a new chain, after a crash for instance, at no cost. A new chain makes C block diagonal, with the
strategy begun anew in the second block. For columns i <= j of the second block,

    <C_i, C_j> = sum_{u < n - j} c_u c_(u + j - i),

as without a new chain. In the first block there are fewer terms, and across blocks it is 0. No inner product grows, and
they are not negative, so the sensitivity does not grow (see `correlated.sensitivity`). Steps whose release was lost
with the crash count as steps.

Guarantee: what a chain remembers is a function of noise alone. It is secret: whoever knows it can subtract it. It is
never written to disk, and no two chains share it.

References:
    - Denisov, McMahan, Rush, Smith and Thakurta 2022, arXiv:2202.08312, Theorem 2.1, for inputs that depend on earlier
      releases.
    - Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024, arXiv:2404.16706, for the buffers.
"""

from __future__ import annotations

import math
from typing import NoReturn, final

import torch
from torch import Tensor

from halfsilver.errors import ConfigError, require
from halfsilver.privacy.correlated import inverse, product
from halfsilver.privacy.noise import GRID_SHARE
from halfsilver.privacy.strategies import Banded, Buffered, Strategy

# A normal number exceeds so many standard deviations with probability 10^-32.
_SURELY = 12.0
_MOST_ERROR = 0.5


def rounding(rounds: int) -> float:
    """The factor by which the noise is larger, so that it pays for rounding what is carried over in so many steps.

    >>> round(rounding(2000) - 1, 5)
    9e-05
    """
    return 1 + (1 + 2 * _MOST_ERROR) * GRID_SHARE * math.sqrt(rounds)


def arithmetic(strategy: Strategy, rounds: int, scale: float) -> float:
    """A bound on the error of float64 in what is carried over, in units of the grid.

    A buffer S <- decay S + w is off by two roundings per step, each 2^-53 of its size, which decay with it: by at most
    2^-52 max |S| / (1 - decay). Kept noise is whole, so only its products and their sum are rounded. Sizes are 12
    standard deviations, as the strategy gives them; a number beyond is less likely than 10^-32, which is in no delta.

    Args:
        strategy: How noise is carried over.
        rounds: Number of steps.
        scale: Standard deviation of fresh noise, in units of the grid.
    """
    inverted, unit = inverse(strategy.column(rounds)), 2.0**-53
    if isinstance(strategy, Banded):
        size = _SURELY * scale * float(torch.linalg.vector_norm(inverted))
        return unit * (len(strategy.coefficients) + 1) * sum(strategy.coefficients[1:]) * size
    total = 0.0
    for decay, factor in zip(strategy.decays, strategy.scales, strict=True):
        powers = decay ** torch.arange(rounds, dtype=torch.float64)
        size = _SURELY * scale * float(torch.linalg.vector_norm(product(powers, inverted, rounds)))
        total += factor * size * (2 * unit / (1 - decay) + (len(strategy.decays) + 1) * unit)
    return total


def check_arithmetic(strategy: Strategy, rounds: int, scale: float) -> None:
    """Refuse noise for which float64 is not precise enough."""
    error = arithmetic(strategy, rounds, scale)
    if not error <= _MOST_ERROR:
        raise ConfigError(
            f"Expected an error of arithmetic of at most {_MOST_ERROR} units, found {error:.3g} for {strategy}, "
            f"rounds={rounds} and scale={scale:.3g}. Use fewer buffers or rounds, or train fewer parameters."
        )


@final
class NoiseChain:
    """The noise of one run for one model, or for one rank's share of it.

    Args:
        strategy: How noise is carried over.
        dimension: Number of coordinates.
        rounds: The largest number of steps.
        scale: Standard deviation of fresh noise, in units of the grid.
        device: Where the noise is needed (default: the CPU).

    Raises:
        ConfigError: A value is out of its range, or float64 is not precise enough for such noise.

    >>> chain = NoiseChain(Buffered((0.5,), (0.25,)), 1, rounds=3, scale=8.0)
    >>> [float(chain.follow(torch.tensor([z], dtype=torch.float64), 0)) for z in (8.0, 0.0, 0.0)]
    [8.0, -2.0, 0.0]
    """

    def __init__(
        self,
        strategy: Strategy,
        dimension: int,
        *,
        rounds: int,
        scale: float,
        device: torch.device | None = None,
    ) -> None:
        require(dimension >= 0, "dimension", dimension, "at least 0")
        check_arithmetic(strategy, rounds, scale)
        factors = strategy.scales if isinstance(strategy, Buffered) else strategy.coefficients[1:]
        self._held = torch.zeros((len(factors), dimension), dtype=torch.float64, device=device)
        self._factors = torch.tensor(factors, dtype=torch.float64, device=device)
        self._decays = None
        if isinstance(strategy, Buffered):
            self._decays = torch.tensor(strategy.decays, dtype=torch.float64, device=device)[:, None]
        self._step = 0

    def __reduce__(self) -> NoReturn:
        raise TypeError("A NoiseChain is secret, and is neither copied to another process nor written to a file.")

    @property
    def bytes(self) -> int:
        """Memory of what the chain remembers."""
        return self._held.numel() * self._held.element_size()

    def follow(self, fresh: Tensor, start: int) -> Tensor:
        """Turn fresh noise z of the coordinates from `start` into w, in place. Once per coordinate and step.

        Args:
            fresh: Whole numbers in float64.
            start: The first coordinate.
        """
        place = slice(start, start + len(fresh))
        held = self._held[:, place]
        fresh.sub_(self._carried(place).round_())
        if self._decays is not None:
            torch.addcmul(fresh, self._decays, held, out=held)
        elif len(held):
            held[self._step % len(held)] = fresh
        return fresh

    def _carried(self, place: slice) -> Tensor:
        """What earlier steps subtract from the next, before it is made whole."""
        held, rows = self._held[:, place], len(self._held)
        if self._decays is None and rows:  # the row of the step before, then those before it
            held = held[[(self._step - 1 - age) % rows for age in range(rows)]]
        return self._factors @ held

    def advance(self) -> None:
        """All coordinates have had this step."""
        self._step += 1
