"""A selection: paid for first, drawn once, sealed until the end, and nothing that remains tells K."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs
from benchmarks.robustness import select_kills, stops
from halfsilver import selection
from halfsilver._core import checkpoint
from halfsilver.errors import BudgetExceeded, ConfigError, SelectionFailed, SelectionLost
from halfsilver.privacy.entropy import Entropy
from halfsilver.report import write_report
from halfsilver.runs.verify import verify
from halfsilver.selection import Selected, Selection

EACH = hs.PrivacyPlan(
    steps=3, spare_steps=100, sampling_rate=1.0, expected_batch_size=100, noise_multiplier=50.0, delta=1e-5
)
PLAN = Selection(each=EACH, trials=3)
X = torch.randn(150, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].argmax(1)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def build(lr: float, **options: Any) -> hs.Trainer:
    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    options = {"plan": EACH, "performance": hs.Performance(backend="vmap", micro_batch_size=100), **options}
    return hs.Trainer(model, loss_fn, optimizer=sgd, **options)


def score(model: nn.Module) -> float:
    return float((model(X[100:]).argmax(1) == Y[100:]).double().mean())


def select(run_dir: Path, settings: Any = (0.1, 1.0), build: Any = build, score: Any = score, **options: Any) -> Any:
    return hs.select(settings, build, score, (X[:100], Y[:100]), **{"plan": PLAN, "run_dir": run_dir, **options})


def trained(after: Callable[[nn.Module], float], before: Callable[[nn.Module], float] | None = None) -> Any:
    """A score whose second form the checks do not see, which come before the payment and at each resume."""

    def one(model: nn.Module) -> float:
        return after(model) if stops.in_a_run() else before(model) if before else 0.0

    return one


def stop_now(*_: Any) -> float:
    raise KeyboardInterrupt


def force(monkeypatch: pytest.MonkeyPatch, k: int, drawn: list[int] | None = None) -> None:
    def draw(plan: Selection, entropy: Entropy) -> int:
        assert entropy.is_private
        (drawn if drawn is not None else []).append(k)
        return k

    monkeypatch.setattr(Selection, "draw", draw)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    return [line for line in lines if line["type"] == kind]


def test_a_selection_from_start_to_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)
    best: Selected[float] = select(tmp_path / "run")
    assert best.setting in (0.1, 1.0)
    assert best.score == score(best.model)
    assert best.epsilon() == best.statement["epsilon_planned"]["rdp"] == PLAN.epsilon()
    assert best.statement["all_runs_on_this_data"]["epsilon"] == PLAN.epsilon()
    assert len(records(tmp_path / "run", "intent")) == 1
    report = verify(tmp_path / "run")
    assert (report["finished"], report["all_runs_now"]["epsilon"]) == (True, PLAN.epsilon())
    page = write_report(tmp_path / "run", tmp_path / "report").read_text(encoding="utf-8")
    assert "This selection is (" in page
    assert "expected number of runs" in page
    again = select(tmp_path / "run", build=build)  # a finished one is only loaded
    assert (again.setting, again.score) == (best.setting, best.score)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), best.model.parameters(), strict=True))
    assert len(records(tmp_path / "run", "intent")) == 1


def test_a_changed_statement_does_not_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)
    select(tmp_path / "run")
    path = tmp_path / "run" / "statement.json"
    text = path.read_text()
    path.write_text(text.replace('"trials": 3.0', '"trials": 2.0'))
    with pytest.raises(hs.HalfsilverError, match="The statement says plan="):
        verify(tmp_path / "run")


def test_the_best_of_all_runs_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 4)
    scores = iter([1.0, float("nan"), 3.0, 2.0])
    assert select(tmp_path, score=trained(lambda model: next(scores))).score == 3.0


def test_a_selection_without_a_finite_score_publishes_one_of_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, 2)
    best = select(tmp_path, score=lambda model: float("nan"))
    assert best.score != best.score
    verify(tmp_path)


# ---- what nobody may learn


def test_what_remains_is_the_same_for_every_k(tmp_path: Path) -> None:
    found = select_kills.forms(tmp_path)
    assert {name for name, same in found.items() if not same} == set()
    assert [name for name, _, _ in found["files_and_sizes"]] == sorted(select_kills._FILES)


def test_nothing_is_shown_whatever_k_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def loud(lr: float) -> hs.Trainer:
        sys.stdout.write("a run\n")
        logging.getLogger("somebody").warning("a run")
        return build(lr, progress=True)

    shown = []
    for k in (1, 3):
        force(monkeypatch, k)
        select(tmp_path / str(k), build=loud)
        shown.append(tuple(capfd.readouterr()))
    assert shown[0] == shown[1]
    assert shown[0][0] == 4 * "a run\n"  # three checks and the model that is returned


def test_warnings_of_runs_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)

    def warns(model: nn.Module) -> float:
        warnings.warn("a run", UserWarning, stacklevel=1)
        return score(model)

    assert select(tmp_path, score=trained(warns)).score >= 0  # warnings are errors in tests, and an error has no score


def test_the_sealed_folder_is_for_its_owner_and_gone_before_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, 2)
    moved: list[list[str]] = []
    replace_file = os.replace

    def seen(source: Any, target: Any) -> None:
        if Path(source).name == "winner.safetensors":
            assert oct(Path(source).parent.stat().st_mode)[-3:] == "700"
            moved.append(os.listdir(Path(source).parent))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", seen)
    select(tmp_path)
    assert moved == [["winner.safetensors"]]
    assert not (tmp_path / "sealed").exists()


# ---- a run that fails


def test_a_score_that_raises_is_the_worst_and_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but Ctrl-C: what a score raises on a trained model may depend on private rows."""
    force(monkeypatch, 4)
    seen: list[str] = []
    errors = iter([ValueError("lr=0.1"), SystemExit(3), None, AssertionError()])

    def fails(model: nn.Module) -> float:
        error = next(errors)
        if error is not None:
            raise error
        seen.append((tmp_path / "sealed" / "error.txt").read_text())
        return 2.0

    assert select(tmp_path, score=trained(fails)).score == 2.0
    assert "SystemExit: 3" in seen[0]
    assert not (tmp_path / "sealed").exists()
    verify(tmp_path)


def test_if_every_score_raises_one_of_the_runs_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)
    best = select(tmp_path, score=trained(lambda model: 1 / 0))
    assert best.score != best.score
    verify(tmp_path)


def answers(tmp_path: Path, thresholds: list[float]) -> list[bool]:
    """Whether some run has a weight above each threshold, asked by a score that raises there, until one is best."""
    found: list[bool] = []
    for t in thresholds:

        def raises(model: nn.Module, t: float = t) -> float:
            if float(next(model.parameters())[0, 0]) > t:
                raise ValueError("Input contains NaN")
            return 0.0

        try:
            select(tmp_path, score=trained(raises))
        except SelectionFailed:
            found.append(True)
        else:
            return [*found, False]
    return found


@pytest.mark.nightly
def test_one_payment_is_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry: after an error, the same runs would be asked again by another score."""
    force(monkeypatch, 3)
    assert answers(tmp_path / "a", [-9.0, -8.0, -7.0]) == [False]
    assert len(records(tmp_path / "a", "intent")) == 1
    with stops.planted("score"):
        assert answers(tmp_path / "b", [-9.0, -8.0, -7.0, 9.0]) == [True, True, True, False]  # the check has teeth


def test_another_score_or_build_is_paid_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)

    def wider(lr: float) -> hs.Trainer:
        made = build(lr)
        with torch.no_grad():
            next(made.model.parameters()).mul_(2)
        return made

    def other(model: nn.Module) -> float:
        return score(model) - 1

    with pytest.raises(KeyboardInterrupt):
        select(tmp_path, score=trained(stop_now, score))
    for changed in ({"score": other}, {"build": wider}):
        with pytest.raises(ConfigError, match=r"build and score to be those .*pay_again=True"):
            select(tmp_path, **changed)
    assert len(records(tmp_path, "intent")) == 1
    assert select(tmp_path, score=other, pay_again=True).score <= 0
    assert len(records(tmp_path, "intent")) == 2
    select(tmp_path)  # a finished one is loaded, whatever its score
    verify(tmp_path)


def test_the_same_score_resumes_the_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        select(tmp_path, score=trained(stop_now, score))
    force(monkeypatch, 99)  # would be another K
    assert select(tmp_path).score >= 0
    assert len(records(tmp_path, "intent")) == 1


def test_a_selection_of_a_version_that_noted_no_score_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        select(tmp_path, score=trained(stop_now, score))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["probe"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert select(tmp_path).score >= 0


def failing(at: float, error: BaseException) -> Callable[[float], hs.Trainer]:
    """Training with this learning rate raises after its last step."""

    class Fails(hs.Trainer):
        def _finish(self, *args: Any) -> Any:
            raise error

    def make(lr: float) -> hs.Trainer:
        made = build(lr)
        return Fails(made.model, loss_fn, optimizer=made.optimizer, plan=EACH) if lr == at else made

    return make


def draw_settings(monkeypatch: pytest.MonkeyPatch, *drawn: int) -> None:
    force(monkeypatch, len(drawn))
    numbers = iter(drawn)
    monkeypatch.setattr(Selection, "draw_setting", lambda plan, settings, entropy: next(numbers))


@pytest.mark.parametrize("error", [ValueError("a loss is NaN"), SystemExit(0)])
def test_a_run_whose_training_raises_is_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    draw_settings(monkeypatch, 0, 1, 0)
    best = select(tmp_path, build=failing(0.1, error), score=trained(lambda model: float("nan")))
    assert best.setting == 1.0
    verify(tmp_path)


def test_if_all_runs_fail_the_selection_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told is the first run's error: the result of one run, as a model would be."""
    draw_settings(monkeypatch, 0, 1)
    made = {0.1: failing(0.1, ValueError("first")), 1.0: failing(1.0, ValueError("second"))}
    with pytest.raises(SelectionLost, match="the first one with ValueError: first") as caught:
        select(tmp_path, build=lambda lr: made[lr](lr))
    assert "ValueError: second" not in str(caught.value)
    assert not (tmp_path / "sealed").exists()
    with pytest.raises(SelectionLost, match="K is gone"):
        select(tmp_path)


def test_a_build_that_raises_in_a_later_run_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a build that counts its calls would tell K."""
    calls: list[float] = []

    def counts(lr: float) -> hs.Trainer:
        calls.append(lr)
        if len(calls) in (5, 6):  # the second and third run, after three checks
            raise ValueError
        return build(lr)

    force(monkeypatch, 4)
    assert select(tmp_path, build=counts).score >= 0
    assert len(calls) == 8


@pytest.mark.parametrize("error", [OSError("disk"), MemoryError()])
def test_what_the_machine_lacks_stops_a_selection_which_then_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    draw_settings(monkeypatch, 1, 0)
    with pytest.raises(SelectionFailed) as caught:
        select(tmp_path, build=failing(0.1, error))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert type(error).__name__ in (tmp_path / "sealed" / "error.txt").read_text()
    assert select(tmp_path).score >= 0
    assert len(records(tmp_path, "intent")) == 1


def test_a_mistake_is_heard_before_a_private_record_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows in the first run, and hangs on nothing private. Once it is corrected, the selection goes on."""
    force(monkeypatch, 2)

    def make(lr: float) -> hs.Trainer:
        return build(lr, mirror=hs.FirstOrder(0.5))

    with pytest.raises(SelectionFailed):
        select(tmp_path, build=make)
    assert "public" in (tmp_path / "sealed" / "error.txt").read_text()
    assert select(tmp_path).score >= 0


# ---- paid for first, and drawn once


def test_the_record_is_on_disk_before_k_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(plan: Selection, entropy: Entropy) -> int:
        assert len(records(tmp_path, "intent")) == 1
        assert not (tmp_path / "sealed" / "draw.json").exists()
        return 1

    monkeypatch.setattr(Selection, "draw", draw)
    select(tmp_path)


def test_what_the_budget_does_not_allow_is_neither_drawn_nor_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    force(monkeypatch, 1, drawn)
    ledger = hs.Ledger.open(tmp_path / "ledger", budget=hs.Budget(epsilon=1.5 * PLAN.epsilon(), delta=1e-5))
    select(tmp_path / "one", ledger=ledger)
    before = ledger.path.read_bytes()
    with pytest.raises(BudgetExceeded, match="does not fit beside what is spent"):
        select(tmp_path / "two", ledger=ledger)
    assert ledger.path.read_bytes() == before
    assert len(drawn) == 1
    assert ledger.spent() == PLAN.epsilon()


def lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selection that was interrupted in its first run, and whose sealed folder is gone."""
    force(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        select(tmp_path, score=trained(stop_now, score))
    shutil.rmtree(tmp_path / "sealed")


def test_k_is_not_drawn_again_unless_it_is_paid_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(tmp_path, monkeypatch)
    drawn: list[int] = []
    force(monkeypatch, 1, drawn)
    for _ in range(2):
        with pytest.raises(SelectionLost, match="pay_again=True"):
            select(tmp_path)
    assert drawn == []
    best = select(tmp_path, pay_again=True)
    assert drawn == [1]
    assert len(records(tmp_path, "intent")) == 2
    both = hs.Ledger.open(tmp_path / "ledger.jsonl").spent(1e-5)
    assert best.statement["all_runs_on_this_data"]["epsilon"] == both > PLAN.epsilon() == best.epsilon()
    assert verify(tmp_path)["all_runs_now"]["runs"] == 2
    select(tmp_path, pay_again=True)  # changes nothing for one that is there
    assert drawn == [1]


def test_k_of_another_selection_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lose(tmp_path / name, monkeypatch)
    (tmp_path / "a" / "sealed").mkdir()
    path = tmp_path / "a" / "sealed" / "draw.json"
    path.write_text(json.dumps({"run_id": "another", "draws": [[0, 1]]}))
    with pytest.raises(SelectionLost):
        select(tmp_path / "a")
    path.write_text("{")
    with pytest.raises(SelectionLost):
        select(tmp_path / "a")


def test_a_run_without_steps_left_ends_the_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was killed and cannot repeat what it lost is no run like the others."""
    plan = Selection(each=replace(EACH, spare_steps=0), trials=3)
    force(monkeypatch, 1)
    write = checkpoint.write

    def dies(path: Path, tensors: Any, about: Any) -> None:
        if path.parent.name == "run-0" and about["step"] > 0:
            raise KeyboardInterrupt
        write(path, tensors, about)

    def make(lr: float) -> hs.Trainer:
        return build(lr, plan=plan.each)

    monkeypatch.setattr(checkpoint, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        select(tmp_path, build=make, plan=plan)
    monkeypatch.setattr(checkpoint, "write", write)
    with pytest.raises(SelectionLost, match="spare_steps"):
        select(tmp_path, build=make, plan=plan)
    assert not (tmp_path / "sealed").exists()
    with pytest.raises(SelectionLost, match="K is gone"):
        select(tmp_path, build=make, plan=plan)
    select(tmp_path, build=make, plan=plan, pay_again=True)


@pytest.mark.nightly
def test_kills_at_ten_points() -> None:
    """The full form is `python -m benchmarks.robustness.select_kills --kills 200 --json`."""
    tally, _ = select_kills.kill(10, points=range(5, 165, 20))
    assert tally.ok, tally
    assert tally.kills == 10
    assert tally.selections > 0


@pytest.mark.parametrize(
    ("without", "figure"),
    [("one-draw", "second_draws"), ("order", "under"), ("resume", "under"), ("deletion", "leftovers")],
)
def test_the_kills_have_teeth(without: str, figure: str) -> None:
    """One kill in the second run of two, after its first step."""
    tally, _ = select_kills.kill(1, points=[143], without=without)
    assert tally.kills == 1
    assert getattr(tally, figure) > 0, tally


# ---- arguments


def test_a_clip_norm_may_be_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)

    def make(norm: float) -> hs.Trainer:
        return build(0.1, plan=replace(EACH, max_grad_norm=norm))

    assert select(tmp_path, settings=(0.5, 2.0), build=make).setting in (0.5, 2.0)
    verify(tmp_path)


shared = nn.Linear(4, 2)


def same_model(lr: float) -> hs.Trainer:
    sgd = torch.optim.SGD(shared.parameters(), lr=lr)
    return hs.Trainer(shared, loss_fn, optimizer=sgd, plan=EACH)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"build": same_model}, "two of its models share weights"),
        ({"build": lambda lr: build(lr, plan=replace(EACH, steps=4))}, "to be plan.each"),
        ({"build": lambda lr: build(lr, plan=replace(EACH, noise_multiplier=1.0))}, "to be plan.each"),
        ({"build": lambda lr: build(lr, callbacks=[print])}, "callbacks"),
        ({"build": lambda lr: build(lr, unsafe_seed=1)}, "unsafe_seed"),
        ({"build": lambda lr: build(lr, metrics_not_private=True)}, "metrics_not_private"),
        ({"build": lambda lr: nn.Linear(4, 2)}, "to be a Trainer"),
        ({"plan": EACH}, "to be a Selection"),
        ({"settings": ()}, "number of settings=0"),
        ({"settings": (object(),)}, "repr that shows their values"),
        ({"score": lambda model: "good"}, "to return one number, not str"),
        ({"score": lambda model: model.weight}, "to return one number, not Parameter"),
    ],
)
def test_what_would_go_wrong_is_refused_before_anything_is_spent(
    tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        select(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_resumed_selection_has_the_same_settings_and_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, 2)
    select(tmp_path)
    changes: list[Callable[[], object]] = [
        lambda: select(tmp_path, settings=(1.0, 0.1)),
        lambda: select(tmp_path, plan=replace(PLAN, trials=4)),
    ]
    for change in changes:
        with pytest.raises(ConfigError, match="to be unchanged on resume"):
            change()


def test_a_trainer_does_not_take_a_selection_for_its_plan() -> None:
    with pytest.raises(ConfigError, match="to be a PrivacyPlan"):
        build(0.1, plan=PLAN)


def test_the_ledger_of_a_run_is_checked(tmp_path: Path) -> None:
    """A class of one's own whose `fit` does something else is found out from the sealed ledger."""
    other = replace(EACH, noise_multiplier=60.0)

    class Cheat(hs.Trainer):
        def fit(self, *args: Any, **options: Any) -> Any:
            self.plan = other
            return super().fit(*args, **options)

    def make(lr: float) -> hs.Trainer:
        model = nn.Linear(4, 2)
        return Cheat(model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=lr), plan=EACH)

    with pytest.raises(SelectionFailed):
        select(tmp_path, build=make)
    assert "under plan.each" in (tmp_path / "sealed" / "error.txt").read_text()
    assert selection._Seal(tmp_path / "sealed", "x").read() is None
