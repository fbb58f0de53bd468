"""Trackers: callbacks that show a run in TensorBoard or MLflow while it trains.

Guarantee: a tracker writes what `Trainer` reports, which are released values and public constants, and the plan. Points
carry the day and no time, because the duration of a step depends on the private records that were drawn.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch

from halfsilver._core.distributed import World
from halfsilver.errors import ConfigError, MissingExtra
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.trainer import StepReport

_POINTS = 200  # of a curve, as in the run folder
_log = logging.getLogger("halfsilver")


@dataclass(eq=False)
class _Tracker(ABC):
    """A callback that records about 200 steps of a run, and all steps with metrics; under torchrun on rank 0 only.

    A store that cannot be opened is an error. One that fails later is dropped with a warning. If the run stopped
    instead, the steps since its last checkpoint would have to be made, and paid for, again.
    """

    _: KW_ONLY
    plan: PrivacyPlan | None = None
    delta: float | None = None
    _store: Any = field(default=None, init=False, repr=False)
    _failed: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.delta is not None:
            if self.plan is None:
                raise ConfigError(f"Expected a plan beside delta={self.delta!r}: epsilon follows from both.")
            self.plan.check_delta(self.delta)
        self._import()

    def __call__(self, report: StepReport) -> None:
        if self._failed or not World.current(torch.device("cpu")).leads:
            return
        if self._store is None:
            self._store = self._open(report.step)
        try:
            if report.metrics or report.step % max(1, report.total_steps // _POINTS) == 0:
                values = {"lr": report.lr, "released_norm": report.released_norm, **report.metrics}
                self._write({name: float(value) for name, value in values.items()}, report.step)
            if report.step == report.total_steps:
                self.close()
        except Exception as error:
            self._failed = True
            _log.warning("%s has failed and is left; the run goes on without it: %s", type(self).__name__, error)

    def close(self) -> None:
        """End the record. The last planned step does so by itself; call it if a budget ended the run early."""
        if self._store is not None and not self._failed:
            self._close()
        self._store = None

    def _settings(self) -> dict[str, Any]:
        """The plan, and epsilon of all its steps."""
        if self.plan is None:
            return {}
        cost = {} if self.delta is None else {"delta": self.delta, "epsilon": self.plan.epsilon(self.delta)}
        return {**self.plan.to_dict(), **cost}

    @abstractmethod
    def _import(self) -> None: ...
    @abstractmethod
    def _open(self, step: int) -> Any: ...
    @abstractmethod
    def _write(self, values: Mapping[str, float], step: int) -> None: ...
    @abstractmethod
    def _close(self) -> None: ...


@final
@dataclass(eq=False)
class TensorBoard(_Tracker):
    """Write the curves of a run to a TensorBoard event file, and the plan as a text.

    Pass it to `Trainer` in ``callbacks`` and look at the curves with ``tensorboard --logdir folder``. A run that
    resumes after a crash repeats some steps; TensorBoard then shows the later ones.

    Guarantee: only released values, public constants and the day are written.

    Args:
        folder: The folder of the event file.
        plan: The plan, which is written once beside the curves. Default None.
        delta: The delta at which the epsilon of the whole plan is written, in (0, 1). Default None, which writes none.
            It needs `plan`.

    Raises:
        MissingExtra: If tensorboard is not installed.
        ConfigError: If `delta` is given without `plan`, or is out of range.

    Example:
        >>> import tempfile
        >>> import halfsilver as hs
        >>> plan = hs.PrivacyPlan(steps=10, sampling_rate=0.1, expected_batch_size=50, noise_multiplier=1.0)
        >>> TensorBoard(tempfile.mkdtemp(), plan=plan, delta=1e-5).delta  # then Trainer(..., callbacks=[...])
        1e-05
    """

    folder: str | Path

    def _import(self) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard") from error

    def _open(self, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.folder), purge_step=step)
        rows = [f"| {name} | {value} |" for name, value in self._settings().items()]
        if rows:
            writer.add_text("plan", "\n".join(["| | |", "|---|---|", *rows]), step, walltime=_day())
        return writer

    def _write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._store.add_scalar(name, value, step, walltime=_day())
        self._store.flush()

    def _close(self) -> None:
        self._store.close()


@final
@dataclass(eq=False)
class MLflow(_Tracker):
    """Write the curves and the plan of a run to an MLflow experiment.

    Pass it to `Trainer` in ``callbacks``. A run that resumes after a crash continues in the same MLflow run, where
    repeated steps have two points. MLflow's usage reports are switched off, unless your program has imported MLflow
    before.

    Guarantee: only released values, public constants and the day are written.

    Args:
        run: The name of the MLflow run.
        experiment: The name of the experiment, which is created if needed. Default "halfsilver".
        tracking_uri: A server or a local file such as ``"sqlite:///mlflow.db"``. Default None, which means the one that
            MLflow itself is configured for.
        plan: The plan, which is written as parameters of the run. Default None.
        delta: The delta at which the epsilon of the whole plan is written, in (0, 1). Default None, which writes none.
            It needs `plan`.

    Raises:
        MissingExtra: If mlflow is not installed.
        ConfigError: If `delta` is given without `plan`, or is out of range.

    Example:
        >>> MLflow("first", experiment="demo", tracking_uri="sqlite:///mlflow.db").experiment
        'demo'
    """

    run: str
    _: KW_ONLY
    experiment: str = "halfsilver"
    tracking_uri: str | None = None
    _run_id: str = field(default="", init=False, repr=False)

    def _import(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            import mlflow  # noqa: F401
        except ImportError as error:
            raise MissingExtra("mlflow", "mlflow") from error

    def _open(self, step: int) -> Any:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        number = found.experiment_id if found else client.create_experiment(self.experiment)
        running = client.search_runs([number], "attributes.status = 'RUNNING'")
        left = [run.info.run_id for run in running if run.info.run_name == self.run]
        while step == 1 and left:  # this run starts anew, so nobody will go on with those
            client.set_terminated(left.pop(), "KILLED", end_time=_day() * 1000)
        made = left or [client.create_run(number, run_name=self.run, start_time=_day() * 1000).info.run_id]
        self._run_id = made[0]
        client.log_batch(self._run_id, params=[Param(name, str(value)) for name, value in self._settings().items()])
        return client

    def _write(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, _day() * 1000, step) for name, value in values.items()]
        self._store.log_batch(self._run_id, metrics=metrics)

    def _close(self) -> None:
        self._store.set_terminated(self._run_id, "FINISHED", end_time=_day() * 1000)


def _day() -> int:
    """Today's midnight in seconds: the only time that is written."""
    return int(datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0).timestamp())
