"""Opacus through `PrivacyEngine.make_private`, in each of its modes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed.contenders.base import NOISE_MULTIPLIER, Entry, Named, Options
from benchmarks.speed.models import Criterion, Workload
from benchmarks.speed.networks import Recurrent

MODES = ("hooks", "ew", "functorch", "ghost")


class _MeanLoss:
    """A criterion with the `reduction` attribute that Opacus's ghost mode switches off and on."""

    def __init__(self, per_example: Criterion) -> None:
        self.reduction, self._per_example = "mean", per_example

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self._per_example(outputs, targets)
        return losses.mean() if self.reduction == "mean" else losses


class Opacus:
    """One logical batch in one pass, as Opacus runs without its batch memory manager."""

    def __init__(self, mode: str, workload: Workload, model: nn.Module, options: Options) -> None:
        from opacus import PrivacyEngine

        self._workload, self.detail = workload, ""
        loader = DataLoader(TensorDataset(*workload.batch), batch_size=workload.rows)
        criterion = _MeanLoss(workload.criterion)
        private = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=workload.lr),
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=workload.clip,
            poisson_sampling=False,  # the batch is the fixed one
            grad_sample_mode=mode,
        )
        self._model: nn.Module = private[0]
        self._optimizer: Any = private[1]
        self._criterion: Any = private[2] if mode == "ghost" else criterion

    def step(self) -> None:
        x, y = self._workload.batch
        self._optimizer.zero_grad()
        self._criterion(self._model(x), y).backward()
        self._optimizer.step()

    def clipped_sum(self) -> Named:
        self.step()
        found = ((n.removeprefix("_module."), p) for n, p in self._model.named_parameters())
        return {name: _summed(p).detach().clone() for name, p in found}


def _summed(p: Any) -> Tensor:
    """What Opacus's optimizer leaves beside a parameter: the clipped sum before the noise."""
    total = p.summed_grad
    assert isinstance(total, Tensor)
    return total


def _lstm() -> Recurrent:
    from opacus.layers import DPLSTM

    recurrent: Recurrent = DPLSTM
    return recurrent


def _prepare() -> None:
    import opacus  # noqa: F401


ENTRIES = {f"opacus_{mode}": Entry(build=partial(Opacus, mode), recurrent=_lstm, prepare=_prepare) for mode in MODES}
