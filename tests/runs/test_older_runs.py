"""Run folders as versions 0.1.0 and 0.2.0 wrote them.

run-v1 has two plans on a ledger with a budget, and the default delta of then. The ledger of run-v2 has a budget, an
entry of what was spent elsewhere and a summary. Of run-v2-stopped, 3 of 4 steps are done.
"""

from __future__ import annotations

import hashlib
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


@pytest.fixture
def of_0_2(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "tests" / "data" / "run-v2", tmp_path / "run"))


def test_a_run_of_0_2_verifies(of_0_2: Path) -> None:
    report = verify(of_0_2)
    assert (report["finished"], report["step"], report["all_runs_now"]["runs"]) == (True, 4, 2)
    assert "SECURITY.md" in report["notices"][0]
    questions = " ".join(report["notices"][1:])
    assert all(word in questions for word in ("piece", "kernels", "scikit-learn", "copy", "fork", "hard links"))
    assert "made by halfsilver 0.2.0" in CliRunner().invoke(cli.app, ["verify", str(of_0_2)]).output
    assert report["all_runs_now"]["external"][0]["why"] == "a table that was published before"
    first, *questions = report["notices"]
    assert "SECURITY.md" in first
    for word in ("micro_batch_size", "kernels", "mapped", "wrapper", "copy"):
        assert any(word in question for question in questions), word


def test_a_ledger_of_0_2_goes_on_in_place_and_older_versions_refuse_it_from_then_on(of_0_2: Path) -> None:
    """Its header and all its records keep their bytes. What follows begins with a record of a type that is new."""
    path = of_0_2 / "ledger.jsonl"
    before = path.read_bytes()
    assert fit(of_0_2).stopped == "finished"
    assert path.read_bytes() == before, "a finished run is only loaded"
    for name in ("next", "another"):
        assert fit(of_0_2.parent / name, ledger=path, delta=1e-6).updates == 4
    assert path.read_bytes().startswith(before)
    added = [json.loads(line) for line in path.read_bytes()[len(before) :].splitlines()]
    one_run = ["run", "intent", "intent", "intent", "intent", "finish"]
    assert [record["type"] for record in added] == ["schema", *one_run, *one_run]
    assert added[0]["schema_version"] == 2
    assert json.loads(before.splitlines()[0])["schema_version"] == 1
    assert verify(of_0_2)["all_runs_now"]["runs"] == 4
    ledger = hs.Ledger.open(path)
    assert ledger.compact(), "the summary is of version 1 again, and the next record says so anew"
    ledger.register_run("last", PLAN)
    types = [json.loads(line)["type"] for line in path.read_bytes().splitlines()]
    assert types == ["header", "summary", "schema", "run"]
    assert hs.Ledger.open(path).counts() == ledger.counts()
    assert verify(of_0_2)["ok"]


def test_a_digest_of_the_weights_has_its_place_in_the_ledger(tmp_path: Path) -> None:
    """As later versions will write it: it is compared like the others."""
    folder = tmp_path / "run"

    def finish(self: hs.Ledger, run_id: str, updates: int, files: dict[str, str]) -> object:
        digest = hashlib.sha256(b"weights").hexdigest()
        return real(self, run_id, updates, {**files, "model.safetensors": digest})

    real = hs.Ledger.finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hs.Ledger, "finish", finish)
        fit(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    assert verify(folder)["ok"]
    (folder / "model.safetensors").write_bytes(b"others")
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors has changed"):
        verify(folder)


def test_a_new_ledger_says_its_version_in_the_header(tmp_path: Path) -> None:
    fit(tmp_path / "new")
    lines = (tmp_path / "new" / "ledger.jsonl").read_bytes().splitlines()
    assert json.loads(lines[0])["schema_version"] == 2
    assert b'"schema"' not in b"".join(lines[1:])


def test_a_run_that_0_2_stopped_goes_on_without_a_word(tmp_path: Path) -> None:
    """Its records name no owner, and its folder says nothing of a place; both do from then on."""
    run = Path(shutil.copytree(ROOT / "tests" / "data" / "run-v2-stopped", tmp_path / "run"))
    assert hs.Ledger.open(run / "ledger.jsonl").spent(1e-6) > 0
    result = fit(run, delta=1e-6)
    assert (result.updates, result.stopped) == (3, "budget")  # the third step was lost, and the plan has none to spare
    records = [json.loads(line) for line in (run / "ledger.jsonl").read_bytes().splitlines()]
    assert [bool(r.get("owner")) for r in records if r["type"] == "intent"] == [False, False, False, True]
    assert verify(run)["finished"]
