"""The state of a run between two steps, and its form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfsilver._sharded import full_on_lead, shard_of
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
    """Tensors and JSON from which training goes on as if it had not stopped, on as many ranks as there are then.

    The tensors are whole on rank 0, which writes them; sharded ones are left out on others.
    """
    optimizer_tensors, optimizer_json = optimizer_parts(optimizer)
    groups = {
        "model": model.state_dict(),
        "optimizer": optimizer_tensors,
        "mirror": {name: state.mirror[name] for name in mirror.persistent},
        "average": {str(i): t for i, t in enumerate(state.average.tensors)},
    }
    tensors = {f"{group}.{name}": full_on_lead(t) for group, entries in groups.items() for name, t in entries.items()}
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
        found, own = under("model.", tensors), model.state_dict()
        model.load_state_dict({name: shard_of(t, own.get(name, t)) for name, t in found.items()})
        state.step = int(about["step"])
        state.average.count = int(about["average_count"])
        optimizer_json, scheduler_json = about["optimizer"], about["scheduler"]
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"The checkpoint does not fit this model: {error}") from error
    restore_optimizer(optimizer, under("optimizer.", tensors), optimizer_json)
    if scheduler is not None and scheduler_json is not None:
        scheduler.load_state_dict(from_json(scheduler_json))
    params, average = trainable(model), under("average.", tensors)
    device = params[0].device
    state.average.tensors = [shard_of(average[str(i)].to(device, copy=True), params[i]) for i in range(len(average))]
    mirror = {name: t.to(device, copy=True) for name, t in under("mirror.", tensors).items()}
    state.mirror |= {name: shard_of(t, state.mirror.get(name, t)) for name, t in mirror.items()}
