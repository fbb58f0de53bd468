"""Refuse models that have no per-example gradient, on made-up input, before any private row is read.

Two things are looked for: a pass that writes into the model, and a loss of one example that depends on another. Layers
of torch that do either are refused by their type. Anything else is tried on made-up rows, extreme ones among them, and
on public rows where there are any. That is a search and no proof: what it misses while training, `ModelState` finds if
it is a write. Mixing that only some inputs cause is not found; ``backend="vmap"`` computes each example by itself.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfsilver._core.model_state import ModelState, untouched
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import (
    Batch,
    LossFn,
    batch_leaves,
    batch_rows,
    map_batch,
    one_loss_each,
    take_rows,
    trainable,
)
from halfsilver.errors import ConfigError, UnsupportedLayer

PROBE_ROWS = 4

# What one example is replaced by, to see whether the others notice. A guard against outliers wakes up at some of these.
_EXTREMES = (torch.nan, 1e4, -1e4, 1e30, -1e30)
# Token ids up to which an embedding is read whole.
_MOST_TOKENS = 1 << 20
_TOKEN_ROWS = 32

Module = nn.Module


def probe(model: Module, loss_fn: LossFn, batch: Batch, public: Batch | None = None) -> None:
    """Check that losses come one per example, that no example sees another, and that a pass changes nothing.

    `batch` holds `PROBE_ROWS` made-up examples; `public` are some public rows of the same kind. The model and
    every random generator are as before afterwards.
    """
    refuse_writers(model)
    state = ModelState(model)
    with untouched(model), own_randomness(0, [p.device for p in model.parameters()]):
        state.record()
        losses = _losses(model, loss_fn, batch)
        _refuse_written(model, state)
        if not torch.isfinite(losses).all():
            raise ConfigError(
                f"The losses of made-up examples are {losses.tolist()}. Give a made-up record that is more like yours: "
                "PrivateData(..., example=...)."
            )
        known = [] if public is None else [public]
        for rows in (batch, *(take_rows(rows, slice(0, PROBE_ROWS)) for rows in known)):
            _refuse_mixing(model, loss_fn, rows, state)
        for rows in (*_tokens(model, batch), *known):
            _attempt(model, loss_fn, rows)
            _refuse_written(model, state)


def _refuse_mixing(model: Module, loss_fn: LossFn, batch: Batch, state: ModelState) -> None:
    losses = _attempt(model, loss_fn, batch)
    if losses is None or len(losses) < 2 or not torch.isfinite(losses).all():
        return  # public rows need not be fit for a private loss
    for row in (0, len(losses) - 1):
        others = torch.arange(len(losses)) != row
        for changed in (_swap(batch, row), *(_spoil(batch, row, value) for value in _EXTREMES)):
            after = _attempt(model, loss_fn, changed)
            _refuse_written(model, state)
            if after is not None:
                _require_same(model, losses[others], after[others])


def refuse_mixing(model: Module, loss_fn: LossFn, batch: Batch) -> None:
    """The same where a batch has the size of a private one: the first row among others, and among its copies."""
    alone = take_rows(batch, torch.zeros(batch_rows(batch), dtype=torch.long))
    with untouched(model), own_randomness(0, [p.device for p in model.parameters()]), torch.no_grad():
        _require_same(model, _pass(model, loss_fn, batch)[0], _pass(model, loss_fn, alone)[0])


def _require_same(model: Module, before: Tensor, after: Tensor) -> None:
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise UnsupportedLayer(
            "The loss of one example depends on another example of its batch, so a clipped gradient would not bound "
            f"anyone's influence.{_advice(model)}"
        )


def _losses(model: Module, loss_fn: LossFn, batch: Batch) -> Tensor:
    try:
        return _passes(model, loss_fn, batch)
    except ConfigError:
        raise
    except Exception as error:
        shown = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in batch_leaves(batch))
        raise ConfigError(
            f"loss_fn(model, batch) fails on made-up examples with the shapes and dtypes of yours, {shown}: {error!r}. "
            "Make data and model fit; if only the values are not valid input, give some that are: "
            "PrivateData(..., example=...)."
        ) from error


def _attempt(model: Module, loss_fn: LossFn, batch: Batch) -> Tensor | None:
    """The losses; None where such values are no valid input, as a private record with them contributes nothing."""
    try:
        return _passes(model, loss_fn, batch)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:
        return None


def _passes(model: Module, loss_fn: LossFn, batch: Batch) -> Tensor:
    """Losses of a pass with gradients, after one without: some layers write in one of the two only."""
    with torch.no_grad():
        _pass(model, loss_fn, batch)
    with torch.enable_grad():
        losses = _pass(model, loss_fn, batch)
        if losses.requires_grad:
            torch.autograd.grad(losses.sum(), trainable(model), allow_unused=True)
    return losses.detach()


def _pass(model: Module, loss_fn: LossFn, batch: Batch) -> Tensor:
    torch.manual_seed(0)  # dropout must draw the same masks in each of the passes that are compared
    batch = map_batch(torch.clone, batch)  # a model may write into its input
    return one_loss_each(loss_fn(model, batch), batch)


def _refuse_written(model: Module, state: ModelState) -> None:
    written = state.put_back(values=True)
    if written:
        raise UnsupportedLayer(
            f"The forward pass changes {', '.join(map(repr, written[:3]))}, which would carry private data past the "
            "noise. Make that layer a pure function of its input: fix the value before training, on public rows."
        )


# ---- losses that draw random numbers


def draws_for_each(model: Module, loss_fn: LossFn, batch: Batch) -> bool:
    """Whether a pass draws its random numbers for each example, so that twice as many examples take twice as many.

    A removed record changes which examples share a number, and so what the others add up to, by any amount. Raises
    `ConfigError` for numbers of Python or NumPy, which any backend draws once for several examples.
    """
    found: list[list[int]] = []

    def counted(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            found[-1] += [t.numel() for t in batch_leaves(out)[:1]]
        return out

    counting: Any = type("Counting", (TorchDispatchMode,), {"__torch_dispatch__": counted})
    for rows in (batch, map_batch(lambda t: torch.cat([t, t]), batch)):
        with own_randomness(0, [p.device for p in model.parameters()]), counting():
            found.append([])
            others = [repr((random.getstate(), np.random.get_state()))]  # noqa: NPY002
            _pass(model, loss_fn, rows)
            if repr((random.getstate(), np.random.get_state())) not in others:  # noqa: NPY002
                raise ConfigError("loss_fn draws by Python's random or NumPy, once for all examples. Draw by torch.")
    return [2 * n for n in found[0]] == found[1]


# ---- layers that are known to write or to mix


def refuse_writers(model: Module) -> None:
    """Refuse layers of torch that write into themselves as they run, whatever made-up rows would show."""
    for name, module in model.named_modules():
        for kind, (found, way_out) in _WRITERS.items():
            if found(module):
                raise UnsupportedLayer(
                    f"{type(module).__name__} at {name!r} {kind}, which would carry private data past the noise: "
                    f"{way_out}."
                )


def _renormalises(module: Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None


def _tracks(module: Module) -> bool:
    norms = (nn.modules.batchnorm._NormBase,)
    return isinstance(module, norms) and module.training and module.running_mean is not None


def _observes(module: Module) -> bool:
    """Quantization observers. Where their module was never imported, there are none."""
    kinds = [("observer", "ObserverBase"), ("fake_quantize", "FakeQuantizeBase")]
    modules = ((sys.modules.get(f"torch.ao.quantization.{name}"), kind) for name, kind in kinds)
    return any(found is not None and isinstance(module, getattr(found, kind)) for found, kind in modules)


def _iterates(module: Module) -> bool:
    """Spectral norm, as a parametrization or in its older form as a hook."""
    hooks = (type(hook).__name__ == "SpectralNorm" for hook in module._forward_pre_hooks.values())
    return module.training and (type(module).__name__ == "_SpectralNorm" or any(hooks))


_NORM = "replace it by GroupNorm or LayerNorm, or freeze it after public pretraining by calling its .eval()"
_WRITERS: dict[str, tuple[Callable[[Module], bool], str]] = {
    "renormalises its weights as it reads them": (_renormalises, "drop max_norm"),
    "keeps running statistics of what it reads": (_tracks, _NORM),
    "records the range of what it reads": (_observes, "remove it, or calibrate and convert it before private training"),
    "updates its estimate of the norm in training mode": (_iterates, "call its .eval() or remove spectral_norm"),
}


def _advice(model: Module) -> str:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return f" {type(module).__name__} at {name!r} does this: {_NORM}."
    return (
        " Look for operations over dimension 0, for an LSTM without batch_first=True, or for shapes (N, 1) and (N,), "
        "which broadcast to (N, N)."
    )


# ---- made-up rows


def _spoil(batch: Batch, row: int, value: float) -> Batch:
    """An extreme value in one example: arithmetic that reaches another example carries it along."""
    return map_batch(lambda t: _with_row(t, row, value) if t.dtype.is_floating_point else t, batch)


def _swap(batch: Batch, row: int) -> Batch:
    """Another example of the same kind in one row; the only test there is for integer input."""
    return map_batch(lambda t: _with_row(t, row, 0.5 * t[row] if t.dtype.is_floating_point else t[row] != 1), batch)


def _with_row(t: Tensor, row: int, value: Tensor | float) -> Tensor:
    changed = t.clone()
    changed[row] = value
    return changed


def _tokens(model: Module, batch: Batch) -> Iterator[Batch]:
    """Rows in which every integer column takes every value that an embedding of the model has a row for.

    On the CPU only: elsewhere a value that is out of range for another layer would end the process.
    """
    columns = [t for t in batch_leaves(batch) if _is_token(t) and t.device.type == "cpu"]
    sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for size in sorted(size for size in sizes if size <= _MOST_TOKENS) if columns else ():
        width = max(1, min(t[0].numel() for t in columns))
        rows = max(2, min(_TOKEN_ROWS, math.ceil(size / width)))
        repeated = take_rows(batch, torch.arange(rows) % batch_rows(batch))
        for start in range(0, size, rows * width):
            yield map_batch(partial(_counted, start=start, size=size), repeated)


def _is_token(t: Tensor) -> bool:
    return not t.dtype.is_floating_point and not t.dtype.is_complex and t.dtype != torch.bool and t.dim() > 1


def _counted(t: Tensor, start: int, size: int) -> Tensor:
    if not _is_token(t):
        return t
    return ((start + torch.arange(t.numel(), device=t.device)) % size).to(t.dtype).view(t.shape)
