"""hs.audit on a user's own model, its report, figure and command."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import halfsilver as hs
from halfsilver.auditing import NOT_PROVED, AuditReport, Kind
from halfsilver.auditing.bank import Layout
from halfsilver.auditing.loops import LOOPS
from halfsilver.cli import app as cli
from halfsilver.cli import audit as cli_audit
from halfsilver.errors import ConfigError
from halfsilver.federated import LocalTraining
from halfsilver.mirror import MirrorMap, Mixture, Stateless, Step
from halfsilver.privacy import noise, releases

# Levels at which no run of all tests is likely ever to be wrong by chance.
SURE: dict[str, Any] = {"alpha": 1e-8, "confidence": 1 - 1e-8}
SMALL: dict[str, Any] = {"canaries": 100, "steps": 5, "replay": False, **SURE}


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(n))
    return x, (x.sum(1) > 0).long()


def trainer(mirror: MirrorMap | None = None, unit: Any = "example") -> hs.Trainer:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
    plan = hs.PrivacyPlan(
        steps=1000,
        sampling_rate=0.2,
        expected_batch_size=50,
        noise_multiplier=1.2,
        max_grad_norm=0.3,
        unit=unit,
        spare_steps=10,
    )
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    return hs.Trainer(model, loss_fn, optimizer=adam, plan=plan, mirror=mirror or hs.Euclidean())


@pytest.fixture(scope="module")
def report() -> AuditReport:
    mirror = hs.chain(hs.clip_released(0.5), hs.FirstOrder(hs.cosine(end=0.5), public_max_norm=1.0))
    return hs.audit(trainer(mirror), rows(60), rows(20), canaries=200, steps=12, **SURE)


@pytest.mark.nightly
def test_an_audit_of_a_users_trainer(report: AuditReport) -> None:
    assert report.alarms == []
    assert 0 < report.lower_bound < report.claimed < trainer().plan.epsilon(1e-5)
    assert report.tightness == report.lower_bound / report.claimed
    assert len(report.observation.replays) == 3
    assert report.observation.plan.steps == 12


@pytest.mark.nightly
def test_the_report_is_json(report: AuditReport) -> None:
    told = json.loads(json.dumps(report.to_dict()))
    assert told["canaries"] == {"out": 200, "in": 200, "cancelling": 4, "broken": 4}
    assert {f["instrument"] for f in told["findings"]} == {"A", "B", "C", "reconciliation"}
    assert told["alarms"] == 0
    assert any("certifies nothing" in line for line in told["not_proved"])


def test_the_figure(report: AuditReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = (report.figure(tmp_path / name).read_bytes() for name in ("scores.png", "scores.svg"))
    assert png.startswith(b"\x89PNG")
    assert b"<svg" in svg
    with pytest.raises(ConfigError, match="png"):
        report.figure(tmp_path / "scores.pdf")


def test_the_trainer_is_left_alone(tmp_path: Path) -> None:
    audited = trainer()
    before = copy.deepcopy(audited.model.state_dict())
    hs.audit(audited, rows(20), run_dir=tmp_path / "kept", **SMALL)
    assert all(torch.equal(before[name], t) for name, t in audited.model.state_dict().items())
    assert (tmp_path / "kept" / "run" / "statement.json").exists()


def test_users_who_train_themselves() -> None:
    report = hs.audit(trainer(unit="user"), rows(20), local=LocalTraining(lr=0.1), **SMALL)
    assert report.alarms == []
    with pytest.raises(ConfigError, match="local"):
        hs.audit(trainer(unit="user"), rows(20), **SMALL)


@dataclass(frozen=True)
class Sign(Stateless):
    def direction(self, released: Any, state: Any, step: Step) -> Any:
        return [g.sign() for g in released], state


@dataclass(frozen=True)
class Doubled(Stateless):
    """A user's map that offers what the audit needs."""

    def direction(self, released: Any, state: Any, step: Step) -> Any:
        return [2 * g for g in released], state

    def mixture(self, released: Any, state: Any, step: Step, *, curvature: float) -> Mixture:
        return Mixture(private=2.0, elementwise=True)


@dataclass(frozen=True)
class Leaking(Sign):
    """A map that reaches for what changes from step to step on the private side."""

    channel: list[int] = field(default_factory=list)

    def direction(self, released: Any, state: Any, step: Step) -> Any:
        self.channel.append(1)
        return [g.sign() + len(self.channel) for g in released], state


MAPS: dict[str, tuple[MirrorMap, str]] = {
    "fall back": (hs.FallBack(hs.FirstOrder(0.5)), ""),
    "fall back, clipped": (hs.FallBack(hs.FirstOrder(hs.cosine(end=0.3), public_max_norm=0.1)), ""),
    "clip last": (hs.chain(hs.FirstOrder(0.5), hs.clip_released(0.1)), ""),
    "a user's": (hs.chain(Doubled(), hs.FallBack(hs.FirstOrder(0.5))), ""),
    "a user's that says nothing": (hs.chain(Sign(), hs.FirstOrder(0.5)), "Sign() has no method `mixture`"),
    "nothing gets through": (hs.FirstOrder(0.0), "lets nothing through"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("mirror", "why"), MAPS.values(), ids=MAPS)
def test_every_map_can_be_audited_or_says_why_not(mirror: MirrorMap, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent on the mechanism as it is, and not with half its noise or twice its clip norm."""
    report = hs.audit(trainer(mirror), rows(60), rows(20), **{**SMALL, "canaries": 200, "steps": 10})
    assert report.alarms == []
    assert why in report.observation.unread
    assert bool(why) == bool(report.observation.unread) == (len(report.not_proved) > len(NOT_PROVED))
    assert report.to_dict()["not_proved"] == list(report.not_proved)

    noisy = noise.noisy_mean
    monkeypatch.setattr(releases, "noisy_mean", lambda s, sigma, *a, **k: noisy(s, sigma / 2, *a, **k))
    broken = hs.audit(trainer(mirror), rows(60), rows(20), **{**SMALL, "canaries": 200, "steps": 10})
    assert {"A", "B"} <= {f.instrument for f in broken.alarms}


def test_a_direction_that_depends_on_more_than_was_released_is_found() -> None:
    report = hs.audit(trainer(Leaking()), rows(60), rows(20), **SMALL)
    assert [(f.instrument, f.test) for f in report.alarms] == [("C", "directions that change when computed again")]


def test_private_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        hs.audit(trainer(), hs.PrivateData(rows(20)), rows(10), **SMALL)


def test_the_layout_of_the_bank() -> None:
    layout = Layout(canaries=100, last=Kind.BROKEN)
    flat = layout.kinds.ravel()
    assert sorted(layout.places) == list(np.flatnonzero(flat != Kind.OUT))
    columns, order = layout.records(rows(7), 2.0)
    assert len(order) == len(layout.places) + 7
    assert (order[:-8] == np.arange(len(layout.places) - 1)).all()
    assert flat[layout.places[order[-1]]] == Kind.BROKEN
    assert columns[3][-1].isnan().all()
    absent, _ = Layout(canaries=100, last=Kind.BROKEN, absent=True).records(rows(7), 2.0)
    assert torch.equal(absent[2], columns[2][:-1])
    with pytest.raises(ConfigError, match="even"):
        Layout(canaries=7)


@pytest.mark.nightly
def test_the_command(tmp_path: Path) -> None:
    asked = ["audit", "trainer/book", "--canaries", "20", "--steps", "4", "--json", "--figure"]
    done = CliRunner().invoke(cli.app, [*asked, str(tmp_path / "scores.svg")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "scores.svg").exists()
    assert json.loads(done.stdout)["loop"] == "trainer/book"


def test_the_command_for_people(report: AuditReport, capsys: pytest.CaptureFixture[str]) -> None:
    cli_audit.show(report)
    shown = capsys.readouterr().out
    assert f"{report.claimed:.4g}" in shown
    assert "0 alarms" in shown
    assert "What this does not prove" in shown
    assert CliRunner().invoke(cli.app, ["audit", "loops"]).stdout.splitlines() == list(LOOPS)


@pytest.mark.nightly
def test_the_command_for_a_task(data_dir: Path) -> None:
    asked = ["audit", "emnist", "--canaries", "40", "--steps", "3", "--rows", "20", "--epsilon", "3", "--json"]
    done = CliRunner().invoke(cli.app, [*asked, "--data", str(data_dir)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plan"]["steps"] == 3
