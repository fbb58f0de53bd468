"""The engine-free core: one implementation for examples and users, and a sum that nobody can bend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core.tensors import flatten, norm, trainable
from halfsilver.errors import ConfigError, UnsupportedLayer
from halfsilver.federated import (
    Contribution,
    InProcess,
    LocalTraining,
    PrivateUsers,
    PublicUsers,
    Round,
    TensorUsers,
    local_update,
)
from halfsilver.privacy.entropy import UnsafeSeed
from halfsilver.privacy.users import Fold
from halfsilver.trainer import StepReport
from tests.cases import MANY
from tests.federated.helpers import LOCAL, Answers, columns, linear, loss_fn, plan, source, users

BAD = (math.nan, math.inf, -math.inf, 1e38, -1e30, 1e9, 1e-42, 0.0)


def trainer(model: nn.Module, p: hs.PrivacyPlan, **options: Any) -> hs.Trainer:
    optimizer = options.pop("optimizer", torch.optim.SGD(model.parameters(), lr=0.5))
    return hs.Trainer(model, loss_fn, optimizer=optimizer, plan=p, **options)


@pytest.mark.parametrize("geometry", [None, hs.Whitened(damping=0.1, refresh=2)])
@pytest.mark.parametrize("mirror", [hs.Euclidean(), hs.FirstOrder(0.7)])
def test_one_example_a_user_is_the_central_trainer(
    tmp_path: Path, mirror: hs.FirstOrder | hs.Euclidean, geometry: hs.Whitened | None
) -> None:
    """One local step of learning rate 1 on one row, the same draws of users and noise: the same weights to 1e-6.

    In a geometry, users train V and receive the factors with the model.

    A known seed gives both the same users and the same noise; most of the gradients are clipped. In float64, where the
    margins of the two clippings agree.
    """
    (x, y), public = columns(40, dtype=torch.float64), columns(12, seed=1, dtype=torch.float64)
    ends = []
    for name in ("central", "federated"):
        model, p = linear().double(), plan(expected_batch_size=20.0, max_grad_norm=0.9)
        performance = hs.Performance(micro_batch_size=1024)
        t = trainer(model, p, mirror=mirror, geometry=geometry, unsafe_seed=3, performance=performance)
        local = LocalTraining(lr=1.0, batch_size=12)
        if name == "central":
            t.fit(hs.PrivateData((x, y), users=list(range(40))), public, run_dir=tmp_path / name)
        else:
            engine = InProcess(PrivateUsers(TensorUsers((x, y), users=list(range(40)))), local)
            t.fit(engine, PublicUsers(model, loss_fn, [public], local), run_dir=tmp_path / name)
        ends.append(flatten(trainable(model)).detach())
    assert float((ends[0] - ends[1]).abs().max()) < 1e-6
    assert float((ends[0] - flatten(trainable(linear())).detach()).abs().max()) > 0.1


@pytest.mark.nightly
def test_the_draw_is_poissons(tmp_path: Path) -> None:
    """Number of drawn users over 2,000 rounds of 50 users at rate 0.1: binomial test, alpha 1e-6; 0.11 is rejected."""
    engine = Answers(50, lambda user, round: None)
    made = source(tmp_path, engine, plan(steps=2000, sampling_rate=0.1), linear(), UnsafeSeed(1))
    for _ in range(2000):
        made.release()
    drawn = sum(len(asked) for asked in engine.asked)
    assert stats.binomtest(drawn, 2000 * 50, 0.1).pvalue > 1e-6
    assert stats.binomtest(drawn, 2000 * 50, 0.11).pvalue < 1e-6
    assert all(len(set(asked)) == len(asked) for asked in engine.asked)


@pytest.mark.parametrize("missing", [0.0, 0.5, 0.9])
def test_noise_is_the_plans_whoever_is_missing(tmp_path: Path, missing: float) -> None:
    """Half the users send +u and half -u, so that the sum is nearly zero. n = 200,000, chi-square, alpha 1e-6."""
    model = nn.Linear(200, 1000, bias=False)
    p = plan(noise_multiplier=1.3, max_grad_norm=0.7, expected_batch_size=50.0, sampling_rate=1.0)

    def answer(user: int, round: Round) -> list[Tensor] | None:
        if user // 2 < missing * 50:
            return None
        return [torch.full((1000, 200), (-1.0) ** user)]

    out = flatten(source(tmp_path, Answers(100, answer), p, model).release()).double()
    for factor, accepted in ((1.0, True), (0.98, False), (1.02, False)):
        statistic = float(out.square().sum()) / (1.3 * 0.7 / 50 * factor) ** 2
        tail = 2 * min(stats.chi2.cdf(statistic, len(out)), stats.chi2.sf(statistic, len(out)))
        assert bool(tail > 1e-6) is accepted


def test_an_empty_cohort_is_a_step(tmp_path: Path) -> None:
    made = source(tmp_path, Answers(0, lambda user, round: None), plan(steps=2), linear())
    assert norm(made.release()) > 0
    made.release()
    with pytest.raises(hs.errors.BudgetExceeded):
        made.release()
    assert made.out.count == 2


@settings(max_examples=50 * MANY)
@given(
    values=st.lists(st.floats(width=32) | st.sampled_from(BAD), min_size=21, max_size=21),
    limit=st.sampled_from((1e-3, 1.0, 30.0)),
)
def test_no_contribution_moves_the_sum_by_more_than_the_clip_norm(values: list[float], limit: float) -> None:
    model = linear()
    numbers = torch.tensor(values, dtype=torch.float32)
    folds = [Fold(trainable(model), limit, expected=100) for _ in range(2)]
    folds[1].add(Contribution([numbers[:18].view(3, 6), numbers[18:]]))
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):  # in one of the two sums, all others come after it and are rounded otherwise
        other = [torch.randn(3, 6, generator=generator) + 1, torch.randn(3, generator=generator)]
        for fold in folds:
            fold.add(Contribution(other))
    moved = flatten(folds[1].total.tensors) - flatten(folds[0].total.tensors)
    assert float(moved.norm()) <= limit
    finite = bool(torch.isfinite(numbers).all())
    if finite and 1e-20 < float(numbers.double().norm()) < limit / 2:
        torch.testing.assert_close(moved, numbers.double(), rtol=1e-5, atol=1e-3 * limit)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.ones(3, 6)],
        [torch.ones(6, 3), torch.ones(3)],
        [torch.ones(3, 6), torch.ones(1)],
        [torch.ones(3, 6, dtype=torch.int64), torch.ones(3)],
        [torch.ones(3, 6, dtype=torch.complex64), torch.ones(3)],
        [torch.ones(3, 6), torch.ones(3), torch.ones(3)],
        [torch.full((3, 6), math.nan), torch.ones(3)],
        [torch.full((3, 6), 2e153, dtype=torch.float64), torch.full((3,), 7e153, dtype=torch.float64)],
        [torch.ones(3, 6).to_sparse(), torch.ones(3)],
        [torch.ones(3, 6), None],
        None,
    ],
)
def test_what_does_not_fit_changes_nothing(tensors: Any) -> None:
    fold = Fold(trainable(linear()), 1.0)
    fold.add(Contribution(tensors))
    assert norm(fold.total.tensors) == 0


def test_the_norm_is_right_where_small_numbers_are_many() -> None:
    """A few ones among 2^-12: a sum of squares in float32 over all of them would lose the small ones."""
    model = nn.Linear(1 << 12, 1 << 4, bias=False)
    values = torch.full((1 << 4, 1 << 12), 2.0**-12)
    values[0, :4] = 1.0
    fold = Fold(trainable(model), 1.0)
    fold.add(Contribution([values]))
    assert norm(fold.total.tensors) == pytest.approx(1 / (1 + 5.4e-4), rel=3e-5)


def test_a_silo_is_capped_at_the_users_it_was_asked_for() -> None:
    fold = Fold(trainable(linear()), 2.0, users=7)
    fold.add(Contribution([torch.full((3, 6), 1e6), torch.zeros(3)], users=7))
    assert norm(fold.total.tensors) == pytest.approx(14.0, rel=1e-3)
    assert norm(fold.total.tensors) <= 14.0


@pytest.mark.parametrize("users", [0, -5, True, 1.5, math.nan, math.inf, -math.inf, 8, 10**9, "1", None, [1]])
def test_a_number_of_users_that_cannot_be_adds_nothing(users: Any) -> None:
    """Neither in the memory of the total nor by making room for others."""
    fold, one = Fold(trainable(linear()), 1.0, users=7), [torch.full((3, 6), 1e9), torch.zeros(3)]
    fold.add(Contribution(one, users))
    assert norm(fold.total.tensors) == 0
    for _ in range(9):
        fold.add(Contribution(one))
    assert norm(fold.total.tensors) == pytest.approx(7.0, rel=1e-3)
    assert norm(fold.total.tensors) <= 7.0


@pytest.mark.parametrize("whole", [int, np.int64])
def test_a_fold_that_was_told_of_no_users_takes_one_at_a_time(whole: Any) -> None:
    fold, one = Fold(trainable(linear()), 1.0), [torch.full((3, 6), 1e9), torch.zeros(3)]
    for k, so_far in ((2, 0.0), (1, 1.0), (1, 2.0)):
        fold.add(Contribution(one, whole(k)))
        assert norm(fold.total.tensors) == pytest.approx(so_far, rel=1e-3)


class Broken:
    """Users of which some cannot be read, some have no rows and some have rows that the loss refuses."""

    def size(self) -> int:
        return 4

    def rows(self, user: int, limit: int) -> Any:
        if user == 0:
            raise OSError("unreadable")
        x, y = columns(3)
        return {1: (x[:0], y[:0]), 2: (x, y + 9), 3: (x, y)}[user]


def test_users_who_cannot_be_used_are_left_out_in_silence(tmp_path: Path) -> None:
    model = linear()
    engine = InProcess(PrivateUsers(Broken()), LOCAL)
    asked = Round(step=0, model=model, loss_fn=loss_fn, users=torch.arange(4), max_grad_norm=1.0, seed=0)
    before = flatten(trainable(model)).clone()
    assert len(list(engine.contributions(asked))) == 1
    assert torch.equal(flatten(trainable(model)), before)


def test_a_refused_step_stays_refused(tmp_path: Path) -> None:
    """A step fails after its intent, the next is beyond the plan: however often it is tried, nothing is released."""

    def fails(user: int, round: Round) -> None:
        raise ConnectionError

    made = source(tmp_path, Answers(50, fails), plan(steps=1, sampling_rate=1.0), linear())
    with pytest.raises(ConnectionError):
        made.release()
    for _ in range(3):
        with pytest.raises(hs.errors.BudgetExceeded):
            made.release()
    assert made.out.count == 0


def test_nobody_counts_twice(tmp_path: Path) -> None:
    """An engine that brings five contributions for one drawn user moves the release by one clip norm."""

    class Repeats(Answers):
        def contributions(self, round: Round) -> Iterator[Contribution]:
            yield from 5 * [Contribution([torch.ones(3, 6), torch.ones(3)])]

    p = plan(sampling_rate=1.0, expected_batch_size=1.0, noise_multiplier=1e-9)
    out = source(tmp_path, Repeats(1, lambda user, round: None), p, linear()).release()
    assert norm(out) == pytest.approx(1.0, rel=1e-3)


class KeepsAMean(nn.Module):
    """Puts a new tensor in the place of its buffer, of an attribute, or in an object that nobody follows."""

    mean: Tensor

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear = linear()
        if place == "buffer":
            self.register_buffer("mean", torch.zeros(6))
        else:
            self.mean = torch.zeros(6)
        self.keeper = SimpleNamespace(mean=self.mean) if place == "hidden" else None

    def forward(self, x: Tensor) -> Tensor:
        keeper: Any = self.keeper or self
        keeper.mean = 0.9 * keeper.mean + 0.1 * x.detach().mean(0)
        out: Tensor = self.linear(x - keeper.mean)
        return out


def test_what_a_layer_keeps_does_not_reach_the_next_user(tmp_path: Path) -> None:
    local = LocalTraining(lr=0.1)
    for model in (KeepsAMean("buffer"), KeepsAMean("attribute")):
        first = flatten(local_update(model, loss_fn, columns(4), local))
        local_update(model, loss_fn, columns(4, seed=1), local)
        assert torch.equal(flatten(local_update(model, loss_fn, columns(4), local)), first)
        assert not model.mean.any()
    public = PublicUsers(hidden := KeepsAMean("hidden"), loss_fn, [columns(4)], local)
    with pytest.raises(UnsupportedLayer, match="another user"):
        trainer(hidden, plan()).fit(InProcess(users(), local), public, run_dir=tmp_path)


def test_a_mistake_in_the_loss_is_told_before_anything_is_spent(tmp_path: Path) -> None:
    def mistaken(model: Any, batch: Any) -> Tensor:
        raise NameError("misspelt")

    model = linear()
    t = hs.Trainer(model, mistaken, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), plan=plan())
    with pytest.raises(ConfigError, match="misspelt"):
        t.fit(InProcess(users(), LOCAL), columns(4), run_dir=tmp_path)
    assert not hs.Ledger.open(tmp_path / "ledger.jsonl").runs


def test_public_rows_of_another_kind_are_not_trained_on_as_a_users(tmp_path: Path) -> None:
    """With a public loss of its own, public rows need not suit the private one: here they are numbers to be small."""

    def small(model: Any, batch: Any) -> Tensor:
        return model(batch.expand(-1, 6)).square().mean(1)  # type: ignore[no-any-return]

    t = trainer(linear(), plan(), mirror=hs.FirstOrder(0.7), public_loss_fn=small)
    assert t.fit(InProcess(users(), LOCAL), torch.ones(4, 1), run_dir=tmp_path).updates == 5


def test_a_users_lack_of_memory_is_nobody_elses() -> None:
    class Hungry(Broken):
        def rows(self, user: int, limit: int) -> Any:
            if user == 0:
                raise MemoryError
            return columns(3)

    asked = Round(step=0, model=linear(), loss_fn=loss_fn, users=torch.arange(4), max_grad_norm=1.0, seed=0)
    assert len(list(InProcess(PrivateUsers(Hungry()), LOCAL).contributions(asked))) == 3


def test_local_training_leaves_no_trace_in_buffers() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    engine = InProcess(users(4), LOCAL)
    asked = Round(step=0, model=model, loss_fn=loss_fn, users=torch.arange(4), max_grad_norm=1.0, seed=0)
    assert len(list(engine.contributions(asked))) == 4
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_local_update_is_sgd() -> None:
    """Against torch's own SGD: two epochs over 6 of 7 rows, in batches of 4."""
    rows, model, twin = columns(7), linear(), linear()
    local = LocalTraining(lr=0.3, batch_size=4, epochs=2, max_examples=6)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.3)
    for _ in range(2):
        for chosen in (slice(0, 4), slice(4, 6)):
            sgd.zero_grad()
            torch.autograd.backward(loss_fn(twin, (rows[0][chosen], rows[1][chosen])).mean())
            sgd.step()
    update = flatten(local_update(model, loss_fn, rows, local))
    torch.testing.assert_close(update, flatten(trainable(model)) - flatten(trainable(twin)))


def test_public_users_are_a_pure_function_of_the_step() -> None:
    model = linear()
    group = [columns(9, seed) for seed in range(4)]
    psi = PublicUsers(model, loss_fn, group, LOCAL, cohort=2, max_norm=0.05)
    first, other = psi.gradient(step=1), psi.gradient(step=2)
    assert norm(first) <= 0.05 * (1 + 1e-6)
    assert torch.equal(flatten(first), flatten(psi.gradient(step=1)))
    assert not torch.equal(flatten(first), flatten(other))
    shifted = [p.detach() + 1 for p in trainable(model)]
    assert not torch.equal(flatten(psi.gradient(shifted, step=1)), flatten(first))
    assert torch.equal(flatten(trainable(model)), flatten(trainable(linear())))


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    """A callback raises in the middle; the second fit ends with all updates, and the ledger counts every round."""

    def made(stop: int | None) -> hs.Trainer:
        model = linear()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=0.5, momentum=0.9 * (kind == "momentum")
        )
        if kind == "adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def callback(report: StepReport) -> None:
            if report.step == stop:
                raise KeyboardInterrupt

        p = plan(steps=12, spare_steps=6)
        return trainer(model, p, optimizer=optimizer, callbacks=[callback], checkpoint_seconds=0.0)

    with pytest.raises(KeyboardInterrupt):
        made(7).fit(InProcess(users(), LOCAL), run_dir=tmp_path)
    result = made(None).fit(InProcess(users(), LOCAL), run_dir=tmp_path)
    assert (result.updates, result.stopped) == (12, "finished")
    assert result.statement["unit"] == "user"
    assert result.statement["spent_so_far"]["steps"] == 13


def test_faulty_clients_neither_stop_nor_skew(tmp_path: Path) -> None:
    """20 clients, 6 of them faulty in turn, 50 rounds; one client moves the mean by at most C / expected cohort."""
    faults: list[Any] = [math.nan, 1e9, 0.0, "shape", None, "replay"]
    model, p = linear(), plan(steps=50, sampling_rate=1.0, expected_batch_size=20.0, noise_multiplier=0.5)

    def answer(user: int, round: Round) -> list[Tensor] | None:
        good = [torch.full((3, 6), 0.01), torch.full((3,), 0.01)]
        fault = faults[(user + round.step) % 6] if user < 6 else 0.01
        if fault is None:
            return None
        if fault == "shape":
            return good[:1]
        return good if fault == "replay" else [torch.full_like(t, fault) for t in good]

    result = trainer(model, p).fit(Answers(20, answer), run_dir=tmp_path / "all")
    assert result.updates == 50
    assert all(bool(torch.isfinite(t).all()) for t in trainable(model))
    for fault in (math.nan, 1e9, -1e30, 0.5):
        one = partial(_one_client, [torch.full((3, 6), fault), torch.zeros(3)])
        engines = (Answers(20, lambda user, round: None), Answers(20, one))
        outs = [
            source(tmp_path / f"{fault}{i}", engine, p, linear(), UnsafeSeed(0)).release()
            for i, engine in enumerate(engines)
        ]
        assert norm([a - b for a, b in zip(*outs, strict=True)]) <= 1.0 / 20 * (1 + 1e-6)


def _one_client(sent: list[Tensor], user: int, round: Round) -> list[Tensor] | None:
    return sent if user == 0 else None


def test_plans_and_engines_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'user'"):
        trainer(linear(), plan(unit="example")).fit(InProcess(users(), LOCAL), run_dir=tmp_path)
    with pytest.raises(ConfigError, match="lr"):
        LocalTraining(lr=0.0)
