"""Clipped gradient sums: one backend a file, behind one small interface.

A new backend is one new file and one line in `BACKENDS`. Options here can change speed and memory, never the guarantee.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from halfsilver._tensors import Batch, LossFn, trainable
from halfsilver.errors import ConfigError, HalfsilverError, UnsupportedLayer, require
from halfsilver.privacy.gradients.base import ClippedSum, GradientBackend
from halfsilver.privacy.gradients.ghost import OpacusGhost
from halfsilver.privacy.gradients.hooks import OpacusHooks
from halfsilver.privacy.gradients.vmap import Vmap

__all__ = ["BACKENDS", "ClippedSum", "GradientBackend", "Speed", "make_backend", "rows_at_once"]

BackendName = Literal["auto", "vmap", "hooks", "ghost"]

BACKENDS: dict[str, Callable[[torch.nn.Module, LossFn, Batch], GradientBackend]] = {
    "hooks": OpacusHooks,
    "ghost": OpacusGhost,
    "vmap": Vmap,
}

# Per-example gradients that may exist at once, in numbers: 1 GB in float64.
_MATERIALISED = 2**27


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Options that change speed and memory only: no value here can weaken the guarantee.

    `micro_batch_size` bounds how many examples are in memory at once; a logical batch may be any size.
    """

    backend: BackendName | GradientBackend = "auto"
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        size = self.micro_batch_size
        require(size is None or size >= 1, "micro_batch_size", size, ">= 1 or None")


def rows_at_once(speed: Speed, model: torch.nn.Module) -> int:
    """The micro-batch: as asked for, or as many rows as materialised gradients leave room for."""
    if speed.micro_batch_size is not None:
        return speed.micro_batch_size
    parameters = sum(p.numel() for p in trainable(model))
    return max(1, min(512, _MATERIALISED // max(parameters, 1)))


def make_backend(speed: Speed, model: torch.nn.Module, loss_fn: LossFn, example: Batch) -> GradientBackend:
    """The backend that was asked for, checked against the oracle on made-up examples."""
    if not isinstance(speed.backend, str):
        return speed.backend
    if speed.backend == "auto":
        return _first_that_works(model, loss_fn, example)
    if speed.backend not in BACKENDS:
        raise ConfigError(f"Expected backend={speed.backend!r} in {('auto', *BACKENDS)}.")
    return _checked(speed.backend, model, loss_fn, example)


def _first_that_works(model: torch.nn.Module, loss_fn: LossFn, example: Batch) -> GradientBackend:
    if importlib.util.find_spec("opacus") is not None:
        try:
            return _checked("hooks", model, loss_fn, example)
        except HalfsilverError:
            pass
    return _checked("vmap", model, loss_fn, example)


def _checked(name: str, model: torch.nn.Module, loss_fn: LossFn, example: Batch) -> GradientBackend:
    """Hold a backend against one-example-at-a-time gradients: hooks can miss a parameter without a word."""
    backend = BACKENDS[name](model, loss_fn, example)
    try:
        found = backend.clipped_sum(example, 1.0)
    except (RuntimeError, ValueError, AttributeError, NotImplementedError, TypeError, UserWarning) as error:
        raise UnsupportedLayer(f"backend={name!r} cannot train this model ({error}). Use backend='vmap'.") from error
    if not isinstance(backend, Vmap) and not _uses_randomness(model):
        expected = Vmap(model, loss_fn, example).clipped_sum(example, 1.0)
        if not all(_close(a, b) for a, b in zip(found.tensors, expected.tensors, strict=True)):
            raise UnsupportedLayer(f"backend={name!r} computes wrong gradients for this model. Use backend='vmap'.")
    return backend


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    scale = float(b.abs().max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=2e-2, atol=2e-2 * scale + 1e-6)


def _uses_randomness(model: torch.nn.Module) -> bool:
    return any(isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.training and m.p > 0 for m in model.modules())
