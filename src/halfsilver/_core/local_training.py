"""What a user's device does: settings and arithmetic of local training. Each side reads its rows itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfsilver._core.tensors import Tensors
from halfsilver.errors import require


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """What a user's device does with the model: SGD over the user's own rows, at most `max_examples` of them."""

    lr: float
    batch_size: int = 16
    epochs: int = 1
    max_examples: int = 256

    def __post_init__(self) -> None:
        require(self.lr > 0, "lr", self.lr, "above 0")
        for name in ("batch_size", "epochs", "max_examples"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    def slices(self, rows: int) -> Iterator[slice]:
        """The batches of all epochs, in the order in which `rows` rows come."""
        count = min(rows, self.max_examples)
        for _ in range(self.epochs):
            yield from (slice(i, min(i + self.batch_size, count)) for i in range(0, count, self.batch_size))


def descend(params: Sequence[Tensor], losses: Iterable[Tensor], lr: float) -> Tensors:
    """One step of SGD per loss, each of which is computed after the step before; returns start minus end."""
    start = [p.detach().clone() for p in params]
    with torch.enable_grad():
        for loss in losses:
            _step(params, torch.autograd.grad(loss, list(params), allow_unused=True), lr)
    return [s.sub_(p.detach()) for s, p in zip(start, params, strict=True)]


@torch.no_grad()
def _step(params: Sequence[Tensor], gradients: Sequence[Tensor | None], lr: float) -> None:
    for p, g in zip(params, gradients, strict=True):
        if g is not None:
            p.add_(g, alpha=-lr)
