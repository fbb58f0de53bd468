"""Runs with correlated noise: who takes part, what the ledger charges, and noise that begins anew after a loss."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import halfsilver as hs
from halfsilver.errors import BudgetExceeded, ConfigError, LedgerCorrupt, RunFolderBusy
from halfsilver.privacy.correlated import sensitivity
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import UnsafeSeed
from halfsilver.privacy.ledger.records import digest, line_of
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.noise_chain import NoiseChain, rounding
from halfsilver.privacy.sampling import turn_chunks
from halfsilver.privacy.selection import Selection
from halfsilver.privacy.strategies import Banded, Buffered, Correlated, Participation
from halfsilver.runs.verify import verify

BUFFERED, BANDED = Buffered((0.9, 0.3), (0.4, 0.2)), Banded((1.0, 0.5, 0.2))
ROWS = 60


def noise(separation: int = 6, strategy: Banded | Buffered = BUFFERED, order_kept: bool = True) -> Correlated:
    return Correlated(separation=separation, strategy=strategy, order_kept=order_kept)


def plan(**changes: Any) -> hs.PrivacyPlan:
    given = {"steps": 30, "sampling_rate": 1 / 6, "expected_batch_size": 10, "noise_multiplier": 2.0, "noise": noise()}
    return hs.PrivacyPlan(**{**given, **changes})


def rows(n: int = ROWS) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def source(folder: Path, data: Any, p: hs.PrivacyPlan, model: nn.Module | None = None, **more: Any) -> PrivateGradient:
    ledger = hs.Ledger.open(folder / "ledger.jsonl", unit=p.unit)
    private = data if isinstance(data, PrivateData) else PrivateData(data)
    return PrivateGradient(model or nn.Linear(6, 3), loss_fn, private, p, ledger=ledger, run_id="run", **more)


class Watching(Dataset[Any]):
    """Notes which records are read in which step of the ledger, and fails when told to."""

    def __init__(self, order: Sequence[int] = range(ROWS)) -> None:
        x, y = rows()
        self.x, self.y = x[list(order)], y[list(order)]
        self.step: Callable[[], int] = lambda: -1
        self.read: dict[int, list[int]] = {i: [] for i in range(len(order))}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        self.read[i].append(self.step())
        return self.x[i], self.y[i]


# ---- who takes part


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 7), st.integers(0, 40), st.integers(1, 4))
def test_turns_are_dealt_out_once_and_depend_on_the_place_alone(
    population: int, turns: int, chunk: int, step: int, ranks: int
) -> None:
    shares = [list(turn_chunks(population, turns, chunk, step, (rank, ranks))) for rank in range(ranks)]
    assert all(len(piece) <= chunk for share in shares for piece in share)
    assert all(piece.dtype == torch.int64 for share in shares for piece in share)
    found = sorted(i for share in shares for piece in share for i in piece.tolist())
    assert found == [i for i in range(population) if i % turns == step % turns]


@pytest.mark.parametrize("sampling_rate", [1 / 6, 0.15, 0.1])
def test_every_record_takes_its_turn_and_none_comes_early(tmp_path: Path, sampling_rate: float) -> None:
    data = Watching()
    mechanism = source(
        tmp_path, PrivateData(data, example=(torch.zeros(6), 0)), plan(sampling_rate=sampling_rate, steps=25)
    )
    data.step = lambda: mechanism.out.round
    for _ in range(25):
        mechanism.release()
    turns = mechanism.plan.batches_per_pass
    assert turns == {1 / 6: 6, 0.15: 6, 0.1: 10}[sampling_rate]
    assert all(steps == list(range(i % turns, 25, turns)) for i, steps in data.read.items())


def test_separation_holds_over_losses_and_restarts(tmp_path: Path) -> None:
    """80 steps, of which a third fail before the noise, in processes that go on where the ledger is. The distance of
    two steps of one record, counted by the ledger, is never below the separation.
    """
    chance, data = random.Random(0), Watching()
    private = PrivateData(data, example=(torch.zeros(6), 0))
    p, done = plan(steps=80), 0
    while done < 80:
        mechanism = source(tmp_path, private, p)
        data.step = partial(getattr, mechanism.out, "round")
        for _ in range(chance.randint(1, 9)):
            if done == 80:
                break
            if chance.random() < 1 / 3:
                mechanism.out.intend()  # and nothing comes of it
            else:
                mechanism.release()
            assert mechanism.out._ledger is not None
            done = mechanism.out._ledger.runs["run"].spent
        del mechanism
    apart = [later - earlier for steps in data.read.values() for earlier, later in pairwise(steps)]
    assert min(apart) >= 6
    assert len(apart) > 100


def test_another_order_of_the_records_brings_nobody_early(tmp_path: Path) -> None:
    """Records are known by their place unless they are said to keep it. So a run that is resumed waits for a pass."""
    p, when = plan(steps=60, noise=noise(order_kept=False)), dict[int, list[int]]()
    for seed in range(5):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed)).tolist()
        data = Watching(order)
        mechanism = source(tmp_path, PrivateData(data, example=(torch.zeros(6), 0)), p)
        data.step = partial(getattr, mechanism.out, "round")
        for _ in range(4):
            mechanism.release()
        for place, steps in data.read.items():
            when.setdefault(order[place], []).extend(steps)
    apart = [later - earlier for steps in when.values() for earlier, later in pairwise(steps)]
    assert min(apart) >= 6
    assert max(map(max, when.values())) == 5 * 4 + 4 * 5 - 1  # five steps are skipped four times


def least_distance_after_takeovers(folder: Path, seed: int, *, skips: bool = True) -> int:
    """Of two steps of one record, in the numbers of the ledger, where processes with other orders take a run over.

    Each process before tries to go on, in turn with the new one, and is refused.
    """
    chance, p = random.Random(seed), plan(steps=90, noise=noise(order_kept=False))
    when, owners = dict[int, list[int]](), list[PrivateGradient]()
    for number in range(3):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1000 * seed + number)).tolist()
        data = Watching(order)
        owner = source(folder, PrivateData(data, example=(torch.zeros(6), 0)), p, performance=FAST)
        owner.out.pause = owner.out.pause if skips else 0
        data.step = partial(getattr, owner.out, "round")
        for _ in range(chance.randint(2, 9)):
            owner.release()
            for earlier in owners:
                with pytest.raises(RunFolderBusy):
                    earlier.release()
        owners.append(owner)
        for place, steps in data.read.items():
            when.setdefault(order[place], []).extend(steps)
    assert owner.out._ledger is not None
    assert sum(out.out.count for out in owners) <= owner.out._ledger.runs["run"].spent
    return min(later - earlier for steps in when.values() for earlier, later in pairwise(sorted(steps)))


FAST = hs.Performance(backend="vmap", micro_batch_size=16)


def test_whoever_takes_a_run_over_waits_and_the_owner_before_is_refused(tmp_path: Path) -> None:
    assert least_distance_after_takeovers(tmp_path / "right", 0) >= 6
    assert least_distance_after_takeovers(tmp_path / "wrong", 0, skips=False) < 6


@pytest.mark.nightly
def test_a_takeover_without_a_pause_is_found_in_10_of_10_runs_and_no_alarm_is_false(tmp_path: Path) -> None:
    found = sum(least_distance_after_takeovers(tmp_path / f"w{i}", i, skips=False) < 6 for i in range(10))
    false = sum(least_distance_after_takeovers(tmp_path / f"r{i}", i) < 6 for i in range(100))
    assert (found, false) == (10, 0)


def test_steps_that_somebody_else_counted_end_the_chain(tmp_path: Path) -> None:
    """A torn record of another run is charged to this one, so that its steps no longer follow each other."""
    mechanism = source(tmp_path, rows(), plan())
    mechanism.out._block = 1
    mechanism.release()
    mechanism.release()
    chain = mechanism.out._chain
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"count":1,')
    mechanism.release()
    assert mechanism.out.round == 4  # the next; step 2 was charged for the torn record
    assert mechanism.out._chain is not None
    assert mechanism.out._chain is not chain
    assert mechanism.out._chain._step == 1


def test_a_chain_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="secret"):
        pickle.dumps(NoiseChain(BUFFERED, 3, rounds=5, scale=1e6))


def test_noise_that_float64_cannot_hold_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    slow = noise(strategy=Buffered((1 - 1e-9,), (1e-3,)))
    with pytest.raises(ConfigError, match="arithmetic"):
        source(tmp_path, rows(), plan(noise=slow, noise_multiplier=1e5), nn.Linear(6, 3))
    assert hs.Ledger.open(tmp_path / "ledger.jsonl").runs == {}


def test_the_number_of_a_step_is_never_given_twice(tmp_path: Path) -> None:
    p, seen = plan(steps=40), []
    for used in (3, 1, 4, 2):
        mechanism = source(tmp_path, rows(), p)
        mechanism.out._block = 3  # a record for three steps; what a crash leaves of it is lost
        for _ in range(used):
            mechanism.out.intend()
            seen.append(mechanism.out.round)
            mechanism.out.noisy(mechanism._clipped_sum())
    assert seen == sorted(set(seen))
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


# ---- noise


def recovered(column: Tensor, releases: Tensor) -> Tensor:
    """C y, for the first column of C and one release per row."""
    n = len(releases)
    rows_, cols = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    return torch.where(rows_ >= cols, column[(rows_ - cols).clamp(min=0)], 0.0) @ releases


@pytest.mark.parametrize("strategy", [BUFFERED, BANDED])
def test_the_noise_is_that_of_the_strategy_at_the_scale_of_the_plan(
    tmp_path: Path, strategy: Banded | Buffered
) -> None:
    """12 steps without a record. C y is independent noise of step_noise C / batch: chi-square over n = 12 x 60,000
    numbers, and the correlation of neighbouring steps, alpha 1e-6 each. Other coefficients and scales are rejected.
    """
    model, p = nn.Linear(6, 10_000, bias=False), plan(steps=12, noise=noise(strategy=strategy), max_grad_norm=0.7)
    nobody = PrivateData((torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)))
    mechanism = source(tmp_path, nobody, p, model, entropy=UnsafeSeed(3))
    releases = torch.stack([mechanism.release()[0].double().ravel() for _ in range(12)])
    scale = p.step_noise * 0.7 / 10
    right, n = strategy.column(12), releases.numel()

    def consistent(column: Tensor, factor: float) -> bool:
        z = recovered(column, releases).numpy() / (scale * factor)
        total = float((z**2).sum())
        variance = 2 * min(stats.chi2.cdf(total, n), stats.chi2.sf(total, n))
        between = float((z[1:] * z[:-1]).sum()) / np.sqrt(z[1:].size)
        return bool(variance > 1e-6 and 2 * stats.norm.sf(abs(between)) > 1e-6)

    assert consistent(right, 1.0)
    assert not consistent(right, 1.01)
    assert not consistent(right, 0.99)
    shifted = torch.cat([right[:1], right[:1], right[1:-1]])  # off by one place
    assert not consistent(shifted, 1.0)
    assert not consistent(torch.eye(12, dtype=torch.float64)[0], 1.0)


def test_a_lost_step_and_a_restart_begin_a_new_chain(tmp_path: Path) -> None:
    mechanism = source(tmp_path, rows(), plan())
    mechanism.release()
    first = mechanism.out._chain
    assert first is not None
    mechanism.release()
    assert mechanism.out._chain is first
    mechanism.out.intend()
    mechanism.release()  # the one before came to nothing
    second = mechanism.out._chain
    assert second is not None
    assert second is not first
    assert second._step == 1
    again = source(tmp_path, rows(), plan())
    assert again.out._chain is None


def test_no_file_of_a_run_holds_the_noise_that_is_kept(tmp_path: Path) -> None:
    """The chain's state is secret. It is looked for in each file, in every precision and as text."""
    model, p = nn.Linear(6, 3), plan(steps=10)
    trainer = hs.Trainer(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=p,
        checkpoint_seconds=0.0,
        progress=False,
    )
    held: list[Tensor] = []
    follow = NoiseChain.follow

    def noted(self: NoiseChain, fresh: Tensor, start: int) -> Tensor:
        found = follow(self, fresh, start)
        held.append(self._held.clone())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseChain, "follow", noted)
        trainer.fit(rows(), run_dir=tmp_path / "run", delta=1e-3)
    files = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    values = torch.cat([t.ravel() for t in held])
    values = values[values.abs() > 1e3]
    assert len(values) > 100
    for value in values[:200].tolist():
        for found in (np.float64(value).tobytes(), np.float32(value).tobytes(), str(value).encode()):
            assert found not in files


# ---- the plan


def test_the_sensitivity_of_the_plan_is_that_of_all_its_steps() -> None:
    p = plan(spare_steps=4)
    expected = sensitivity(BUFFERED.column(34), Participation(rounds=34, separation=6))
    assert p.step_noise == pytest.approx(2.0 * float(expected) * rounding(34))
    assert p.epsilon(1e-5) == pytest.approx(hs.PrivacyPlan(**ONE).epsilon(1e-5))
    assert p.count(0).count == 0
    assert p.count(17).count == p.count().count == 1


ONE: dict[str, Any] = {"steps": 1, "sampling_rate": 1.0, "expected_batch_size": 1, "noise_multiplier": 2.0}


@pytest.mark.parametrize("strategy", [BUFFERED, BANDED, Banded([1, 0])])  # type: ignore[arg-type]
def test_a_plan_goes_through_json(strategy: Banded | Buffered) -> None:
    p = plan(noise=noise(strategy=strategy))
    again = hs.PrivacyPlan.from_dict(json.loads(json.dumps(p.to_dict())))
    assert again == p
    assert again.fingerprint() == p.fingerprint()
    assert p.fingerprint() != plan(noise=noise(5, strategy)).fingerprint()


def test_independent_plans_are_written_as_before() -> None:
    assert set(hs.PrivacyPlan(**ONE).to_dict()) == {
        "steps",
        "sampling_rate",
        "expected_batch_size",
        "noise_multiplier",
        "max_grad_norm",
        "unit",
        "spare_steps",
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: plan(noise=noise(7)), "separation=7 at most 6"),
        (lambda: plan(noise=Correlated(separation=3)), "strategy"),
        (lambda: plan(noise=Correlated(strategy=BUFFERED)), "separation"),
        (lambda: plan(noise=None), "noise"),
        (lambda: Correlated(separation=0), "separation"),
        (lambda: Correlated(buffers=9), "buffers"),
        (lambda: Correlated(strategy=(1.0, 0.5)), "strategy"),  # type: ignore[arg-type]
        (lambda: Banded(("a",)), "coefficients"),  # type: ignore[arg-type]
        (lambda: hs.PrivacyPlan.from_dict({**plan().to_dict(), "noise": {"separation": 3}}), "strategy|correlated"),
        (lambda: hs.PrivacyPlan.from_dict({**plan().to_dict(), "noise": 3}), "correlated"),
    ],
)
def test_impossible_plans_are_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()


def test_calibration_finds_separation_and_coefficients() -> None:
    p = hs.PrivacyPlan.calibrate(
        epsilon=1, delta=1e-5, population=600, batch_size=100, epochs=2, noise=hs.Correlated(buffers=1), spare_steps=2
    )
    assert isinstance(p.noise, Correlated)
    assert p.noise.separation == 6
    assert p.epsilon() <= 1 < hs.PrivacyPlan(**{**ONE, "noise_multiplier": p.noise_multiplier / 1.001}).epsilon(1e-5)


def test_the_noise_of_sums_is_that_of_dense_matrices() -> None:
    p = plan()
    n = p.steps
    rows_, cols = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    column = BUFFERED.column(n)
    matrix = torch.where(rows_ >= cols, column[(rows_ - cols).clamp(min=0)], 0.0)
    sums = torch.ones(n, n, dtype=torch.float64).tril() @ torch.linalg.inv(matrix)
    assert p.sum_noise() == pytest.approx(p.step_noise * float(sums.square().sum(1).mean().sqrt()))


@pytest.mark.nightly
def test_a_plan_knows_what_sampling_would_leave() -> None:
    """At a large epsilon correlated noise leaves less, and at a small one more."""
    asked: dict[str, Any] = {"delta": 1e-6, "population": 1000, "batch_size": 50, "epochs": 4}
    for epsilon, better in ((8.0, True), (0.3, False)):
        p = hs.PrivacyPlan.calibrate(**asked, epsilon=epsilon, noise=hs.Correlated(buffers=1))
        by_coins = p.sampled()
        assert by_coins.sampler == "poisson"
        assert by_coins.epsilon() == pytest.approx(epsilon, rel=1e-3)
        assert bool(p.sum_noise() < by_coins.sum_noise()) is better


def test_a_selection_of_such_runs_counts_one_mechanism_for_each() -> None:
    assert Selection(each=plan(), trials=5.0).count().trials == (1, 5.0, 0.0)


# ---- ledger, budget, statement


def test_the_first_step_is_charged_for_all(tmp_path: Path) -> None:
    ledger = hs.Ledger.open(tmp_path / "l.jsonl")
    ledger.register_run("a", plan(), block_max=4)
    assert ledger.spent(1e-5) == 0
    ledger.intend("a", 1)
    first = ledger.spent(1e-5)
    assert first == pytest.approx(plan().epsilon(1e-5))
    ledger.intend("a", 4)
    assert ledger.spent(1e-5) == first
    assert ledger.runs["a"].spent == 5
    ledger.register_run("b", plan(steps=7))
    ledger.intend("b")
    assert ledger.spent(1e-5) == pytest.approx(hs.PrivacyPlan(**{**ONE, "steps": 2}).epsilon(1e-5))
    again = hs.Ledger.open(tmp_path / "l.jsonl")
    assert again.spent(1e-5) == ledger.spent(1e-5)


def test_a_budget_grants_a_whole_run_or_nothing(tmp_path: Path) -> None:
    one, two = plan().epsilon(1e-5), hs.PrivacyPlan(**{**ONE, "steps": 2}).epsilon(1e-5)
    ledger = hs.Ledger.open(tmp_path / "l.jsonl", budget=hs.Budget(epsilon=(one + two) / 2, delta=1e-5))
    for name in ("a", "b"):
        ledger.register_run(name, plan(), block_max=40)
    assert ledger.intend("a", 3).count == 3
    with pytest.raises(BudgetExceeded):
        ledger.intend("b")
    assert ledger.intend("a", 40).count == 27
    with pytest.raises(BudgetExceeded, match="all 30 steps"):
        ledger.intend("a")


def test_compaction_and_a_torn_record_keep_the_charge(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    ledger = hs.Ledger.open(path)
    ledger.register_run("a", plan())
    ledger.intend("a")
    ledger.intend("a")
    with path.open("ab") as file:
        file.write(b'{"count":1,')
    assert hs.Ledger.open(path).spent(1e-5) == pytest.approx(plan().epsilon(1e-5))
    ledger = hs.Ledger.open(path)
    ledger.finish("a", 2)
    before = ledger.spent(1e-5)
    assert ledger.compact()
    assert hs.Ledger.open(path).spent(1e-5) == before == pytest.approx(plan().epsilon(1e-5))
    assert hs.Ledger.open(path).runs["a"].spent == 3


def test_a_ledger_with_an_unknown_sampler_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    ledger = hs.Ledger.open(path)
    ledger.register_run("a", plan())
    ledger.intend("a")
    *before, last = path.read_bytes().splitlines()
    record = {**json.loads(last), "sampler": "shuffled"}
    whole = line_of({**record, "hash": digest(record)})  # nothing else is wrong with it
    path.write_bytes(b"\n".join([*before, whole]))
    with pytest.raises(LedgerCorrupt, match="sampler='shuffled'"):
        hs.Ledger.open(path)


def test_a_run_trains_resumes_and_is_verified(tmp_path: Path) -> None:
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
    data = x, (x.sum(1) > 0).long()
    p = plan(steps=40, expected_batch_size=100, spare_steps=3)

    def stop(report: Any) -> None:
        if report.step == 20:
            raise InterruptedError

    def trainer(*callbacks: Callable[[Any], None]) -> hs.Trainer:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return hs.Trainer(model, loss_fn, optimizer=optimizer, plan=p, progress=False, callbacks=callbacks)

    with pytest.raises(InterruptedError):
        trainer(stop).fit(data, run_dir=tmp_path, delta=1e-4)
    second = trainer()
    result, model = second.fit(data, run_dir=tmp_path, delta=1e-4), second.model
    assert result.epsilon() == pytest.approx(p.epsilon(1e-4))
    assert float((model(x).argmax(1) == data[1]).float().mean()) > 0.9
    found = verify(tmp_path)
    assert found["statement"]["sampler"] == "separated"
    assert "correlated" in found["statement"]["mechanism"]
    assert found["statement"]["spent_so_far"]["epsilon_pld"] == pytest.approx(p.epsilon(1e-4))


def test_a_count_of_usable_records_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    trainer = hs.Trainer(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=plan(spare_steps=1, expected_batch_size=1000),
        progress=False,
    )
    with pytest.raises(ConfigError, match=r"noise=.*Independent"):
        trainer.fit(rows(), run_dir=tmp_path, delta=1e-5, check_usable=True)
