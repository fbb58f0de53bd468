"""halfsilver as users run it: a `PrivateGradient` with its ledger, and the update that `Trainer` makes.

The plan takes every record in every step (sampling rate 1), so that the batch is the fixed one of the workload.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from benchmarks.speed.contenders.base import NOISE_MULTIPLIER, Named, Options
from benchmarks.speed.models import Workload
from halfsilver import FirstOrder, PrivacyPlan
from halfsilver._core import system
from halfsilver._core.tensors import Tensors, take_rows, trainable
from halfsilver.mirror import Clock, PublicLoss, Step
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import Performance
from halfsilver.privacy.gradients.linear import LinearModel, with_row_norms
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient

_STEPS = 1_000_000  # of the plan: more than any benchmark takes
_LINEAR_ROWS = 4096  # as MirrorLinearRegression does
_ALPHA = 0.9
_NEXT_TO_NOTHING = 1e-9


class Ours:
    """DP-SGD on all rows."""

    def __init__(self, workload: Workload, model: nn.Module, options: Options) -> None:
        self._model, self._workload = model, workload
        memory = system.freed_memory_kept()  # as in `Trainer.fit`
        memory.__enter__()
        weakref.finalize(self, memory.__exit__, None, None, None)
        self._expected = self._private_rows()
        folder = Path(tempfile.mkdtemp(prefix="halfsilver-speed-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)
        self._source = PrivateGradient(
            model,
            workload.loss_fn,
            PrivateData(self._records()),
            self._plan(),
            ledger=Ledger.open(folder / "ledger.jsonl"),
            run_id="speed",
            performance=self._speed(options),
        )
        self.rows = self._source._batches.rows
        self.detail = f"backend {self._source._backend.name}, {self.rows} rows at once"

    def _private_rows(self) -> int:
        return self._workload.rows

    def _records(self) -> tuple[Tensor, ...]:
        records = cast("tuple[Tensor, Tensor]", take_rows(self._workload.batch, slice(0, self._expected)))
        return with_row_norms(*records) if self._workload.linear else records

    def _plan(self) -> PrivacyPlan:
        return PrivacyPlan(
            steps=_STEPS,
            sampling_rate=1.0,
            expected_batch_size=self._expected,
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=self._workload.clip,
        )

    def _speed(self, options: Options) -> Performance:
        if self._workload.linear:
            assert isinstance(self._model, nn.Linear)
            return Performance(backend=LinearModel(self._model), micro_batch_size=_LINEAR_ROWS)
        return Performance(backend=options.backend)  # type: ignore[arg-type] # the library checks the name

    def step(self) -> None:
        direction = self._direction(self._source.release())
        for p, d in zip(trainable(self._model), direction, strict=True):
            p.grad = d
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _direction(self, released: Tensors) -> Tensors:
        return released

    def clipped_sum(self) -> Named | None:
        """Through the very object that is timed, at a noise that no tolerance notices."""
        noise = self._source.out._noise
        self._source.out._noise = _NEXT_TO_NOTHING
        try:
            mean = self._source.release()
        finally:
            self._source.out._noise = noise
        names = (name for name, p in self._model.named_parameters() if p.requires_grad)
        return {name: g * self._expected for name, g in zip(names, mean, strict=True)}


class OursMirror(Ours):
    """PDA-DPMD: the first half of the rows is private, the other half public, in a pass of its own."""

    def __init__(self, workload: Workload, model: nn.Module, options: Options) -> None:
        super().__init__(workload, model, options)
        public = take_rows(workload.batch, slice(self._expected, workload.rows))
        self._public = PublicLoss(model, workload.loss_fn, public)
        self._mirror, self._taken = FirstOrder(_ALPHA), 0

    def _private_rows(self) -> int:
        return self._workload.rows // 2

    def _direction(self, released: Tensors) -> Tensors:
        clock = Clock(step=self._taken, total_steps=_STEPS, steps_per_epoch=1.0)
        self._taken += 1
        step = Step(params=trainable(self._model), public=self._public, clock=clock, lr=self._workload.lr)
        return self._mirror.direction(released, {}, step)[0]
