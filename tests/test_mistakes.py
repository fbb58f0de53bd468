"""The mistakes that a new user is most likely to make: each is refused in words that say what to do, none by torch."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import halfsilver as hs
from halfsilver.__main__ import main
from halfsilver.errors import BudgetExceeded, HalfsilverError, LedgerCorrupt
from tests.test_trainer import loss_fn, network, plan, rows, trainer

Mistake = Callable[[Path], object]
MIRROR = hs.FirstOrder(0.9)
SPEED = hs.Performance(backend="vmap", micro_batch_size=8)


def fit(folder: Path, private: Any = None, public: Any = None, delta: float | None = None, **options: Any) -> None:
    private = rows(400) if private is None else private
    made = trainer(**{"plan": plan(steps=1), "performance": SPEED, **options})
    made.fit(private, public, run_dir=folder / "run", delta=delta)


def with_loss(loss: Any) -> hs.Trainer:
    model = network()
    return hs.Trainer(model, loss, optimizer=torch.optim.SGD(model.parameters(), lr=1), plan=plan(), performance=SPEED)


def mean_loss(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def spoilt(row: int, value: float, column: int = 0) -> tuple[Tensor, Tensor]:
    """Public rows, one of them with this value in its features (column 0) or as its label (column 1)."""
    public = rows(40, 1)
    public[column][row] = value
    return public


def fit_with(folder: Path, optimizer: Any, scheduler: Any = lambda optimizer: None) -> None:
    model = network()
    made = optimizer(model.parameters())
    fit(folder, model=model, optimizer=made, scheduler=scheduler(made))


def other_sgd() -> torch.optim.SGD:
    return torch.optim.SGD(network().parameters(), lr=1)


def twice(folder: Path) -> None:
    fit(folder)
    fit(folder, plan=plan(steps=2))


def same_rows(folder: Path, name: str) -> None:
    data: Any = rows(400)
    trainer(mirror=MIRROR).fit(data, run_dir=folder / "run", **{name: data})


def calibrated(**changes: Any) -> hs.PrivacyPlan:
    asked = {"epsilon": 1.0, "delta": 1e-5, "steps": 3, "population": 400, "batch_size": 40}
    return hs.PrivacyPlan.calibrate(**{**asked, **changes})


TEXT: Any = "1"
X, Y = rows(400)
NETWORK = network()
MISTAKES: dict[str, tuple[Mistake, tuple[str, ...]]] = {
    # the plan
    "epsilon below 0": (lambda _: calibrated(epsilon=-1), ("epsilon=-1 in (0, inf)",)),
    "delta above 1/n": (lambda _: calibrated(delta=0.01), ("delta=0.01 at most 0.0025", "400 examples")),
    "delta above 1/n in fit": (lambda p: fit(p, delta=0.01), ("delta=0.01 at most 0.0025", "400 examples")),
    "no noise": (lambda _: plan(noise_multiplier=0), ("noise_multiplier=0 in (0, inf)",)),
    "batch size as rate": (lambda _: plan(sampling_rate=64), ("sampling_rate=64 in (0, 1]", "over the number of")),
    "steps as a fraction": (lambda _: plan(steps=1e3), ("steps=1000.0 to be a whole number",)),
    # the trainer
    "no plan": (lambda _: trainer(plan=None), ("plan=None to be a PrivacyPlan",)),
    "optimizer of another model": (
        lambda _: trainer(optimizer=other_sgd()),
        ("exactly the trainable parameters", "requires_grad"),
    ),
    "optimizer of one layer": (
        lambda _: trainer(NETWORK, optimizer=torch.optim.SGD(list(NETWORK.parameters())[:2], lr=1)),
        ("exactly the trainable parameters",),
    ),
    "scheduler of another optimizer": (
        lambda _: trainer(scheduler=torch.optim.lr_scheduler.StepLR(other_sgd(), 1)),
        ("scheduler to be made for the optimizer",),
    ),
    "everything frozen": (
        lambda _: trainer(network().requires_grad_(False)),
        ("trainable parameters=0 at least 1", "requires_grad_()"),
    ),
    "a class for a mirror": (lambda _: trainer(mirror=hs.FirstOrder), ("mirror=", "FirstOrder(0.9)")),
    "unknown backend": (lambda p: fit(p, performance=hs.Performance(backend="fast")), ("backend='fast' in ('auto'",)),  # type: ignore[arg-type]
    "mirror without public data": (lambda p: fit(p, mirror=MIRROR), ("FirstOrder needs public data", "Euclidean()")),
    "run_dir of another plan": (twice, ("plan of the run in", "another run_dir")),
    "users without keys": (lambda p: fit(p, plan=plan(unit="user")), ("unit='user'", "users=keys")),
    # the model and its loss
    "mean as loss": (lambda p: with_loss(mean_loss).fit((X, Y), run_dir=p), ("shape (4,)", 'reduction="none"')),
    "mean as loss, pretraining": (
        lambda _: with_loss(mean_loss).pretrain(rows(40)),
        ("shape (40,); got shape ()", 'reduction="none"'),
    ),
    "number as loss": (
        lambda p: with_loss(lambda m, b: mean_loss(m, b).item()).fit((X, Y), run_dir=p),
        ("one loss per example", "got float"),
    ),
    "batch norm": (lambda p: fit(p, model=network(nn.BatchNorm1d(16))), ("BatchNorm1d at '2'", "GroupNorm", ".eval()")),
    "LBFGS": (lambda p: fit_with(p, torch.optim.LBFGS), ("optimizer='LBFGS'", "closure")),
    "a scheduler that wants a metric": (
        lambda p: fit_with(p, lambda w: torch.optim.SGD(w, lr=0.1), torch.optim.lr_scheduler.ReduceLROnPlateau),
        ("scheduler='ReduceLROnPlateau'", "metrics"),
    ),
    "epsilon as text": (lambda _: calibrated(epsilon="2"), ("epsilon='2' to be a number",)),
    "population as text": (lambda _: calibrated(population="9"), ("population='9' to be a number",)),
    "clip norm as text": (lambda _: plan(max_grad_norm="1"), ("max_grad_norm='1' to be a number",)),
    "budget as text": (lambda _: hs.Budget(epsilon=TEXT, delta=1e-5), ("epsilon='1' to be a number",)),
    "alpha as text": (lambda _: hs.FirstOrder(TEXT), ("alpha='1' to be a number",)),
    # private data
    "loader of a part": (
        lambda p: fit(p, DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler(range(9)))),
        ("SubsetRandomSampler", "Subset(dataset, indices)"),
    ),
    "loader that collates": (
        lambda p: fit(p, DataLoader(TensorDataset(X, Y), collate_fn=lambda found: found)),
        ("collate_fn of its own", "pad to one length"),
    ),
    "metric of a number": (
        lambda p: trainer(metrics={"acc": lambda m, b: 1.0}).evaluate(rows(20)),
        ("Expected loss_fn(model, batch), and so each of metrics, to return", "got float"),
    ),
    "names of metrics": (
        lambda p: trainer(metrics=["accuracy"]),
        ("metrics=['accuracy'] to be functions like loss_fn by name",),
    ),
    "array of texts": (lambda p: fit(p, (X, np.array(["a"] * len(X)))), ("array of numbers", "<U1")),
    "wrong shape": (lambda p: fit(p, (X[:, :5], Y)), ("(4, 5) torch.float32", "example=")),
    "labels as fractions": (lambda p: fit(p, (X, Y.float())), ("(4,) torch.float32", "made-up examples")),
    "a data set without an example": (lambda p: fit(p, list(zip(X, Y, strict=True))), ("example=(torch.zeros",)),
    # public data
    "private rows as public ones": (lambda p: same_rows(p, "public"), ("given as public=", "other rows")),
    "private rows as test rows": (lambda p: same_rows(p, "test"), ("given as test=", "other rows")),
    "private handle as public rows": (lambda p: fit(p, public=hs.PrivateData(rows(40))), ("given as public=",)),
    "public loader of a part": (
        lambda p: fit(p, public=DataLoader(TensorDataset(*rows(40)), sampler=SubsetRandomSampler(range(9)))),
        ("SubsetRandomSampler",),
    ),
    "public NaN": (lambda p: fit(p, public=spoilt(7, torch.nan)), ("rows [7] hold NaN", "Leave them out")),
    "public NaN, pretraining": (lambda _: trainer().pretrain(spoilt(7, torch.nan)), ("rows [7] hold NaN",)),
    "public loss is NaN": (
        lambda p: fit(p, public=rows(40), public_loss_fn=lambda m, b: loss_fn(m, b) * torch.nan),
        ("mean loss of the public rows is nan", "look at loss_fn"),
    ),
    "public label out of range": (
        lambda p: fit(p, public=spoilt(3, 9, column=1)),
        ("public rows of (6,) torch.float32, () torch.int64", "Target 9"),
    ),
    "public label, pretraining": (lambda _: trainer().pretrain(spoilt(3, 9, column=1)), ("Target 9", "labels fit")),
    "public rows of another shape": (lambda p: fit(p, public=(X[:40, :5], Y[:40])), ("public rows of (5,)",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, tmp_path: Path) -> None:
    mistake, parts = MISTAKES[name]
    with pytest.raises(HalfsilverError) as caught:
        mistake(tmp_path)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_more_public_than_private_rows_is_allowed_but_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The size of the private set is its secret, so the plan's declared constants speak for it."""
    with caplog.at_level(logging.WARNING, logger="halfsilver"):
        fit(tmp_path / "a", public=rows(399, 1))
        assert caplog.messages == []
        fit(tmp_path / "b", public=rows(400, 1))
    assert "got 400 and, as declared, 400. Have the two changed places?" in caplog.text


def test_dropout_is_no_mistake(tmp_path: Path) -> None:
    fit(tmp_path, model=network(nn.Dropout(0.5)))


# ---- on the command line: one line, and an exit code


def ended(*words: str) -> int | str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["halfsilver", *words])
        with pytest.raises(SystemExit) as stop:
            main()
    return stop.value.code


EPSILON = ["epsilon", "--sampling-rate", "0.01", "--steps", "10", "--delta", "1e-5", "--noise-multiplier"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "mnist", "--data", "."], "task='mnist' in ('linreg', 'emnist'"),
        (["compare", "emnist", "--recipe", "eps9", "--data", "."], "recipe='eps9' of task 'emnist' in ('eps0.48'"),
        (["compare", "emnist"], "--data DIR, or set HALFSILVER_DATA"),
        (["run", "emnist", "--data", "/nowhere", "--epsilon", "1"], "HALFSILVER_DATA"),
        (["verify", "/nowhere"], "run='/nowhere' to be a run folder, which has a config.json"),
        ([*EPSILON, "0"], "noise_multiplier=0.0 in (0, inf)"),
        (["overlap", "/nowhere", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HALFSILVER_DATA", raising=False)
    assert ended(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("halfsilver: ")
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("error", [LedgerCorrupt("torn"), BudgetExceeded("spent"), PermissionError("locked")])
def test_an_answer_that_is_no_has_exit_code_1(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise error

    monkeypatch.setattr("halfsilver.privacy.plan.PrivacyPlan", refuse)
    assert ended(*EPSILON, "1") == 1
    assert capsys.readouterr().err == f"halfsilver: {error}\n"


def test_an_unknown_option_has_exit_code_2_and_the_version_0() -> None:
    assert ended("epsilon", "--sigma", "1") == 2
    assert ended("--version") == 0


def test_without_the_extra_the_command_line_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_typer(name: str, *rest: Any) -> Any:
        if name == "typer":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "halfsilver.cli.app", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_typer)
    assert ended("--version") == 2
    assert "pip install 'halfsilver[cli]'" in capsys.readouterr().err
