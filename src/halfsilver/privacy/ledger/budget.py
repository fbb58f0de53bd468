"""How many more steps a budget allows. The ledger asks before every block, so the accountant is called rarely."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from halfsilver.errors import require, require_numbers
from halfsilver.privacy.accounting import (
    Count,
    MechanismCount,
    PairCount,
    epsilon_of,
    mechanisms,
    merged,
    rdp_at,
    total_accountant,
)
from halfsilver.privacy.ledger.history import History, Mechanism, Pair, Run

# The whole ones among those of which dp-accounting takes the best, so that `Ledger.spent` never reads more than what
# counts against the budget. Never change them: a ledger finds its order again by going through them.
_ORDERS: tuple[int, ...] = (*range(2, 64), 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that all runs on one private data set may spend together.

    Guarantee: everything that a ledger with this budget ever grants is (epsilon, delta)-DP together, even if later
    plans are chosen after earlier outputs were seen. It is a privacy filter, not only a stopping rule for one plan.

    Args:
        epsilon: The limit on epsilon, above 0 and finite. Smaller is stronger.
        delta: The delta at which it holds, in (0, 1). Choose it well below one over the number of private records.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> Budget(epsilon=2.0, delta=1e-5)
        Budget(epsilon=2.0, delta=1e-05)

    References:
        - Rogers, Roth, Ullman and Vadhan 2016, Privacy Odometers and Filters: Pay-as-you-Go Composition,
          arXiv:1605.08294.
        - Feldman and Zrnic 2021, Individual Privacy Accounting via a Renyi Filter, arXiv:2008.11193.
        - Whitehouse, Ramdas, Rogers and Wu 2023, Fully-Adaptive Composition in Differential Privacy, arXiv:2203.05481.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        require_numbers(epsilon=self.epsilon, delta=self.delta)
        require(math.isfinite(self.epsilon) and self.epsilon > 0, "epsilon", self.epsilon, "in (0, inf)")
        require(0 < self.delta < 1, "delta", self.delta, "in (0, 1)")


@dataclass(frozen=True)
class Rule:
    """Which steps a budget admits. The plan that takes the first step fixes the rule, before there is any output.

    Why everything that is ever admitted is (epsilon, delta)-DP, whoever chose the steps after seeing whatever outputs:

    1. *Alone*, if the first plan fits at delta but not at delta / 2. Only steps of its mechanism are admitted, as many
       as PLD allows at delta. That number is fixed in advance, and stopping before it is post-processing.
    2. *Shared*, otherwise. A history is admitted if it has one mechanism and fits by PLD at delta / 2 (set A, as in 1),
       or if it fits by RDP of one fixed order at delta / 2 (set B). Set B is a filter, because divergences of one order
       add up even if each mechanism is chosen after seeing outputs [1, 2]. The best order in hindsight is not covered.
    3. A selection counts as one step, and "PLD" above is RDP of the best order for it. That too is a bound for a number
       of steps of one mechanism that is fixed in advance.
    4. Both sets contain the beginnings of what they contain, so every transcript lies in A or in B. For any event O,
       P[O] = P[O & A] + P[O - A] <= e^epsilon P'[O & A] + delta / 2 + e^epsilon P'[O - A] + delta / 2.
    5. What was spent elsewhere and is known by its (epsilon, delta) alone (`prior`) is part of the rule if it was
       recorded before the first step. Then it is fixed in advance. PLD composes its worst case [5] in 1 and A. In B,
       its deltas come off delta / 2, and randomized response with its epsilons adds Renyi divergence of the fixed
       order. Recorded later, it may depend on outputs, and so would the delta that is left for B. So one with a
       delta above 0 ends the grants. One with delta 0 adds to B as any mechanism does, and so does a Gaussian one.
       Nothing can refuse what was spent elsewhere, so it may itself exceed the budget; then no step is granted.

    References:
        - [1] Feldman and Zrnic 2021, Individual Privacy Accounting via a Renyi Filter, arXiv:2008.11193.
        - [2] Lecuyer 2021, Practical Privacy Filters and Odometers with Renyi Differential Privacy and Applications to
          Differentially Private Deep Learning, arXiv:2103.01379.
        - [3] Rogers, Roth, Ullman and Vadhan 2016, Privacy Odometers and Filters: Pay-as-you-Go Composition,
          arXiv:1605.08294, for the notions of filter and odometer.
        - [4] Whitehouse, Ramdas, Rogers and Wu 2023, Fully-Adaptive Composition in Differential Privacy,
          arXiv:2203.05481.
        - [5] Kairouz, Oh and Viswanath 2017, The Composition Theorem for Differential Privacy, arXiv:1311.0776.
    """

    budget: Budget
    first: MechanismCount  # the whole plan of the run that takes the first step
    prior: tuple[PairCount, ...] = ()

    @property
    def alone(self) -> bool:
        return _needs_all_of_delta(self.first, self.budget, self.prior)

    @property
    def order(self) -> int:
        return _best_order(self.first, self.budget, self.prior)

    def epsilon(self, counts: Sequence[Count]) -> float:
        """What counts against the budget's epsilon."""
        delta, later = self.budget.delta if self.alone else self.budget.delta / 2, self._later(counts)
        if any(pair.delta > 0 for pair in later):
            return math.inf
        if mechanisms(counts) <= 1 and not later:
            return epsilon_of(counts, delta, total_accountant(counts))
        return math.inf if self.alone else epsilon_of(counts, delta, "rdp", order=self.order)

    def _later(self, counts: Sequence[Count]) -> list[PairCount]:
        """Pairs beyond those of the rule. What is in the rule stays counted, so only kinds and numbers differ."""
        known = {(pair.epsilon, pair.delta): pair.count for pair in self.prior}
        pairs = (c for c in merged(counts) if isinstance(c, PairCount))
        return [pair for pair in pairs if pair.count > known.get((pair.epsilon, pair.delta), 0)]

    def fits(self, counts: Sequence[Count]) -> bool:
        return self.epsilon(counts) <= self.budget.epsilon

    def refusal(self, counts: Sequence[Count]) -> str:
        """Why these would be too many."""
        later = self._later(counts)
        if any(pair.delta > 0 for pair in later):
            return "is not granted: an (epsilon, delta) that was spent elsewhere was recorded after the first step"
        if self.alone and (later or mechanisms(counts) > 1):
            plan = f"noise_multiplier={self.first.noise_multiplier}, sampling_rate={self.first.sampling_rate}"
            kind = f"selections of runs of {self.first.trials.steps} steps" if self.first.trials else "steps"
            return f"is not granted: the first plan needed all of delta, so only {kind} with {plan} are"
        several = later or mechanisms(counts) > 1
        by = "RDP (noise or rate differ)" if several else total_accountant(counts).upper()
        share = "delta" if self.alone else "half of delta"
        return f"would make epsilon={self.epsilon(counts):.6g} in all, by {by} at {share}"


@lru_cache(maxsize=64)
def _needs_all_of_delta(plan: MechanismCount, budget: Budget, prior: tuple[PairCount, ...] = ()) -> bool:
    by = total_accountant([plan])
    if epsilon_of([plan, *prior], budget.delta / 2, by) <= budget.epsilon:
        return False
    return epsilon_of([plan, *prior], budget.delta, by) <= budget.epsilon


@lru_cache(maxsize=64)
def _best_order(plan: MechanismCount, budget: Budget, prior: tuple[PairCount, ...] = ()) -> int:
    """The order alpha at which most steps of this mechanism fit.

    With r(alpha) the Renyi divergence of one step, k steps fit at delta / 2 if

    k r(alpha) <= epsilon + log(alpha delta / 2) / (alpha - 1) - log(1 - 1 / alpha).

    What was spent before takes its divergence from the right side, and its delta from delta / 2.

    References:
        - Canonne, Kamath and Steinke 2020, The Discrete Gaussian for Differential Privacy, arXiv:2004.00010,
          Proposition 12, for the conversion from RDP to (epsilon, delta).
    """
    delta = budget.delta / 2 - sum(pair.delta * pair.count for pair in prior)
    if delta <= 0:
        return _ORDERS[0]  # whatever the order, nothing fits

    def room(order: int) -> float:
        left = budget.epsilon + math.log(delta * order) / (order - 1) - math.log1p(-1 / order)
        left -= sum(pair.rdp(order) for pair in prior)
        divergence = rdp_at(plan, order)
        return left / divergence if divergence > 0 else math.inf

    return max(_ORDERS, key=room)


_FINER, _MOST_NOISE = 1.002, 3500  # noise multipliers that are tried for advice: up to 1000 times that of the plan

_Others = tuple[frozenset[tuple[Mechanism, int]], frozenset[tuple[Pair, int]]]


class _Ceiling(NamedTuple):
    """The most steps of one mechanism within the budget, while those of the others stay as they are."""

    others: _Others
    steps: int
    exact: bool  # False: no more were asked for, so there may be room above


class BudgetFilter:
    """Admits steps up to a budget (any number without one) by its `Rule`.

    The accountant is called again only after a change that no earlier answer covers: a run was registered or finished,
    or, when not all plans fit, steps of another mechanism were taken.
    """

    def __init__(self, budget: Budget | None) -> None:
        self.budget = budget
        self._ceilings: dict[tuple[Rule, Mechanism], _Ceiling] = {}

    def admit(self, history: History, run: Run, wanted: int) -> int:
        """How many of `wanted` steps fit in the plan of the run and, with all else, in the budget."""
        wanted = min(wanted, run.remaining)
        rule = self._rule(history, run)
        # What is planned stays the same while steps are taken, so the accountant's cache has the answer.
        if not wanted or rule is None or rule.fits(history.planned()):
            return wanted
        if run.charge(run.remaining).count <= 1:  # of correlated noise: the first step pays for all, and others nothing
            return wanted if rule.fits([*history.counts(), run.charge(wanted)]) else 0
        taken = history.totals[run.mechanism]
        ceiling = self._ceilings.get((rule, run.mechanism))
        others = _others(history, run)
        full = ceiling is not None and taken + wanted > ceiling.steps
        if ceiling is None or ceiling.others != others or (full and not ceiling.exact):
            more = _room(history, run, rule)
            ceiling = _Ceiling(others, taken + more, exact=more < run.remaining)
            self._ceilings[rule, run.mechanism] = ceiling
        return max(0, min(wanted, ceiling.steps - taken))

    def has_room(self, history: History, run: Run) -> bool:
        """Whether all steps of the run, registered or not, fit beside what is spent."""
        rule = self._rule(history, run)
        return rule is None or rule.fits([*history.counts(), run.charge(run.remaining)])

    def advice(self, history: History, run: Run) -> str:
        """The largest epsilon for which a run at the same rate fits: with more noise or, if none helps, fewer steps."""
        rule = self._rule(history, run)
        assert rule is not None, "without a budget everything fits"
        budget, spent, count = rule.budget, history.counts(), run.charge(run.remaining)

        def with_noise(k: int) -> MechanismCount:
            return replace(count, noise_multiplier=count.noise_multiplier * _FINER ** (_MOST_NOISE - k))

        def fits(k: int) -> bool:
            first = rule.first if history.first else with_noise(k)
            return Rule(budget, first, rule.prior).fits([*spent, with_noise(k)])

        if least := most(fits, _MOST_NOISE):
            count, what = with_noise(least), "as many steps at the same rate"
        elif fewer := _room(history, run, rule):
            count, what = run.charge(fewer), f"{fewer} steps of the same noise"
        else:
            return f"No noise makes as many fit, and one more step {rule.refusal([*spent, run.charge(1)])}."
        delta = run.plan.delta or budget.delta
        epsilon = 0.995 * epsilon_of([count], delta, total_accountant([count]))  # rounding it never gives more
        return f"The largest that fits is epsilon={epsilon:.3g} at delta={delta:g}, with {what}."

    def refusal(self, history: History, run: Run) -> str:
        """Why one more step of the run does not fit."""
        rule = self._rule(history, run)
        assert rule is not None, "without a budget nothing is refused"
        return rule.refusal([*history.counts(), run.charge(1)])

    def _rule(self, history: History, run: Run) -> Rule | None:
        first = history.first or run
        return Rule(self.budget, first.plan.count(), history.prior_pairs()) if self.budget else None


def _others(history: History, run: Run) -> _Others:
    """All that is counted but the steps of this mechanism."""
    steps = frozenset(item for item in history.totals.items() if item[0] != run.mechanism)
    return steps, frozenset(history.pairs.items())


def _room(history: History, run: Run, rule: Rule) -> int:
    spent = history.counts()
    return most(lambda k: rule.fits([*spent, run.charge(k)]), run.remaining)


def most(fits: Callable[[int], bool], wanted: int) -> int:
    """The largest k <= `wanted` that fits, where all below one that fits do; 0 if none does."""
    low, high = 0, wanted + 1  # invariant: low fits (or is 0), high does not (or is not wanted)
    while high - low > 1:
        middle = wanted if high > wanted else (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
