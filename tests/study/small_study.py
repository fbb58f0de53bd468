"""A study that takes seconds: a linear model, 200 private rows, two epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

import halfsilver as hs
from halfsilver.study.problem import Problem
from halfsilver.study.study import Request

GRID = hs.study.Grid(cold=(0.5, 1.0), warm=(0.5, 1.0), pda=(1.0,), alpha_end=(0.9,))
RECIPE = hs.Recipe(
    name="tiny",
    batch_size=20,
    epochs=2,
    public_batch_size=8,
    grid=GRID,
    pretrain=hs.study.Pretrain(epochs=3),
    average=0.9,
    lr_end=0.1,
)


def records(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator)
    return x, (x.sum(1) > 0).long()


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def accuracy(model: Any, batch: Any) -> Tensor:
    return torch.eq(model(batch[0]).argmax(1), batch[1]).double()


def make_model() -> nn.Module:
    return nn.Linear(4, 2)


def problem(**changes: Any) -> Problem:
    values: dict[str, Any] = {
        "make_model": make_model,
        "loss_fn": loss_fn,
        "private": records(200, 0),
        "public": records(40, 1),
        "test": records(100, 2),
        "validation": records(50, 3),
        "population": 200,
        "metrics": {"accuracy": accuracy},
    }
    return Problem(**{**values, **changes})


def request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "task": "custom",
        "recipe": RECIPE,
        "epsilon": 5.0,
        "delta": 1e-4,
        "seeds": {"public": 2, "cold": 1, "warm": 2, "pda": 2},
        "quick": True,
    }
    return Request(**{**values, **changes})


class Forbidden(Dataset[Any]):
    """Private rows that must not be read."""

    def __len__(self) -> int:
        raise AssertionError("a private row was counted")

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a private row was read")


def scored_losses(folder: Path) -> np.ndarray[Any, Any]:
    """Of a run of a study, one for each row that it was scored on."""
    return load_file(folder / "scored.safetensors")["loss"].astype(np.float64)
