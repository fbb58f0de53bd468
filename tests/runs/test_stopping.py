"""Signals end a run with a checkpoint; a finished run is told of, compared and loaded."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import halfsilver as hs
from halfsilver._core import checkpoint
from halfsilver.cli import app as cli
from halfsilver.errors import CheckpointCorrupt, ConfigError
from halfsilver.privacy.accounting import epsilon_of
from halfsilver.report import write_report
from halfsilver.report.statement_page import PlainStatement
from halfsilver.runs import session
from halfsilver.runs.folder import RunFolder
from halfsilver.runs.verify import verify
from halfsilver.trainer import StepReport

PLAN = hs.PrivacyPlan(steps=40, sampling_rate=0.1, expected_batch_size=40, noise_multiplier=1.0)
ROWS = (torch.randn(400, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(400))


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Those of Python: a shell that starts tests in the background has SIGINT ignored."""
    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def loss_fn(model: Any, batch: Any) -> Tensor:
    losses: Tensor = (model(batch[0])[:, 0] - batch[1] - 1).square()
    return losses


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def trainer(model: nn.Module | None = None, lr: float = 0.1, **options: Any) -> hs.Trainer:
    model = model or network()
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    return hs.Trainer(model, loss_fn, optimizer=sgd, **{"plan": PLAN, "progress": False, **options})


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_loses_no_step(
    number: signal.Signals, raised: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The ledger counts as many steps as the model has had updates, so the run can be completed without spare steps."""

    def send(report: StepReport) -> None:
        if report.step == 11:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(raised):
        trainer(callbacks=[send]).fit(ROWS, run_dir=tmp_path)
    assert signal.getsignal(number) == before
    [run] = hs.Ledger.open(tmp_path / "ledger.jsonl").runs.values()
    assert 11 <= run.spent < 40
    assert f"Stopped after step {run.spent} of 40" in caplog.text
    result = trainer().fit(ROWS, run_dir=tmp_path)
    assert (result.stopped, result.updates) == ("finished", 40)


def raise_error(report: StepReport) -> None:
    raise ValueError("the callback")


def twice(report: StepReport) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


STOPS: dict[str, tuple[Callable[[StepReport], None], type[BaseException]]] = {
    "Ctrl-C": (lambda report: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt),
    "SIGTERM": (lambda report: os.kill(os.getpid(), signal.SIGTERM), SystemExit),
    "two signals": (twice, KeyboardInterrupt),
    "callback": (raise_error, ValueError),
}


@pytest.mark.parametrize("name", STOPS)
def test_whatever_stops_a_run_its_statement_follows_the_ledger(name: str, tmp_path: Path) -> None:
    stop, raised = STOPS[name]
    with pytest.raises(raised):
        trainer(callbacks=[lambda report: stop(report) if report.step == 11 else None]).fit(ROWS, run_dir=tmp_path)
    [run] = hs.Ledger.open(tmp_path / "ledger.jsonl").runs.values()
    said = json.loads((tmp_path / "statement.json").read_text())["spent_so_far"]
    assert said == {"steps": run.spent, "epsilon_pld": epsilon_of([PLAN.count(run.spent)], 1e-5, "pld")}
    assert verify(tmp_path)["ok"]


def test_a_statement_that_was_not_updated_does_not_verify(tmp_path: Path) -> None:
    """Nor does that of a run that was killed; the figures that are printed are those of the ledger."""
    old: list[bytes] = []

    def stop(report: StepReport) -> None:
        old.append((tmp_path / "statement.json").read_bytes())
        if report.step == 3:
            raise_error(report)

    with pytest.raises(ValueError, match="the callback"):
        trainer(callbacks=[stop]).fit(ROWS, run_dir=tmp_path)
    (tmp_path / "statement.json").write_bytes(old[0])
    found = verify(tmp_path)
    assert (found["ok"], found["spent_now"]["steps"], found["statement"]["spent_so_far"]["steps"]) == (False, 3, 0)
    shown = CliRunner().invoke(cli.app, ["verify", str(tmp_path)])
    assert shown.exit_code == 1
    assert "agree" not in shown.stdout
    assert "older than the ledger" in " ".join(shown.stdout.split())
    told = str(PlainStatement.of(tmp_path))
    assert re.search(r"steps of this run +3, planned 40", told)
    assert "older than the ledger" in " ".join(told.split())
    trainer().fit(ROWS, run_dir=tmp_path)
    assert verify(tmp_path)["ok"]
    assert "older than the ledger" not in " ".join(str(PlainStatement.of(tmp_path)).split())


def test_a_disk_that_refuses_the_statement_too_does_not_hide_what_stopped_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(report: StepReport) -> None:
        monkeypatch.setattr(session, "write_json", lambda path, made: 1 / 0)
        raise ValueError("the callback")

    with pytest.raises(ValueError, match="the callback"):
        trainer(callbacks=[stop]).fit(ROWS, run_dir=tmp_path)


# ---- how often a checkpoint is written


@pytest.mark.parametrize(
    ("steps", "block", "seconds", "write", "every"),
    [
        (80, 1, 1.0, 0.02, 1),  # each step: both hold
        (80, 1, 1.0, 0.05, 3),  # 2 % of the time comes first
        (80, 1, 0.01, 0.02, 100),  # too short a run for a second one
        (5000, 1, 0.1, 0.02, 100),  # 2 % of the plan
        (5000, 1, 1.0, 0.02, 30),  # 30 seconds
        (5000, 20, 0.05, 0.01, 100),
        (1000, 15, 0.06, 0.0, 15),  # whole blocks, and not more than 2 % of the plan
        (1000, 15, 0.06, 0.05, 45),  # whole blocks, and not more than 2 % of the time
        (1000, 1, None, 9.0, 20),  # of an engine, whose rounds take as long as they do
    ],
)
def test_checkpoints_are_as_frequent_as_two_percent_allow(
    steps: int, block: int, seconds: float | None, write: float, every: int
) -> None:
    made = trainer(plan=replace(PLAN, steps=steps))
    source: Any = SimpleNamespace(block=block, step_seconds=seconds)
    assert made._steps_between(source, write, False) == every


@pytest.mark.parametrize(("steps", "level"), [(80, logging.INFO), (800, logging.WARNING)])
def test_the_log_says_what_a_kill_costs_where_that_is_much(
    steps: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made, source = trainer(plan=replace(PLAN, steps=steps)), SimpleNamespace(block=1, step_seconds=0.1)
    made._steps_between(cast(Any, source), 0.1, True)
    [line] = caplog.records
    assert (line.levelno, line.args and f"up to 50 of {steps} steps" in line.getMessage()) == (level, True)
    made._steps_between(cast(Any, source), 0.1, False)
    made._steps_between(cast(Any, source), 0.0, True)
    assert len(caplog.records) == 1


def test_a_kill_after_the_first_step_loses_none(tmp_path: Path) -> None:
    def stop(report: StepReport) -> None:
        if report.step == 2:
            raise_error(report)

    with pytest.raises(ValueError, match="the callback"):
        trainer(callbacks=[stop]).fit(ROWS, run_dir=tmp_path)
    assert checkpoint.read(tmp_path / "checkpoint.safetensors")[1]["step"] == 1


def test_a_second_signal_acts_at_once(tmp_path: Path) -> None:
    def send(report: StepReport) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one was not heard")

    with pytest.raises(KeyboardInterrupt):
        trainer(callbacks=[send]).fit(ROWS, run_dir=tmp_path)


def test_a_signal_in_the_last_step_is_not_lost(tmp_path: Path) -> None:
    """The run finishes, and then the signal acts."""

    def send(report: StepReport) -> None:
        if report.step == 40:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer(callbacks=[send]).fit(ROWS, run_dir=tmp_path)
    [run] = hs.Ledger.open(tmp_path / "ledger.jsonl").runs.values()
    assert run.closed
    hs.load(tmp_path, network())


def test_a_rate_that_a_scheduler_moved_is_that_of_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new trainer with the optimizer of the run, as when one cell of a notebook is run again."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    falling = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9)
    for _ in range(2):
        made = hs.Trainer(model, loss_fn, optimizer=sgd, scheduler=falling, plan=PLAN, progress=False)
        made.fit(ROWS, run_dir=tmp_path)
    assert "nothing is trained" in caplog.text


def test_a_setting_that_one_version_of_torch_lacks_is_not_compared(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.claim({"optimizer_settings": [{"lr": 0.1, "new": True}]})
    folder.claim({"optimizer_settings": [{"lr": 0.1}]})
    with pytest.raises(ConfigError, match="unchanged"):
        folder.claim({"optimizer_settings": [{"lr": 0.2}]})


def test_a_selection_does_not_say_when_it_began(tmp_path: Path) -> None:
    for name, more in (("run", {}), ("selection", {"trials": 5.0})):
        (tmp_path / name).mkdir()
        assert ("begun" in RunFolder(tmp_path / name).claim({"plan": {"steps": 3, **more}})) == (name == "run")


def test_a_handler_of_somebody_else_is_kept(tmp_path: Path) -> None:
    came = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        trainer(callbacks=[lambda report: signal.raise_signal(signal.SIGTERM)]).fit(ROWS, run_dir=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(came) == 40


def test_other_settings_of_the_optimizer_are_refused(tmp_path: Path) -> None:
    trainer().fit(ROWS, run_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"optimizer_settings of the run in .* unchanged.*0\.1.*0\.2"):
        trainer(lr=0.2).fit(ROWS, run_dir=tmp_path)


def test_a_finished_run_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer().fit(ROWS, run_dir=tmp_path)
    assert not caplog.records
    trainer().fit(ROWS, run_dir=tmp_path)
    assert "has finished. It is loaded, and nothing is trained" in caplog.text


@pytest.mark.parametrize("options", [{}, {"average": 0.9}, {"geometry": hs.Whitened()}])
def test_loaded_weights_are_those_of_the_trained_model(options: dict[str, Any], tmp_path: Path) -> None:
    """Those of the average where there is one, and in the model's own coordinates."""
    made, other = trainer(**options), network()
    result = made.fit(ROWS, tuple(t[:50].clone() for t in ROWS), run_dir=tmp_path)
    assert hs.load(tmp_path, other) == result.statement
    for mine, loaded in zip(made.model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, loaded)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="finished run"):
        hs.load(tmp_path, network())
    trainer().fit(ROWS, run_dir=tmp_path)
    with pytest.raises(ConfigError, match="do not fit this model"):
        hs.load(tmp_path, nn.Linear(5, 1))
    other = tmp_path / "other"
    trainer().fit(ROWS, run_dir=other)
    (other / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointCorrupt, match="another run"):
        hs.load(other, network())


def test_what_the_owner_says_is_in_the_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    about = {"data set": "made-up rows", "purpose": "a test <b>"}
    trainer(about=about).fit(ROWS, run_dir=tmp_path)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "made-up rows" in text
    assert "a test &lt;b&gt;" in text
    assert datetime.now(UTC).date().isoformat()[:7] in text
    with pytest.raises(ConfigError, match=r"about of the run in .* unchanged"):
        trainer(about={**about, "purpose": "another"}).fit(ROWS, run_dir=tmp_path)
    with pytest.raises(ConfigError, match="to be texts by name"):
        trainer(about={"rows": 3})
