"""Settings and arithmetic of local training. The private and the public side each read their own rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfsilver._core.tensors import Tensors
from halfsilver.errors import require


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a user's device trains: plain SGD over the user's own rows.

    Each step is theta <- theta - lr * (mean gradient over one batch). Momentum and shuffling are not used.

    Args:
        lr: The learning rate on the device, above 0. Tune it together with that of the server's optimizer.
        batch_size: Rows per step, at least 1. Default 16.
        epochs: Passes over the user's rows, at least 1. Default 1. More epochs mean fewer rounds for the same progress,
            but updates of users with different data drift apart.
        max_examples: The most rows of a user that are used, at least 1. Default 256. It bounds time and memory per
            user; the privacy guarantee does not depend on it.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> [batch.stop for batch in LocalTraining(lr=0.1, batch_size=2).slices(5)]
        [2, 4, 5]

    References:
        - McMahan, Moore, Ramage, Hampson and Aguera y Arcas 2017, Communication-Efficient Learning of Deep Networks
          from Decentralized Data, arXiv:1602.05629, for the parameters B and E.
    """

    lr: float
    batch_size: int = 16
    epochs: int = 1
    max_examples: int = 256

    def __post_init__(self) -> None:
        require(self.lr > 0, "lr", self.lr, "above 0")
        for name in ("batch_size", "epochs", "max_examples"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    def slices(self, rows: int) -> Iterator[slice]:
        """The batches of all epochs, in the order in which the rows come.

        Args:
            rows: How many rows the user has, at least 0. At most `max_examples` of them are used.

        Returns:
            An iterator over slices of row numbers.
        """
        count = min(rows, self.max_examples)
        for _ in range(self.epochs):
            yield from (slice(i, min(i + self.batch_size, count)) for i in range(0, count, self.batch_size))


def descend(params: Sequence[Tensor], losses: Iterable[Tensor], lr: float) -> Tensors:
    """One step of SGD per loss, each computed after the step before. Returns start minus end."""
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
