"""The privacy loss distribution of a Gaussian step: dp-accounting's, with its two slow parts made faster.

dp-accounting goes through up to a million points in Python, once to discretise and once to read off epsilon. Here each
is a handful of array operations. Composition, which is most of the mathematics, is dp-accounting's.

References:
    Doroshenko et al. (2022), Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions,
    arXiv:2207.04380.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

_LARGEST = 1e6  # an epsilon beyond this is infinite
_CLOSE = 1e-10


def gaussian_loss(sigma: float, rate: float, interval: float) -> PrivacyLossDistribution:
    """The loss distribution of a sum of sensitivity 1 over Poisson-sampled records, with Gaussian noise.

    Args:
        sigma: Standard deviation of the noise, above 0.
        rate: Probability with which a record takes part, in (0, 1].
        interval: Spacing of the discretised privacy loss.

    >>> round(epsilon_at(gaussian_loss(1.51, 500 / 48_000, 1e-4).self_compose(9600), 1e-5), 3)
    3.23
    """
    removed = _one_way(sigma, rate, interval, AdjacencyType.REMOVE)
    if rate == 1:  # both ways are the same
        return PrivacyLossDistribution(removed)
    return PrivacyLossDistribution(removed, _one_way(sigma, rate, interval, AdjacencyType.ADD))


def epsilon_at(losses: PrivacyLossDistribution, delta: float) -> float:
    """The least epsilon at which the hockey-stick divergence is at most `delta`, to ten digits and from above.

    Args:
        losses: A loss distribution.
        delta: In (0, 1).
    """

    def above(epsilon: float) -> float:
        return math.log(max(float(losses.get_delta_for_epsilon(epsilon)), 1e-300) / delta)

    if above(0.0) <= 0:
        return 0.0
    high = 1.0
    while above(high) > 0:
        high *= 2
        if high > _LARGEST:
            return math.inf
    found = float(brentq(above, 0.0, high, xtol=_CLOSE / 4, rtol=_CLOSE / 4))
    while above(found) > 0:
        found += _CLOSE * max(1.0, found)
    return found


def _one_way(sigma: float, rate: float, interval: float, way: AdjacencyType) -> DensePLDPmf:
    """Probabilities of multiples of `interval` whose deltas there are the right ones, and too large between them."""
    bounds = GaussianPrivacyLoss(sigma, sampling_prob=rate, adjacency_type=way).connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    at = np.minimum.accumulate(deltas(np.arange(low, high + 1) * interval, sigma, rate, way))
    # Below the first multiple delta is 1 - e^(epsilon - a), and above the last it is the probability of infinity.
    # The probability at a multiple is what bends delta there, as a function of e^epsilon.
    slopes, growth = np.diff(at) / math.expm1(interval), math.exp(interval)
    masses = np.concatenate([[1 - at[0] + slopes[0]], slopes[1:] - growth * slopes[:-1], [-growth * slopes[-1]]])
    return DensePLDPmf(interval, low, np.maximum(masses, 0.0), float(at[-1]), pessimistic_estimate=True)


def deltas(epsilons: NDArray[np.float64], sigma: float, rate: float, way: AdjacencyType) -> NDArray[np.float64]:
    """Hockey-stick divergence at each epsilon between the sums with and without one record, for one way round.

    With P = N(0, sigma^2) and Q = (1 - rate) P + rate N(-1, sigma^2), it is Q(x <= c) - e^epsilon P(x <= c) where a
    record is removed, and P(x >= c) - e^epsilon Q(x >= c) where one is added. The loss log(Q/P) falls with x, and is
    epsilon, or -epsilon, at x = c = -1/2 - sigma^2 log(1 + (e^loss - 1) / rate).

    Args:
        epsilons: Of either sign.
        sigma: As for `gaussian_loss`.
        rate: As for `gaussian_loss`.
        way: REMOVE or ADD.
    """
    removed = way is AdjacencyType.REMOVE
    losses = epsilons if removed else -epsilons
    reached = losses > (math.log1p(-rate) if rate < 1 else -math.inf)  # log(Q/P) is above this everywhere
    found = np.zeros_like(epsilons)
    if removed:  # elsewhere e^epsilon P is less than Q at every x; where one is added, e^epsilon Q is more than P
        found[~reached] = -np.expm1(epsilons[~reached])
    loss, epsilon = losses[reached], epsilons[reached]
    # e^loss may be too large for a float; and at the edge the logarithm is minus infinity, where the cut belongs.
    small = np.maximum(np.expm1(np.minimum(loss, 1.0)) / rate, -1.0)
    large = loss - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(loss, 1.0)))
    with np.errstate(divide="ignore"):
        cut = (-0.5 - sigma**2 * np.where(loss > 1, large, np.log1p(small))) / sigma
    if removed:
        mixed = (1 - rate) * ndtr(cut) + rate * ndtr(cut + 1 / sigma)
        found[reached] = mixed - np.exp(epsilon + log_ndtr(cut))  # e^epsilon may be too large, P too small
    else:
        mixed = (1 - rate) * ndtr(-cut) + rate * ndtr(-cut - 1 / sigma)
        found[reached] = ndtr(-cut) - np.exp(epsilon) * mixed
    return np.clip(found, 0.0, 1.0)
