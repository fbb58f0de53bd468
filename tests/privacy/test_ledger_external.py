"""What was spent elsewhere: composed as dp-accounting does, kept on disk, counted by budget, statement and report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import pytest
import torch
from dp_accounting import pld, rdp
from dp_accounting.pld import common, privacy_loss_distribution
from scipy.stats import norm
from torch import Tensor, nn

import halfsilver as hs
from halfsilver.errors import BudgetExceeded, CheckpointCorrupt, ConfigError, LedgerCorrupt
from halfsilver.privacy.accounting import MechanismCount, PairCount, epsilon_of, merged, total_accountant
from halfsilver.privacy.ledger.budget import Rule
from halfsilver.report import write_report
from halfsilver.runs.verify import verify

GAUSSIAN = MechanismCount(noise_multiplier=4.0, sampling_rate=1.0, count=9)
SAMPLED = MechanismCount(noise_multiplier=1.5, sampling_rate=0.05, count=100)


# ---- accounting


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Of the Gaussian mechanism, exactly, for any real epsilon (Balle and Wang 2018, arXiv:1805.06530, theorem 8)."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-6), (1.0, 0.0), (2.0, 5e-6), (0.0, 3e-6)])
def test_a_pair_and_gaussian_steps_compose_as_the_formula_says(epsilon: float, delta: float) -> None:
    """delta(e) = d + (1 - d) [p delta_G(e - e0) + q delta_G(e + e0)]: randomized response shifts Gaussian loss."""
    found = epsilon_of([GAUSSIAN, PairCount(epsilon=epsilon, delta=delta, count=1)], 1e-5, "pld")
    mu, p = math.sqrt(GAUSSIAN.count) / GAUSSIAN.noise_multiplier, 1 / (1 + math.exp(-epsilon))

    def exact(e: float) -> float:
        return delta + (1 - delta) * (p * gaussian_delta(e - epsilon, mu) + (1 - p) * gaussian_delta(e + epsilon, mu))

    assert exact(found) <= 1e-5 < exact(found - 5e-4)  # an upper bound, within the discretisation


@pytest.mark.parametrize("steps", [GAUSSIAN, SAMPLED])
def test_pld_is_dp_accountings_own_composition(steps: MechanismCount) -> None:
    oracle = pld.PLDAccountant(value_discretization_interval=1e-4).compose(steps.event())
    pair = privacy_loss_distribution.from_privacy_parameters(common.DifferentialPrivacyParameters(0.7, 1e-6))
    expected = oracle._pld.compose(pair).compose(pair).get_epsilon_for_delta(1e-5)
    found = epsilon_of([steps, PairCount(epsilon=0.7, delta=1e-6, count=2)], 1e-5, "pld")
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("i", [0, 1, 2])
def test_pairs_alone_compose_optimally(i: int) -> None:
    """Against the closed form of Kairouz, Oh and Viswanath 2017 (arXiv:1311.0776), theorem 3.3, with k = 5."""
    k, e, d = 5, 0.5, 1e-3
    terms = (math.comb(k, m) * (math.exp((k - m) * e) - math.exp((k - 2 * i + m) * e)) for m in range(i))
    total = 1 - (1 - d) ** k * (1 - sum(terms) / (1 + math.exp(e)) ** k)
    found = epsilon_of([PairCount(epsilon=e, delta=d, count=k)], total * (1 + 1e-9), "pld")
    assert found == pytest.approx((k - 2 * i) * e, abs=1e-3)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 3.0, 40.0])
@pytest.mark.parametrize("order", [2, 17.5, 512])
def test_the_divergence_is_that_of_randomized_response(epsilon: float, order: float) -> None:
    event = dpa.RandomizedResponseDpEvent(2 / (1 + math.exp(epsilon)), 2)
    oracle = rdp.RdpAccountant([order], dpa.NeighboringRelation.REPLACE_ONE).compose(event)
    assert PairCount(epsilon=epsilon, delta=0.0, count=3).rdp(order) == pytest.approx(3 * oracle.rdp[0], rel=1e-9)


def test_rdp_adds_divergences_and_takes_deltas_off() -> None:
    pair = PairCount(epsilon=0.7, delta=2e-6, count=2)
    steps = rdp.RdpAccountant().compose(SAMPLED.event())
    total = [r + pair.rdp(a) for a, r in zip(steps.orders, steps.rdp, strict=True)]
    expected = rdp.compute_epsilon(steps.orders, total, 1e-5 - 4e-6)[0]
    found = epsilon_of([SAMPLED, pair], 1e-5, "rdp")
    assert found == pytest.approx(expected, rel=1e-12)
    assert found >= epsilon_of([SAMPLED, pair], 1e-5, "pld")
    assert epsilon_of([SAMPLED, pair], 3e-6, "pld") == epsilon_of([SAMPLED, pair], 3e-6, "rdp") == math.inf


def test_pairs_are_merged_and_are_no_mechanisms() -> None:
    pair = PairCount(epsilon=0.7, delta=2e-6, count=1)
    assert merged([pair, SAMPLED, pair]) == (SAMPLED, PairCount(epsilon=0.7, delta=2e-6, count=2))
    assert (total_accountant([pair, SAMPLED]), total_accountant([SAMPLED, GAUSSIAN])) == ("pld", "rdp")


# ---- the ledger


def plan(steps: int = 40, sigma: float = 20.0) -> hs.PrivacyPlan:
    return hs.PrivacyPlan(steps=steps, sampling_rate=1.0, expected_batch_size=200, noise_multiplier=sigma)


def granted(ledger: hs.Ledger, run_id: str, plan: hs.PrivacyPlan) -> int:
    """Steps until the ledger refuses."""
    ledger.register_run(run_id, plan, block_max=plan.steps)
    try:
        return ledger.intend(run_id, plan.steps).count
    except BudgetExceeded:
        return 0


def test_it_is_on_disk_with_its_reason_and_survives_a_compaction(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger, other = hs.Ledger.open(path), hs.Ledger.open(path)
    head = ledger.external((1.0, 1e-6), "synthetic table")
    ledger.external(dpa.GaussianDpEvent(50.0), "a histogram")
    granted(other, "run", plan())
    other.finish("run", 0)
    other.external(SAMPLED.event(), "training in another tool")
    record = json.loads(path.read_text().splitlines()[1])
    assert (record["why"], record["event"], record["count"]) == (
        "synthetic table", {"epsilon": 1.0, "delta": 1e-6}, 1,
    )  # fmt: skip
    assert head == (record["seq"], record["hash"])
    before, spent = other.counts(), other.spent(1e-5)
    assert before == merged(
        [
            MechanismCount(noise_multiplier=50.0, sampling_rate=1.0, count=1),
            plan().count(),
            SAMPLED,
            PairCount(epsilon=1.0, delta=1e-6, count=1),
        ]
    )
    assert other.compact()
    assert not other.compact()
    again = hs.Ledger.open(path)
    for found in (again, ledger, other):  # `ledger` had read the file before the compaction
        assert (found.counts(), found.spent(1e-5)) == (before, spent)
        assert [(e.why, e.prior) for e in found.externals] == [
            ("synthetic table", True), ("a histogram", True), ("training in another tool", False),
        ]  # fmt: skip
    granted(again, "second", plan(3))
    again.finish("second", 0)
    assert again.compact()
    assert [e.why for e in hs.Ledger.open(path).externals][-1] == "training in another tool"


@pytest.mark.parametrize("where", ["line", "summary"])
def test_an_entry_cannot_be_changed_or_taken_out(tmp_path: Path, where: str) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = hs.Ledger.open(path)
    ledger.external((1.0, 1e-6), "synthetic table")
    granted(ledger, "run", plan())
    ledger.finish("run", 0)
    if where == "summary":
        ledger.compact()
    path.write_text(path.read_text().replace('"epsilon":1.0', '"epsilon":0.1'))
    with pytest.raises(LedgerCorrupt):
        hs.Ledger.open(path)


@pytest.mark.parametrize(
    "event",
    [
        5.0,
        (1.0,),
        (-1.0, 1e-6),
        (1.0, 1.0),
        (math.inf, 0.0),
        (math.nan, 0.0),
        dpa.GaussianDpEvent(0.0),
        dpa.LaplaceDpEvent(1.0),
        dpa.PoissonSampledDpEvent(0.1, dpa.LaplaceDpEvent(1.0)),
        dpa.PoissonSampledDpEvent(0.0, dpa.GaussianDpEvent(1.0)),
        dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(1.0), 0),
        dpa.NonPrivateDpEvent(),
    ],
    ids=str,
)
def test_events_that_it_cannot_count_are_refused(tmp_path: Path, event: Any) -> None:
    """A bare number too: 5 may be an epsilon or a noise multiplier."""
    ledger = hs.Ledger.open(tmp_path / "ledger.jsonl")
    with pytest.raises(ConfigError, match="Expected"):
        ledger.external(event, "why")
    with pytest.raises(ConfigError, match="why"):
        ledger.external((1.0, 0.0), " ")
    assert ledger.externals == ()


# ---- the budget


BUDGET = hs.Budget(epsilon=2.0, delta=1e-5)


def open_budgeted(tmp_path: Path) -> hs.Ledger:
    return hs.Ledger.open(tmp_path / "ledger.jsonl", budget=BUDGET)


def test_a_pair_before_the_first_step_is_part_of_the_rule(tmp_path: Path) -> None:
    """As many steps as dp-accounting's PLD of pair and steps allows at half of delta, and not one more."""
    ledger = open_budgeted(tmp_path)
    ledger.external((0.5, 1e-6), "synthetic table")
    many = plan(16, 8.0)
    count = granted(ledger, "run", many)
    base = privacy_loss_distribution.from_privacy_parameters(common.DifferentialPrivacyParameters(0.5, 1e-6))

    def epsilon(steps: int) -> float:
        oracle = pld.PLDAccountant(value_discretization_interval=1e-4).compose(many.count(steps).event())
        return float(oracle._pld.compose(base).get_epsilon_for_delta(5e-6))

    assert 0 < count < 16
    assert epsilon(count) <= 2.0 < epsilon(count + 1)
    ledger.finish("run", 0)
    ledger.compact()
    again = hs.Ledger.open(ledger.path)
    assert 1.9 < again.spent() <= 2.0
    assert granted(again, "again", plan(1)) == 0


def test_the_rule_of_two_mechanisms_takes_the_pairs_delta_off(tmp_path: Path) -> None:
    ledger = open_budgeted(tmp_path)
    ledger.external((0.3, 2e-6), "synthetic table")
    ledger.external((0.2, 0.0), "a count")
    first, second = plan(20), plan(2000, 40.0)
    assert granted(ledger, "first", first) == 20
    count = granted(ledger, "second", second)
    prior = (PairCount(epsilon=0.2, delta=0.0, count=1), PairCount(epsilon=0.3, delta=2e-6, count=1))
    order = Rule(BUDGET, first.count(), prior).order

    def epsilon(steps: int) -> float:
        known = rdp.RdpAccountant([order]).compose(first.event()).compose(second.count(steps).event())
        return float(rdp.compute_epsilon([order], known.rdp + sum(p.rdp(order) for p in prior), 5e-6 - 2e-6)[0])

    assert 0 < count < 2000
    assert epsilon(count) <= 2.0 < epsilon(count + 1)


def test_a_pair_with_a_delta_after_the_first_step_ends_the_grants(tmp_path: Path) -> None:
    ledger = open_budgeted(tmp_path)
    ledger.register_run("run", plan(), block_max=5)
    ledger.intend("run", 5)
    ledger.external((0.01, 1e-9), "synthetic table")
    with pytest.raises(BudgetExceeded, match="recorded after the first step"):
        ledger.intend("run", 5)


@pytest.mark.parametrize("event", [(0.3, 0.0), dpa.GaussianDpEvent(8.0)], ids=str)
def test_what_has_no_delta_adds_to_the_rule_at_any_time(tmp_path: Path, event: Any) -> None:
    ledger, many = open_budgeted(tmp_path), plan(200)
    ledger.register_run("run", many, block_max=200)
    ledger.intend("run", 5)
    ledger.external(event, "another tool")
    count = 5 + ledger.intend("run", 195).count
    order = Rule(BUDGET, many.count()).order

    def epsilon(steps: int) -> float:
        known = rdp.RdpAccountant([order]).compose(many.count(steps).event())
        if isinstance(event, tuple):
            more = PairCount(epsilon=0.3, delta=0.0, count=1).rdp(order)
        else:
            more = order / (2 * 8.0**2)  # Mironov 2017, proposition 7
        return float(rdp.compute_epsilon([order], known.rdp + more, 5e-6)[0])

    assert 5 < count < 200
    assert epsilon(count) <= 2.0 < epsilon(count + 1)
    assert ledger.spent() <= 2.0


def test_more_than_the_budget_is_recorded_and_ends_the_grants(tmp_path: Path) -> None:
    ledger = open_budgeted(tmp_path)
    ledger.external((3.0, 0.0), "a mistake")
    assert ledger.spent() == pytest.approx(3.0, abs=1e-3)
    ledger.register_run("run", plan())
    with pytest.raises(BudgetExceeded, match="would make epsilon"):
        ledger.intend("run")


# ---- statement, verify, report


def _loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(folder: Path, ledger: Path, name: str) -> hs.Ledger:
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hs.Trainer(model, _loss, optimizer=sgd, plan=plan(3))
    x = torch.randn(200, 3)
    trainer.fit((x, (x.sum(1) > 0).long()), run_dir=folder / name, ledger=ledger)
    return hs.Ledger.open(ledger)


def test_statement_report_and_verify_count_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    hs.Ledger.open(path).external((0.4, 1e-7), "synthetic <table>")
    ledger = train(tmp_path, path, "a")
    statement = json.loads((tmp_path / "a" / "statement.json").read_text())
    total = statement["all_runs_on_this_data"]
    assert total["external"] == [{"why": "synthetic <table>", "count": 1, "epsilon": 0.4, "delta": 1e-7}]
    expected = epsilon_of([plan(3).count(), PairCount(epsilon=0.4, delta=1e-7, count=1)], total["delta"], "pld")
    assert total["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert "synthetic &lt;table&gt;" in write_report(tmp_path / "a").read_text()
    assert verify(tmp_path / "a")["all_runs_now"] == total
    ledger.external(dpa.GaussianDpEvent(9.0), "later")
    train(tmp_path, path, "b")
    for compacted in (False, True):
        for name in ("a", "b"):
            found = verify(tmp_path / name)
            assert [e["why"] for e in found["all_runs_now"]["external"]] == ["synthetic <table>", "later"]
            assert found["all_runs_now"]["accountant"] == "rdp"
        assert compacted or hs.Ledger.open(path).compact()
    total["external"] = []
    (tmp_path / "a" / "statement.json").write_text(json.dumps(statement, indent=2, sort_keys=True) + "\n")
    with pytest.raises(CheckpointCorrupt, match="all_runs_on_this_data"):
        verify(tmp_path / "a")


def test_a_delta_beyond_that_of_the_statement_makes_epsilon_infinite_which_is_null_in_json(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    hs.Ledger.open(path).external((0.4, 0.01), "a leak")
    train(tmp_path, path, "a")
    text = (tmp_path / "a" / "statement.json").read_text()
    total = json.loads(text, parse_constant=lambda name: pytest.fail(name))["all_runs_on_this_data"]
    assert total["epsilon"] is None
    assert verify(tmp_path / "a")["ok"]
    assert write_report(tmp_path / "a").exists()
