"""The workloads of the speed benchmark: network, loss and one fixed batch each.

The data are random, of the right shape and dtype, from a fixed seed: images whose contrast varies and tokens by Zipf's
law, so that gradient norms differ and tokens repeat. Clip norms are below the median gradient norm at the start: the
oracle counts how many examples they clip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.speed import networks
from benchmarks.speed.networks import Recurrent, copy_parameters

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every contender is given. `criterion` returns one loss per example; `batch` is (inputs, targets)."""

    name: str
    make: Callable[[Recurrent], nn.Module]
    criterion: Criterion
    batch: tuple[Tensor, Tensor]
    clip: float
    lr: float = 0.01
    channels_last: bool = False
    linear: bool = False

    @property
    def rows(self) -> int:
        return len(self.batch[0])

    def pieces(self, rows: int) -> list[tuple[Tensor, Tensor]]:
        """The batch in parts of at most `rows` examples."""
        inputs, targets = (torch.split(t, rows) for t in self.batch)
        return list(zip(inputs, targets, strict=True))

    def loss_fn(self, model: Any, batch: Any) -> Tensor:
        return self.criterion(model(batch[0]), batch[1])

    def model(self, recurrent: Recurrent = nn.LSTM) -> nn.Module:
        """The network at its start, which is the same whatever stands in for nn.LSTM."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make(nn.LSTM)
            if recurrent is not nn.LSTM:
                reference, model = model, self.make(recurrent)
                copy_parameters(reference, model)
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of each sequence."""
    losses = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


def squared_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs.squeeze(1) - targets).square()


def _images(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, **options: Any) -> Workload:
    generator = torch.Generator().manual_seed(1)
    contrast = 0.2 + 1.8 * torch.rand(shape[0], 1, 1, 1, generator=generator)
    x = contrast * torch.randn(shape, generator=generator)
    y = torch.randint(classes, shape[:1], generator=generator)
    if options.get("channels_last"):
        x = x.contiguous(memory_format=torch.channels_last)
    return Workload(name=name, make=lambda _: make(), criterion=class_loss, batch=(x, y), **options)


def _text(
    name: str, make: Callable[[Recurrent], nn.Module], words: int, rows: int, tokens: int, **options: Any
) -> Workload:
    generator = torch.Generator().manual_seed(1)
    frequency = 1 / torch.arange(2.0, words + 2)
    stream = torch.multinomial(frequency.expand(rows, words), tokens + 1, replacement=True, generator=generator)
    batch = (stream[:, :-1].contiguous(), stream[:, 1:].contiguous())
    return Workload(name=name, make=make, criterion=token_loss, batch=batch, **options)


def _linear(name: str, rows: int, width: int, **options: Any) -> Workload:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=generator) / width**0.5
    batch = (x, torch.randn(rows, generator=generator))
    make = partial(nn.Linear, width, 1, bias=False)
    return Workload(name=name, make=lambda _: make(), criterion=squared_loss, batch=batch, linear=True, **options)


def _lstm(words: int, width: int, hidden: int, layers: int) -> Callable[[Recurrent], nn.Module]:
    return lambda recurrent: networks.LanguageModel(words, width, hidden, layers, recurrent)


# Rows of the batch, and the workload with so many rows.
WORKLOADS: dict[str, tuple[int, Callable[[int], Workload]]] = {
    "cifar": (500, lambda n: _images("cifar", networks.cifar_cnn, (n, 3, 32, 32), 10, clip=0.9)),
    "emnist": (500, lambda n: _images("emnist", networks.emnist_cnn, (n, 1, 28, 28), 47, clip=2.5)),
    "wikitext": (250, lambda n: _text("wikitext", _lstm(8000, 120, 120, 2), 8000, n, 35, clip=0.2)),
    "stackoverflow": (16, lambda n: _text("stackoverflow", _lstm(10_004, 96, 670, 1), 10_004, n, 20, clip=0.33)),
    "gpt": (32, lambda n: _text("gpt", lambda _: networks.GPT(8000, 256, 8, 4, 128), 8000, n, 128, clip=1.4)),
    "linreg": (10_000, lambda n: _linear("linreg", n, 6000, clip=0.5)),
    "cifar_cl": (
        500,
        lambda n: _images("cifar_cl", networks.cifar_cnn, (n, 3, 32, 32), 10, clip=0.9, channels_last=True),
    ),
    "emnist_cl": (
        500,
        lambda n: _images("emnist_cl", networks.emnist_cnn, (n, 1, 28, 28), 47, clip=2.5, channels_last=True),
    ),
}

# Too small to say anything about speed: for the tests of the benchmark itself.
HIDDEN: dict[str, tuple[int, Callable[[int], Workload]]] = {
    "tiny": (
        24,
        lambda n: _images("tiny", lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), (n, 1, 4, 4), 4, clip=3.0),
    ),
}


def workload(name: str) -> Workload:
    """By name; "emnist@32" has 32 rows, and "gpt/128x32x64" is a transformer of that width, rows and tokens."""
    if name.startswith("gpt/"):
        width, rows, tokens = (int(size) for size in name.removeprefix("gpt/").split("x"))
        return _text(name, lambda _: networks.GPT(2000, width, 4, 4, tokens), 2000, rows, tokens, clip=0.5)
    known, _, rows_wanted = name.partition("@")
    usual, make = {**WORKLOADS, **HIDDEN}[known]
    return replace(make(int(rows_wanted or usual)), name=name)
