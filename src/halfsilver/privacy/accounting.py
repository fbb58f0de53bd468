"""From counted mechanism steps to epsilon.

The mechanism is data: `MechanismCount` says how often which step ran, and `composition` interprets it, by the
dp-accounting library. `PairCount` stands for what ran elsewhere and is known by its (epsilon, delta) alone. A plan, the
ledger and ``halfsilver verify`` all call the same two functions.

dp-accounting takes about as long to import as torch. So it is imported when an epsilon is asked for, and who counts
nothing, as a device of a federation does, never waits for it.

References:
    - Kairouz, Oh and Viswanath 2017, The Composition Theorem for Differential Privacy, arXiv:1311.0776, for the worst
      mechanism of an (epsilon, delta).
    - See also the head of `composition`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from halfsilver.errors import ConfigError, require

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Accountant = Literal["pld", "rdp"]

# At 1e-3 the discretisation error is visible below epsilon 0.2; at 1e-4 it is below 1 % there.
PLD_INTERVAL = 1e-4


class Trials(NamedTuple):
    """A random number of runs of so many steps each, of which only the best leaves. See `halfsilver.selection`."""

    steps: int
    mean: float
    eta: float


@dataclass(frozen=True, kw_only=True, order=True)
class MechanismCount:
    """`count` steps of the Gaussian mechanism, each on a Poisson sample (or on all rows when the rate is 1).

    With `trials`, `count` selections whose runs consist of such steps.

    Args:
        noise_multiplier: Standard deviation of the noise in units of the sensitivity; above 0.
        sampling_rate: The probability of a unit to be in a batch, in (0, 1].
        count: The number of steps, or of selections, at least 0.
        trials: How each selection draws its runs (default: empty, for steps).
    """

    noise_multiplier: float
    sampling_rate: float
    count: int
    trials: Trials | tuple[()] = ()  # compares with that of any other count, as None would not

    def event(self) -> DpEvent:
        """As dp-accounting names it."""
        from halfsilver.privacy import composition

        return composition.event(self)


@dataclass(frozen=True, kw_only=True, order=True)
class PairCount:
    """`count` mechanisms of which nothing is known but that each is (epsilon, delta)-DP.

    Every such mechanism is a function of the worst one, which reveals with probability delta whose data it has, and
    otherwise tells it by randomized response with odds e^epsilon. So whatever holds for the worst one, composed with
    anything else, holds for all.

    Args:
        epsilon: At least 0.
        delta: In [0, 1).
        count: How many, at least 0.

    References:
        - Kairouz, Oh and Viswanath 2017, The Composition Theorem for Differential Privacy, arXiv:1311.0776, theorem
          3.3 and its proof.
    """

    epsilon: float
    delta: float
    count: int

    def rdp(self, order: float) -> float:
        """Renyi divergence of the part that reveals nothing, log(p^a q^(1-a) + q^a p^(1-a)) / (a - 1) per mechanism.

        Here a is the order, and p and q = 1 - p the probabilities of randomized response, with p / q = e^epsilon.

        References:
            - Mironov 2017, Renyi Differential Privacy, arXiv:1702.07476, proposition 5.
        """
        log_p = -math.log1p(math.exp(-self.epsilon))
        log_q = log_p - self.epsilon
        terms = order * log_p + (1 - order) * log_q, order * log_q + (1 - order) * log_p
        largest = max(terms)
        total = largest + math.log(sum(math.exp(term - largest) for term in terms))
        return self.count * max(0.0, total / (order - 1))


Count = MechanismCount | PairCount


def merged(counts: Sequence[Count]) -> tuple[Count, ...]:
    """One entry for each distinct mechanism, sorted, without empty ones; pairs last."""
    steps = Counter[tuple[float, float, Trials | tuple[()]]]()
    pairs = Counter[tuple[float, float]]()
    for c in counts:
        if isinstance(c, PairCount):
            pairs[c.epsilon, c.delta] += c.count
        else:
            steps[c.noise_multiplier, c.sampling_rate, c.trials] += c.count
    return (
        *(
            MechanismCount(noise_multiplier=sigma, sampling_rate=q, count=k, trials=trials)
            for (sigma, q, trials), k in sorted(steps.items())
            if k > 0
        ),
        *(PairCount(epsilon=e, delta=d, count=k) for (e, d), k in sorted(pairs.items()) if k > 0),
    )


def mechanisms(counts: Sequence[Count]) -> int:
    """The number of distinct mechanisms of which steps were counted; pairs are none."""
    return sum(isinstance(c, MechanismCount) for c in merged(counts))


def _has_selection(counts: Sequence[Count]) -> bool:
    return any(isinstance(c, MechanismCount) and c.trials for c in counts)


def epsilon_of(
    counts: Sequence[Count],
    delta: float,
    accountant: Accountant,
    *,
    interval: float = PLD_INTERVAL,
    order: int | None = None,
) -> float:
    """Epsilon at `delta` of everything counted, composed; 0 for nothing.

    PLD composes the privacy loss distributions of all steps by convolution and rounds pessimistically, so its epsilon
    is a tight upper bound. RDP adds the Renyi divergences of all steps for each order, and takes the order whose
    conversion to (epsilon, delta) is best. The deltas of pairs come off `delta` first; if nothing is left, epsilon is
    infinite. Where a noise multiplier is below 0.1 and RDP gives more than 100, "pld" returns the epsilon of RDP: it is
    an upper bound, too, and the loss distribution would have millions of points. At deltas below about 1e-10, where the
    rounding of the convolution shows (see `composition.convolution_error`), "pld" returns the smaller one of both.

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
        ConfigError: If `delta` or `accountant` is out of range, or if PLD is to count a selection.

    Example:
        >>> step = MechanismCount(noise_multiplier=1.51, sampling_rate=500 / 48_000, count=9600)
        >>> round(epsilon_of([step], 1e-5, "rdp"), 3)
        3.508

    References:
        - See the head of `composition`. The conversion from RDP is Proposition 12 of Canonne, Kamath and Steinke 2020,
          The Discrete Gaussian for Differential Privacy, arXiv:2004.00010.
    """
    require(0 < delta < 1, "delta", delta, "in (0, 1)")
    require(accountant in ("pld", "rdp"), "accountant", accountant, "'pld' or 'rdp'")
    return _epsilon(merged(counts), delta, accountant, interval, order)


def total_accountant(counts: Sequence[Count]) -> Accountant:
    """The accountant of a data set's odometer: PLD while there is one mechanism, RDP once there are several.

    Pairs are no mechanisms here; both accountants add them. A selection needs RDP in any case, because its privacy loss
    distribution is not known.

    The reading is the epsilon of the steps so far as if they had been fixed in advance. It is a guarantee if the choice
    and length of runs did not depend on outputs. If they did, the reading is too small, and only a budget gives a
    guarantee.

    References:
        - Rogers, Roth, Ullman and Vadhan 2016, Privacy Odometers and Filters: Pay-as-you-Go Composition,
          arXiv:1605.08294.
    """
    return "pld" if mechanisms(counts) <= 1 and not _has_selection(counts) else "rdp"


def rdp_at(mechanism: Count, order: int) -> float:
    """Renyi divergence of one order for all counted steps. It adds up over steps; whole orders have a closed form.

    That of a selection is the least over a second order, which is sought among all of dp-accounting's.

    References:
        - Mironov, Talwar and Zhang 2019, Renyi Differential Privacy of the Sampled Gaussian Mechanism,
          arXiv:1908.10530, section 3.3.
    """
    from halfsilver.privacy import composition

    return mechanism.rdp(order) if isinstance(mechanism, PairCount) else composition.rdp_at(mechanism, order)


@lru_cache(maxsize=512)
def _epsilon(
    counts: tuple[Count, ...], delta: float, accountant: Accountant, interval: float, order: int | None
) -> float:
    if not counts:
        return 0.0
    if accountant == "pld" and _has_selection(counts):
        raise ConfigError("Expected accountant='rdp' for a selection: its privacy loss distribution is not known.")
    from halfsilver.privacy import composition

    if accountant == "pld":
        return composition.epsilon_by_pld(counts, delta, interval)
    return composition.epsilon_by_rdp(counts, delta, order)
