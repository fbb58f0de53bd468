"""Training on the rows of one user: the same few lines for private users and for public ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfsilver._tensors import Batch, LossFn, Tensors, batch_rows, take_rows, trainable
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


def local_update(model: nn.Module, loss_fn: LossFn, rows: Batch, local: LocalTraining) -> Tensors:
    """theta - theta_local: what a user asks the server to subtract. The model is left as it was.

    A step of SGD takes the mean of the losses of `batch_size` rows, in the order in which they come. With one row, one
    epoch and ``lr=1`` the update is the gradient.
    """
    with kept(model):
        params = trainable(model)
        start = [p.detach().clone() for p in params]
        for batch in _batches(rows, local):
            _descend(params, loss_fn(model, batch).mean(), local.lr)
        return [s.sub_(p.detach()) for s, p in zip(start, params, strict=True)]


def _batches(rows: Batch, local: LocalTraining) -> Iterator[Batch]:
    count = min(batch_rows(rows), local.max_examples)
    for _ in range(local.epochs):
        for i in range(0, count, local.batch_size):
            yield take_rows(rows, slice(i, min(i + local.batch_size, count)))


def _descend(params: Tensors, loss: Tensor, lr: float) -> None:
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    with torch.no_grad():
        for p, g in zip(params, gradients, strict=True):
            if g is not None:
                p.add_(g, alpha=-lr)


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Puts parameters and buffers back: a running mean, say, would carry one user's rows to all that follow.

    A layer may have put another tensor in a buffer's place, so the places are restored as well.
    """
    places = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(t, t.detach().clone()) for t in (*trainable(model), *model.buffers())]
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, buffers in places:
            module._buffers.update(buffers)
        with torch.no_grad():
            for t, value in values:
                t.copy_(value)
