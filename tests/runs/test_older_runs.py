"""A run folder as version 0.1.0 wrote it: two plans on a ledger with a budget, and the default delta of then."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import halfsilver as hs
from halfsilver.cli import app as cli
from halfsilver.errors import CheckpointCorrupt, ConfigError
from halfsilver.runs.folder import write_json
from halfsilver.runs.statement import default_delta
from halfsilver.runs.verify import verify
from tests.markdown import ROOT

PLAN = hs.PrivacyPlan(steps=4, sampling_rate=1e-3, expected_batch_size=1000, noise_multiplier=1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "tests" / "data" / "run-v1", tmp_path / "run"))


def fit(folder: Path, plan: hs.PrivacyPlan = PLAN, **options: object) -> hs.trainer.RunResult:
    model = torch.nn.Linear(4, 1)
    trainer = hs.Trainer(
        model,
        lambda m, b: m(b).square().squeeze(1),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=plan,
        performance=hs.Performance(backend="vmap"),
    )
    return trainer.fit(torch.ones(100, 4), run_dir=folder, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("population", [100, 10_000, 100_000, 10**7])
def test_the_default_delta_is_a_tenth_of_one_over_the_population_at_most(population: int) -> None:
    plan = hs.PrivacyPlan(steps=1, sampling_rate=100 / population, expected_batch_size=100, noise_multiplier=1.0)
    assert default_delta(plan) <= min(1e-5, 0.1 / population) * (1 + 1e-9)
    plan.check_delta(default_delta(plan))


def test_a_run_keeps_the_delta_it_began_with(run: Path, tmp_path: Path) -> None:
    """The default was 1/n then and is a tenth of it now. An explicit delta must still be the same."""
    assert fit(run).statement["delta"] == 1e-6
    assert fit(tmp_path / "new").statement["delta"] == pytest.approx(1e-7)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["delta"] == pytest.approx(1e-7)
    with pytest.raises(ConfigError, match="Expected delta of the run"):
        fit(run, delta=1e-7)


def test_its_statement_verifies_by_the_rules_of_its_version(run: Path) -> None:
    """It gives the total of two mechanisms at twice the delta; what is written now gives it at delta."""
    report = verify(run)
    then, now = report["statement"]["all_runs_on_this_data"], report["all_runs_now"]
    assert (report["statement"]["statement_version"], then["accountant"], then["delta"]) == (1, "rdp", 2e-6)
    assert (now["epsilon"], now["delta"], now["composition"]) == (then["epsilon"], 1e-6, "filter")
    for change in ({"delta": 1e-6}, {"epsilon": 0.5}, {"runs": 1, "accountant": "pld", "epsilon": 0.0, "delta": 1e-6}):
        changed = json.loads((run / "statement.json").read_text())
        changed["all_runs_on_this_data"].update(change)
        copy = Path(shutil.copytree(run, run.parent / next(iter(change)), dirs_exist_ok=True))
        write_json(copy / "statement.json", changed)
        with pytest.raises(CheckpointCorrupt, match="all_runs_on_this_data"):
            verify(copy)


def test_it_goes_on_in_the_form_of_today(run: Path) -> None:
    assert fit(run).statement["statement_version"] == 2
    assert verify(run)["statement"]["all_runs_on_this_data"]["delta"] == 1e-6
    ledger = hs.Ledger.open(run / "ledger.jsonl")
    assert ledger.budget == hs.Budget(epsilon=9.0, delta=1e-6)
    assert fit(run.parent / "next", replace(PLAN, noise_multiplier=3.0), ledger=ledger).updates == 4
    assert verify(run)["all_runs_now"]["runs"] == 3


def test_a_run_of_a_version_with_a_leak_is_told_of(run: Path) -> None:
    (notice,) = verify(run)["notices"]
    assert "0.1.0" in notice
    assert "max_norm" in notice
    shown = CliRunner().invoke(cli.app, ["verify", str(run)])
    assert shown.exit_code == 0
    assert "made by halfsilver 0.1.0" in shown.output
