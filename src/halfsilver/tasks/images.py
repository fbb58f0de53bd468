"""What the two image tasks share: loss, accuracy, a random move of the picture, and the parts of a problem.

Images stay bytes until a batch is taken, which keeps a data set in a quarter of the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from halfsilver._core.tensors import Batch, LossFn
from halfsilver.study.problem import Problem
from halfsilver.tasks.split import CURVE_ROWS, Split, permutation

Rows = tuple[Tensor, Tensor]  # images, labels
Scale = Callable[[Tensor], Tensor]
Edge = Callable[[Tensor, int], Tensor]  # places, some beyond the edge, and the size -> places inside


def image_loss(scale: Scale) -> LossFn:
    """Cross-entropy of each example."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(scale(images)), labels, reduction="none")

    return loss_fn


def image_accuracy(scale: Scale) -> LossFn:
    """1 for each example that is recognised, else 0."""

    def accuracy(model: Any, batch: Batch) -> Tensor:
        images, labels = batch
        return torch.eq(model(scale(images)).argmax(1), labels).double()

    return accuracy


def image_confidence(scale: Scale) -> LossFn:
    """The largest probability of each example."""

    def confidence(model: Any, batch: Batch) -> Tensor:
        return model(scale(batch[0])).softmax(1).amax(1)  # type: ignore[no-any-return]

    return confidence


def image_problem(
    train: Rows, test: Rows, split: Split, *, data: str, scale: Scale, pixels: str, **own: Any
) -> Problem:
    """The task on these rows; curves are drawn on at most 10,000 test rows, the same ones whatever the split.

    `pixels` says in words what `scale` does, for the record. The number of rows is a published constant.
    """
    rows, tests = len(train[1]), len(test[1])
    parts = split.parts(rows)
    drawn = permutation(tests, 0)[:CURVE_ROWS] if tests > CURVE_ROWS else None
    return Problem(
        loss_fn=image_loss(scale),
        metrics={"accuracy": image_accuracy(scale)},
        confidence=image_confidence(scale),
        private=take(train, parts.private),
        public=take(train, parts.public),
        validation=take(train, parts.validation) if split.validation else None,
        test=test,
        curve=None if drawn is None else take(test, drawn),
        population=len(parts.private),
        about={"data": data, "split": split.about(rows), "test_rows": tests, "stamps": [], "pixels": pixels},
        **own,
    )


def take(rows: Rows, index: Tensor) -> Rows:
    """Copies of the rows at `index`, with the channels last in memory, where convolutions are fastest."""
    images, labels = rows
    return images[index].contiguous(memory_format=torch.channels_last), labels[index]


def moved(images: Tensor, reach: int, edge: Edge, *, flip: bool = False) -> Tensor:
    """Each image moved by up to `reach` pixels down and across and, if asked, half of them mirrored left to right.

    `edge` says what comes in from beyond the edge. Draws from torch's global generator; dtype and shape stay, and the
    result has its channels last in memory.
    """
    rows, height, width = images.shape[0], images.shape[2], images.shape[3]
    down, across = torch.randint(-reach, reach + 1, (2, rows, 1), device=images.device)
    y = edge(torch.arange(height, device=images.device) + down, height)
    x = edge(torch.arange(width, device=images.device) + across, width)
    if flip:
        x = torch.where(torch.rand(rows, 1, device=images.device) < 0.5, width - 1 - x, x)
    each = torch.arange(rows, device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[each, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


def mirrored(place: Tensor, size: int) -> Tensor:
    """Beyond the edge lie the pixels inside it, mirrored at the last one."""
    return (size - 1) - ((size - 1) - place.abs()).abs()


def repeated(place: Tensor, size: int) -> Tensor:
    """Beyond the edge the last pixel goes on."""
    return place.clamp(0, size - 1)
