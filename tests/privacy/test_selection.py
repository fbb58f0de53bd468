"""The cost of a selection by the paper's formula, the distribution of K, and selections in the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as dp
from scipy import special, stats

from halfsilver.errors import BudgetExceeded, ConfigError
from halfsilver.privacy.accounting import PairCount, epsilon_of, total_accountant
from halfsilver.privacy.entropy import OsEntropy
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.privacy.ledger.budget import Rule
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.selection import Plan, Selection

ALPHA = 1e-6
DELTA = 1e-5

# Epsilon 1 by RDP at delta 1e-5: 1000 steps on samples of 1 %.
EACH = PrivacyPlan(steps=1000, sampling_rate=0.01, expected_batch_size=500, noise_multiplier=1.5132, delta=DELTA)
FULL = PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=500, noise_multiplier=4.0454, delta=DELTA)


# ---- what it costs


def sampled_gaussian(plan: PrivacyPlan, order: int) -> float:
    """Mironov, Talwar and Zhang 2019, arXiv:1908.10530, section 3.3, for whole orders; and the Gaussian for q = 1."""
    sigma, q = plan.noise_multiplier, plan.sampling_rate
    if q == 1:
        return plan.max_releases * order / (2 * sigma**2)
    terms = [
        special.gammaln(order + 1)
        - special.gammaln(k + 1)
        - special.gammaln(order - k + 1)
        + (order - k) * math.log1p(-q)
        + k * math.log(q)
        + (k * k - k) / (2 * sigma**2)
        for k in range(order + 1)
    ]
    return float(plan.max_releases * special.logsumexp(terms) / (order - 1))


def to_epsilon(divergence: float, order: int, delta: float) -> float:
    """Proposition 12 of Canonne, Kamath and Steinke 2020, arXiv:2004.00010."""
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def gamma_of(trials: float, eta: float) -> float:
    """The mean by Definition 1 of arXiv:2110.03620, inverted by bisection in gamma."""
    low, high = 1e-9, 1 - 1e-9
    for _ in range(200):
        g = (low + high) / 2
        mean = (1 / g - 1) / math.log(1 / g) if eta == 0 else eta * (1 - g) / (g * (1 - g**eta))
        low, high = (g, high) if mean > trials else (low, g)
    return low


def by_the_paper(plan: PrivacyPlan, trials: float, eta: float, delta: float) -> float:
    """Theorem 2 of arXiv:2110.03620, with whole orders 2 .. 100."""
    orders, g = range(2, 101), gamma_of(trials, eta)
    r = {order: sampled_gaussian(plan, order) for order in orders}
    extra = (1 + eta) * min((1 - 1 / h) * r[h] + math.log(1 / g) / h for h in orders)
    return min(to_epsilon(r[o] + extra + math.log(trials) / (o - 1), o, delta) for o in orders)


@pytest.mark.parametrize(("trials", "expected"), [(5, 1.62), (10, 1.76), (30, 1.94)])
def test_the_cost_of_a_run_of_epsilon_1(trials: float, expected: float) -> None:
    """Base: epsilon 1 by RDP at delta 1e-5, 1000 steps, q = 0.01, sigma = 1.5132; eta = 0."""
    assert epsilon_of([EACH.count()], DELTA, "rdp") == pytest.approx(1.0, abs=5e-4)
    found = Selection(each=EACH, trials=trials).epsilon()
    assert found == pytest.approx(expected, abs=5e-3)
    assert found == pytest.approx(by_the_paper(EACH, trials, 0.0, DELTA), rel=2e-3)  # fewer orders: never less
    assert found <= by_the_paper(EACH, trials, 0.0, DELTA) + 1e-9


@pytest.mark.parametrize(("trials", "eta"), [(1.5, 0.5), (10, 1.0), (200, 3.0)])
@pytest.mark.parametrize("plan", [EACH, FULL])
def test_other_shapes_and_plans_agree_with_the_formula(plan: PrivacyPlan, trials: float, eta: float) -> None:
    found, own = Selection(each=plan, trials=trials, eta=eta).epsilon(), by_the_paper(plan, trials, eta, DELTA)
    assert own * 0.995 <= found <= own + 1e-9


def test_eta_0_costs_least_and_each_run_costs_less_than_all() -> None:
    costs = [Selection(each=EACH, trials=10, eta=eta).epsilon() for eta in (0.0, 0.5, 1.0)]
    assert sorted(costs) == costs
    assert costs[0] > epsilon_of([EACH.count()], DELTA, "rdp")


def test_spare_steps_are_part_of_each_run() -> None:
    spare = replace(EACH, spare_steps=100)
    assert Selection(each=spare, trials=10).epsilon() == Selection(each=replace(EACH, steps=1100), trials=10).epsilon()


def test_calibration_reaches_epsilon_and_does_not_exceed_it() -> None:
    plan = Selection.calibrate(epsilon=2, delta=DELTA, trials=10, population=50_000, batch_size=500, steps=1000)
    assert 2 * 0.999 < plan.epsilon() <= 2
    assert by_the_paper(plan.each, 10, 0.0, DELTA) == pytest.approx(2, rel=2e-3)


def test_pld_cannot_count_a_selection() -> None:
    plan = Selection(each=EACH, trials=10)
    with pytest.raises(ConfigError, match="Expected accountant='rdp' for a selection"):
        plan.epsilon(accountant="pld")
    assert total_accountant([plan.count()]) == "rdp"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Selection(each=EACH, trials=1), r"Expected trials=1 in \(1, 1000\]"),
        (lambda: Selection(each=EACH, trials=math.inf), "Expected trials=inf"),
        (lambda: Selection(each=EACH, trials=10, eta=-0.5), r"Expected eta=-0.5 in \[0, 10\]"),
        (lambda: Selection(each=Selection(each=EACH, trials=2), trials=2), "that of one run"),  # type: ignore[arg-type]
        (lambda: Selection.from_dict({**EACH.to_dict(), "trials": 10.0}), "Expected eta=None to be a number"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Selection], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


# ---- the distribution of K

BINS = (1, 2, 3, 4, 6, 9, 13, 18, 25, 35, 50)


def chances(trials: float, eta: float) -> np.ndarray:
    """P[K = k] for k = 1 .. 5000, from gamma functions instead of a recursion."""
    g, k = gamma_of(trials, eta), np.arange(1, 5001)
    if eta == 0:
        return np.asarray((1 - g) ** k / (k * math.log(1 / g)))
    product = special.gammaln(k + eta) - special.gammaln(eta) - special.gammaln(k + 1)
    return np.asarray(np.exp(product + k * math.log1p(-g)) / (g**-eta - 1))


def chi_square(drawn: np.ndarray, trials: float, eta: float) -> float:
    """The p-value of draws in bins."""
    below = np.cumsum(chances(trials, eta))
    expected = np.diff([0.0, *(below[k - 1] for k in BINS), 1.0]) * len(drawn)
    found = np.bincount(np.searchsorted(BINS, drawn), minlength=len(BINS) + 1)
    return float(stats.chi2.sf(((found - expected) ** 2 / expected).sum(), len(BINS)))


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_k_has_the_distribution_that_is_paid_for(eta: float) -> None:
    """n = 20,000 draws from the system's entropy, alpha = 1e-6: accepts gamma, rejects that of a mean of 12.

    A test with this n misses the mean of 12 with probability below 2e-12. It also rejects another eta.
    """
    plan = Selection(each=EACH, trials=10, eta=eta)
    assert float(chances(10, eta) @ np.arange(1, 5001)) == pytest.approx(10, rel=1e-6)
    drawn = np.array([plan.draw(OsEntropy()) for _ in range(20_000)])
    assert drawn.min() == 1
    assert chi_square(drawn, 10, eta) > ALPHA
    assert chi_square(drawn, 12, eta) < ALPHA
    assert chi_square(drawn, 10, eta + 0.5) < ALPHA


class Words:
    """Given bits in place of entropy."""

    is_private = False

    def __init__(self, share: float) -> None:
        self._bits = min(int(share * 2**126), 2**126 - 1)

    def words(self, n: int) -> np.ndarray:
        return np.array([self._bits >> 63, self._bits & (2**63 - 1)])[:n]


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_ends_of_a_draw(eta: float) -> None:
    plan = Selection(each=EACH, trials=10, eta=eta)
    first = float(chances(10, eta)[0])
    ks = [plan.draw(Words(share)) for share in (0.0, first * (1 - 1e-9), first * (1 + 1e-9))]  # type: ignore[arg-type]
    assert ks == [1, 1, 2]
    assert plan.draw(Words(1.0)) > plan.quantile(0.999999)  # type: ignore[arg-type]
    assert plan.quantile(0.5) == int(np.searchsorted(np.cumsum(chances(10, eta)), 0.5)) + 1


def test_settings_are_drawn_uniformly() -> None:
    """n = 20,000 draws of 3 settings, alpha = 1e-6; rejects a share of 0.38 (missed with probability below 1e-12)."""
    plan = Selection(each=EACH, trials=10)
    found = np.bincount([plan.draw_setting(3, OsEntropy()) for _ in range(20_000)], minlength=3)
    assert len(found) == 3
    assert stats.chisquare(found).pvalue > ALPHA
    assert stats.chisquare(found, np.array([0.38, 0.31, 0.31]) * 20_000).pvalue < ALPHA


def test_gamma_is_on_the_side_that_costs_no_more_than_is_counted() -> None:
    """The mean at it is at most `trials`, and it is at least dp-accounting's, which rounds it down."""
    for trials in (1.0001, 2, 10, 30, 1000):
        for eta in (0.0, 0.1, 1.0, 10.0):
            gamma = Selection(each=EACH, trials=trials, eta=eta).gamma
            assert gamma >= dp._gamma_truncated_negative_binomial(eta, trials) * (1 - 1e-12)
            assert dp._truncated_negative_binomial_mean(gamma, eta) <= trials * (1 + 1e-12)


# ---- in the ledger


def test_a_selection_is_one_record_that_the_budget_weighs(tmp_path: Path) -> None:
    plan = Selection(each=EACH, trials=10)
    small = Ledger.open(tmp_path / "small", budget=Budget(epsilon=1.7, delta=DELTA))
    small.register_run("a", plan)
    with pytest.raises(BudgetExceeded, match=r"would make epsilon=1\.79\d* in all, by RDP at half of delta"):
        small.intend("a")
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=1.9, delta=DELTA))
    ledger.register_run("a", plan)
    assert ledger.intend("a").count == 1
    assert ledger.spent() == plan.epsilon()
    with pytest.raises(BudgetExceeded, match="has used all 1 steps"):
        ledger.intend("a")
    kinds = [json.loads(line)["type"] for line in ledger.path.read_text().splitlines()]
    assert kinds == ["header", "run", "intent"]
    again = Ledger.open(ledger.path)
    assert again.runs["a"].plan == plan
    assert again.counts() == (plan.count(),)


def test_one_that_needs_all_of_delta_gets_it_and_stays_alone(tmp_path: Path) -> None:
    plan = Selection(each=EACH, trials=10)
    ledger = Ledger.open(tmp_path / "ledger", budget=Budget(epsilon=plan.epsilon(), delta=DELTA))
    ledger.register_run("a", plan)
    ledger.intend("a")
    ledger.register_run("b", EACH)
    with pytest.raises(BudgetExceeded, match="only selections of runs of 1000 steps with noise_multiplier"):
        ledger.intend("b")


@pytest.mark.parametrize("first", ["selection", "run"])
def test_runs_and_selections_share_a_budget_by_rdp_of_one_order(tmp_path: Path, first: str) -> None:
    """Divergences of the order that the first plan fixed add up: an independent sum says where the room ends."""
    plans: dict[str, Plan] = {"selection": Selection(each=EACH, trials=10), "run": replace(EACH, steps=400)}
    budget = Budget(epsilon=2.6, delta=DELTA)
    ledger = Ledger.open(tmp_path / "ledger", budget=budget)
    other = next(name for name in plans if name != first)
    for name in (first, other):
        ledger.register_run(name, plans[name], block_max=1000)
        granted = ledger.intend(name, 1000).count
        assert granted == plans[name].max_releases
    order = Rule(budget, plans[first].count()).order
    both = divergence_of_selection(EACH, 10, 0.0, order) + sampled_gaussian(replace(EACH, steps=400), order)
    own = to_epsilon(both, order, DELTA / 2)
    assert own == pytest.approx(Rule(budget, plans[first].count()).epsilon(ledger.counts()), rel=2e-3)
    assert own < 2.6
    assert ledger.spent() <= own
    third = Selection(each=EACH, trials=10, eta=1.0)
    ledger.register_run("third", third)
    with pytest.raises(BudgetExceeded, match=r"by RDP \(noise or rate differ\) at half of delta"):
        ledger.intend("third")


def divergence_of_selection(plan: PrivacyPlan, trials: float, eta: float, order: int) -> float:
    g, orders = gamma_of(trials, eta), range(2, 101)
    extra = min((1 - 1 / h) * sampled_gaussian(plan, h) + math.log(1 / g) / h for h in orders)
    return sampled_gaussian(plan, order) + (1 + eta) * extra + math.log(trials) / (order - 1)


def test_a_compacted_ledger_still_counts_it(tmp_path: Path) -> None:
    plan = Selection(each=EACH, trials=10)
    ledger = Ledger.open(tmp_path / "ledger")
    runs: dict[str, Plan] = {"a": plan, "b": replace(EACH, steps=5), "c": plan}
    for name, one in runs.items():
        ledger.register_run(name, one, block_max=5)
        ledger.intend(name, 5)
        ledger.finish(name, 1)
    before = ledger.counts()
    assert [c.count for c in before] == [5, 2]
    assert ledger.compact()
    assert Ledger.open(ledger.path).counts() == before
    assert Ledger.open(ledger.path).runs["a"].plan == plan


def test_a_torn_record_counts_as_the_selection(tmp_path: Path) -> None:
    plan = Selection(each=EACH, trials=10)
    ledger = Ledger.open(tmp_path / "ledger")
    ledger.register_run("a", plan)
    with open(ledger.path, "ab") as file:
        file.write(b'{"count":')
    assert Ledger.open(ledger.path).counts() == (plan.count(),)
    with pytest.raises(BudgetExceeded):
        Ledger.open(ledger.path).intend("a")


@pytest.mark.nightly
@pytest.mark.parametrize("order", [None, 12])  # below 10 the divergence of a larger order is less, and taken
def test_beside_what_was_spent_elsewhere(order: int | None) -> None:
    """Divergences add up, and the delta of the pair comes off first: against the formulas of this file."""
    plan, pair = Selection(each=EACH, trials=10), PairCount(epsilon=0.3, delta=DELTA / 10, count=2)
    p = 1 / (1 + math.exp(-0.3))

    def answer(a: int) -> float:  # randomized response
        return math.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1)

    def own(a: int) -> float:
        return to_epsilon(divergence_of_selection(EACH, 10, 0.0, a) + 2 * answer(a), a, DELTA * 0.8)

    expected = own(order) if order else min(own(a) for a in range(2, 64))
    found = epsilon_of([plan.count(), pair], DELTA, "rdp", order=order)
    assert found == pytest.approx(expected, rel=2e-3)
    assert total_accountant([plan.count(), pair]) == "rdp"
    with pytest.raises(ConfigError, match="selection"):
        epsilon_of([plan.count(), pair], DELTA, "pld")
    assert (
        epsilon_of([plan.count(), PairCount(epsilon=0.3, delta=DELTA, count=1)], DELTA, "rdp", order=order) == math.inf
    )
