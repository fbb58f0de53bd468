"""Pretraining: theta_0 = argmin Psi, by early stopping on a held-out part of the public data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from halfsilver._core import checkpoint as files
from halfsilver._core.averaging import Average
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, batch_rows, eval_mode, trainable
from halfsilver.errors import CheckpointCorrupt, require
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
    schedule: Callable[[float], float] | None = None,
    checkpoint: str | Path | None = None,
    after_epoch: Callable[[int, float, float], None] | None = None,
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
        average: The decay of an exponential average over steps of the weights and of the running statistics of batch
            norms, in (0, 1). The average is then what is tested and what the model keeps. Default None, no average.
        lr_end: The learning rate falls along a cosine over `epochs` to this share of its start, in [0, 1]. Default 1, a
            constant rate.
        schedule: The learning rate before each step, as a multiple of the optimizer's and as a function of the share of
            the training that is over, from 0 to 1. Default None, which follows `lr_end` epoch by epoch. `OneCycle`
            suits networks with batch norm.
        checkpoint: A file that is replaced after each epoch. If it exists, training resumes from it and ends as an
            uninterrupted run does, where everything random comes from torch's generator for the CPU. It must belong to
            the same arguments. Default None, no file.
        after_epoch: Called after each epoch with its number, its training loss and the held-out loss, to show progress.
            Default None.

    Returns:
        Losses, the number of epochs, and which of them was best.

    Raises:
        ConfigError: If an argument is out of range, or the loss of the public rows fails or is not finite.
        CheckpointCorrupt: If `checkpoint` is damaged, or belongs to another model, optimizer or seed.

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
    require(schedule is None or lr_end == 1, "lr_end", lr_end, "to be 1 with a schedule")
    PublicLoss(model, loss_fn, dataset).check()
    device = trainable(model)[0].device
    part = _Part(model=model, loss_fn=loss_fn, rows=rows, batch_size=batch_size, device=device)
    optimizer = optimizer or torch.optim.Adam(trainable(model), lr=1e-3)
    with own_randomness(derive_seed(seed, "pretrain"), [device]), eval_mode(model):
        order = torch.randperm(len(rows))
        train, test = order[held_out:], order[:held_out]
        steps = epochs * part.pieces(train)
        every_step = LambdaLR(optimizer, lambda step: schedule(step / steps)) if schedule else None
        every_epoch = LambdaLR(optimizer, lambda epoch: falling(epoch / epochs, lr_end)) if not schedule else None
        training = _Training(
            part=part,
            optimizer=optimizer,
            average=Average(average),
            every_step=every_step,
            every_epoch=every_epoch,
            transform=transform or (lambda batch: batch),
            file=None if checkpoint is None else Path(checkpoint),
            about={"seed": seed, "epochs": epochs, "batch_size": batch_size, "rows": len(rows), "holdout": held_out},
        )
        return training.until_no_better(train, test, epochs, patience, after_epoch or (lambda *_: None))


def held_out_rows(rows: int, holdout: float, seed: int) -> tuple[Tensor, Tensor]:
    """The numbers of the rows on which `pretrain` trains, and of those that it holds out.

    Args:
        rows: Number of public rows.
        holdout: As for `pretrain`.
        seed: As for `pretrain`.
    """
    with own_randomness(derive_seed(seed, "pretrain")):
        order = torch.randperm(rows)
    held_out = round(holdout * rows)
    return order[held_out:], order[:held_out]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A model with the rows it is trained and tested on."""

    model: nn.Module
    loss_fn: LossFn
    rows: PublicRows
    batch_size: int
    device: torch.device

    def pieces(self, index: Tensor) -> int:
        return -(-len(index) // self.batch_size)

    def batches(self, index: Tensor) -> Iterator[Batch]:
        # Pieces of equal size: a last batch of one row would break batch normalisation.
        for piece in index.tensor_split(self.pieces(index)):
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


@dataclass(kw_only=True)
class _Training:
    """What changes from epoch to epoch, and the file that it is kept in."""

    part: _Part
    optimizer: torch.optim.Optimizer
    average: Average
    every_step: LambdaLR | None
    every_epoch: LambdaLR | None
    transform: Callable[[Batch], Batch]
    file: Path | None
    about: dict[str, Any]
    history: list[tuple[float, float]] = field(default_factory=list)
    best: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)

    def until_no_better(
        self, train: Tensor, test: Tensor, epochs: int, patience: int, after_epoch: Callable[[int, float, float], None]
    ) -> PretrainResult:
        averaged = _averaged(self.part.model)
        if not self._resumed(averaged):
            self.history = [self.part.losses(train, test)]
            self.best_weights = copy.deepcopy(self.part.model.state_dict())
        while len(self.history) <= epochs and (not len(test) or len(self.history) - 1 - self.best < patience):
            train_loss = self.part.train_epoch(train, self.optimizer, self.transform, lambda: self._updated(averaged))
            if self.every_epoch:
                self.every_epoch.step()
            with self.average.in_place_of(averaged):
                self.history.append((train_loss, self.part.mean_loss(test)))
                if not len(test) or self.history[-1][1] < self.history[self.best][1]:  # a NaN is never better
                    self.best, self.best_weights = len(self.history) - 1, copy.deepcopy(self.part.model.state_dict())
            self._keep()
            after_epoch(len(self.history) - 1, *self.history[-1])
        self.part.model.load_state_dict(self.best_weights)
        train_loss, holdout_loss = self.history[self.best]
        return PretrainResult(epochs=len(self.history) - 1, best_epoch=self.best, train_loss=train_loss,
                              holdout_loss=holdout_loss, history=tuple(self.history))  # fmt: skip

    def _updated(self, averaged: list[Tensor]) -> None:
        self.average.update(averaged)
        if self.every_step:
            self.every_step.step()

    def _keep(self) -> None:
        if self.file is None:
            return
        moments, optimizer = files.optimizer_parts(self.optimizer)
        tensors = {
            **{f"model.{name}": t for name, t in self.part.model.state_dict().items()},
            **{f"best.{name}": t for name, t in self.best_weights.items()},
            **{f"optimizer.{name}": t for name, t in moments.items()},
            **{f"average.{i}": t for i, t in enumerate(self.average.tensors)},
            "random": torch.get_rng_state(),
        }
        history = [[x if math.isfinite(x) else None for x in losses] for losses in self.history]
        steps = [scheduler.last_epoch if scheduler else 0 for scheduler in (self.every_step, self.every_epoch)]
        state = {"optimizer": optimizer, "history": history, "best": self.best, "steps": steps}
        files.write(self.file, tensors, {**self.about, **state, "averaged": self.average.count})

    def _resumed(self, averaged: list[Tensor]) -> bool:
        if self.file is None or not self.file.exists():
            return False
        tensors, about = files.read(self.file)
        differs = [name for name, value in self.about.items() if about.get(name) != value]
        model, best = files.under("model.", tensors), files.under("best.", tensors)
        if differs or model.keys() != self.part.model.state_dict().keys():
            raise CheckpointCorrupt(
                f"{self.file} belongs to another call of pretrain: {', '.join(differs) or 'the model'} differs. "
                "Use another file, or delete this one."
            )
        self.part.model.load_state_dict(model)
        files.restore_optimizer(self.optimizer, files.under("optimizer.", tensors), about["optimizer"])
        means = files.under("average.", tensors)
        self.average.tensors = [means[str(i)].to(t.device) for i, t in enumerate(averaged)] if means else []
        self.average.count = about["averaged"]
        for scheduler, steps in zip((self.every_step, self.every_epoch), about["steps"], strict=True):
            if scheduler:
                scheduler.last_epoch = steps
        torch.set_rng_state(tensors["random"])
        nan = math.nan
        self.history = [(nan if a is None else a, nan if b is None else b) for a, b in about["history"]]
        self.best, self.best_weights = about["best"], best
        return True


def _averaged(model: nn.Module) -> list[Tensor]:
    """Trainable parameters, and the running statistics that belong to them: means of weights need means of these."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    return [*trainable(model), *(t for m in norms for t in (m.running_mean, m.running_var) if t is not None)]
