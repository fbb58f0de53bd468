"""Small public problems on which the answers of every mirror map are known or can be computed otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch, trainable
from halfsilver.mirror import Clock, PublicLoss

MakePublic = Callable[..., PublicLoss]
Released = Callable[[PublicLoss], list[Tensor]]


class Pieces(nn.Module):
    """A linear model whose 8 coefficients are a vector, a matrix and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.vector = nn.Parameter(torch.randn(3, generator=generator))
        self.matrix = nn.Parameter(torch.randn(2, 2, generator=generator))
        self.scalar = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] @ self.vector + x[:, 3:] @ self.matrix.reshape(-1) + self.scalar


def squared_error(model: Any, batch: Batch) -> Tensor:
    x, y = batch
    return torch.nn.functional.mse_loss(model(x), y, reduction="none") / 2


def logistic(model: Any, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.binary_cross_entropy_with_logits(model(x), (y > 0).to(x.dtype), reduction="none")


def design(rows: int = 40) -> Tensor:
    """Features with uneven scales, so that the Hessian is far from the identity."""
    generator = torch.Generator().manual_seed(2)
    scales = torch.tensor([2.0, 1.0, 0.5, 1.5, 0.3, 1.0, 0.7])
    return torch.randn(rows, 7, generator=generator) * scales


def targets(x: Tensor) -> Tensor:
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(3))
    return x.sum(1) + 0.5 * noise


@pytest.fixture
def least_squares() -> MakePublic:
    """Makes a public least-squares problem; its Hessian is X'X/n with a column of ones."""

    def make(dtype: torch.dtype = torch.float64, **options: Any) -> PublicLoss:
        x = design()
        return PublicLoss(Pieces().to(dtype), squared_error, (x.to(dtype), targets(x).to(dtype)), **options)

    return make


@pytest.fixture
def logistic_regression() -> MakePublic:
    def make(dtype: torch.dtype = torch.float64, **options: Any) -> PublicLoss:
        x = design()
        return PublicLoss(Pieces().to(dtype), logistic, (x.to(dtype), targets(x).to(dtype)), **options)

    return make


@pytest.fixture
def released() -> Released:
    """A stand-in for a noised gradient, in the shapes of the model."""

    def make(public: PublicLoss, seed: int = 4) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        params = trainable(public.model)
        return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in params]

    return make


@pytest.fixture
def clock() -> Clock:
    return Clock(step=3, total_steps=10, steps_per_epoch=2.0)
