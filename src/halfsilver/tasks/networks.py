"""The networks of the paper's appendix, in plain PyTorch, and one with batch norm that gives features.

The appendix's tables give widths, kernels and strides. Read here as in the works that they come from: rectified linear
units between layers, the softmax as a dense layer up to the classes, and "same" padding (but none in the second EMNIST
one).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Recurrent = Callable[..., nn.Module]  # nn.LSTM, or a class with its arguments and parameter names


def cifar_cnn() -> nn.Module:
    """The paper's CIFAR-10 network: three pairs of 3x3 convolutions, each with a pool, and two dense layers."""
    layers: list[nn.Module] = []
    width = 3
    for channels in (32, 64, 128):
        for inputs in (width, channels):
            layers += [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        width = channels
    head = [nn.Flatten(), nn.Linear(128 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers, *head)


def emnist_cnn() -> nn.Module:
    """The paper's EMNIST network: convolutions of 8x8 and 4x4 with stride 2, and two dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 6 * 6, 32), nn.ReLU(), nn.Linear(32, 47),
    )  # fmt: skip


class LanguageModel(nn.Module):
    """Embedding, LSTM, and one or more dense layers up to the vocabulary.

    With 8,000 words, widths of 120 and two layers it is the paper's network for WikiText-2, whose first dense layer
    on one-hot words is an embedding.
    """

    def __init__(self, words: int, width: int, hidden: int, layers: int, recurrent: Recurrent = nn.LSTM) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = recurrent(width, hidden, num_layers=layers, batch_first=True)
        between: list[nn.Module] = [] if hidden == width else [nn.Linear(hidden, width)]
        self.head = nn.Sequential(*between, nn.Linear(width, words))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])  # type: ignore[no-any-return]


def residual_cnn(width: int, *, channels: int = 3, classes: int = 10) -> nn.Sequential:
    """A small residual network with batch norm, for public rows: batch norm mixes the rows of a batch.

    Three stages halve height and width; the first two end in a residual block. Its parts have names, for
    `halfsilver.features.Frozen`. `halfsilver.mirror.fold_batch_norm` makes a network of it that can be trained
    privately.
    """
    parts = {
        "first": nn.Sequential(*_normal(channels, width)),
        "shrink1": nn.Sequential(*_normal(width, 2 * width), nn.MaxPool2d(2)),
        "block1": _Residual(2 * width),
        "shrink2": nn.Sequential(*_normal(2 * width, 4 * width), nn.MaxPool2d(2)),
        "block2": _Residual(4 * width),
        "shrink3": nn.Sequential(*_normal(4 * width, 4 * width), nn.MaxPool2d(2)),
        "pool": _MeanAndMax(),
        "head": nn.Linear(8 * width, classes),
    }
    network = nn.Sequential()
    for name, part in parts.items():
        network.add_module(name, part)
    return network


def _normal(inputs: int, outputs: int) -> list[nn.Module]:
    """The norm's shift stands for a bias of the convolution."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.change = nn.Sequential(*_normal(width, width), *_normal(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(x)  # type: ignore[no-any-return]


class _MeanAndMax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1)
