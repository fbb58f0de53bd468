"""`halfsilver verify` and the other commands, run as a person runs them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import halfsilver as hs
from halfsilver._core import checkpoint
from halfsilver.cli import app as cli
from halfsilver.errors import CheckpointCorrupt, HalfsilverError, LedgerCorrupt
from halfsilver.privacy.accounting import epsilon_of
from halfsilver.runs.folder import write_json
from halfsilver.runs.verify import verify


def plan_of(sigma: float, steps: int = 12) -> hs.PrivacyPlan:
    return hs.PrivacyPlan(steps=steps, sampling_rate=0.1, expected_batch_size=10, noise_multiplier=sigma)


def run_at(folder: Path, *, steps: int = 12, sigma: float = 1.0, **options: Any) -> Path:
    model = torch.nn.Linear(4, 1)
    trainer = hs.Trainer(
        model,
        lambda m, b: m(b).square().squeeze(1),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=plan_of(sigma, steps),
        **{name: value for name, value in options.items() if name != "ledger"},
    )
    trainer.fit(torch.randn(100, 4), run_dir=folder, delta=1e-5, ledger=options.get("ledger"))
    return folder


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_at(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_at(tmp_path_factory.mktemp("runs") / "b", steps=9)


def edit_json(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        value = json.loads((run / name).read_text())
        change(value)
        write_json(run / name, value)  # in the form that halfsilver writes: the change itself must be seen

    return tamper


def edit_checkpoint(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        tensors, about = checkpoint.read(run / "checkpoint.safetensors")
        change(about)
        checkpoint.write(run / "checkpoint.safetensors", tensors, about)

    return tamper


def edit_tensors(run: Path) -> None:
    tensors, about = checkpoint.read(run / "checkpoint.safetensors")
    checkpoint.write(run / "checkpoint.safetensors", {name: t + 1 for name, t in tensors.items()}, about)


def cut_ledger(run: Path) -> None:
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:3]))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))


def write(name: str, text: str) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        (run / name).write_text(text)

    return tamper


def flip(name: str, position: int) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[position] ^= 4
        (run / name).write_bytes(bytes(data))

    return tamper


TAMPERED: dict[str, Callable[[Path], Any]] = {
    "more noise claimed": edit_json("config.json", lambda c: c["plan"].update(noise_multiplier=9.0)),
    "fewer steps claimed": edit_json("config.json", lambda c: c["plan"].update(steps=3)),
    "another run": edit_json("config.json", lambda c: c.update(run_id="feed")),
    "no plan": edit_json("config.json", lambda c: c.pop("plan")),
    "smaller epsilon": edit_json("statement.json", lambda s: s["epsilon_planned"].update(pld=0.1)),
    "smaller delta": edit_json("statement.json", lambda s: s.update(delta=1e-9)),
    "other unit": edit_json("statement.json", lambda s: s.update(unit="user")),
    "more spent than the ledger knows": edit_json("statement.json", lambda s: s["spent_so_far"].update(steps=99)),
    "statement without its total": edit_json("statement.json", lambda s: s.pop("all_runs_on_this_data")),
    "stamp invented": edit_json("statement.json", lambda s: s.update(not_private_because=["x"])),
    "seed hidden in the name only": edit_json("config.json", lambda c: c.update(unsafe_seed=3)),
    "ledger cut short": cut_ledger,
    "ledger bit": flip("ledger.jsonl", 300),
    "ledger gone": lambda run: (run / "ledger.jsonl").unlink(),
    "checkpoint gone": lambda run: (run / "checkpoint.safetensors").unlink(),
    "checkpoint header": flip("checkpoint.safetensors", 20),
    "checkpoint of another plan": edit_checkpoint(lambda a: a.update(plan_hash="0" * 64)),
    "checkpoint ahead of the ledger": edit_checkpoint(lambda a: a.update(step=13)),
    "checkpoint with another head": edit_checkpoint(lambda a: a.update(ledger_head=[2, "0" * 64])),
    "checkpoint without a head": edit_checkpoint(lambda a: a.update(ledger_head=None)),
    "steps hidden": edit_json("statement.json", lambda s: s["spent_so_far"].update(steps=11)),
    "negative steps": edit_json("statement.json", lambda s: s["spent_so_far"].update(steps=-1)),
    "smaller epsilon so far": edit_json("statement.json", lambda s: s["spent_so_far"].update(epsilon_pld=0.1)),
    "smaller total": edit_json("statement.json", lambda s: s["all_runs_on_this_data"].update(epsilon=0.1)),
    "smaller delta of the total": edit_json("statement.json", lambda s: s["all_runs_on_this_data"].update(delta=1e-9)),
    "other accountant": edit_json("statement.json", lambda s: s["all_runs_on_this_data"].update(accountant="none")),
    "no runs": edit_json("statement.json", lambda s: s["all_runs_on_this_data"].update(runs=0)),
    "better figure beside the true one": edit_json("statement.json", lambda s: s.update(epsilon=0.1)),
    "delta said twice": lambda run: replace(run / "statement.json", "{", '{\n  "delta": 1e-30,'),
    "delta, consistently": lambda run: [
        edit_json(name, lambda v: v.update(delta=1e-6))(run) for name in ("config.json", "statement.json")
    ],
    "other optimizer": edit_json("config.json", lambda c: c.update(optimizer="Adam")),
    "older version": edit_json("config.json", lambda c: c["versions"].update(torch="1.0")),
    "ledger with a better budget": lambda run: replace(run / "ledger.jsonl", '"budget":null', '"budget":1'),
    "ledger of another run": lambda run: shutil.copy(run.parent / "other" / "ledger.jsonl", run),
    "statement of another run": lambda run: shutil.copy(run.parent / "other" / "statement.json", run),
    "checkpoint of another run": lambda run: shutil.copy(run.parent / "other" / "checkpoint.safetensors", run),
    "checkpoint at an earlier step": edit_checkpoint(lambda a: a.update(step=11)),
    "checkpoint at step true": edit_checkpoint(lambda a: a.update(step=True)),
    "checkpoint with half a head": edit_checkpoint(lambda a: a.update(ledger_head=[2])),
    "checkpoint with a text for a head": edit_checkpoint(lambda a: a.update(ledger_head="head")),
    "checkpoint cut short": lambda run: os.truncate(run / "checkpoint.safetensors", 300),
    "better metrics": lambda run: replace(run / "metrics.jsonl", '"step": 1', '"loss": 0.0, "step": 1'),
    "metrics gone": lambda run: (run / "metrics.jsonl").unlink(),
    "other weights": edit_tensors,
    "config is not JSON": write("config.json", "{"),
    "statement is a list": write("statement.json", "[]"),
    "config gone": lambda run: (run / "config.json").unlink(),
}


def test_a_clean_run_verifies(finished_run: Path) -> None:
    report = verify(finished_run)
    assert report["ok"]
    assert report["finished"]
    assert report["step"] == 12


def test_a_moved_run_verifies(finished_run: Path, tmp_path: Path) -> None:
    assert verify(shutil.copytree(finished_run, tmp_path / "moved"))["ok"]


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_run_does_not(finished_run: Path, other_run: Path, tmp_path: Path, what: str) -> None:
    run = shutil.copytree(finished_run, tmp_path / "copy")
    shutil.copytree(other_run, tmp_path / "other")
    TAMPERED[what](run)
    with pytest.raises(HalfsilverError):
        verify(run)


def hide(stamp: str) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        edit_json("config.json", lambda c: c.update({stamp: None}))(run)
        edit_json("statement.json", lambda s: s.update(not_private_because=[]))(run)

    return tamper


@pytest.mark.parametrize("stamp", ["unsafe_seed", "metrics_not_private"])
def test_a_stamp_cannot_be_taken_off(tmp_path: Path, stamp: str) -> None:
    run = run_at(tmp_path / "run", **{stamp: 1})
    assert stamp in verify(run)["statement"]["not_private_because"][0]
    hide(stamp)(run)
    with pytest.raises(CheckpointCorrupt, match="not the config"):
        verify(run)


def test_runs_on_one_ledger_verify_and_tell_of_a_seeded_one(tmp_path: Path) -> None:
    ledger = hs.Ledger.open(tmp_path / "ledger", head_file=tmp_path / "head")
    runs = [run_at(tmp_path / str(steps), steps=steps, ledger=ledger, unsafe_seed=1) for steps in (6, 5)]
    assert all(verify(run, head_file=tmp_path / "head")["ok"] for run in runs)
    assert verify(runs[1])["statement"]["all_runs_on_this_data"]["unsafe_runs"] == 2
    for field, value in (("epsilon", 0.01), ("delta", 1e-9), ("runs", 3), ("accountant", "rdp")):
        run = shutil.copytree(runs[0], tmp_path / field)
        edit_json("statement.json", lambda s, f=field, v=value: s["all_runs_on_this_data"].update({f: v}))(run)  # type: ignore[misc]
        with pytest.raises(CheckpointCorrupt, match="all_runs_on_this_data"):
            verify(run)


def total_in(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "statement.json").read_text())["all_runs_on_this_data"]
    return found


def with_total(run: Path, **changes: Any) -> Path:
    """A copy of the run whose statement has another total."""
    copy = Path(shutil.copytree(run, run.parent / f"copy {len(list(run.parent.iterdir()))}"))
    edit_json("statement.json", lambda s: s["all_runs_on_this_data"].update(changes))(copy)
    return copy


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs on one ledger, of two mechanisms, one after the other; the second one's figures are asked for."""
    folder = tmp_path_factory.mktemp("shared")
    for name, sigma in (("first", 0.8), ("published", 1.0), ("later", 1.0)):
        run_at(folder / name, ledger=folder / "ledger", sigma=sigma)
    return folder


def test_the_total_is_at_least_what_the_ledger_held_at_the_finish(shared: Path) -> None:
    """A statement that named this run alone was accepted as long as its epsilon was this run's own."""
    run, true = shared / "published", total_in(shared / "published")
    assert (true["runs"], true["accountant"], true["delta"]) == (2, "rdp", 1e-5)
    own = verify(run)["statement"]["spent_so_far"]["epsilon_pld"]
    for understated in (
        {"runs": 1, "accountant": "pld", "epsilon": own},
        {"epsilon": true["epsilon"] * (1 - 1e-6)},
        {"runs": 1},
        {"accountant": "pld"},
        {"delta": 1e-6},
        {"delta": 2e-5},
        {"composition": "filter"},
        {"budget": {"epsilon": 1.0, "delta": 1e-5}},
    ):
        with pytest.raises(CheckpointCorrupt, match="all_runs_on_this_data"):
            verify(with_total(run, **understated))


def test_the_total_may_be_any_that_the_ledger_held_since(shared: Path) -> None:
    run, now = shared / "published", verify(shared / "published")["all_runs_now"]
    assert now == total_in(shared / "later")
    assert now["epsilon"] > total_in(run)["epsilon"]
    assert verify(with_total(run, **now))["ok"]
    between = (now["epsilon"] + total_in(run)["epsilon"]) / 2
    assert verify(with_total(run, runs=3, epsilon=between))["ok"]
    for overstated in ({"epsilon": between}, {"runs": 3, "epsilon": 1.01 * now["epsilon"]}, {"runs": 4}):
        with pytest.raises(CheckpointCorrupt, match="all_runs_on_this_data"):
            verify(with_total(run, **overstated))


def test_the_ledgers_total_of_now_stands_beside_that_of_the_statement(shared: Path) -> None:
    report = json.loads(call("verify", str(shared / "first"), "--json").stdout)
    assert (report["statement"]["all_runs_on_this_data"]["runs"], report["all_runs_now"]["runs"]) == (1, 3)
    table = call("verify", str(shared / "first")).stdout
    for total in (report["statement"]["all_runs_on_this_data"], report["all_runs_now"]):
        assert f"epsilon {total['epsilon']:.6g}, delta 1e-05, runs {total['runs']}" in table


def test_after_a_compaction_the_total_is_bounded_by_what_is_still_known(shared: Path) -> None:
    folder = Path(shutil.copytree(shared, shared.parent / "compacted"))
    ledger = hs.Ledger.open(folder / "ledger")
    assert ledger.compact()
    for name in ("first", "published", "later"):
        run, true = folder / name, total_in(folder / name)
        assert verify(run, folder / "ledger")["ok"]
        assert verify(with_total(run, **total_in(folder / "later")), folder / "ledger")["ok"]
        for wrong in ({"epsilon": 0.99 * true["epsilon"]}, {"runs": true["runs"] - 1}, {"runs": 4}, {"delta": 2e-5}):
            with pytest.raises(CheckpointCorrupt, match="all_runs_on_this_data"):
                verify(with_total(run, **wrong), folder / "ledger")


def test_runs_side_by_side_are_counted_as_far_as_they_had_come(tmp_path: Path) -> None:
    """While this run goes on its statement is that of its start; others spend before, during and after it."""
    ledger, plan = hs.Ledger.open(tmp_path / "ledger"), plan_of(1.0)
    ledger.register_run("other", plan, block_max=4)
    ledger.intend("other", 4)
    run = tmp_path / "run"

    def others_spend(report: Any) -> None:
        if report.step == 5:
            ledger.intend("other", 2)
            shutil.copytree(run, tmp_path / "half way")
        if report.step == 6:
            ledger.intend("other", 1)

    run_at(run, ledger=tmp_path / "ledger", callbacks=[others_spend], checkpoint_seconds=0.0)
    ledger.intend("other", 4)
    steps = {name: epsilon_of([plan.count(k)], 1e-5, "pld") for name, k in (("start", 4), ("finish", 19))}
    assert total_in(run)["epsilon"] == steps["finish"]
    assert total_in(tmp_path / "half way")["epsilon"] == steps["start"]
    with pytest.raises(CheckpointCorrupt, match="the run ended with updates=12"):
        verify(tmp_path / "half way")
    assert verify(run)["all_runs_now"]["epsilon"] == epsilon_of([plan.count(23)], 1e-5, "pld")
    for epsilon in (steps["start"], 0.999 * steps["finish"]):
        with pytest.raises(CheckpointCorrupt, match="all_runs_on_this_data"):
            verify(with_total(run, epsilon=epsilon))


def test_the_statement_of_an_unfinished_run_is_that_of_the_steps_it_counts(tmp_path: Path) -> None:
    ledger, plan = hs.Ledger.open(tmp_path / "ledger"), plan_of(1.0)
    ledger.register_run("other", plan, block_max=4)
    ledger.intend("other", 4)

    def stop(report: Any) -> None:
        ledger.intend("other", 1)
        if report.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_at(tmp_path / "run", ledger=tmp_path / "ledger", callbacks=[stop], checkpoint_seconds=0.0)
    run = tmp_path / "run"
    ledger.intend("other", 1)
    assert (verify(run)["ok"], verify(run)["finished"]) == (True, False)
    assert total_in(run)["epsilon"] == epsilon_of([plan.count(10)], 1e-5, "pld")
    for epsilon in (0.0, epsilon_of([plan.count(8)], 1e-5, "pld"), epsilon_of([plan.count(12)], 1e-5, "pld")):
        with pytest.raises(CheckpointCorrupt, match="all_runs_on_this_data"):
            verify(with_total(run, epsilon=epsilon))


def test_a_head_kept_elsewhere_shows_that_all_was_set_back(tmp_path: Path) -> None:
    """An older ledger with what lies beside it: nothing there tells, the head does. Of the ledger alone, both do."""
    ledger = hs.Ledger.open(tmp_path / "ledger", head_file=tmp_path / "head")
    run = run_at(tmp_path / "run", ledger=ledger)
    old = {name: (tmp_path / name).read_bytes() for name in ("ledger", "ledger.head")}
    run_at(tmp_path / "next", ledger=ledger)
    (tmp_path / "ledger").write_bytes(old["ledger"])
    with pytest.raises(LedgerCorrupt, match=r"ledger\.head shows"):
        verify(run)
    (tmp_path / "ledger.head").write_bytes(old["ledger.head"])
    assert verify(run)["ok"]
    for head in ("head", "missing"):
        with pytest.raises(LedgerCorrupt):
            verify(run, head_file=tmp_path / head)


def call(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


def test_epsilon_command() -> None:
    words = [
        "epsilon",
        "--noise-multiplier",
        "1.51",
        "--sampling-rate",
        "0.0104166667",
        "--steps",
        "9600",
        "--delta",
        "1e-5",
    ]
    out = json.loads(call(*words, "--json").stdout)
    assert out["epsilon"]["pld"] == pytest.approx(3.230, abs=2e-3)
    assert out["epsilon"]["rdp"] == pytest.approx(3.508, abs=2e-3)
    assert "3.23" in call(*words).stdout


@pytest.mark.nightly
def test_calibrate_command() -> None:
    words = ["calibrate", "--epsilon", "3.51", "--delta", "1e-5", "--sampling-rate", "0.0104166667", "--steps", "9600"]
    out = json.loads(call(*words, "--json").stdout)
    assert 1.42 <= out["noise_multiplier"] <= 1.43
    assert out["epsilon"]["pld"] <= 3.51
    declared = ["--population", "48000", "--batch-size", "500", "--epochs", "100"]
    same = json.loads(call(*words[:5], *declared, "--json").stdout)
    assert same["steps"] == 9600
    assert same["noise_multiplier"] == pytest.approx(out["noise_multiplier"], rel=1e-4)


def test_verify_command(finished_run: Path) -> None:
    assert json.loads(call("verify", str(finished_run), "--json").stdout)["ok"] is True
    assert "Verified" in call("verify", str(finished_run)).stdout


def test_digests_of_files_survive_a_compaction(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    ledger = hs.Ledger.open(run / "ledger.jsonl")
    (before,) = (dict(one.files) for one in ledger.runs.values())
    assert set(before) == {"checkpoint.safetensors", "metrics.jsonl"}
    assert ledger.compact()
    (after,) = (dict(one.files) for one in hs.Ledger.open(run / "ledger.jsonl").runs.values())
    assert after == before
    verify(run)
    replace(run / "metrics.jsonl", '"step": 2', '"step": 2, "accuracy": 1.0')
    with pytest.raises(CheckpointCorrupt, match="has changed since the run finished"):
        verify(run)
