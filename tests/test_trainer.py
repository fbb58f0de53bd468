"""The loop: it is Algorithm 1, it resumes, it stops at its budget, and its public branch sees nothing private."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfsilver as hs
from halfsilver._core.averaging import Average
from halfsilver._core.tensors import flatten, trainable
from halfsilver.errors import CheckpointCorrupt, ConfigError, LedgerCorrupt, RunFolderBusy
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.runs.folder import RunFolder
from halfsilver.trainer import StepReport


def loss_fn(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y, reduction="none")


def accuracy(model: Any, batch: Any) -> Tensor:
    return torch.eq(model(batch[0]).argmax(1), batch[1]).double()


def rows(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return x, (x[:, :3] + 0.1 * torch.randn(n, 3, generator=g)).argmax(1)


def plan(**changes: Any) -> hs.PrivacyPlan:
    defaults = {"steps": 20, "sampling_rate": 0.1, "expected_batch_size": 40, "noise_multiplier": 1.0}
    return hs.PrivacyPlan(**{**defaults, **changes})


def network(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *extra, nn.Linear(16, 3))


def trainer(model: nn.Module | None = None, **options: Any) -> hs.Trainer:
    model = model or network()
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "plan": plan(), **options}
    return hs.Trainer(model, loss_fn, **options)


def weights(model: nn.Module) -> Tensor:
    return flatten([p.detach() for p in trainable(model)])


def test_one_step_is_the_formula(tmp_path: Path) -> None:
    """theta - eta (alpha g~ + (1 - alpha) grad Psi), with g~ recorded and grad Psi by plain autograd."""
    model, alpha, lr = network(), 0.7, 0.5
    before, public = weights(model).clone(), rows(30, 1)
    psi = loss_fn(model, public).mean()
    grad = flatten(torch.autograd.grad(psi, trainable(model)))
    recorded: list[Tensor] = []
    original = PrivateGradient.release

    def recording(self: PrivateGradient) -> list[Tensor]:
        released = original(self)
        recorded.append(flatten(released))
        return released

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateGradient, "release", recording)
        trainer(model, plan=plan(steps=1), mirror=hs.FirstOrder(alpha)).fit(rows(400), public, run_dir=tmp_path)
    expected = before - lr * (alpha * recorded[0] + (1 - alpha) * grad)
    torch.testing.assert_close(weights(model), expected, rtol=1e-5, atol=1e-6)


def test_it_learns_and_writes_its_folder(tmp_path: Path) -> None:
    t = trainer(plan=plan(steps=60, noise_multiplier=0.5), metrics={"accuracy": accuracy}, mirror=hs.FirstOrder(0.9))
    t.pretrain(rows(60, 1), epochs=5)
    start = t.evaluate(rows(500, 2))
    result = t.fit(rows(2000), rows(60, 1), run_dir=tmp_path / "a", test=rows(500, 2), test_every=20)
    assert result.updates == 60
    assert result.stopped == "finished"
    assert result.history[-1]["accuracy"] > max(0.6, start["accuracy"])
    assert [r["step"] for r in result.history if "loss" in r] == [0, 20, 40, 60]
    assert result.history[0] == {"step": 0, **start}
    names = {p.name for p in (tmp_path / "a").iterdir()}
    assert {
        "config.json",
        "statement.json",
        "metrics.jsonl",
        "checkpoint.safetensors",
        "ledger.jsonl",
    } <= names
    statement = json.loads((tmp_path / "a" / "statement.json").read_text())
    assert statement["spent_so_far"]["steps"] == 60
    assert statement["epsilon_planned"]["pld"] == pytest.approx(result.epsilon(statement["delta"]))
    assert statement["not_private_because"] == []


def test_a_finished_run_is_loaded_not_repeated(tmp_path: Path) -> None:
    t = trainer()
    t.fit(rows(400), run_dir=tmp_path)
    trained = weights(t.model).clone()
    again = trainer()
    result = again.fit(rows(400), run_dir=tmp_path)
    assert result.stopped == "finished"
    assert torch.equal(weights(again.model), trained)
    assert result.statement["spent_so_far"]["steps"] == 20


class StopHere(Exception):
    pass


def stop_at(step: int) -> Any:
    def callback(report: StepReport) -> None:
        if report.step == step:
            raise StopHere

    return callback


def test_without_a_folder_the_run_is_in_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = (trainer(plan=plan(steps=2)).fit(rows(50, 0)) for _ in range(2))
    assert first.run_dir.parent == second.run_dir.parent == tmp_path
    assert first.run_dir != second.run_dir
    assert str(second.run_dir) in caplog.text
    assert (second.run_dir / "statement.json").exists()


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[4, 8, 15]),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=21),
}


@pytest.mark.parametrize(("kind", "schedule"), [("sgd", "cosine"), ("adam", "multistep"), ("sgd", "onecycle")])
def test_resume_goes_on_from_the_checkpoint(tmp_path: Path, kind: str, schedule: str) -> None:
    """Frozen releases: interrupted and resumed, every step after the checkpoint equals the uninterrupted run's."""

    def make(**options: Any) -> hs.Trainer:
        model = network()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        if kind == "adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        scheduler = SCHEDULERS[schedule](optimizer)
        return trainer(
            model, optimizer=optimizer, scheduler=scheduler, average=0.8, plan=plan(spare_steps=30),
            mirror=hs.chain(hs.clip_released(1.0), hs.FirstOrder(hs.cosine(end=0.5))), public_batch_size=8,
            checkpoint_seconds=0.0, **options,
        )  # fmt: skip

    def frozen(self: PrivateGradient) -> list[Tensor]:
        step = len(released_at)
        released_at.append(step)
        self.out.intend()
        self.out.noisy(ClippedSum.zeros(trainable(self._model), 1.0))
        return [torch.full_like(p, math.sin(float(step))) for p in trainable(self._model)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateGradient, "release", frozen)
        released_at: list[int] = []
        whole = make()
        whole.fit(rows(400), rows(50, 1), run_dir=tmp_path / "whole")
        released_at = []
        with pytest.raises(StopHere):
            make(callbacks=[stop_at(7)]).fit(rows(400), rows(50, 1), run_dir=tmp_path / "cut")
        released_at = released_at[:6]  # the step that was under way is done again
        resumed = make()
        resumed.fit(rows(400), rows(50, 1), run_dir=tmp_path / "cut")
    assert torch.equal(weights(whole.model), weights(resumed.model))
    assert hs.Ledger.open(tmp_path / "cut" / "ledger.jsonl").counts()[0].count == 21


def test_repeated_steps_use_up_the_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stopped at step 8 with the checkpoint at 1: 7 of 20 steps are gone, so 13 updates remain, and it says so."""
    with pytest.raises(StopHere):
        trainer(callbacks=[stop_at(8)], checkpoint_seconds=1e9).fit(rows(400), run_dir=tmp_path)
    spent = hs.Ledger.open(tmp_path / "ledger.jsonl").counts()[0].count
    result = trainer(checkpoint_seconds=1e9).fit(rows(400), run_dir=tmp_path)
    assert spent >= 8
    assert result.stopped == "budget"
    assert result.updates == 21 - spent
    assert f"ended early, after {21 - spent} of 20 steps" in caplog.text
    assert result.statement["spent_so_far"]["steps"] == 20


def test_metrics_of_repeated_steps_are_not_kept_twice(tmp_path: Path) -> None:
    options: dict[str, Any] = {"plan": plan(spare_steps=40), "checkpoint_seconds": 1e9}
    with pytest.raises(StopHere):
        trainer(callbacks=[stop_at(5)], **options).fit(rows(400), run_dir=tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lr"')  # cut short by a crash
    result = trainer(**options).fit(rows(400), run_dir=tmp_path, test=rows(50, 2))
    assert [r["step"] for r in result.history] == list(range(1, 21))


def test_a_run_stopped_by_its_budget_is_evaluated_too(tmp_path: Path) -> None:
    with pytest.raises(StopHere):
        trainer(callbacks=[stop_at(5)], checkpoint_seconds=1e9).fit(rows(400), run_dir=tmp_path)
    result = trainer().fit(rows(400), run_dir=tmp_path, test=rows(50, 2))
    assert result.stopped == "budget"
    assert "loss" in result.history[-1]


def test_a_trainer_is_for_one_run(tmp_path: Path) -> None:
    t = trainer()
    t.fit(rows(400), run_dir=tmp_path / "a")
    with pytest.raises(ConfigError, match="Make new ones"):
        t.fit(rows(400), run_dir=tmp_path / "b")


def test_a_moved_folder_goes_on(tmp_path: Path) -> None:
    with pytest.raises(StopHere):
        trainer(callbacks=[stop_at(5)], checkpoint_seconds=0.0).fit(rows(400), run_dir=tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert trainer().fit(rows(400), run_dir=tmp_path / "b").updates > 10


def test_a_lost_checkpoint_of_a_finished_run_is_an_error(tmp_path: Path) -> None:
    trainer().fit(rows(400), run_dir=tmp_path)
    (tmp_path / "checkpoint.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match="is gone"):
        trainer().fit(rows(400), run_dir=tmp_path)


def test_averages_in_half_precision_do_not_stall() -> None:
    average = Average(0.999)
    for i in range(2000):
        average.update([torch.tensor([i / 2000], dtype=torch.bfloat16)])
    assert float(average.tensors[0]) == pytest.approx(0.5 + 0.5 * 0.13, abs=0.07)


@pytest.mark.nightly
def test_two_runs_share_the_data_sets_budget(tmp_path: Path) -> None:
    p = plan(steps=30, sampling_rate=1.0, expected_batch_size=400, noise_multiplier=8.0)
    budget = hs.Budget(epsilon=p.epsilon(1e-5) * 1.2, delta=1e-5)
    ledger = hs.Ledger.open(tmp_path / "data-ledger.jsonl", budget=budget)
    results = list[hs.trainer.RunResult]()

    def other(report: hs.trainer.StepReport) -> None:
        if report.step == 2:
            results.append(
                trainer(plan=p).fit(rows(400), run_dir=tmp_path / "a", ledger=tmp_path / "data-ledger.jsonl")
            )

    second = trainer(plan=p, callbacks=[other]).fit(rows(400), run_dir=tmp_path / "b", ledger=ledger)
    (first,) = results
    assert (first.updates, first.stopped) == (30, "finished")
    assert second.stopped == "budget"
    assert 2 <= second.updates < 30
    assert ledger.spent(1e-5) <= budget.epsilon
    assert second.statement["all_runs_on_this_data"]["runs"] == 2
    before = ledger.path.read_bytes()
    with pytest.raises(hs.errors.BudgetExceeded, match="does not fit beside what is spent"):
        trainer(plan=p).fit(rows(400), run_dir=tmp_path / "c", ledger=ledger)
    assert ledger.path.read_bytes() == before


@pytest.mark.parametrize("change", ["added", "removed", "nan", "same"])
def test_public_branch_is_bit_identical_on_neighbours(tmp_path: Path, change: str) -> None:
    """Dropout on, the private pass really run, its releases frozen: all iterates agree in every bit."""
    x, y = rows(400)
    other = {
        "added": (torch.cat([x, 9 * x[:1]]), torch.cat([y, y[:1]])),
        "removed": (x[:-1], y[:-1]),
        "nan": (x.clone().index_fill_(0, torch.tensor([3]), math.nan), y),
        "same": (x, y),
    }[change]
    original = PrivateGradient.release

    def frozen(self: PrivateGradient) -> list[Tensor]:
        original(self)
        return [torch.full_like(p, 0.01 * self.out.count) for p in trainable(self._model)]

    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateGradient, "release", frozen)
        for i, data in enumerate(((x, y), other)):
            model = network(nn.Dropout(0.3))
            t = trainer(model, mirror=hs.FirstOrder(0.6), public_batch_size=16)
            t.fit(data, rows(50, 1), run_dir=tmp_path / str(i))
            ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])


def test_averages(tmp_path: Path) -> None:
    iterates: list[Tensor] = []
    model = network()
    t = trainer(model, average="uniform", callbacks=[lambda r: iterates.append(weights(model).clone())])
    t.fit(rows(400), run_dir=tmp_path)
    torch.testing.assert_close(weights(model), torch.stack(iterates).mean(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="average"):
        trainer(average=1.5)


def test_private_metrics_are_off_unless_said(tmp_path: Path) -> None:
    handle = hs.PrivateData(rows(400))
    with pytest.raises(ConfigError, match="metrics_not_private=True"):
        trainer().fit(handle, run_dir=tmp_path / "a", test=handle)
    t = trainer(metrics_not_private=True, unsafe_seed=3)
    result = t.fit(handle, run_dir=tmp_path / "b", test=handle)
    assert result.history[-1]["loss"] == pytest.approx(t.evaluate(rows(400))["loss"], rel=1e-5)
    assert len(result.statement["not_private_because"]) == 2


def test_unsafe_seed_reproduces_and_os_entropy_does_not(tmp_path: Path) -> None:
    ends = []
    for i, seed in enumerate((1, 1, None, None)):
        t = trainer(unsafe_seed=seed)
        t.fit(rows(400), run_dir=tmp_path / str(i))
        ends.append(weights(t.model))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[2], ends[3])


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked(), pytest.raises(RunFolderBusy):
        trainer().fit(rows(400), run_dir=tmp_path)


def test_a_run_does_not_go_on_without_its_ledger(tmp_path: Path) -> None:
    with pytest.raises(StopHere):
        trainer(callbacks=[stop_at(5)], checkpoint_seconds=0.0).fit(rows(400), run_dir=tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    text = ledger.read_text()
    ledger.unlink()
    with pytest.raises((LedgerCorrupt, FileNotFoundError)):
        trainer().fit(rows(400), run_dir=tmp_path)
    ledger.write_text("".join(text.splitlines(keepends=True)[:3]))  # an older copy of it
    with pytest.raises((LedgerCorrupt, CheckpointCorrupt)):
        trainer().fit(rows(400), run_dir=tmp_path)


def test_state_dict_round_trip() -> None:
    a, b = trainer(), trainer()
    with torch.no_grad():
        for p in a.model.parameters():
            p.add_(1.0)
    b.load_state_dict(a.state_dict())
    assert torch.equal(weights(a.model), weights(b.model))


def test_user_level_runs(tmp_path: Path) -> None:
    keyed = hs.PrivateData(rows(60), users=[i // 3 for i in range(60)])
    p = plan(unit="user", sampling_rate=0.5, expected_batch_size=10, steps=3)
    result = trainer(plan=p).fit(keyed, run_dir=tmp_path)
    assert result.statement["unit"] == "user"


@pytest.mark.parametrize("copied", [False, True])
def test_an_optimizer_with_a_scheduler_is_taken(copied: bool) -> None:
    """A scheduler replaces `step` of its optimizer by a function that looks as if it were not bound."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer = copy.deepcopy((model, optimizer)) if copied else (model, optimizer)
    assert trainer(model, optimizer=optimizer).optimizer is optimizer
