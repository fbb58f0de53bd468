"""CIFAR-10: small colour pictures of ten classes, with the paper's convolutional network."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch
from halfsilver.study.problem import Problem
from halfsilver.tasks import files
from halfsilver.tasks.augment import mixed, recoloured, with_hole
from halfsilver.tasks.images import image_problem, mirrored, moved
from halfsilver.tasks.networks import cifar_cnn
from halfsilver.tasks.split import VALIDATION_ROWS, Split, public_share

_CLASSES = 10
_SHIFT, _HOLE = 4, 12  # pixels
_COLOUR, _MIX = 0.25, 0.4


def problem(data: Path, *, seed: int = 0, public: int | None = None, validation: int = VALIDATION_ROWS) -> Problem:
    """The task from the files under `data`/cifar-10-batches-bin; 4 % of the rows are public unless `public` says so.

    `validation` rows are set aside for a search.
    """
    train, test = files.cifar10(data, "train"), files.cifar10(data, "test")
    public = public_share(len(train[1])) if public is None else public
    return image_problem(
        train,
        test,
        Split(seed=seed, public=public, validation=validation),
        data="CIFAR-10",
        scale=scale,
        pixels="(x / 255 - 0.5) / 0.25",
        make_model=make_model,
        augment=augment,
    )


def make_model() -> nn.Module:
    """The network with fresh weights from torch's global generator."""
    return cifar_cnn().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def scale(images: Tensor) -> Tensor:
    """Bytes to [-2, 2] by constants, so that no statistic of private rows enters."""
    return images.float().sub(127.5).div(63.75)


def augment(batch: Batch) -> Batch:
    """A public batch moved by up to four pixels, mirrored, recoloured, with a hole, and blended in pairs.

    2,000 images are few: with moves and mirroring alone the network learns them by heart.
    """
    images, labels = batch
    changed = with_hole(recoloured(moved(images, _SHIFT, mirrored, flip=True), _COLOUR), _HOLE)
    return mixed(changed, labels, _CLASSES, _MIX)
