"""No schedule of runs, crashes and compactions spends more than the budget; none is refused too early."""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import pytest
from dp_accounting import pld, rdp

from halfsilver._core import system
from halfsilver.errors import BudgetExceeded
from halfsilver.privacy.accounting import MechanismCount, rdp_at
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.privacy.ledger.budget import Rule
from halfsilver.privacy.ledger.records import GENESIS, canonical, decode, digest
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.strategies import Correlated, Independent
from tests.cases import MANY

DELTA = 1e-5
EPSILONS = (0.15, 0.3)
SIGMAS = (40.0, 60.0)


Touched = frozenset[tuple[float, int]]


@functools.cache
def direct_epsilon(touched: Touched, delta: float = DELTA, order: int | None = None) -> float:
    """From dp-accounting without halfsilver: PLD, or RDP of one order; for several mechanisms RDP of the best one."""
    by_rdp = rdp.RdpAccountant(orders=order and [order])
    accountant = by_rdp if order or len(touched) > 1 else pld.PLDAccountant(value_discretization_interval=1e-4)
    for sigma, count in touched:
        accountant.compose(dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(sigma), count))
    return float(accountant.get_epsilon(delta)) if touched else 0.0


def admissible(touched: Touched, first: PrivacyPlan, epsilon: float) -> bool:
    """Whether the guarantee of a budget covers this, once more in plain words.

    The two ways in which a ledger may go share delta, so each has half of it. A first plan that fits at delta but not
    at half of it has delta to itself, and then there is no second way.
    """
    plan = frozenset([(first.noise_multiplier, first.max_releases)])
    alone = direct_epsilon(plan, DELTA) <= epsilon < direct_epsilon(plan, DELTA / 2)
    if len(touched) <= 1:
        return direct_epsilon(touched, DELTA if alone else DELTA / 2) <= epsilon
    order = Rule(Budget(epsilon=epsilon, delta=DELTA), first.count()).order
    return not alone and direct_epsilon(touched, DELTA / 2, order) <= epsilon


def steps_of(ledger: Ledger) -> list[MechanismCount]:
    return [c for c in ledger.counts() if isinstance(c, MechanismCount)]


class Schedule:
    """A random history of one data set, with what was really done kept apart from the ledger."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.epsilon = self.rng.choice(EPSILONS)
        self.path = path
        self.touched: Counter[float] = Counter()
        self.first: PrivacyPlan | None = None
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
            self.check()

    def check(self) -> None:
        """Within the budget by the rule, and by the figure that is printed; the rule hangs on one plan for good."""
        touched, ledger = frozenset(self.touched.items()), Ledger.open(self.path)
        first = ledger._history.first.plan if ledger._history.first else None
        assert first is None or isinstance(first, PrivacyPlan)
        assert self.first is None or first == self.first
        self.first = first
        assert first is None or admissible(touched, first, self.epsilon)
        assert direct_epsilon(touched) <= self.epsilon
        assert ledger.spent() <= self.epsilon

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
        after = Counter({c.noise_multiplier: c.count for c in steps_of(ledger)})
        after[self.plans[run_id].noise_multiplier] += 1
        first = (ledger._history.first or ledger.runs[run_id]).plan  # a torn record may have become the first just now
        assert isinstance(first, PrivacyPlan)
        over_budget = not admissible(frozenset(after.items()), first, self.epsilon)
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
        counted = Counter({c.noise_multiplier: c.count for c in steps_of(ledger)})
        assert all(counted[sigma] >= count for sigma, count in self.touched.items())
        for run_id, run in ledger.runs.items():
            assert run.spent <= self.plans[run_id].max_releases


def test_random_schedules_never_exceed_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing here depends on the disk, and 10,000 syncs take long.
    monkeypatch.setattr(system, "fsync_file", lambda fd: None)
    monkeypatch.setattr(system, "fsync_folder", lambda path: None)
    exhausted = 0
    for seed in range(34 * MANY):
        schedule = Schedule(tmp_path / str(seed), seed)
        schedule.play(moves=12)
        schedule.check_end()
        exhausted += schedule.ledgers[0].spent() > 0.8 * schedule.epsilon
    assert exhausted > 3 * MANY, "the schedules did not come near the budget, so they show nothing"


def poisson(steps: int = 40, sigma: float = 2.0) -> PrivacyPlan:
    return PrivacyPlan(steps=steps, sampling_rate=0.1, expected_batch_size=10, noise_multiplier=sigma)


def test_a_poisson_plan_stops_exactly_where_pld_says(tmp_path: Path) -> None:
    """At half of delta: the other half is kept for a second mechanism."""
    epsilon = poisson().epsilon(DELTA) / 2
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=epsilon, delta=DELTA))
    ledger.register_run("a", poisson(), block_max=100)
    taken = ledger.intend("a", 100).count
    with pytest.raises(BudgetExceeded):
        ledger.intend("a")
    assert ledger.spent() <= epsilon
    one_more = pld.PLDAccountant(value_discretization_interval=1e-4).compose(poisson().count(taken + 1).event())
    assert one_more.get_epsilon(DELTA / 2) > epsilon


def test_a_plan_made_for_the_budget_gets_all_of_it(tmp_path: Path) -> None:
    """It needs all of delta, so no step of another mechanism may follow; of its own it may, after a compaction too."""
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=poisson().epsilon(DELTA), delta=DELTA))
    ledger.register_run("never starts", poisson(steps=3, sigma=3.0))
    ledger.register_run("a", poisson(), block_max=10)
    assert [ledger.intend("a", 10).count for _ in range(3)] == [10, 10, 10]
    for run_id in ("a", "never starts"):
        ledger.finish(run_id, 0)
    assert ledger.compact()
    for opened in (ledger, Ledger.open(ledger.path)):
        opened.register_run("b", poisson(sigma=50.0))
        with pytest.raises(BudgetExceeded, match=r"only steps with noise_multiplier=2.0, sampling_rate=0.1 are\."):
            opened.intend("b")
    ledger.register_run("c", poisson(), block_max=40)
    assert ledger.intend("c", 40).count == 10
    assert ledger.spent() == poisson().epsilon(DELTA)


def test_a_second_plan_and_the_first_together_stay_within_one_delta(tmp_path: Path) -> None:
    """Once the total was enforced at delta and held at twice that: the change of accountant was not paid for."""
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=3.0, delta=1e-3))
    for run_id, plan in {"a": poisson(200, 2.5), "b": poisson(200, 1.5)}.items():
        ledger.register_run(run_id, plan, block_max=200)
        ledger.intend(run_id, 200)
    assert [run.spent < 200 for run in ledger.runs.values()] == [False, True]
    with pytest.raises(BudgetExceeded, match=r"would make epsilon=3\.\d+ in all, by RDP .* at half of delta"):
        ledger.intend("b")
    rule = Rule(Budget(epsilon=3.0, delta=1e-3), poisson(200, 2.5).count())
    assert not rule.alone
    spent = rdp.RdpAccountant([rule.order])
    for count in steps_of(ledger):
        spent.compose(count.event())
    assert 2.9 < spent.get_epsilon(5e-4) <= 3.0
    assert rule.order == max(range(2, 33), key=lambda k: steps_at(k, rule.first)), "the best one for the first plan"


def steps_at(order: int, plan: MechanismCount) -> float:
    """How many such plans one order has room for: epsilon is the divergence of that order and a constant."""
    divergence = rdp_at(plan, order)
    constant = rdp.RdpAccountant([order]).compose(plan.event()).get_epsilon(5e-4) - divergence
    return float((3.0 - constant) / divergence)


def test_an_old_ledger_beyond_the_rule_opens_and_grants_nothing_more(tmp_path: Path) -> None:
    """Steps that an earlier version granted stay counted and are told, even if they are more than is granted now."""
    path = tmp_path / "ledger"
    free = Ledger.open(path)
    for run_id, sigma in (("a", 20.0), ("b", 30.0)):
        free.register_run(run_id, full_batch(sigma), block_max=30)
        free.intend(run_id, 30)
    lines = [decode(line) for line in path.read_bytes().splitlines(keepends=True)]
    lines[0]["budget"] = {"epsilon": free.spent(DELTA), "delta": DELTA}
    path.write_bytes(b"".join(rechained(lines)))
    path.with_name("ledger.head").unlink()
    ledger = Ledger.open(path)
    assert ledger.spent() == ledger.budget.epsilon  # type: ignore[union-attr]
    with pytest.raises(BudgetExceeded):
        ledger.intend("a")


def full_batch(sigma: float) -> PrivacyPlan:
    return PrivacyPlan(steps=31, sampling_rate=1.0, expected_batch_size=10, noise_multiplier=sigma)


def rechained(records: list[dict[str, Any]]) -> Iterator[bytes]:
    prev = GENESIS
    for record in records:
        record = {**record, "prev": prev}
        record["hash"] = prev = digest(record)
        yield canonical(record) + b"\n"


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
    assert admissible(frozenset(taken.items()), plans["40.0"], 0.3)


def asking(epsilon: float, steps: int = 20, **more: Any) -> PrivacyPlan:
    given = {"delta": DELTA, "population": 2000, "batch_size": 200, "steps": steps, "spare_steps": 0}
    return PrivacyPlan.calibrate(epsilon=epsilon, **{**given, **more})


@pytest.fixture
def nearly_spent(tmp_path: Path) -> Ledger:
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=2.0, delta=DELTA))
    for name, epsilon in (("a", 1.2), ("b", 0.9)):
        ledger.register_run(name, asking(epsilon), block_max=20, whole=True)
        assert ledger.intend(name, 20).count == 20
    return ledger


@pytest.mark.nightly
@pytest.mark.parametrize("noise", [Independent(), Correlated()], ids=["independent", "correlated"])
def test_a_new_run_that_does_not_fit_is_refused_and_told_what_does(nearly_spent: Ledger, noise: Any) -> None:
    before = nearly_spent.path.read_bytes()
    with pytest.raises(BudgetExceeded, match=r"new run 'c' does not fit.*Nothing was spent") as caught:
        nearly_spent.register_run("c", asking(1.9, noise=noise), block_max=20, whole=True)
    assert nearly_spent.path.read_bytes() == before
    (largest,) = map(float, re.findall(r"epsilon=([0-9.e-]+) at", str(caught.value)))
    assert 0 < largest < 1.9
    with pytest.raises(BudgetExceeded):
        nearly_spent.register_run("d", asking(1.02 * largest, noise=noise), block_max=20, whole=True)
    nearly_spent.register_run("e", asking(largest, noise=noise), block_max=20, whole=True)
    assert nearly_spent.intend("e", 20).count == 20


def test_the_first_run_is_told_of_the_budget_itself(tmp_path: Path) -> None:
    """Alone on the data, as many steps may ask for all of it."""
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=1.0, delta=DELTA))
    with pytest.raises(BudgetExceeded, match=r"largest that fits is epsilon=0\.99\d* at .* with as many steps"):
        ledger.register_run("a", asking(1.5), whole=True)


def test_where_no_noise_makes_room_the_reason_is_told(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=1.0, delta=DELTA))
    ledger.register_run("a", asking(1.0), block_max=20, whole=True)
    ledger.intend("a", 20)
    with pytest.raises(BudgetExceeded, match=r"No noise makes as many fit.*the first plan needed all of delta"):
        ledger.register_run("b", asking(0.1), whole=True)


def test_where_only_fewer_steps_fit_their_number_is_told(tmp_path: Path) -> None:
    """As many with more noise would be another mechanism, and then all are composed by RDP."""
    long, short = poisson(60), poisson(55)
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=long.epsilon(DELTA / 2), delta=DELTA))
    ledger.register_run("a", short, block_max=55, whole=True)
    ledger.intend("a", 55)
    with pytest.raises(BudgetExceeded, match=r"largest that fits is epsilon=\d.* with 5 steps of the same noise"):
        ledger.register_run("b", short, whole=True)
    ledger.register_run("c", poisson(5), block_max=5, whole=True)
    assert ledger.intend("c", 5).count == 5


def test_a_run_that_has_begun_goes_on_as_far_as_it_can(nearly_spent: Ledger) -> None:
    plan = asking(0.3, steps=10)
    nearly_spent.register_run("c", plan, block_max=10, whole=True)
    nearly_spent.intend("c", 1)
    nearly_spent.external(asking(0.9).event(), "another tool")
    for opened in (nearly_spent, Ledger.open(nearly_spent.path)):
        assert opened.register_run("c", plan, block_max=10, whole=True).spent == 1
    assert nearly_spent.intend("c", 10).count < 9


def test_nothing_is_kept_for_the_plans_of_others(tmp_path: Path) -> None:
    """Two runs of which each fits beside what is spent are both entered; whoever comes later ends early."""
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=1.0, delta=DELTA))
    for name in ("a", "b"):
        ledger.register_run(name, asking(0.8), block_max=20, whole=True)
    assert ledger.intend("a", 20).count == 20
    assert 0 < ledger.intend("b", 20).count < 20
