"""Checkpoints: one safetensors file with its JSON in the header. Data, never code.

A single file replaced atomically cannot be half old and half new.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from halfsilver._core import system
from halfsilver._core.sharded import shard_of
from halfsilver.errors import CheckpointCorrupt

SCHEMA_VERSION = 1
_KEY = "halfsilver"
_PAIRS, _COUNTS = "pairs", "counts"


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Replace the checkpoint; after a crash it is the old one or this one, whole."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **about}, sort_keys=True)
    data = {name: t.detach().contiguous().cpu().clone() for name, t in tensors.items()}
    system.write_atomically(path, save(data, metadata={_KEY: text}))


def read(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON of a checkpoint, or `CheckpointCorrupt`; nothing in the file is ever executed."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            about = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, KeyError, ValueError, OSError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is not a halfsilver checkpoint: {error!r}. Restore it from a copy.") from error
    if not isinstance(about, dict) or about.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointCorrupt(f"Expected {path} to have schema_version={SCHEMA_VERSION}; it is from another version.")
    return tensors, about


def optimizer_parts(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state_dict, split into tensors and JSON."""
    state = optimizer.state_dict()
    tensors = {f"{i}.{k}": v for i, s in state["state"].items() for k, v in s.items() if isinstance(v, Tensor)}
    rest = {str(i): {k: v for k, v in s.items() if not isinstance(v, Tensor)} for i, s in state["state"].items()}
    groups = [{k: _plain(v) for k, v in g.items()} for g in state["param_groups"]]
    return tensors, {"state": rest, "param_groups": groups}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> None:
    """Inverse of `optimizer_parts`."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        state: dict[int, dict[str, Any]] = {int(i): dict(values) for i, values in about["state"].items()}
        for name, t in tensors.items():
            index, key = name.split(".", 1)
            state[int(index)][key] = shard_of(t.clone(), params[int(index)])  # the optimizer changes it in place
        optimizer.load_state_dict({"state": state, "param_groups": about["param_groups"]})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"The checkpoint belongs to another optimizer: {error}.") from error


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries whose names start with `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def to_json(value: Any) -> Any:
    """A scheduler's state for JSON, whose keys are texts only: other dicts, and counters, are kept as pairs."""
    if isinstance(value, dict) and (isinstance(value, Counter) or any(not isinstance(k, str) for k in value)):
        return {_PAIRS: [[k, to_json(v)] for k, v in value.items()], _COUNTS: isinstance(value, Counter)}
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    return [to_json(v) for v in value] if isinstance(value, list | tuple) else value


def from_json(value: Any) -> Any:
    """Inverse of `to_json`."""
    if isinstance(value, dict) and _PAIRS in value:
        pairs = {k: from_json(v) for k, v in value[_PAIRS]}
        return Counter(pairs) if value[_COUNTS] else pairs
    if isinstance(value, dict):
        return {k: from_json(v) for k, v in value.items()}
    return [from_json(v) for v in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
