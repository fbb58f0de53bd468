"""What server and nodes agree on: the model, the loss, and how a user trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from halfsilver.federated import LocalTraining

LOCAL = LocalTraining(lr=0.5, batch_size=5, epochs=2)
CLIP = 1.0


def model() -> nn.Module:
    return nn.Linear(64, 10)  # the weights are the server's


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def wrong(model: Any, batch: Any) -> Tensor:
    return torch.ne(model(batch[0]).argmax(1), batch[1]).float()


def read(path: str | Path) -> tuple[tuple[Tensor, Tensor], list[int]]:
    """Columns of a file that split.py wrote, and for each row the number of its user."""
    columns = load_file(path)
    return (columns["x"], columns["y"]), columns["user"].tolist()
