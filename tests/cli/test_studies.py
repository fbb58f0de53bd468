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
from halfsilver.runs.folder import read_json
from halfsilver.study import advice
from halfsilver.tasks import named, source
from halfsilver.tasks.recipes import load
from tests.study.small_study import RECIPE, problem, records


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


@pytest.mark.paper
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


def test_options_come_from_a_file_and_the_command_line_goes_first(small: Path) -> None:
    file = small / "study.toml"
    file.write_text(
        'task = "emnist"\nepsilon = 5.0\nseeds = 3\nmethods = ["public", "warm"]\nquick = true\nworkers = 1\n'
    )
    done = invoke("compare", "--config", str(file), "--seeds", "1", "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert summary["epsilon"] == 5.0
    assert [(run["method"], run["seed"]) for run in summary["runs"]] == [("public", 0), ("warm", 0)]


@pytest.mark.parametrize(
    ("text", "message"), [("epsilom = 2.0", "epsilom"), ("epsilon = ", "TOML"), (None, "TOML file")]
)
def test_a_wrong_file_is_named(text: str | None, message: str, small: Path) -> None:
    file = small / "study.toml"
    if text is not None:
        file.write_text(text)
    result = invoke("compare", "emnist", "--config", str(file))
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_compare_linreg_takes_the_options_of_a_study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def study(dims: Any, trials: int, out: Path, **options: Any) -> list[dict[str, Any]]:
        given.update(dims=dims, trials=trials, **options)
        return [{"dim": 500, "method": "warm", "mean": 0.01, "ci95": 0.001}]

    monkeypatch.setattr("halfsilver.tasks.linreg.study.study", study)
    done = invoke("compare", "linreg", "--dims", "500", "--trials", "3", "--workers", "1", "--json")
    assert json.loads(done.stdout) == {"results": [{"dim": 500, "method": "warm", "mean": 0.01, "ci95": 0.001}]}
    assert (given["dims"], given["trials"], given["workers"]) == ([500], 3, 1)


@pytest.fixture
def advisable(small: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with so many public rows that pretraining holds out enough of them."""
    monkeypatch.setattr(source, "TASKS", {"emnist": lambda data, **options: problem(public=records(400, 1))})
    monkeypatch.setattr(named, "load", lambda task, name: (replace(RECIPE, name=name), {"delta": 1e-4}))
    monkeypatch.setattr(advice, "_MOST_RATES", 1)
    return small


@pytest.mark.paper
@pytest.mark.filterwarnings("ignore:400 public rows")
def test_advise_says_writes_and_draws(advisable: Path) -> None:
    words = ["advise", "emnist", "--epsilon", "5", "--out", "advice"]
    told = invoke(*words)
    assert told.exit_code == 0, told.output
    for part in ("Batch: ", "Clip norm: ", "Forecast: loss ", "accuracy ", "advice.html"):
        assert part in told.stdout
    page = (advisable / "advice" / "advice.html").read_text()
    assert page.count("<svg") == 4
    assert "costs no privacy" in page
    out = json.loads(invoke(*words, "--json").stdout)
    assert out["plan"]["steps"] == read_json(advisable / "advice" / "advice.json")["plan"]["steps"]
    assert out["plan"]["max_grad_norm"] > 0


def test_advice_needs_rows_that_the_start_has_not_seen(advisable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = replace(RECIPE, pretrain=replace(RECIPE.pretrain, holdout=0.0))
    monkeypatch.setattr(named, "load", lambda task, name: (without, {"delta": 1e-4}))
    done = invoke("advise", "emnist", "--epsilon", "5", "--out", "advice")
    assert isinstance(done.exception, HalfsilverError)
    assert "pretrain.holdout of the recipe=0.0" in str(done.exception)
    assert not (advisable / "advice").exists()


@pytest.mark.paper
@pytest.mark.filterwarnings("ignore:400 public rows")
def test_compare_as_advised_trains_what_the_advice_says(advisable: Path) -> None:
    words = ["compare", "emnist", "--epsilon", "5", "--methods", "auto", "--seeds", "2", "--workers", "1", "--out", "s"]
    done = invoke(*words, "--json")
    assert done.exit_code == 0, done.output
    summary, kept = json.loads(done.stdout), read_json(advisable / "s" / "advice.json")
    assert {run["method"] for run in summary["runs"]} == {"public", "advised"}
    run = next(run for run in summary["runs"] if run["method"] == "advised")
    assert run["setting"]["lr"] == kept["learning_rate"]
    for name in ("expected_batch_size", "steps", "max_grad_norm"):
        assert run["plan"][name] == kept["plan"][name]
    assert run["epsilon"]["pld"] <= 5
    assert not (advisable / "s" / "search").exists()
    again = invoke(*words, "--json")
    assert json.loads(again.stdout)["runs"] == summary["runs"]
    assert "rehearsal" not in again.stderr


@pytest.mark.paper
def test_compare_some_methods_and_how_to_do_it_again(small: Path) -> None:
    words = ["compare", "emnist", "--epsilon", "5", "--seeds", "1", "--methods", "guarded,warm", "--workers", "1"]
    done = invoke(*words, "--quick", "--out", "s", "--json")
    assert done.exit_code == 0, done.output
    assert [run["method"] for run in json.loads(done.stdout)["runs"]] == ["warm", "guarded"]
    page = invoke("report", "s")
    assert "--methods warm,guarded" in Path(page.stdout.strip()).read_text()


@pytest.mark.paper
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


@pytest.mark.nightly
def test_compare_on_the_real_emnist_files(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From raw files to a verdict, cut short: 4 steps of 500 images."""
    recipe, more = load("emnist", "workstation")
    short = replace(
        recipe,
        epochs=0.02,
        pretrain=replace(recipe.pretrain, epochs=1),
        grid=hs.study.Grid(cold=(2.0,), warm=(1.0,), pda=(1.0,), alpha_end=(0.9,)),
    )
    monkeypatch.setattr(named, "load", lambda task, name: (short, more))
    words = ["compare", "emnist", "--epsilon", "3", "--seeds", "1", "--search", "paper", "--workers", "1"]
    done = invoke(*words, "--methods", "cold,warm", "--json", "--data", str(data_dir), "--out", str(tmp_path / "s"))
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    split = summary["problem"]["split"]
    assert (split["public"], split["validation"], summary["population"]) == (3993, 5000, 90_852)
    losses = {r["method"]: r["final"]["loss"] for r in summary["runs"]}
    assert losses["warm"] < losses["cold"]
    assert all(r["epsilon"]["pld"] <= 3.0 for r in summary["runs"])
    assert "One seed" in " ".join(summary["verdict"]["sentences"])
