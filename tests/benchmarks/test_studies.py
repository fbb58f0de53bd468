"""The benchmarks that are studies at given settings, on tasks that take seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.studies import ablation, advised, cohorts, correlated, finals, tables
from halfsilver.runs.folder import read_json, write_json
from halfsilver.study import advice
from halfsilver.study.problem import Setting
from halfsilver.study.study import Request, Study
from halfsilver.tasks import source
from tests.federated import test_user_study as users
from tests.markdown import ROOT
from tests.study import small_study as small


@pytest.fixture(autouse=True)
def fresh() -> None:
    source._opened.cache_clear()


@pytest.mark.paper
def test_an_ablation_changes_one_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(small.RECIPE, search_share=0.5)
    monkeypatch.setattr(source, "TASKS", {"emnist": lambda data, **options: small.problem()})
    monkeypatch.setattr(ablation, "load", lambda task, name: (recipe, {"delta": 1e-4}))
    words = ["emnist", "--epsilon", "5", "--data", str(tmp_path), "--out", str(tmp_path), "--workers", "1"]
    monkeypatch.setattr("sys.argv", ["ablation", *words, "--seeds", "1", "--only", "swapped", "--json"])
    ablation.main()
    rows = read_json(tmp_path / "ablation.json")["rows"]
    assert [(row["variant"], row["method"]) for row in rows] == [
        *(("as it is", method) for method in ("public", "warm", "pda")),
        *(("learning rates of warm and pda swapped", method) for method in ("warm", "pda")),
    ]
    assert "loss_change" not in rows[0]
    assert rows[3]["loss_change"] == pytest.approx(rows[3]["loss"] - rows[1]["loss"])
    (swapped,) = [path for path in tmp_path.glob("*/study.json") if path.parent.name != "0"]
    assert read_json(swapped)["settings"]["warm"] == Setting(2.0).to_json()
    assert read_json(swapped)["plan"]["steps"] == 10
    runs = tmp_path / "0" / "runs", swapped.parent / "runs"
    first, second = (read_json(folder / "warm-seed-0" / "result.json")["curve"][0] for folder in runs)
    assert first == second, "both variants have the same start"


@pytest.mark.paper
def test_cohorts_of_a_study_of_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "study", tmp_path / "out"
    request = Request(task="stackexchange", recipe=users.RECIPE, epsilon=8.0, delta=1e-4, seeds={"warm": 1}, quick=True)
    Study(folder=folder, request=request, source=users.problem).go()
    monkeypatch.setattr(source, "TASKS", {"stackexchange": lambda data, **options: users.problem()})
    monkeypatch.setattr(cohorts, "load", lambda task, name: (users.RECIPE, {}))
    words = ["--study", str(folder), "--out", str(out), "--data", str(tmp_path), "--method", "warm", "--workers", "1"]
    monkeypatch.setattr("sys.argv", ["cohorts", *words, "--epsilons", "8", "4", "--cohorts", "5", "--rounds", "2"])
    cohorts.main()
    found = read_json(out / "cohorts-warm.json")
    assert [(row["cohort"], row["epsilon"]) for row in found["rows"]] == [(5, 4.0), (5, 8.0)]
    assert found["setting"] == read_json(folder / "search" / "warm" / "choice.json")["setting"]
    write_json(out / "again.json", found)  # nothing in it that JSON has not


def test_final_runs_take_the_settings_of_a_recorded_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "TASKS", {"emnist": lambda data, **options: small.problem()})
    monkeypatch.setattr(finals, "load", lambda task, name: (small.RECIPE, {"delta": 1e-4}))
    tried = [{"method": "warm", "setting": {"lr": lr}, "loss": loss} for lr, loss in ((0.5, 2.0), (1.0, 1.0))]
    record = {"task": "emnist", "recipe": "any", "epsilon": 5, "tried": tried}
    study = finals.finals(record, seeds=1, data=tmp_path, out=tmp_path / "study")
    summary = study.go().to_json()
    assert [(run["method"], (run["setting"] or {}).get("lr")) for run in summary["runs"]] == [
        ("public", None),
        ("warm", 1.0),
    ]
    assert not (tmp_path / "study" / "search").exists()
    changed = finals.finals({**record, "changes": {"epochs": 3}}, seeds=1, data=tmp_path, out=tmp_path / "other")
    assert (study.request.recipe.epochs, changed.request.recipe.epochs) == (small.RECIPE.epochs, 3)


@pytest.mark.paper
def test_an_advised_run_stands_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small.problem()
    problem = replace(whole, public=tuple(torch.cat([part] * 10) for part in whole.public))
    monkeypatch.setattr(source, "TASKS", {"emnist": lambda data, **options: problem})
    recipe = replace(small.RECIPE, pretrain=replace(small.RECIPE.pretrain, holdout=0.2))
    monkeypatch.setattr(advised, "load", lambda task, name: (recipe, {"delta": 1e-4}))
    words = ["advised", "emnist", "--epsilon", "5", "--data", str(tmp_path), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(advice, "_MOST_RATES", 1)
    advised.main()
    record = read_json(tmp_path / "emnist-eps5-seed0.json")
    assert record["by hand"] is None  # there is no study at this epsilon
    assert set(record["results"]) == {"start", "advised", "advised and finished"}
    run = read_json(tmp_path / "emnist-eps5-seed0" / "run" / "statement.json")
    assert run["plan"]["steps"] == record["advice"]["plan"]["steps"]


def test_the_summary_of_tables_pairs_splits_and_counts_forecasts() -> None:
    forecast = {"loss": {"low": 0.1, "high": 0.5}}
    records = [
        {
            "table": "t",
            "epsilon": 2,
            "start": {"loss": 1.0},
            "by hand": {"loss": hand},
            "advised": {"loss": own},
            "advice": {"forecast": forecast},
        }
        for hand, own in ((0.5, 0.4), (0.9, 0.6))
    ]
    (row,) = tables.summary(records)
    assert (row["score"], row["splits"], row["forecast held"]) == ("loss", 2, 1)
    assert row["difference"] == pytest.approx(-0.2)
    assert row["half_width"] == pytest.approx(12.7062 * 0.1, rel=1e-4)  # t with 1 degree of freedom, standard error 0.1


def test_the_page_of_correlated_noise_has_the_figures_beside_jax_privacy() -> None:
    rows = read_json(ROOT / "benchmarks/results/correlated.json")["rows"]
    page = (ROOT / "docs/correlated.md").read_text(encoding="utf-8")
    names = ("independent", "banded", "banded, theirs", "BLT", "BLT, theirs")
    assert len(rows) == len(correlated.SETTINGS)
    for row in rows:
        figures = " | ".join(f"{row[name]:.4g}" for name in names)
        assert f"| {row['rounds']} | {row['separation']} rounds | {figures} |" in page
        assert all(abs(row[f"{name}, ratio"] - 1) < 0.01 for name in ("banded", "BLT"))
