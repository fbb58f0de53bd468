"""Studies: every run is paid for, paired and resumable, and nothing is done twice."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfsilver as hs
from benchmarks.studies import carry
from halfsilver._core import checkpoint
from halfsilver.errors import ConfigError, RunFolderBusy
from halfsilver.mirror.pretrain import held_out_rows
from halfsilver.study import study as study_module
from halfsilver.study.arena import Arena, make_plan
from halfsilver.study.compare import default_recipe
from halfsilver.study.method import PDA, WARM
from halfsilver.study.problem import Setting
from halfsilver.study.run import Job, mirror_of, run
from halfsilver.study.start import load_start, make_start, new_model
from halfsilver.study.study import Study
from halfsilver.study.summary import ledger_totals
from tests.study.small_study import (
    GRID,
    RECIPE,
    accuracy,
    loss_fn,
    make_model,
    problem,
    records,
    request,
    scored_losses,
)

# ---- a study


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    own, folder = problem(), tmp_path_factory.mktemp("study")
    return folder, Study(folder=folder, request=request(search="paper search"), source=lambda: own).go().to_json()


@pytest.mark.paper
def test_every_private_run_is_in_the_ledger_and_the_total_is_more_than_one(finished: Any) -> None:
    folder, summary = finished
    runs = 5 + len(GRID.cold) + len(GRID.warm) + 1  # real ones and those of the paper search
    assert summary["ledger"]["runs"] == runs
    own = max(r["epsilon"]["pld"] for r in summary["runs"])
    assert own <= 5.0 < summary["ledger"]["epsilon"]
    assert any("search not accounted" in s for s in summary["stamps"])
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))


@pytest.mark.paper
def test_methods_are_paired(finished: Any) -> None:
    """public, warm and pda of a seed begin at the same weights, and seeds differ."""
    _, summary = finished
    runs = {(r["method"], r["seed"]): r for r in summary["runs"]}
    first = {key: run["curve"][0]["loss"] for key, run in runs.items()}
    assert first["public", 0] == first["warm", 0] == first["pda", 0] != first["warm", 1]
    assert runs["public", 0]["final"]["loss"] == pytest.approx(first["public", 0], rel=1e-6)
    assert runs["public", 0]["epsilon"]["pld"] == 0
    assert runs["pda", 0]["trace"][-1]["alpha"] == pytest.approx(0.9, abs=0.02)
    assert runs["pda", 0]["trace"][-1]["lr"] < 0.2


def test_what_is_finished_is_not_done_again(finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, summary = finished
    own = problem()
    monkeypatch.setattr(study_module, "run", lambda *args, **kwargs: pytest.fail("run again"))
    monkeypatch.setattr(study_module, "make_start", lambda *args, **kwargs: pytest.fail("started again"))
    again = Study(folder=folder, request=request(search="paper search"), source=lambda: own).go()
    assert again.to_json()["runs"] == summary["runs"]


def test_seeds_can_be_added_and_none_left_out(finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished[0], folder)
    own = problem()
    made: list[Any] = []
    monkeypatch.setattr(study_module, "make_start", lambda *args, **kwargs: made.append("start"))
    monkeypatch.setattr(study_module, "run", lambda arena, recipe, job, **_: made.append((job.method.name, job.seed)))
    monkeypatch.setattr(study_module, "_final_text", lambda folder: "")
    more = request(search="paper search", seeds={"public": 2, "cold": 1, "warm": 3, "pda": 2})
    Study(folder=folder, request=more, source=lambda: own).go()
    assert made == ["start", ("warm", 2)]
    made.clear()
    four = request(search="paper search", seeds={"public": 2, "cold": 1, "warm": 5, "pda": 2})
    Study(folder=folder, request=four, source=lambda: own).go(only=4)
    assert made == ["start", ("warm", 4)]  # and not the seeds between
    with pytest.raises(ConfigError, match="seeds of warm=2 at least 5"):
        Study(folder=folder, request=request(search="paper search"), source=lambda: own).go()


def test_a_study_goes_on_elsewhere_from_its_summary(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished runs are kept, what is missing is done, and what was spent before is still counted."""
    begun, elsewhere, own = tmp_path / "begun", tmp_path / "elsewhere", problem()
    shutil.copytree(finished[0], begun)
    shutil.rmtree(begun / "runs" / "warm-seed-1")
    carry.keep(begun, tmp_path / "first.json")
    carry.restore(tmp_path / "first.json", elsewhere)
    done: list[int] = []

    def counted(arena: Arena, recipe: hs.Recipe, job: Job, **options: Any) -> None:
        done.append(job.seed)
        run(arena, recipe, job, **options)

    monkeypatch.setattr(study_module, "run", counted)
    Study(folder=elsewhere, request=request(search="paper search"), source=lambda: own).go()
    assert done == [1]
    carry.keep(elsewhere, tmp_path / "second.json")
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    assert [r for r in second["runs"] if (r["method"], r["seed"]) != ("warm", 1)] == first["runs"]
    assert len(second["runs"]) == len(finished[1]["runs"])
    assert second["choices"] == first["choices"]
    one_run = ledger_totals(elsewhere / "ledger.jsonl", 1e-4)
    assert second["ledger"]["epsilon"] == pytest.approx(first["ledger"]["epsilon"] + one_run["epsilon"])
    assert second["ledger"]["runs"] == first["ledger"]["runs"] + 1
    assert set(second) == set(first)


def test_other_data_or_another_model_are_noticed(finished: Any) -> None:
    folder, _ = finished
    others = {"rows": problem(public=records(41, 1)), "parameters": problem(make_model=lambda: nn.Linear(4, 3))}
    for name, other in others.items():
        with pytest.raises(ConfigError, match=name):
            Study(folder=folder, request=request(search="paper search"), source=lambda other=other: other).go()  # type: ignore[misc]


def test_another_question_needs_another_folder(finished: Any) -> None:
    folder, _ = finished
    own = problem()
    with pytest.raises(ConfigError, match="epsilon"):
        Study(folder=folder, request=request(search="paper search", epsilon=6.0), source=lambda: own).go()


def test_two_processes_cannot_work_in_one_study(tmp_path: Path) -> None:
    from halfsilver._core import system

    own = problem()
    with system.lock_file(tmp_path / ".lock", blocking=False), pytest.raises(RunFolderBusy):
        Study(folder=tmp_path, request=request(), source=lambda: own).go()


def test_a_start_of_another_recipe_is_refused(finished: Any) -> None:
    folder, _ = finished
    other = replace(RECIPE, pretrain=hs.study.Pretrain(epochs=4))
    with pytest.raises(ConfigError, match="pretrain"):
        make_start(problem(), other, 0, folder / "start" / "seed-0.safetensors")


def test_starts_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a, b, c = (new_model(problem(), seed).weight for seed in (0, 0, 1))
    assert torch.equal(a, b)  # type: ignore[arg-type]
    assert not torch.equal(a, c)  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_that_diverges_is_reported_as_such(tmp_path: Path) -> None:
    grid = hs.study.Grid(cold=(1e30,), warm=(1e30,), pda=(1e30,), alpha_end=(0.9,))
    recipe = replace(RECIPE, grid=grid, average=None)
    x, y = records(50, 2)
    own = problem(test=(torch.cat([x, x]), torch.cat([y, 1 - y])))  # with each label: no weights are right by chance
    summary = Study(
        folder=tmp_path, request=request(recipe=recipe, seeds={"public": 1, "warm": 1}), source=lambda: own
    ).go()
    text, loss = " ".join(summary.verdict.sentences), summary.runs[1].final["loss"]
    assert loss is None or loss > 1e6
    assert "diverged" in text or "raises" in text
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.paper
def test_a_killed_run_goes_on_while_it_has_steps_to_spare_and_else_begins_again(tmp_path: Path) -> None:
    """Killed after step 12 of 20: lost steps are made up for from the spare ones, or the run starts anew."""
    for spare, restarts in ((0.7, 0), (0.0, 1)):
        folder, own, recipe = tmp_path / str(spare), problem(), replace(RECIPE, spare=spare)
        plan = make_plan(recipe, 200, 5.0, 1e-4)
        arena = Arena(problem=own, plan=plan, spends=True)
        start, ledger = (
            folder / "start.safetensors",
            folder / "ledger.jsonl",
        )  # in the run folder, as the command has it
        job = Job(method=WARM, seed=0, setting=Setting(1.0), folder=folder, start=start, ledger=ledger, delta=1e-4)
        make_start(own, recipe, 0, start)
        with pytest.raises(KeyboardInterrupt), monkeypatched_report(12):
            run(arena, recipe, job)
        run(arena, recipe, job)
        result = json.loads(job.result.read_text())
        assert (result["steps"], result["stamps"]) == (plan.steps, [])
        entered = hs.Ledger.open(ledger, create=False).runs.values()
        assert len(entered) == 1 + restarts, "a run that began again must stay in the ledger"
        assert sum(r.spent for r in entered) >= plan.steps + 12


@contextmanager
def monkeypatched_report(step: int) -> Iterator[None]:
    """Training that is interrupted when it would report `step`."""
    own = hs.Trainer._report

    def report(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._state.step == step:
            raise KeyboardInterrupt
        own(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hs.Trainer, "_report", report)
        yield


def test_a_finished_run_answers_only_its_own_question(finished: Any) -> None:
    folder, _ = finished
    made = Study(folder=folder, request=request(search="paper search"), source=problem)
    arena = Arena(problem=problem(), plan=made._plan(), spends=True)
    chosen = Setting(**json.loads((folder / "search" / "warm" / "choice.json").read_text())["setting"])
    run(arena, RECIPE, made.job(WARM, 0, chosen))
    with pytest.raises(ConfigError, match="setting"):
        run(arena, RECIPE, made.job(WARM, 0, Setting(7.0)))


def test_private_rows_are_not_taken_for_anything_else() -> None:
    rows = records(30, 0)
    for name in ("public", "test", "validation", "curve"):
        with pytest.raises(ConfigError, match=name):
            problem(private=rows, **{name: rows})


def test_noise_is_fixed_once() -> None:
    noisy = replace(RECIPE, noise_multiplier=0.6)
    assert make_plan(noisy, 200, None, 1e-4).noise_multiplier == 0.6
    with pytest.raises(ConfigError, match="either epsilon or"):
        make_plan(noisy, 200, 0.1, 1e-4)


# ---- hs.compare


def test_a_recipe_with_damping_takes_the_exact_step(tmp_path: Path) -> None:
    exact = replace(RECIPE, damping=0.1, grid=hs.study.Grid(cold=(0.5,), warm=(0.5,), pda=(0.1, 0.3)))
    own, where = problem(), tmp_path / "start"
    make_start(own, exact, 0, where)
    job = Job(method=PDA, seed=0, setting=Setting(0.3), folder=tmp_path, start=where, ledger=tmp_path, delta=1e-4)
    plan = make_plan(exact, own.population, 1.0, 1e-4)
    assert mirror_of(exact, job, plan) == hs.Bregman(damping=0.1)
    study = Study(folder=tmp_path / "study", request=request(recipe=exact, seeds={"pda": 1}), source=problem)
    setting = study.go().choices["pda"].setting
    assert setting is not None
    assert setting.alpha_end is None


def test_compare_ends_in_words(tmp_path: Path) -> None:
    test = records(100, 2)
    result = hs.compare(
        make_model,
        loss_fn,
        records(200, 0),
        records(40, 1),
        test,
        curve=tuple(column[:10] for column in test),
        epsilon=5.0,
        delta=1e-4,
        population=200,
        recipe=RECIPE,
        metrics={"accuracy": accuracy},
        seeds=2,
        methods=("public", "warm"),
        out=tmp_path / "study",
    )
    text = str(result)
    assert "public search, warm: learning rate" in text
    assert "standard error" in text
    assert "All 2 private runs in the ledger together: epsilon" in text
    assert result.verdict["sentences"][0] in text
    (first, *_) = [run["curve"][0]["loss"] for run in result.summary["runs"] if run["method"] == "public"]
    assert first == pytest.approx(scored_losses(tmp_path / "study" / "runs" / "public-seed-0")[:10].mean(), rel=1e-5)


@pytest.mark.paper
def test_without_a_recipe_the_clip_norm_comes_from_held_out_public_rows(tmp_path: Path) -> None:
    """Oracle: a gradient for each row by itself."""
    public = records(60, 1)
    given: dict[str, Any] = {"epsilon": 5.0, "delta": 1e-4, "population": 200, "batch_size": 40, "epochs": 1}
    data, out = (records(200, 0), public, records(50, 2)), tmp_path / "study"
    hs.compare(make_model, loss_fn, *data, **given, methods=("public", "warm"), seeds=1, out=out)
    kept, study = (json.loads((out / name).read_text()) for name in ("clip.json", "study.json"))
    recipe = default_recipe(batch_size=40, epochs=1)
    _, held_out = held_out_rows(60, recipe.pretrain.holdout, 0)
    model, norms = new_model(problem(), 0), []
    load_start(model, out / "start" / "seed-0.safetensors")
    for row in held_out.tolist():
        loss = loss_fn(model, tuple(column[row : row + 1] for column in public)).sum()
        norms.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm())
    assert kept["max_grad_norm"] == pytest.approx(float(torch.stack(norms).quantile(0.75)), rel=5e-3)
    assert kept["rows"] == len(held_out) > 1
    assert study["recipe"]["max_grad_norm"] == kept["max_grad_norm"]
    assert study["recipe"]["cold_max_grad_norm"] == 1
    rates = [lr * kept["max_grad_norm"] for lr in study["recipe"]["grid"]["warm"]]
    assert rates == pytest.approx(list(recipe.grid.warm))
    hs.compare(make_model, loss_fn, *data, **given, methods=("public", "warm"), seeds=1, out=out)  # the same question


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"search": "private"}, "search='private'"),
        ({"batch_size": 10}, "the recipe has its own"),
        ({"recipe": None}, "batch_size=None"),
        ({"seeds": 0}, "at least 1"),
        ({"methods": ("public", "sgd")}, "sgd"),
        ({"population": 0}, "population=0"),
        ({"delta": 1.0}, "delta=1.0"),
        ({"recipe": replace(RECIPE, score="accuracy")}, "score='accuracy'"),
        ({"metrics": {"accuracy": lambda model, batch: torch.tensor(1.0)}}, "one value per example"),
        ({"search": "paper"}, "set-aside"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    right: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-4, "population": 200, "recipe": RECIPE, "out": tmp_path}
    with pytest.raises(ConfigError, match=message):
        hs.compare(make_model, loss_fn, records(9, 0), records(9, 1), records(9, 2), **{**right, **wrong})


# ---- killed


_SCRIPT = """
import sys
from pathlib import Path
from tests.study.test_study import request, problem
from halfsilver.study.study import Study
folder, workers = Path(sys.argv[1]), int(sys.argv[2])
Study(folder=folder, request=request(search="paper search"), source=problem).go(workers_count=workers)
"""


@pytest.mark.nightly
def test_a_study_that_is_killed_goes_on(tmp_path: Path) -> None:
    """Three kills at random moments: finished runs are left alone, and the ledger counts every step that was taken."""
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "study"), "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    delays = random.Random(0)
    seen: dict[Path, int] = {}
    for _ in range(3):
        process = subprocess.Popen(command, env=environment)
        # After the imports, which take seconds, a whole study of this size takes seconds too.
        _wait_for_work(process, tmp_path / "study", delays.uniform(0.1, 1.5))
        process.kill()
        process.wait()
        for path, written in seen.items():
            assert path.stat().st_mtime_ns == written, f"{path} was made again"
        seen = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").rglob("result.json")}
    subprocess.run(command, env=environment, check=True, timeout=300)
    ledger = hs.Ledger.open(tmp_path / "study" / "ledger.jsonl", create=False)
    folders = [p.parent for p in (tmp_path / "study").rglob("result.json") if (p.parent / "config.json").exists()]
    assert len(folders) == 10 <= len(ledger.runs)  # a run that lost more than it had to spare began again
    for folder in folders:
        run_id = json.loads((folder / "config.json").read_text())["run_id"]
        planned = json.loads((folder / "config.json").read_text())["plan"]["steps"]
        assert checkpoint.read(folder / "checkpoint.safetensors")[1]["step"] == planned
        assert planned <= ledger.runs[run_id].spent
    for path, written in seen.items():
        assert path.stat().st_mtime_ns == written, f"{path} was made again"


def _wait_for_work(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> None:
    """Let it work for so long after it has begun, which is when the study's files change again."""
    before = len(list(folder.rglob("*")))
    deadline = time.monotonic() + 60
    while process.poll() is None and len(list(folder.rglob("*"))) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(seconds)
