"""`halfsilver ledger`: what it lists is what the ledger counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import halfsilver as hs
from halfsilver.privacy.accounting import epsilon_of
from halfsilver.runs.statement import make_statement

CliRunner = pytest.importorskip("typer.testing").CliRunner

from halfsilver.cli.app import app  # noqa: E402

PLAN = hs.PrivacyPlan(steps=10, sampling_rate=0.1, expected_batch_size=50, noise_multiplier=2.0)


def filled(path: Path, budget: hs.Budget | None) -> hs.Ledger:
    ledger = hs.Ledger.open(path, budget=budget)
    for name, steps in (("first", 10), ("second", 4)):
        ledger.register_run(name, PLAN, block_max=10)
        ledger.intend(name, steps)
    ledger.finish("first", 9)
    return ledger


def test_runs_and_what_is_left(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "ledger.jsonl", hs.Budget(epsilon=2.0, delta=1e-5))
    found = json.loads(CliRunner().invoke(app, ["ledger", str(tmp_path), "--json"]).stdout)
    assert [(run["run_id"], run["steps"], run["state"]) for run in found["runs"]] == [
        ("first", 10, "finished, 9 updates"),
        ("second", 4, "open"),
    ]
    assert found["runs"][0]["epsilon"] == pytest.approx(PLAN.epsilon(1e-5))
    assert found["epsilon"] == pytest.approx(epsilon_of([PLAN.count(14)], 1e-5, "pld"))
    assert found["left"] == pytest.approx(2.0 - ledger.spent())
    other = json.loads(CliRunner().invoke(app, ["ledger", str(tmp_path), "--delta", "0.01", "--json"]).stdout)
    assert other["epsilon"] < found["epsilon"]
    assert other["left"] == found["left"]  # of the budget, at the budget's delta
    ledger.external((5.0, 0.0), "another tool")
    shown = CliRunner().invoke(app, ["ledger", str(tmp_path / "ledger.jsonl")])
    assert shown.exit_code == 0
    assert "another tool" in shown.stdout
    assert "left 0." in shown.stdout


def test_without_a_budget_the_delta_is_that_of_fit(tmp_path: Path) -> None:
    filled(tmp_path / "ledger.jsonl", None)
    usual = CliRunner().invoke(app, ["ledger", str(tmp_path)])
    assert "at delta 1e-05, one example protected (add-remove-one)" in usual.stdout.replace("\n", " ")
    given = CliRunner().invoke(app, ["ledger", str(tmp_path), "--delta", "1e-6"])
    assert "at delta 1e-06" in given.stdout
    assert "No budget is set." in given.stdout.replace("\n", " ")
    missing = CliRunner().invoke(app, ["ledger", str(tmp_path / "other")])
    assert "to be a ledger, or a run folder" in str(missing.exception)


def test_a_total_with_correlated_noise_holds_for_its_adjacency(tmp_path: Path) -> None:
    """Also in the statement of a run with independent noise on the same data."""
    ledger = filled(tmp_path / "ledger.jsonl", None)
    before = make_statement(PLAN, ledger, "first", delta=1e-5)
    assert "adjacency" not in before["all_runs_on_this_data"]
    noise = hs.Correlated(buffers=1)
    turns = hs.PrivacyPlan.calibrate(epsilon=2, delta=1e-5, population=500, batch_size=50, epochs=2, noise=noise)
    ledger.register_run("in turn", turns, block_max=10)
    ledger.intend("in turn")
    after = make_statement(PLAN, ledger, "first", delta=1e-5)
    assert after["adjacency"] == "add-remove-one"
    assert after["all_runs_on_this_data"]["adjacency"] == "empty-one-place"
    shown = CliRunner().invoke(app, ["ledger", str(tmp_path)]).stdout
    assert "(empty-one-place)" in shown
