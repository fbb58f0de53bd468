"""Pretraining: theta_0 = argmin Psi, by early stopping on a held-out part of the public data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfsilver._core.averaging import Average
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, batch_rows, eval_mode, trainable
from halfsilver.errors import require
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.rows import PublicRows, derive_seed
from halfsilver.mirror.schedules import falling


@dataclass(frozen=True, kw_only=True)
class PretrainResult:
    """The result of `pretrain`. The model has the weights of `best_epoch`.

    Args:
        epochs: Epochs that were trained.
        best_epoch: The epoch with the least held-out loss. 0 is the start, so training never helped. Without held-out
            rows it is the last epoch.
        train_loss: The mean loss of the training rows in the best epoch.
        holdout_loss: The mean loss of the held-out rows after the best epoch; NaN without such rows.
        history: Pairs of (train_loss, holdout_loss), before training and after each epoch. The best is
            ``history[best_epoch]``.
    """

    epochs: int
    best_epoch: int
    train_loss: float
    holdout_loss: float
    history: tuple[tuple[float, float], ...]


def pretrain(
    model: nn.Module,
    loss_fn: LossFn,
    dataset: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    epochs: int = 200,
    patience: int = 10,
    holdout: float = 0.1,
    batch_size: int = 64,
    seed: int = 0,
    transform: Callable[[Batch], Batch] | None = None,
    average: float | None = None,
    lr_end: float = 1.0,
) -> PretrainResult:
    """Train on public data, ``theta_0 = argmin Psi(theta)``, until the held-out loss stops improving.

    The model keeps its best weights and its training mode, and no gradients. Private data are not involved, so it
    costs no privacy. Everything random depends on `seed` alone, and no global random generator is advanced.

    Args:
        model: The model to train, in place.
        loss_fn: A function of model and batch that returns one loss for each row.
        dataset: Public rows: a tensor, a tuple or dict of tensors, or a data set with ``__len__`` and ``__getitem__``.
        optimizer: Any torch optimizer of the model's trainable parameters. Default None, Adam with learning rate 1e-3.
        epochs: The largest number of passes over the training rows, at least 1. Default 200.
        patience: Epochs without improvement of the held-out loss after which training stops, at least 1. Default 10.
            Raise it for small data sets, whose held-out loss is noisy.
        holdout: The share of rows that are held out, in (0, 1). Default 0.1. With 0 all rows are trained on for all
            epochs; use it with a number of `epochs` that is known to be good.
        batch_size: The largest number of rows in a batch, at least 1. Default 64.
        seed: Determines the held-out rows, the order of the others, dropout and `transform`. Default 0.
        transform: Augments a batch before each training pass. Held-out rows are not augmented. Default None.
        average: The decay of an exponential average of the weights, in (0, 1). The average is then what is tested and
            what the model keeps. Default None, no average.
        lr_end: The learning rate falls along a cosine over `epochs` to this share of its start, in [0, 1]. Default 1, a
            constant rate.

    Returns:
        Losses, the number of epochs, and which of them was best.

    Raises:
        ConfigError: If an argument is out of range, or the loss of the public rows fails or is not finite.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().squeeze(1)
        >>> result = pretrain(model, loss, (x, 2 * x), epochs=5)
        >>> result.epochs, result.history[0][1] > result.holdout_loss
        (5, True)

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193,
        algorithm 1, line 2
    """
    rows = PublicRows(dataset)
    held_out = round(holdout * len(rows))
    require(0 < held_out < len(rows) or holdout == 0, "holdout", holdout, f"to leave rows on both sides of {len(rows)}")
    for name, count in {"epochs": epochs, "patience": patience, "batch_size": batch_size}.items():
        require(count >= 1, name, count, "at least 1")
    require(0 <= lr_end <= 1, "lr_end", lr_end, "in [0, 1]")
    PublicLoss(model, loss_fn, dataset).check()
    device = trainable(model)[0].device
    part = _Part(model=model, loss_fn=loss_fn, rows=rows, batch_size=batch_size, device=device)
    optimizer = optimizer or torch.optim.Adam(trainable(model), lr=1e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: falling(epoch / epochs, lr_end))
    with own_randomness(derive_seed(seed, "pretrain"), [device]), eval_mode(model):
        order = torch.randperm(len(rows))
        train, test = order[held_out:], order[:held_out]
        transform = transform or (lambda batch: batch)
        return _until_no_better(part, optimizer, decay, Average(average), train, test, epochs, patience, transform)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A model with the rows it is trained and tested on."""

    model: nn.Module
    loss_fn: LossFn
    rows: PublicRows
    batch_size: int
    device: torch.device

    def batches(self, index: Tensor) -> Iterator[Batch]:
        # Pieces of equal size: a last batch of one row would break batch normalisation.
        for piece in index.tensor_split(-(-len(index) // self.batch_size)):
            yield self.rows.batch(piece, self.device)

    def train_epoch(
        self,
        index: Tensor,
        optimizer: torch.optim.Optimizer,
        transform: Callable[[Batch], Batch],
        updated: Callable[[], None],
    ) -> float:
        self.model.train()
        total = 0.0
        for batch in self.batches(index[torch.randperm(len(index))]):
            optimizer.zero_grad(set_to_none=True)
            loss = self.loss_fn(self.model, transform(batch)).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            updated()
            total += float(loss.detach()) * batch_rows(batch)
        optimizer.zero_grad(set_to_none=True)
        return total / len(index)

    def losses(self, train: Tensor, test: Tensor) -> tuple[float, float]:
        return self.mean_loss(train), self.mean_loss(test)

    @torch.no_grad()
    def mean_loss(self, index: Tensor) -> float:
        if not len(index):
            return math.nan
        self.model.eval()
        return sum(float(self.loss_fn(self.model, batch).sum()) for batch in self.batches(index)) / len(index)


def _until_no_better(
    part: _Part,
    optimizer: torch.optim.Optimizer,
    decay: torch.optim.lr_scheduler.LambdaLR,
    average: Average,
    train: Tensor,
    test: Tensor,
    epochs: int,
    patience: int,
    transform: Callable[[Batch], Batch],
) -> PretrainResult:
    params, history = trainable(part.model), [part.losses(train, test)]
    best, best_weights = 0, copy.deepcopy(part.model.state_dict())
    while len(history) <= epochs and (not len(test) or len(history) - 1 - best < patience):
        train_loss = part.train_epoch(train, optimizer, transform, lambda: average.update(params))
        decay.step()
        with average.in_place_of(params):
            history.append((train_loss, part.mean_loss(test)))
            if not len(test) or history[-1][1] < history[best][1]:  # a NaN is never better
                best, best_weights = len(history) - 1, copy.deepcopy(part.model.state_dict())
    part.model.load_state_dict(best_weights)
    train_loss, holdout_loss = history[best]
    return PretrainResult(epochs=len(history) - 1, best_epoch=best, train_loss=train_loss,
                          holdout_loss=holdout_loss, history=tuple(history))  # fmt: skip
