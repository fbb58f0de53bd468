"""Trackers: what they write, read back with the libraries that they write for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfsilver._core.distributed import World
from halfsilver.errors import ConfigError, MissingExtra
from halfsilver.privacy.gradients import Performance
from halfsilver.tracking import MLflow, TensorBoard
from halfsilver.trainer import StepReport
from tests.test_trainer import StopHere, accuracy, plan, rows, stop_at, trainer

Curves = dict[str, list[tuple[int, float]]]
DAY = 24 * 60 * 60
PLAN = plan(steps=6, spare_steps=14)
SPEED = Performance(backend="vmap", micro_batch_size=8)  # nothing to measure first


def fit(folder: Path, *callbacks: Any) -> Curves:
    """Six steps, a checkpoint after each, metrics at the third and the last; what the run's own log says of them."""
    options: dict[str, Any] = {"metrics": {"accuracy": accuracy}, "checkpoint_seconds": 0.0, "performance": SPEED}
    result = trainer(plan=PLAN, callbacks=callbacks, **options).fit(
        rows(400), run_dir=folder, test=rows(40, 1), test_every=3
    )
    names = ("lr", "released_norm", "loss", "accuracy")
    return {name: [(line["step"], line[name]) for line in result.history[1:] if name in line] for name in names}


def report(step: int, **metrics: float) -> StepReport:
    return StepReport(step=step, total_steps=1000, lr=0.5, released_norm=float(step), metrics=metrics)


def alike(curves: Curves) -> Any:
    """As TensorBoard has them: in single precision."""
    return {name: [(step, pytest.approx(value, rel=1e-6)) for step, value in points] for name, points in curves.items()}


# ---- TensorBoard


def events(folder: Path) -> Any:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def scalars(folder: Path) -> Curves:
    found = events(folder)
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_shows_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logged = fit(tmp_path / "run", TensorBoard(tmp_path / "events", plan=PLAN, delta=1e-4))
    assert logged["accuracy"][0][0] == 3  # the log is not empty
    assert scalars(tmp_path / "events") == alike(logged)
    found = events(tmp_path / "events")
    text = found.Tensors("plan/text_summary")[0].tensor_proto.string_val[0].decode()
    assert f"| noise_multiplier | {PLAN.noise_multiplier} |" in text
    assert f"| epsilon | {PLAN.epsilon(1e-4)} |" in text
    assert {e.wall_time % DAY for name in found.Tags()["scalars"] for e in found.Scalars(name)} == {0}


def test_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(StopHere):
        fit(tmp_path / "run", TensorBoard(tmp_path / "events"), stop_at(4))
    before = scalars(tmp_path / "events")["released_norm"]
    logged = fit(tmp_path / "run", TensorBoard(tmp_path / "events"))
    assert [step for step, _ in before] == [1, 2, 3, 4]
    assert before[3] != alike(logged)["released_norm"][3]  # made again, with other noise
    assert scalars(tmp_path / "events") == alike(logged)


# ---- MLflow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A local store; making its tables takes two seconds, so all tests share it."""
    pytest.importorskip("mlflow")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'runs.db'}"


@pytest.fixture
def flow(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MLflow]:
    monkeypatch.chdir(tmp_path)
    return lambda **options: MLflow("mine", experiment=tmp_path.name, tracking_uri=store, **options)


def recorded(tracker: MLflow) -> tuple[Any, list[Any]]:
    """MLflow's client, and the runs of the tracker's experiment, the oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(tracker.tracking_uri)
    number = client.get_experiment_by_name(tracker.experiment).experiment_id
    return client, list(client.search_runs([number], order_by=["attributes.status DESC"]))


def points(client: Any, run: Any) -> Curves:
    found = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert {m.timestamp % (DAY * 1000) for curve in found.values() for m in curve} == {0}
    return {name: [(m.step, m.value) for m in curve] for name, curve in found.items()}


def test_mlflow_shows_the_run(tmp_path: Path, flow: Callable[..., MLflow]) -> None:
    tracker = flow(plan=PLAN, delta=1e-4)
    logged = fit(tmp_path / "run", tracker)
    client, (run,) = recorded(tracker)
    assert points(client, run) == logged
    assert run.data.params == {
        name: str(value) for name, value in {**PLAN.to_dict(), "delta": 1e-4, "epsilon": PLAN.epsilon(1e-4)}.items()
    }
    assert run.data.tags == {"mlflow.runName": "mine"}  # no user, no machine, no source
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.info.start_time % (DAY * 1000) == run.info.end_time % (DAY * 1000) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_mlflow_goes_on_with_the_run(tmp_path: Path, flow: Callable[..., MLflow]) -> None:
    with pytest.raises(StopHere):
        fit(tmp_path / "run", flow(plan=PLAN), stop_at(4))
    logged = fit(tmp_path / "run", tracker := flow(plan=PLAN))
    client, (run,) = recorded(tracker)
    found = points(client, run)["released_norm"]
    assert sorted(step for step, _ in found) == [1, 2, 3, 4, 4, 5, 6]
    assert set(found) >= set(logged["released_norm"])
    assert run.info.status == "FINISHED"


def test_mlflow_does_not_mix_runs_of_one_name(flow: Callable[..., MLflow]) -> None:
    for _ in range(2):
        tracker = flow()
        tracker(report(1, loss=1.0))
    client, (open_run, killed) = recorded(tracker)
    assert (open_run.info.status, killed.info.status) == ("RUNNING", "KILLED")
    tracker.close()  # as after a budget has ended the run
    tracker.close()
    assert client.get_run(open_run.info.run_id).info.status == "FINISHED"
    assert points(client, open_run) == {"lr": [(1, 0.5)], "released_norm": [(1, 1.0)], "loss": [(1, 1.0)]}


# ---- both


def test_long_runs_are_thinned_but_for_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path)
    for step in range(1, 1001):
        tracker(report(step, **({"loss": 1.0} if step == 7 else {})))
    assert [step for step, _ in scalars(tmp_path)["lr"]] == sorted([7, *range(5, 1001, 5)])


def test_rank_0_alone_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(World, "current", classmethod(lambda cls, device: World(1, 2)))
    TensorBoard(tmp_path / "events")(report(1, loss=1.0))
    assert not (tmp_path / "events").exists()


def test_a_store_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ending it would make the steps since the last checkpoint cost their epsilon once more."""
    pytest.importorskip("tensorboard")
    tracker = TensorBoard(tmp_path / "events")

    def full(report: StepReport) -> None:
        tracker._store.add_scalar = tracker._store.close = None

    with caplog.at_level(logging.WARNING, "halfsilver"):
        logged = fit(tmp_path / "run", tracker, full)
    assert logged["lr"][-1][0] == 6
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        "TensorBoard has failed and is left; the run goes on without it"
    ]


def test_a_store_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        TensorBoard(tmp_path / "file")(report(1))


def test_epsilon_needs_a_plan_and_a_delta_that_fits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a plan beside delta=1e-05"):
        TensorBoard(tmp_path, delta=1e-5)
    with pytest.raises(ConfigError, match=r"delta=0.01 at most 0.0025"):
        TensorBoard(tmp_path, plan=PLAN, delta=0.01)


@pytest.mark.parametrize(("kind", "package"), [(TensorBoard, "tensorboard"), (MLflow, "mlflow")])
def test_a_missing_extra_is_named(kind: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"{package} is not installed.*pip install 'halfsilver\[{package}\]'"):
        kind("runs")
