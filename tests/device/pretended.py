"""A pretended `cuda` device: what `pretended.cpp` gives, and the functions of `torch.cuda` that go with it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def install(library: Path) -> None:
    """Make `cuda` a device of this process for good; before any model is made."""
    ops: Any = torch.ops
    ops.load_library(str(library))
    ops = ops.pretended
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": lambda device=None: ops.wait(),
        "manual_seed": ops.seed,
        "manual_seed_all": ops.seed,
        "get_rng_state": lambda device="cuda": ops.state(),
        "set_rng_state": lambda state, device="cuda": ops.set_state(state),
    }
    for name, function in replaced.items():
        mock.patch.object(torch.cuda, name, function).start()
    mock.patch.object(torch.UntypedStorage, "clone", _copied).start()
    mock.patch.object(torch.backends.cudnn, "is_acceptable", return_value=False).start()


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy, on either device: this torch can make no storage on `cuda` by itself."""
    same = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    return same.clone().untyped_storage()
