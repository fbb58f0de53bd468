"""EMNIST ByMerge: 47 classes of handwritten letters and digits, with the paper's small convolutional network."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from halfsilver._tensors import Batch
from halfsilver.study.problem import Problem
from halfsilver.tasks import files
from halfsilver.tasks.images import image_accuracy, image_loss, moved, repeated, split_rows
from halfsilver.tasks.networks import emnist_cnn
from halfsilver.tasks.split import VALIDATION_ROWS, Split, public_share

_SHIFT = 2  # pixels; letters are not mirrored, which would make others of them


def problem(data: Path, *, seed: int = 0, public: int | None = None, validation: int = VALIDATION_ROWS) -> Problem:
    """The task from the files under `data`/EMNIST/raw; 4 % of the training rows are public unless `public` says so.

    The number of rows is that of the file, a published constant. `validation` rows are set aside for a search.
    """
    train, test = files.emnist(data, "train"), files.emnist(data, "test")
    rows = len(train[1])
    split = Split(seed=seed, public=public_share(rows) if public is None else public, validation=validation)
    about = {"data": "EMNIST ByMerge", "split": split.about(rows), "test_rows": len(test[1]), "stamps": []}
    return Problem(
        make_model=make_model,
        loss_fn=image_loss(scale),
        metrics={"accuracy": image_accuracy(scale)},
        augment=augment,
        about={**about, "pixels": "divided by 255"},
        **split_rows(train, test, split),
    )


def make_model() -> nn.Module:
    """The network with fresh weights from torch's global generator."""
    return emnist_cnn().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def scale(images: Tensor) -> Tensor:
    """Bytes to [0, 1]: a constant, so that no statistic of private rows enters."""
    return images.float().div(255)


def augment(batch: Batch) -> Batch:
    """A public batch with each image moved by up to two pixels."""
    images, labels = batch
    return moved(images, _SHIFT, repeated), labels
