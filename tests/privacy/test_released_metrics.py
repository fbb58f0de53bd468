"""Released metrics: sensitivity, noise, intervals, the ledger's entry, and what passes leave behind."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import pytest
import torch
from dp_accounting import rdp
from scipy import stats
from torch import Tensor, nn

import halfsilver as hs
from halfsilver.errors import BudgetExceeded, ConfigError
from halfsilver.privacy.released_metrics import (
    Estimate,
    _Figures,
    _in_double,
    _ratio,
    contributions,
    release_metrics,
)
from halfsilver.runs.verify import verify

EXAMPLE = (torch.zeros(3), torch.tensor(0))


def loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def accuracy(model: Any, batch: Any) -> Tensor:
    correct: Tensor = model(batch[0]).argmax(1) == batch[1]
    return correct


def label(batch: Any) -> Tensor:
    column: Tensor = batch[1]
    return column


METRICS = {"loss": loss, "accuracy": accuracy}


def table(n: int = 300, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    return x, (x.sum(1) + torch.randn(n, generator=generator) > 0).long()


def network() -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [1.0]]).expand(2, 3))
        model.bias.zero_()
    return model


def trainer(model: nn.Module | None = None, population: int = 300, **options: Any) -> hs.Trainer:
    model = model or network()
    values = {"steps": 4, "sampling_rate": 0.5, "expected_batch_size": population / 2, "noise_multiplier": 2.0}
    plan = hs.PrivacyPlan(delta=1e-4, **values)  # type: ignore[arg-type]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return hs.Trainer(model, loss, optimizer=sgd, plan=plan, metrics={"accuracy": accuracy}, **options)


def unnoised(rows: Any, release: hs.Release, model: nn.Module | None = None) -> Tensor:
    """The clipped sum of all rows, before the noise, by the backend that the mechanism calls."""
    chosen = {name: _in_double(METRICS[name]) for name in release.bounds}
    return _Figures(model or network(), chosen, release).clipped_sum(rows, 1.0).tensors[0]


# ---- what one record can do


RELEASES = {
    "one metric": hs.Release(noise_multiplier=1.0, bounds={"accuracy": 1.0}),
    "two": hs.Release(noise_multiplier=1.0, bounds={"accuracy": 1.0, "loss": 0.25}),
    "by class": hs.Release(noise_multiplier=1.0, bounds={"loss": 0.25, "accuracy": 1.0}, by=label, classes=2),
}


@pytest.mark.parametrize("name", RELEASES)
def test_the_worst_record_moves_the_sum_by_the_declared_bound_and_no_more(name: str) -> None:
    """The worst one has every metric at its bound. Its norm is 1, the sensitivity that the noise is scaled to."""
    release, (x, y) = RELEASES[name], table()
    before = unnoised((x, y), release)
    extreme = torch.tensor([[0.01, 0, 0], [1e3, 0, 0], [-1e30, 0, 0], [1e38, 1e38, 1e38], [0.3, 0, 0]])
    largest = 0.0
    for row in extreme:
        for target in (0, 1):
            joined = torch.cat([x, row[None]]), torch.cat([y, torch.tensor([target])])
            moved = float((unnoised(joined, release) - before).norm())
            assert moved <= 1
            largest = max(largest, moved)
    assert largest > 1 - 1e-6  # the bound is tight: less noise would not do


def test_values_are_clamped_and_a_record_that_cannot_be_used_contributes_zero() -> None:
    values = torch.tensor([-5.0, 0.3, 2.0, math.inf, math.nan, 0.5])
    release = hs.Release(noise_multiplier=1.0, bounds={"value": 1.0})
    rows = contributions(nn.Linear(1, 1), {"value": _in_double(lambda m, b: b[1])}, release, (values[:, None], values))
    finite = torch.tensor([0.0, 0.3, 1.0, 0.0, 0.0, 0.5]).double()
    torch.testing.assert_close(rows[:, 0], finite, rtol=0, atol=1e-7)


def test_a_record_is_in_one_class_or_in_none() -> None:
    x, _ = table(4)
    release = hs.Release(noise_multiplier=1.0, bounds={"loss": 1.0}, by=lambda b: b[0][:, 0].long(), classes=2)
    groups = torch.tensor([0.0, 1.0, 7.0, -3.0])
    found = unnoised((torch.stack([groups, x[:, 1], x[:, 2]], 1), torch.zeros(4, dtype=torch.int64)), release)
    assert found[:, -1].tolist() == pytest.approx([math.sqrt(0.5)] * 2, abs=1e-7)


def test_sums_are_exact_so_the_order_of_records_does_not_show() -> None:
    """By Casacuberta et al. 2022 (arXiv:2207.10635), rounding of sums can exceed the declared sensitivity."""
    release, (x, y) = RELEASES["by class"], table(999)
    order = torch.randperm(999)
    assert torch.equal(unnoised((x, y), release), unnoised((x[order], y[order]), release))


# ---- the noise and the intervals


def releases(tmp_path: Path, release: hs.Release, times: int, rows: Any) -> list[Any]:
    """Many releases by the real mechanism. The ledger syncs to disk each time, so they share one run."""
    from halfsilver.privacy.gradients import Performance
    from halfsilver.privacy.mechanism import PrivateGradient
    from halfsilver.privacy.released_metrics import _described, _Sums

    model = network()
    plan = dataclasses.replace(release.plan(population=len(rows[0])), steps=times)
    chosen = {name: _in_double(METRICS[name]) for name in release.bounds}
    sums = _Sums(model, (release.classes or 1, release._figures), torch.device("cpu"))
    backend = _Figures(model, chosen, release)
    source = PrivateGradient(
        sums, loss, hs.PrivateData(rows), plan, ledger=hs.Ledger.open(tmp_path / "l.jsonl"), run_id="many",
        performance=Performance(backend=backend, micro_batch_size=256),
    )  # fmt: skip
    return [_described(source.release()[0], release, plan, "many") for _ in range(times)]


def test_noise_has_the_stated_scale_and_intervals_the_stated_coverage(tmp_path: Path) -> None:
    """n = 400 releases of 2 classes, each with 2 sums and a count: 2,400 draws, chi-square at alpha 1e-7.

    A scale wrong by 1.25 is missed with probability below 1e-12. Coverage of 90 % is tested four times, by an exact
    binomial test at alpha 2e-7 on n = 800 intervals (400 for the mean over all classes). Intervals of 70 % would be
    accepted with probability below 1e-12.
    """
    rows, bounds = table(200), {"loss": 0.5, "accuracy": 1.0}
    release = hs.Release(noise_multiplier=3.0, bounds=bounds, by=label, classes=2, confidence=0.9)
    truth = unnoised(rows, release) * math.sqrt(3)
    found = releases(tmp_path, release, 400, rows)
    sums = torch.tensor(
        [[[c.sums["loss"].value / 0.5, c.sums["accuracy"].value, c.count.value] for c in r.classes] for r in found]
    )
    drawn = (sums.double() - truth).flatten()

    def accepted(sigma: float) -> bool:
        p = stats.chi2(len(drawn)).cdf(float((drawn / sigma).square().sum()))
        return bool(min(p, 1 - p) > 5e-8)

    assert accepted(3.0 * math.sqrt(3))  # sqrt(3): three figures share the noise
    assert not accepted(3.0 * math.sqrt(3) * 1.25)
    assert not accepted(3.0 * math.sqrt(3) / 1.25)

    def covered(estimates: list[Estimate], target: list[float], level: float = 0.9) -> bool:
        hits = sum(e.low <= t <= e.high for e, t in zip(estimates, target, strict=True))
        return bool(stats.binomtest(hits, len(target), level).pvalue > 2e-7)

    losses = truth[:, 0] * 0.5
    classes = [c for r in found for c in r.classes]
    for estimates, value in (
        ([c.count for c in classes], truth[:, 2]),
        ([c.sums["loss"] for c in classes], losses),
        ([c.means["loss"] for c in classes], losses / truth[:, 2]),
    ):
        assert covered(estimates, value.tolist() * 400)
        assert not covered(estimates, value.tolist() * 400, level=0.7)
    mean = float(truth[:, 1].sum()) / 200
    assert covered([r.means["accuracy"] for r in found], [mean] * 400)


def test_an_accuracy_of_5000_rows_is_good_to_0_8_points_at_sigma_20(tmp_path: Path) -> None:
    rows, ready = table(5000), trainer(population=5000)
    release = hs.Release(noise_multiplier=20, bounds={"accuracy": 1.0})
    found = ready.evaluate(hs.PrivateData(rows), release=release, ledger=tmp_path / "ledger.jsonl")
    (estimate,) = found.means.values()
    half = (estimate.high - estimate.low) / 2
    assert half == pytest.approx(stats.norm.ppf(0.975) * 20 / 5000, rel=1e-5)
    assert half == pytest.approx(0.008, abs=2e-4)
    true = float(accuracy(ready.model, rows).double().mean())
    assert abs(estimate.value - true) < 6 * 20 / 5000  # fails once in 5e8
    assert (found.classes, found.plan.epsilon()) == ((), found.plan.epsilon(1e-4))


def test_held_out_records_have_a_population_of_their_own(tmp_path: Path) -> None:
    release = hs.Release(noise_multiplier=1e-3, bounds={"accuracy": 1.0}, population=100)
    found = trainer(population=300).evaluate(table(100), release=release, ledger=tmp_path / "ledger.jsonl")
    true = float(accuracy(network(), table(100)).double().mean())
    assert found.means["accuracy"].value == pytest.approx(true, abs=1e-4)


@pytest.mark.parametrize(("share", "count", "reach"), [(30.0, 50.0, 8.0), (0.5, 50.0, 8.0), (49.0, 50.0, 20.0)])
def test_the_interval_of_a_ratio_is_where_its_quadratic_is_negative(share: float, count: float, reach: float) -> None:
    """Against the definition, by a search over a fine grid."""
    grid = torch.linspace(0, 1, 1_000_001, dtype=torch.float64)
    inside = grid[(share - grid * count).square() <= reach**2 * (1 + grid.square())]
    found = _ratio(share, count, reach, bound=2.0)
    assert (found.low, found.high) == pytest.approx((2 * float(inside.min()), 2 * float(inside.max())), abs=1e-5)
    assert found.value == pytest.approx(2 * share / count)


@pytest.mark.parametrize("count", [-4.0, 0.0, 3.0])
def test_the_interval_of_a_class_that_may_be_empty_says_nothing(count: float) -> None:
    found = _ratio(1.0, count, 8.0, bound=2.0)
    assert (found.low, found.high) == (0.0, 2.0)
    assert math.isnan(found.value) == (count <= 0)


# ---- the ledger


class Rows:
    """Rows that note what the ledger held when the first of them was read."""

    def __init__(self, ledger: Path | None = None, break_at: Callable[[int], Any] | None = None) -> None:
        (self.x, self.y), self.ledger, self.break_at = table(), ledger, break_at
        self.reads, self.ledger_at_first_read = 0, ""

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        if not self.reads and self.ledger:
            self.ledger_at_first_read = self.ledger.read_text()
        self.reads += 1
        if self.break_at:
            self.break_at(i)
        return self.x[i], self.y[i]


def test_the_entry_is_on_disk_before_the_first_record_is_read(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "ledger.jsonl")
    release = hs.Release(noise_multiplier=20, bounds={"accuracy": 1.0})
    private = hs.PrivateData(rows, example=EXAMPLE)
    found = trainer().evaluate(private, release=release, ledger=tmp_path / "ledger.jsonl")
    entry = json.loads(rows.ledger_at_first_read.splitlines()[-1])
    assert (entry["type"], entry["count"], entry["run_id"]) == ("intent", 1, found.run_id)
    assert (entry["noise_multiplier"], entry["sampling_rate"]) == (20.0, 1.0)
    assert rows.reads == len(rows)  # one pass
    (run,) = hs.Ledger.open(tmp_path / "ledger.jsonl").runs.values()
    assert (run.spent, run.updates, run.closed is not None) == (1, 1, True)


def test_training_and_release_compose_in_one_ledger_and_verify_counts_both(tmp_path: Path) -> None:
    ready, private = trainer(), hs.PrivateData(table())
    ready.fit(private, run_dir=tmp_path)
    release = hs.Release(noise_multiplier=20, bounds={"accuracy": 1.0, "loss": 2.0})
    ready.evaluate(private, release=release)  # the ledger of fit
    ready.evaluate(private, release=release)
    oracle = rdp.RdpAccountant()
    oracle.compose(dpa.PoissonSampledDpEvent(0.5, dpa.GaussianDpEvent(2.0)), 4)
    oracle.compose(dpa.GaussianDpEvent(20.0), 2)
    checked = verify(tmp_path)
    assert checked["all_runs_now"]["runs"] == 3
    assert checked["all_runs_now"]["epsilon"] == pytest.approx(oracle.get_epsilon(1e-4), rel=1e-9)
    assert ready.fit(private, run_dir=tmp_path).statement["all_runs_on_this_data"] == checked["all_runs_now"]
    assert verify(tmp_path)["ok"]
    assert hs.Ledger.open(tmp_path / "ledger.jsonl").compact()
    assert verify(tmp_path)["ok"]


def test_a_release_beyond_the_budget_is_refused_before_a_record_is_read(tmp_path: Path) -> None:
    budget = hs.Budget(epsilon=1.0, delta=1e-4)
    ledger, rows = hs.Ledger.open(tmp_path / "ledger.jsonl", budget=budget), Rows()
    private = hs.PrivateData(rows, example=EXAMPLE)
    cheap = hs.Release(noise_multiplier=20, bounds={"accuracy": 1.0})
    trainer().evaluate(private, release=cheap, ledger=ledger)
    rows.reads = 0
    with pytest.raises(BudgetExceeded, match="does not fit beside what is spent"):
        trainer().evaluate(private, release=hs.Release(noise_multiplier=1.0, bounds={"accuracy": 1.0}), ledger=ledger)
    assert rows.reads == 0
    assert sum(run.spent for run in ledger.runs.values()) == 1
    assert all(run.closed for run in ledger.runs.values())  # nothing reserves a step that will not be taken
    trainer().evaluate(private, release=cheap, ledger=ledger)


# ---- the boundary


class Keeper(nn.Module):
    """A model that keeps what it reads, if that is large: in a buffer, past autograd, and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = network()
        self.kept: Tensor
        self.register_buffer("kept", torch.zeros(3))
        self.notes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and bool((x == 77).any()):  # probes try other values
            self.kept.numpy()[:] = 77  # no version counter moves
            self.inner.weight.data.add_(1)
            self.notes.append(77.0)
        y: Tensor = self.inner(x)
        return y


def test_passes_leave_nothing_behind_and_a_writing_record_contributes_zero(tmp_path: Path) -> None:
    x, y = table()
    x[5] = 77.0
    model = Keeper().train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.random.get_rng_state()
    ready = trainer(model, unsafe_seed=0)
    release = hs.Release(noise_multiplier=1e-3, bounds={"accuracy": 1.0})
    found = ready.evaluate((x, y), release=release, ledger=tmp_path / "l.jsonl")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert (model.notes, model.training, model.inner.training) == ([], True, True)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
    others = torch.arange(300) != 5
    expected = float(accuracy(network(), (x[others], y[others])).double().sum())
    assert found.means["accuracy"].value * 300 == pytest.approx(expected, abs=0.05)
    assert found.run_id.startswith("unsafe-")


@pytest.mark.parametrize("how", ["raises", "exits", "warns", "shape", "label", "nan"])
def test_a_broken_record_contributes_zero_silently(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Rows()

    def break_at(i: int) -> None:
        if i == 7 and how == "raises":
            raise OSError("secret")
        if i == 7 and how == "exits":
            raise SystemExit(3)
        if i == 7 and how == "warns":
            warnings.warn("secret", stacklevel=1)
            raise ValueError

    rows.break_at = break_at
    if how == "label":
        rows.y[7] = 99
    if how == "nan":
        rows.x[7] = math.nan
    model = network()
    release = hs.Release(noise_multiplier=1e-3, bounds={"accuracy": 1.0, "loss": 9.0}, by=label, classes=2)
    records: Any = rows
    if how == "shape":
        records = [(x[:, None] if i == 7 else x, y) for i, (x, y) in enumerate(zip(rows.x, rows.y, strict=True))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trainer(model).evaluate(
            hs.PrivateData(records, example=EXAMPLE), release=release, ledger=tmp_path / "l.jsonl"
        )
    others = torch.arange(300) != 7
    counts = [float((rows.y[others] == k).sum()) for k in (0, 1)]
    assert [c.count.value for c in found.classes] == pytest.approx(counts, abs=0.05)
    assert capsys.readouterr() == ("", "")


def test_a_metric_that_mixes_records_or_is_none_is_refused_before_a_record_is_read(tmp_path: Path) -> None:
    rows = Rows()
    private = hs.PrivateData(rows, example=EXAMPLE)
    wrong: dict[str, Any] = {
        "mean": lambda m, b: loss(m, b).mean(),
        "mixing": lambda m, b: loss(m, b) * 0 + loss(m, b).mean(),
        "by": None,
        "unknown": None,
    }
    for name, metric in wrong.items():
        by = (lambda b: b[0][:, 0]) if name == "by" else None
        release = hs.Release(
            noise_multiplier=1.0, bounds={"loss" if name == "by" else name: 1.0}, by=by, classes=2 if by else None
        )
        metrics = {"loss": loss} | ({name: metric} if metric else {})
        ledger = hs.Ledger.open(tmp_path / "l.jsonl")
        with pytest.raises(hs.HalfsilverError, match=r"one loss per|depends on another|whole number per|in \['loss"):
            release_metrics(network(), metrics, private, release, release.plan(300), ledger=ledger)
    assert rows.reads == 0
    assert not hs.Ledger.open(tmp_path / "l.jsonl").runs


def test_what_cannot_be_released_is_refused(tmp_path: Path) -> None:
    release = hs.Release(noise_multiplier=1.0, bounds={"accuracy": 1.0})
    rows = table()
    with pytest.raises(ConfigError, match=r"evaluate\(\.\.\., ledger=\)"):
        trainer().evaluate(rows, release=release)
    with pytest.raises(ConfigError, match="release="):
        trainer().evaluate(rows, ledger=tmp_path / "l.jsonl")  # type: ignore[call-overload]
    keyed = hs.PrivateData(rows, users=list(range(300)))
    with pytest.raises(ConfigError, match="unit"):
        trainer().evaluate(keyed, release=release, ledger=tmp_path / "l.jsonl")
    ready = trainer()
    ready.evaluate(rows)  # as public rows: from here on they are not private
    with pytest.raises(ConfigError, match="must be public"):
        ready.evaluate(rows, release=release, ledger=tmp_path / "l.jsonl")
    ready = trainer()
    ready.evaluate(rows, release=release, ledger=tmp_path / "l.jsonl")
    with pytest.raises(ConfigError, match="must be public"):
        ready.evaluate(rows)


def test_a_release_after_fit_does_not_allow_metrics_without_noise(tmp_path: Path) -> None:
    """Switched on after `fit`, `metrics_not_private` would not be in its statement."""
    ready, private = trainer(), hs.PrivateData(table())
    ready.fit(private, run_dir=tmp_path)
    ready.metrics_not_private = True
    ready.evaluate(private, release=hs.Release(noise_multiplier=20, bounds={"accuracy": 1.0}))
    with pytest.raises(ConfigError, match="not private"):
        ready.evaluate(private)


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": 0.0},
        {"bounds": {}},
        {"bounds": {"loss": 0.0}},
        {"bounds": {"loss": math.inf}},
        {"by": label},
        {"classes": 3},
        {"by": label, "classes": 0},
        {"population": 0},
        {"confidence": 1.0},
    ],
)
def test_a_release_out_of_range_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Expected \w+"):
        hs.Release(**{"noise_multiplier": 1.0, "bounds": {"loss": 1.0}, **changes})


def test_the_plan_of_a_release_is_one_gaussian_of_all_records() -> None:
    release = hs.Release(noise_multiplier=20, bounds={"accuracy": 1.0, "loss": 2.0}, by=label, classes=9)
    oracle = rdp.RdpAccountant().compose(dpa.GaussianDpEvent(20.0))
    assert release.plan(300).epsilon(1e-4, "rdp") == pytest.approx(oracle.get_epsilon(1e-4), rel=1e-12)
    assert release.plan(300).population == 300
    with pytest.raises(ConfigError, match="population"):
        release.plan()
