"""halfsilver compare, run and report, on real files where the test says so and on a small task elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import halfsilver as hs
from halfsilver.cli import app as cli
from halfsilver.errors import HalfsilverError
from halfsilver.tasks import named, source
from halfsilver.tasks.recipes import load
from tests.study.small_study import RECIPE, problem


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A task of 200 rows under the name of a real one."""
    opened: list[dict[str, Any]] = []

    def make(data: Path, **options: Any) -> Any:
        opened.append(options)
        return problem(validation=None) if options.get("validation") == 0 else problem()

    source._opened.cache_clear()
    monkeypatch.setattr(source, "TASKS", {"emnist": make})
    monkeypatch.setattr(named, "load", lambda task, name: (replace(RECIPE, name=name), {"delta": 1e-4}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALFSILVER_DATA", str(tmp_path))
    return tmp_path


def test_compare_prints_one_json_object_and_goes_on(small: Path) -> None:
    words = ["compare", "emnist", "--epsilon", "5", "--seeds", "2", "--workers", "1", "--quick", "--json"]
    first = invoke(*words)
    assert first.exit_code == 0, first.output
    summary = json.loads(first.stdout)
    assert summary["quick"] is True
    assert summary["search"] == "public search"
    assert "search not accounted" not in " ".join(summary["stamps"])
    assert {r["method"] for r in summary["runs"]} == {"public", "cold", "warm", "pda"}
    assert (small / "studies" / "emnist-eps5-workstation-quick" / "summary.json").exists()
    again = invoke(*words)
    assert json.loads(again.stdout)["runs"] == summary["runs"]
    assert "seed 0" not in again.stderr, "a finished run was done again"


def test_compare_some_methods_and_how_to_do_it_again(small: Path) -> None:
    words = ["compare", "emnist", "--epsilon", "5", "--seeds", "1", "--methods", "guarded,warm", "--workers", "1"]
    done = invoke(*words, "--quick", "--out", "s", "--json")
    assert done.exit_code == 0, done.output
    assert [run["method"] for run in json.loads(done.stdout)["runs"]] == ["warm", "guarded"]
    page = invoke("report", "s")
    assert "--methods warm,guarded" in Path(page.stdout.strip()).read_text()


def test_compare_for_people_and_its_report(small: Path) -> None:
    done = invoke(
        "compare", "emnist", "--epsilon", "5", "--seeds", "1", "--search", "paper", "--workers", "1", "--out", "s"
    )
    assert done.exit_code == 0, done.output
    for part in (
        "method",
        "paper search, pda: learning rate",
        "private runs in the ledger together: epsilon",
        "search not accounted",
    ):
        assert part in " ".join(done.stdout.split())
    page = invoke("report", "s")
    assert page.exit_code == 0, page.output
    assert "search not accounted" in Path(page.stdout.strip()).read_text()


def test_run_makes_a_run_folder_that_verifies(small: Path) -> None:
    done = invoke("run", "emnist", "--method", "pda", "--epsilon", "5", "--quick", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["setting"] == {"lr": 1.0, "alpha_end": 0.9}
    assert result["epsilon"]["pld"] <= 5.0
    assert invoke("verify", result["folder"]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "emnist", "--method", "sgd"], "method='sgd'"),
        (["compare", "emnist", "--epsilon", "1", "--methods", "warm,sgd"], "method='sgd' in ('public', 'cold',"),
        (["compare", "emnist", "--search", "test"], "search='test'"),
        (["compare", "emnist"], "Expected either epsilon"),
        (["compare", "emnist", "--epsilon", "-1"], "epsilon=-1"),
        (["compare", "emnist", "--epsilon", "1", "--seeds", "0"], "at least 1"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, small: Path) -> None:
    error = invoke(*words).exception
    assert isinstance(error, HalfsilverError)
    assert message in str(error)


def test_without_data_it_says_where_to_look(tmp_path: Path) -> None:
    error = invoke(
        "compare", "emnist", "--epsilon", "1", "--data", str(tmp_path), "--out", str(tmp_path / "s")
    ).exception
    assert isinstance(error, HalfsilverError)
    assert "emnist-bymerge-train" in str(error)


@pytest.mark.slow
def test_compare_on_the_real_emnist_files(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From raw files to a verdict, cut short: 18 steps of 500 images."""
    recipe, more = load("emnist", "workstation")
    short = replace(
        recipe,
        epochs=0.1,
        pretrain=replace(recipe.pretrain, epochs=2),
        grid=hs.study.Grid(cold=(2.0,), warm=(1.0,), pda=(1.0,), alpha_end=(0.9,)),
    )
    monkeypatch.setattr(named, "load", lambda task, name: (short, more))
    words = ["compare", "emnist", "--epsilon", "3", "--seeds", "1", "--search", "paper", "--workers", "1", "--json"]
    done = invoke(*words, "--data", str(data_dir), "--out", str(tmp_path / "s"))
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    split = summary["problem"]["split"]
    assert (split["public"], split["validation"], summary["population"]) == (3993, 5000, 90_852)
    losses = {r["method"]: r["final"]["loss"] for r in summary["runs"]}
    assert losses["warm"] < losses["cold"]
    assert all(r["epsilon"]["pld"] <= 3.0 for r in summary["runs"])
    assert "One seed" in " ".join(summary["verdict"]["sentences"])
