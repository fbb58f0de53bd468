"""Refuse models that have no per-example gradient, on made-up input, before any private row is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from halfsilver._tensors import Batch, LossFn, batch_leaves, batch_rows, map_batch
from halfsilver.errors import ConfigError, UnsupportedLayer

PROBE_ROWS = 4

_MIXERS = (torch.nn.modules.batchnorm._BatchNorm,)


def probe(model: torch.nn.Module, loss_fn: LossFn, batch: Batch) -> None:
    """Check that losses come one per example, that no example sees another, and that no buffer changes.

    `batch` holds `PROBE_ROWS` made-up or public examples. Modes and buffers of the model are as before afterwards.
    """
    with _untouched(model), torch.no_grad():
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        losses = _losses(model, loss_fn, batch)
        _check_shape(losses, batch)
        _check_buffers(model, buffers)
        for other in (_spoil_first(batch), _swap_first(batch)):
            changed = _losses(model, loss_fn, other)
            if not torch.allclose(losses[1:], changed[1:], rtol=1e-3, atol=1e-5, equal_nan=True):
                raise UnsupportedLayer(
                    "The loss of one example depends on another example of its batch, so a clipped gradient would not "
                    f"bound anyone's influence.{_advice(model)}"
                )


def _losses(model: torch.nn.Module, loss_fn: LossFn, batch: Batch) -> Tensor:
    torch.manual_seed(0)  # dropout must draw the same masks in each of the passes that are compared
    return loss_fn(model, batch)


def _check_shape(losses: Tensor, batch: Batch) -> None:
    rows = batch_rows(batch)
    if losses.shape != (rows,):
        raise ConfigError(
            f"Expected loss_fn(model, batch) to return one loss per example, shape ({rows},); got "
            f"{tuple(losses.shape)}. "
            'Use reduction="none", and average over any further dimensions yourself.'
        )


def _check_buffers(model: torch.nn.Module, before: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise UnsupportedLayer(
                f"The forward pass changes the buffer {name!r}, which would carry private data past the noise."
                f"{_advice(model)}"
            )


def _advice(model: torch.nn.Module) -> str:
    for name, module in model.named_modules():
        if isinstance(module, _MIXERS) and module.training:
            return (
                f" {type(module).__name__} at {name!r} does this: replace it by GroupNorm or LayerNorm, "
                "or freeze it after public pretraining by calling its .eval()."
            )
    return " Look for operations over dimension 0, or for an LSTM without batch_first=True."


def _spoil_first(batch: Batch) -> Batch:
    """NaN in the first example: any arithmetic that reaches another example carries it along."""
    return map_batch(lambda t: _with_first(t, torch.nan) if t.dtype.is_floating_point else t, batch)


def _swap_first(batch: Batch) -> Batch:
    """Another first example of the same kind; the only test there is for integer input."""
    return map_batch(lambda t: _with_first(t, -3 * t[0] if t.dtype.is_floating_point else t[0] != 1), batch)


def _with_first(t: Tensor, value: Tensor | float) -> Tensor:
    changed = t.clone()
    changed[0] = value
    return changed


@contextmanager
def _untouched(model: torch.nn.Module) -> Iterator[None]:
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    devices = {b.device for b in batch_leaves(list(model.parameters())) if b.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
