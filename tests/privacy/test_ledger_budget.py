"""No schedule of runs, crashes and compactions spends more than the budget; none is refused too early."""

from __future__ import annotations

import functools
import random
from collections import Counter
from pathlib import Path

import dp_accounting as dpa
import pytest
from dp_accounting import pld, rdp

from halfsilver import _os
from halfsilver.errors import BudgetExceeded
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.privacy.plan import PrivacyPlan

DELTA = 1e-5
EPSILONS = (0.15, 0.3)
SIGMAS = (40.0, 60.0)


@functools.cache
def direct_epsilon(touched: frozenset[tuple[float, int]]) -> float:
    """From dp-accounting without halfsilver: PLD for one mechanism, RDP for several."""
    accountant = rdp.RdpAccountant() if len(touched) > 1 else pld.PLDAccountant()
    for sigma, count in touched:
        accountant.compose(dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(sigma), count))
    return float(accountant.get_epsilon(DELTA)) if touched else 0.0


class Schedule:
    """A random history of one data set, with what was really done kept apart from the ledger."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.epsilon = self.rng.choice(EPSILONS)
        self.path = path
        self.touched: Counter[float] = Counter()
        budget = Budget(epsilon=self.epsilon, delta=DELTA)
        self.ledgers = [Ledger.open(path, budget=budget), Ledger.open(path)]
        self.plans: dict[str, PrivacyPlan] = {}
        for _ in range(self.rng.randint(1, 3)):
            self.register()

    def register(self) -> None:
        plan = PrivacyPlan(
            steps=self.rng.choice([3, 6, 12]),
            sampling_rate=1.0,
            expected_batch_size=10,
            noise_multiplier=self.rng.choice(SIGMAS),
        )
        run_id = f"run {len(self.plans)}"
        self.plans[run_id] = plan
        self.rng.choice(self.ledgers).register_run(run_id, plan, block_max=self.rng.choice([1, 2, 5]))

    def play(self, moves: int) -> None:
        actions = [self.step] * 8 + [self.register, self.reopen, self.tear, self.finish]
        for _ in range(moves):
            self.rng.choice(actions)()
            assert direct_epsilon(frozenset(self.touched.items())) <= self.epsilon

    def step(self) -> None:
        ledger, run_id = self.rng.choice(self.ledgers), self.rng.choice(list(self.plans))
        try:
            count = ledger.intend(run_id, self.rng.randint(1, 6)).count
        except BudgetExceeded:
            self.check_refusal(ledger, run_id)
        else:
            self.touched[self.plans[run_id].noise_multiplier] += count

    def check_refusal(self, ledger: Ledger, run_id: str) -> None:
        """One more step is really one too many."""
        after = Counter({c.noise_multiplier: c.count for c in ledger.counts()})
        after[self.plans[run_id].noise_multiplier] += 1
        over_budget = direct_epsilon(frozenset(after.items())) > self.epsilon
        assert over_budget or ledger.runs[run_id].remaining == 0

    def reopen(self) -> None:
        self.ledgers[self.rng.randrange(2)] = Ledger.open(self.path)

    def tear(self) -> None:
        with open(self.path, "ab") as handle:
            handle.write(b'{"count":')

    def finish(self) -> None:
        ledger = self.rng.choice(self.ledgers)
        ledger.finish(self.rng.choice(list(self.plans)), 0)
        ledger.compact()

    def check_end(self) -> None:
        ledger = Ledger.open(self.path)
        counted = Counter({c.noise_multiplier: c.count for c in ledger.counts()})
        assert all(counted[sigma] >= count for sigma, count in self.touched.items())
        assert ledger.spent() <= self.epsilon
        for run_id, run in ledger.runs.items():
            assert run.spent <= self.plans[run_id].max_releases


def test_1000_random_schedules_never_exceed_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing here depends on the disk, and 10,000 syncs take long.
    monkeypatch.setattr(_os, "fsync_file", lambda fd: None)
    monkeypatch.setattr(_os, "fsync_folder", lambda path: None)
    exhausted = 0
    for seed in range(1000):
        schedule = Schedule(tmp_path / str(seed), seed)
        schedule.play(moves=12)
        schedule.check_end()
        exhausted += schedule.ledgers[0].spent() > 0.8 * schedule.epsilon
    assert exhausted > 100, "the schedules did not come near the budget, so they show nothing"


def test_a_poisson_plan_stops_exactly_where_pld_says(tmp_path: Path) -> None:
    plan = PrivacyPlan(steps=40, sampling_rate=0.1, expected_batch_size=10, noise_multiplier=2.0)
    epsilon = plan.epsilon(DELTA) / 2
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=epsilon, delta=DELTA))
    ledger.register_run("a", plan, block_max=100)
    taken = ledger.intend("a", 100).count
    with pytest.raises(BudgetExceeded):
        ledger.intend("a")
    assert ledger.spent() <= epsilon
    one_more = pld.PLDAccountant(value_discretization_interval=1e-4).compose(plan.count(taken + 1).event())
    assert one_more.get_epsilon(DELTA) > epsilon


def test_steps_of_another_mechanism_lower_what_is_left(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=0.3, delta=DELTA))
    plans = {
        str(sigma): PrivacyPlan(steps=30, sampling_rate=1.0, expected_batch_size=10, noise_multiplier=sigma)
        for sigma in SIGMAS
    }
    for run_id, plan in plans.items():
        ledger.register_run(run_id, plan, block_max=2)
    taken: Counter[float] = Counter()
    while True:
        try:
            for run_id, plan in plans.items():
                taken[plan.noise_multiplier] += ledger.intend(run_id, 2).count
        except BudgetExceeded:
            break
    assert len(taken) == 2
    assert 0.25 < direct_epsilon(frozenset(taken.items())) <= 0.3
