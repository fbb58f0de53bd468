"""EMNIST ByMerge: 47 classes of handwritten letters and digits, with the paper's small convolutional network."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch
from halfsilver.study.problem import Problem
from halfsilver.tasks import files
from halfsilver.tasks.images import image_problem, moved, repeated
from halfsilver.tasks.networks import emnist_cnn
from halfsilver.tasks.split import VALIDATION_ROWS, Split, public_share

_SHIFT = 2  # pixels; letters are not mirrored, which would make others of them


def problem(data: Path, *, seed: int = 0, public: int | None = None, validation: int = VALIDATION_ROWS) -> Problem:
    """The task from the files under `data`/EMNIST/raw; 4 % of the training rows are public unless `public` says so.

    `validation` rows are set aside for a search.
    """
    train, test = files.emnist(data, "train"), files.emnist(data, "test")
    public = public_share(len(train[1])) if public is None else public
    return image_problem(
        train,
        test,
        Split(seed=seed, public=public, validation=validation),
        data="EMNIST ByMerge",
        scale=scale,
        pixels="divided by 255",
        make_model=make_model,
        augment=augment,
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
