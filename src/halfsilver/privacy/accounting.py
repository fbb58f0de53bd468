"""From counted mechanism steps to epsilon, by the dp-accounting library alone.

The mechanism is data: `MechanismCount` says how often which step ran, and dp-accounting interprets it. A plan, the
ledger and ``halfsilver verify`` all call the same two functions.

References:
    - Koskela, Jalko and Honkela 2020, Computing Tight Differential Privacy Guarantees Using FFT, arXiv:1906.03049.
    - Gopi, Lee and Wutschitz 2021, Numerical Composition of Differential Privacy, arXiv:2106.02848.
    - Doroshenko et al. 2022, Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions,
      arXiv:2207.04380, for the discretisation of dp-accounting.
    - Mironov 2017, Renyi Differential Privacy, arXiv:1702.07476.
    - Mironov, Talwar and Zhang 2019, Renyi Differential Privacy of the Sampled Gaussian Mechanism, arXiv:1908.10530.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import dp_accounting as dpa
from dp_accounting import pld, rdp

from halfsilver.errors import ConfigError, require

Accountant = Literal["pld", "rdp"]

# At 1e-3 the discretisation error is visible below epsilon 0.2; at 1e-4 it is below 1 % there.
PLD_INTERVAL = 1e-4


@dataclass(frozen=True, kw_only=True, order=True)
class MechanismCount:
    """`count` steps of the Gaussian mechanism, each on a Poisson sample (or on all rows when the rate is 1).

    Args:
        noise_multiplier: Standard deviation of the noise in units of the sensitivity; above 0.
        sampling_rate: The probability of a unit to be in a batch, in (0, 1].
        count: The number of steps, at least 0.
    """

    noise_multiplier: float
    sampling_rate: float
    count: int

    def event(self) -> dpa.DpEvent:
        gaussian = dpa.GaussianDpEvent(self.noise_multiplier)
        if self.sampling_rate < 1:
            gaussian = dpa.PoissonSampledDpEvent(self.sampling_rate, gaussian)
        return dpa.SelfComposedDpEvent(gaussian, self.count)


def merged(counts: Sequence[MechanismCount]) -> tuple[MechanismCount, ...]:
    """One entry for each distinct mechanism, sorted, without empty ones."""
    totals: dict[tuple[float, float], int] = {}
    for c in counts:
        key = (c.noise_multiplier, c.sampling_rate)
        totals[key] = totals.get(key, 0) + c.count
    return tuple(
        MechanismCount(noise_multiplier=sigma, sampling_rate=q, count=k)
        for (sigma, q), k in sorted(totals.items())
        if k > 0
    )


def epsilon_of(
    counts: Sequence[MechanismCount],
    delta: float,
    accountant: Accountant,
    *,
    interval: float = PLD_INTERVAL,
    order: int | None = None,
) -> float:
    """Epsilon at `delta` of everything counted, composed; 0 for nothing.

    PLD composes the privacy loss distributions of all steps by convolution and rounds pessimistically, so its epsilon
    is a tight upper bound. RDP adds the Renyi divergences of all steps for each order, and takes the order whose
    conversion to (epsilon, delta) is best.

    Args:
        counts: What ran, and how often.
        delta: In (0, 1).
        accountant: "pld" or "rdp".
        interval: Spacing of the discretised privacy loss, for PLD. Default 1e-4. A coarser one is faster and gives a
            larger epsilon, which is still an upper bound.
        order: One order for RDP in place of the best one. Default None. A fixed order gives a larger epsilon, which
            holds even if steps were chosen after seeing outputs.

    Returns:
        Epsilon, at least 0.

    Raises:
        ConfigError: If `delta` or `accountant` is out of range.

    Example:
        >>> step = MechanismCount(noise_multiplier=1.51, sampling_rate=500 / 48_000, count=9600)
        >>> round(epsilon_of([step], 1e-5, "rdp"), 3)
        3.508

    References:
        - See the head of this module. The conversion from RDP is Proposition 12 of Canonne, Kamath and Steinke 2020,
          The Discrete Gaussian for Differential Privacy, arXiv:2004.00010.
    """
    require(0 < delta < 1, "delta", delta, "in (0, 1)")
    return _epsilon(merged(counts), delta, accountant, interval, order)


def total_accountant(counts: Sequence[MechanismCount]) -> Accountant:
    """The accountant of a data set's odometer: PLD while there is one mechanism, RDP once there are several.

    The reading is the epsilon of the steps so far as if they had been fixed in advance. It is a guarantee if the choice
    and length of runs did not depend on outputs. If they did, the reading is too small, and only a budget gives a
    guarantee.

    References:
        - Rogers, Roth, Ullman and Vadhan 2016, Privacy Odometers and Filters: Pay-as-you-Go Composition,
          arXiv:1605.08294.
    """
    return "pld" if len(merged(counts)) <= 1 else "rdp"


def rdp_at(mechanism: MechanismCount, order: int) -> float:
    """Renyi divergence of one order for all counted steps. It adds up over steps; whole orders have a closed form.

    References:
        - Mironov, Talwar and Zhang 2019, Renyi Differential Privacy of the Sampled Gaussian Mechanism,
          arXiv:1908.10530, section 3.3.
    """
    ledger = rdp.RdpAccountant([order])
    with _quiet_absl():
        return float(ledger.compose(mechanism.event()).rdp[0])


@lru_cache(maxsize=512)
def _epsilon(
    counts: tuple[MechanismCount, ...], delta: float, accountant: Accountant, interval: float, order: int | None
) -> float:
    if not counts:
        return 0.0
    with _quiet_absl():
        return float(_composed(counts, accountant, interval, order).get_epsilon(delta))


@lru_cache(maxsize=8)  # a budget and a statement ask of the same steps at different deltas
def _composed(
    counts: tuple[MechanismCount, ...], accountant: Accountant, interval: float, order: int | None
) -> dpa.PrivacyAccountant:
    if accountant == "pld":
        ledger = pld.PLDAccountant(value_discretization_interval=interval)
    elif accountant == "rdp":
        ledger = rdp.RdpAccountant(None if order is None else [order])
    else:
        raise ConfigError(f"Expected accountant={accountant!r} in ('pld', 'rdp').")
    for c in counts:
        ledger.compose(c.event())
    return ledger


@contextmanager
def _quiet_absl() -> Iterator[None]:
    """RDP warns of each order that it leaves out because a series did not converge. Epsilon stays an upper bound."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
