"""The state of a run between two steps, and its form in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfsilver._core.averaging import Average
from halfsilver._core.checkpoint import from_json, optimizer_parts, restore_optimizer, to_json, under
from halfsilver._core.sharded import full_on_lead, shard_of
from halfsilver._core.tensors import Tensors, trainable
from halfsilver.errors import CheckpointCorrupt
from halfsilver.mirror import MirrorMap, State

_HOW = ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")

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


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rate, momentum and so on of each group of parameters, for the config of a run.

    A learning rate that a scheduler moves is that of its start. How a step is computed is left out.
    """
    return [
        {name: value for name, value in group.items() if name not in _HOW}
        | {"lr": group.get("initial_lr", group["lr"])}
        for group in optimizer_parts(optimizer)[1]["param_groups"]
    ]


def unpack(
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
    state: TrainState,
    model: torch.nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
) -> None:
    """Put a packed state back, or raise `CheckpointCorrupt`."""
    try:
        _restore_model(model, under("model.", tensors))
        state.step = int(about["step"])
        restore_optimizer(optimizer, under("optimizer.", tensors), about["optimizer"])
        if scheduler is not None and about["scheduler"] is not None:
            scheduler.load_state_dict(from_json(about["scheduler"]))
        _restore_state(state, trainable(model), tensors, int(about["average_count"]))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointCorrupt(f"The checkpoint does not fit this model or its optimizer: {error!r}") from error


def _restore_model(model: torch.nn.Module, found: Mapping[str, Tensor]) -> None:
    own = model.state_dict()
    others = [name for name, t in found.items() if name in own and t.dtype != own[name].dtype]
    if others:
        raise TypeError(f"{others} are of other dtypes")
    model.load_state_dict({name: shard_of(t, own.get(name, t)) for name, t in found.items()})


def _restore_state(state: TrainState, params: Tensors, tensors: Mapping[str, Tensor], count: int) -> None:
    average, mirror, device = under("average.", tensors), under("mirror.", tensors), params[0].device
    if average and [average[str(i)].shape for i in range(len(average))] != [p.shape for p in params]:
        raise ValueError("the averages have other shapes than the parameters")
    if any(name in state.mirror and t.shape != state.mirror[name].shape for name, t in mirror.items()):
        raise ValueError("the mirror's state has another shape")
    state.average.count = count
    state.average.tensors = [shard_of(average[str(i)].to(device, copy=True), params[i]) for i in range(len(average))]
    on_device = {name: t.to(device, copy=True) for name, t in mirror.items()}
    state.mirror |= {name: shard_of(t, state.mirror.get(name, t)) for name, t in on_device.items()}
