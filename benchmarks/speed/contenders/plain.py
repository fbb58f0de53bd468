"""The bare engine: ordinary SGD on the mean loss, which every ratio is relative to."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.speed.contenders.base import Named, Options
from benchmarks.speed.contenders.ours import Ours
from benchmarks.speed.models import Workload


class Plain:
    """Whole batch, or gradients accumulated over pieces of `rows` examples."""

    def __init__(self, workload: Workload, model: nn.Module, rows: int) -> None:
        self._workload, self._model, self.detail = workload, model, ""
        self._pieces = workload.pieces(rows)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)

    def step(self) -> None:
        self._optimizer.zero_grad()
        for piece in self._pieces:
            losses = self._workload.loss_fn(self._model, piece)
            loss = losses.mean() if len(self._pieces) == 1 else losses.sum() / self._workload.rows
            loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def clipped_sum(self) -> Named | None:
        return None


class PlainLinear:
    """The gradient of least squares as two matrix products, without autograd."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self._x, self._y = workload.batch
        self.detail = ""
        self._theta, self._lr = next(model.parameters()).detach()[0], workload.lr

    def step(self) -> None:
        residual = self._x @ self._theta - self._y
        self._theta.sub_(residual @ self._x, alpha=self._lr / len(self._x))

    def clipped_sum(self) -> Named | None:
        return None


def whole(workload: Workload, model: nn.Module, options: Options) -> Plain | PlainLinear:
    return PlainLinear(workload, model) if workload.linear else Plain(workload, model, workload.rows)


def micro(workload: Workload, model: nn.Module, options: Options) -> Plain:
    """In pieces as large as ours: what of our cost is due to pieces and not to privacy."""
    rows = Ours(workload, workload.model(), options).rows
    made = Plain(workload, model, rows)
    made.detail = f"{rows} rows at once"
    return made
