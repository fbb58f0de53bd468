"""Refuse models that have no per-example gradient, on made-up input, before any private row is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from halfsilver._random import own_randomness
from halfsilver._tensors import Batch, LossFn, batch_leaves, map_batch, one_loss_each
from halfsilver.errors import ConfigError, UnsupportedLayer

PROBE_ROWS = 4

_MIXERS = (torch.nn.modules.batchnorm._BatchNorm,)


def probe(model: torch.nn.Module, loss_fn: LossFn, batch: Batch) -> None:
    """Check that losses come one per example, that no example sees another, and that a forward pass changes nothing.

    `batch` holds `PROBE_ROWS` made-up examples. Parameters, buffers and generators are as before afterwards.
    """
    with _untouched(model), torch.no_grad():
        before = {name: t.clone() for name, t in _tensors(model)}
        losses = _losses(model, loss_fn, batch)
        _check_unchanged(model, before)
        if not torch.isfinite(losses).all():
            raise ConfigError(
                f"The losses of made-up examples are {losses.tolist()}. Give a made-up record that is more like yours: "
                "PrivateData(..., example=...)."
            )
        for row in (0, len(losses) - 1):
            others = torch.arange(len(losses)) != row
            for changed in (_spoil(batch, row), _swap(batch, row)):
                after = _losses(model, loss_fn, changed)
                if not torch.allclose(losses[others], after[others], rtol=1e-3, atol=1e-5):
                    raise UnsupportedLayer(
                        "The loss of one example depends on another example of its batch, so a clipped gradient would "
                        f"not bound anyone's influence.{_advice(model)}"
                    )


def _losses(model: torch.nn.Module, loss_fn: LossFn, batch: Batch) -> Tensor:
    torch.manual_seed(0)  # dropout must draw the same masks in each of the passes that are compared
    try:
        losses = loss_fn(model, batch)
    except Exception as error:
        shown = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in batch_leaves(batch))
        raise ConfigError(
            f"loss_fn(model, batch) fails on made-up examples with the shapes and dtypes of yours, {shown}: {error!r}. "
            "Make data and model fit; if only the values are not valid input, give some that are: "
            "PrivateData(..., example=...)."
        ) from error
    return one_loss_each(losses, batch)


def _check_unchanged(model: torch.nn.Module, before: dict[str, Tensor]) -> None:
    for name, t in _tensors(model):
        if not torch.equal(t, before[name]):
            raise UnsupportedLayer(
                f"The forward pass changes {name!r}, which would carry private data past the noise.{_advice(model)}"
            )


def _advice(model: torch.nn.Module) -> str:
    for name, module in model.named_modules():
        if isinstance(module, _MIXERS) and module.training:
            return (
                f" {type(module).__name__} at {name!r} does this: replace it by GroupNorm or LayerNorm, "
                "or freeze it after public pretraining by calling its .eval()."
            )
        if getattr(module, "max_norm", None) is not None:
            return f" {type(module).__name__} at {name!r} renormalises its weights as it reads them: drop max_norm."
    return " Look for operations over dimension 0, or for an LSTM without batch_first=True."


def _spoil(batch: Batch, row: int) -> Batch:
    """NaN in one example: any arithmetic that reaches another example carries it along."""
    return map_batch(lambda t: _with_row(t, row, torch.nan) if t.dtype.is_floating_point else t, batch)


def _swap(batch: Batch, row: int) -> Batch:
    """Another example of the same kind in one row; the only test there is for integer input."""
    return map_batch(lambda t: _with_row(t, row, 0.5 * t[row] if t.dtype.is_floating_point else t[row] != 1), batch)


def _with_row(t: Tensor, row: int, value: Tensor | float) -> Tensor:
    changed = t.clone()
    changed[row] = value
    return changed


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextmanager
def _untouched(model: torch.nn.Module) -> Iterator[None]:
    before = {name: t.detach().clone() for name, t in _tensors(model)}
    try:
        with own_randomness(0, [p.device for p in model.parameters()]):
            yield
    finally:
        with torch.no_grad():
            for name, t in _tensors(model):
                t.copy_(before[name])
