"""How many more steps a budget allows: asked at every block, so seldom put to the accountant."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from halfsilver.errors import require
from halfsilver.privacy.accounting import max_steps, total_epsilon
from halfsilver.privacy.ledger_history import History, Mechanism, Run


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that all runs on a data set may spend together."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        require(math.isfinite(self.epsilon) and self.epsilon > 0, "epsilon", self.epsilon, "in (0, inf)")
        require(0 < self.delta < 1, "delta", self.delta, "in (0, 1)")


class _Ceiling(NamedTuple):
    """The most steps of one mechanism within the budget, while those of the others stay as they are."""

    others: frozenset[tuple[Mechanism, int]]
    steps: int
    exact: bool  # False: no more were asked for, so there may be room above


class BudgetFilter:
    """Admits steps up to a budget (any number without one).

    The accountant is asked again only after a change that no earlier answer covers: a run was registered or
    finished, or, when not all plans fit, steps of another mechanism were taken.
    """

    def __init__(self, budget: Budget | None) -> None:
        self.budget = budget
        self._ceilings: dict[Mechanism, _Ceiling] = {}

    def admit(self, history: History, run: Run, wanted: int) -> int:
        """How many of `wanted` steps fit in the plan of the run and, with all else, in the budget."""
        wanted = min(wanted, run.remaining)
        if not wanted or self.budget is None or self._all_plans_fit(history, self.budget):
            return wanted
        taken = history.totals[run.mechanism]
        ceiling = self._ceilings.get(run.mechanism)
        others = frozenset(item for item in history.totals.items() if item[0] != run.mechanism)
        full = ceiling is not None and taken + wanted > ceiling.steps
        if ceiling is None or ceiling.others != others or (full and not ceiling.exact):
            more = _room(history, run, self.budget)
            ceiling = _Ceiling(others, taken + more, exact=more < run.remaining)
            self._ceilings[run.mechanism] = ceiling
        return max(0, min(wanted, ceiling.steps - taken))

    @staticmethod
    def _all_plans_fit(history: History, budget: Budget) -> bool:
        # What is planned stays the same while steps are taken, so the accountant's cache has the answer.
        return total_epsilon(history.planned(), budget.delta) <= budget.epsilon


def _room(history: History, run: Run, budget: Budget) -> int:
    return max_steps(
        history.counts(),
        noise_multiplier=run.plan.noise_multiplier,
        sampling_rate=run.plan.sampling_rate,
        wanted=run.remaining,
        epsilon=budget.epsilon,
        delta=budget.delta,
    )
