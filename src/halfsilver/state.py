"""The state of a run between two steps, and its form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfsilver._tensors import trainable
from halfsilver.averaging import Average
from halfsilver.checkpoint import from_json, optimizer_parts, restore_optimizer, to_json, under
from halfsilver.errors import CheckpointCorrupt
from halfsilver.mirror import MirrorMap, State

Parts = tuple[dict[str, Tensor], dict[str, Any]]


@dataclass(kw_only=True)
class TrainState:
    """All that changes from step to step besides model, optimizer and scheduler; nothing in it grows with the data."""

    step: int
    mirror: State
    average: Average


def pack(
    state: TrainState,
    model: torch.nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    mirror: MirrorMap,
) -> Parts:
    """Tensors and JSON from which training goes on as if it had not stopped."""
    optimizer_tensors, optimizer_json = optimizer_parts(optimizer)
    groups = {
        "model": model.state_dict(),
        "optimizer": optimizer_tensors,
        "mirror": {name: state.mirror[name] for name in mirror.persistent},
        "average": {str(i): t for i, t in enumerate(state.average.tensors)},
    }
    tensors = {f"{group}.{name}": t for group, entries in groups.items() for name, t in entries.items()}
    about = {
        "step": state.step,
        "average_count": state.average.count,
        "optimizer": optimizer_json,
        "scheduler": to_json(scheduler.state_dict()) if scheduler else None,
    }
    return tensors, about


def unpack(
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
    state: TrainState,
    model: torch.nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
) -> None:
    """Put a packed state back."""
    try:
        model.load_state_dict(under("model.", tensors))
        state.step = int(about["step"])
        state.average.count = int(about["average_count"])
        optimizer_json, scheduler_json = about["optimizer"], about["scheduler"]
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"The checkpoint does not fit this model: {error}") from error
    restore_optimizer(optimizer, under("optimizer.", tensors), optimizer_json)
    if scheduler is not None and scheduler_json is not None:
        scheduler.load_state_dict(from_json(scheduler_json))
    device = trainable(model)[0].device
    average = under("average.", tensors)
    state.average.tensors = [average[str(i)].to(device, copy=True) for i in range(len(average))]
    state.mirror |= {name: t.to(device, copy=True) for name, t in under("mirror.", tensors).items()}
