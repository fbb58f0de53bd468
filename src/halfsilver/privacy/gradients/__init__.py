"""Clipped gradient sums: one backend a file, behind one small interface.

A new backend is one new file and one line in `BACKENDS`. Options here can change speed and memory, never the guarantee.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from halfsilver._core.model_state import without_dropout
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, batch_leaves, batch_rows, norm, take_rows
from halfsilver._core.views import Views, unchanged_views
from halfsilver.errors import ConfigError, HalfsilverError, UnsupportedLayer, require
from halfsilver.privacy.gradients.base import Adding, ClippedSum, GradientBackend, row_norms
from halfsilver.privacy.gradients.book import BookKeeping
from halfsilver.privacy.gradients.hooks import OpacusHooks
from halfsilver.privacy.gradients.linear import LinearModel
from halfsilver.privacy.gradients.probe import draws_for_each
from halfsilver.privacy.gradients.softmax import SoftmaxModel
from halfsilver.privacy.gradients.vmap import Vmap

__all__ = ["BACKENDS", "Adding", "ClippedSum", "GradientBackend", "Performance", "make_backend"]

BackendName = Literal["auto", "book", "vmap", "hooks"]

BACKENDS: dict[str, Callable[[torch.nn.Module, LossFn, Batch], GradientBackend]] = {
    "book": BookKeeping,
    "hooks": OpacusHooks,
    "vmap": Vmap,
}

# Distance from the oracle, in clip norms: at full precision, and with passes in half of it.
_EXACT, _ROUGH = 2e-2, 0.5
_log = logging.getLogger("halfsilver")


@dataclass(frozen=True, kw_only=True)
class Performance:
    """Options that change speed and memory only. None can weaken the guarantee, but for a backend given as an object.

    Args:
        backend: How clipped gradient sums are computed: "book" (book-keeping, the fastest), "hooks" (Opacus), "vmap"
            (torch.func, the slowest and most general), or "auto", which takes the first that serves the model. A named
            backend is checked against one-example-at-a-time gradients. An object is trusted to keep the contract of
            `GradientBackend`, and the statement says so.
        micro_batch_size: Examples in memory at once, at least 1. A logical batch may have any size (default: the
            fastest size, measured on made-up examples at the start). From 64 on, it is rounded down to a multiple of
            64. A size at which made-up examples are rounded by their place is not used: the next lower multiple of 64
            is, or a single example, which is slow.
        autocast: torch.bfloat16 or torch.float16 for private forward passes; norms, clipping and sums keep their
            precision (default: none).

    Raises:
        ConfigError: A value is out of its range.

    >>> Performance(backend="vmap", micro_batch_size=32).trusted is None
    True
    """

    backend: BackendName | GradientBackend = "auto"
    micro_batch_size: int | None = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        size, halves = self.micro_batch_size, (None, torch.bfloat16, torch.float16)
        require(size is None or size >= 1, "micro_batch_size", size, ">= 1 or None")
        require(self.autocast in halves, "autocast", self.autocast, "torch.bfloat16, torch.float16 or None")

    @property
    def trusted(self) -> str | None:
        """The class of a backend that was given as an object, which nothing checks; None where all is checked.

        `LinearModel` and `SoftmaxModel` are the library's own. Each serves one kind of model, and has a proof of its
        own.
        """
        unchecked = not isinstance(self.backend, str | LinearModel | SoftmaxModel)
        return type(self.backend).__name__ if unchecked else None

    def precise(self, loss_fn: LossFn) -> LossFn:
        """`loss_fn` with its forward pass in the precision of `autocast`, and losses in float32.

        Args:
            loss_fn: Returns one loss per example.
        """
        if self.autocast is None:
            return loss_fn
        if isinstance(loss_fn, Views):  # stays one, because backends compute its views one after the other
            return replace(loss_fn, loss_fn=self.precise(loss_fn.loss_fn))

        def loss(model: Any, batch: Batch) -> Tensor:
            device = batch_leaves(batch)[0].device.type
            with torch.autocast(device, self.autocast):
                return loss_fn(model, batch).float()

        return loss


def make_backend(performance: Performance, model: torch.nn.Module, loss_fn: LossFn, example: Batch) -> GradientBackend:
    """The backend that was asked for, checked against the oracle on made-up examples."""
    if not isinstance(performance.backend, str):
        return performance.backend
    if performance.backend == "auto":
        return _first_that_works(performance, model, loss_fn, example)
    if performance.backend not in BACKENDS:
        raise ConfigError(f"Expected backend={performance.backend!r} in {('auto', *BACKENDS)}.")
    return _checked(performance.backend, performance, model, loss_fn, example)


def _first_that_works(
    performance: Performance, model: torch.nn.Module, loss_fn: LossFn, example: Batch
) -> GradientBackend:
    opacus = ["hooks"] if importlib.util.find_spec("opacus") is not None else []
    for name in ("book", *opacus):
        try:
            return _checked(name, performance, model, loss_fn, example)
        except HalfsilverError as error:
            _log.info("backend=%r does not serve this model: %s", name, error)
    return _checked("vmap", performance, model, loss_fn, example)


def _checked(
    name: str, performance: Performance, model: torch.nn.Module, loss_fn: LossFn, example: Batch
) -> GradientBackend:
    """Hold a backend against one-example-at-a-time gradients: hooks can miss a parameter without a word.

    Without dropout and augmentation, and at a clip norm that every made-up example exceeds: a wrong norm shows only
    where it clips. At full precision first: in half of it, honest rounding is as large as many mistakes.
    """
    backend = BACKENDS[name](model, loss_fn, example)
    if not draws_for_each(model, loss_fn, example) and name != "vmap":
        raise UnsupportedLayer("loss_fn draws one random number for several examples, which then depend on each other.")
    with without_dropout(model), unchanged_views():
        oracle = Vmap(model, loss_fn, example)
        norms = row_norms(_drawn(oracle.per_example, example))
        if not torch.isfinite(norms).all() or not norms.any():  # a hinge may be flat at some
            raise ConfigError(
                f"Made-up examples have gradients of norm {norms.tolist()}, on which no backend can be checked. "
                "Give a made-up record that is more like yours: PrivateData(..., example=...)."
            )
        clip = 0.5 * float(norms[norms > 0].min())
        _require_close(name, backend, oracle, example, clip, _EXACT)
        if performance.autocast is not None:
            precise = performance.precise(loss_fn)
            backend = BACKENDS[name](model, precise, example)
            # Against the oracle at the same precision: examples with small gradients lose most of them by rounding.
            _require_close(name, backend, Vmap(model, precise, example), example, clip, _ROUGH)
            _require_bounded(name, backend, example, clip)
    return backend


def _drawn(function: Callable[..., Any], batch: Batch, *given: Any, seed: int = 0, **more: Any) -> Any:
    """What a pass returns if it draws from generators seeded by `seed`, so that two passes draw the same numbers."""
    with own_randomness(seed, [t.device for t in batch_leaves(batch)]):
        return function(batch, *given, **more)


def _require_close(
    name: str, backend: GradientBackend, oracle: Vmap, example: Batch, clip: float, tolerance: float
) -> None:
    """Where the oracle has to draw random numbers of a loss row by row, rows are compared one at a time."""

    def close(batch: Batch) -> bool:
        pairs = [_drawn(one.clipped_sum, batch, clip).tensors for one in (backend, oracle)]
        return all(float((a - b).norm()) <= tolerance * clip for a, b in zip(*pairs, strict=True))

    try:
        if close(example) or close(example):  # at its first call, a kernel may draw more to see what it can do
            return
        first, second = (row_norms(_drawn(oracle.per_example, example, seed=seed)) for seed in (0, 1))
        draws = oracle.one_by_one and not torch.allclose(first, second, rtol=1e-3)
        if draws and all(close(take_rows(example, slice(i, i + 1))) for i in range(batch_rows(example))):
            return _require_bounded(name, backend, example, clip)
    except (RuntimeError, ValueError, AttributeError, NotImplementedError, TypeError, UserWarning) as error:
        raise UnsupportedLayer(f"backend={name!r} cannot train this model ({error}). Use backend='vmap'.") from error
    advice = (
        "It changes from call to call: draw by torch's global generator." if name == "vmap" else "Use backend='vmap'."
    )
    raise UnsupportedLayer(f"backend={name!r} computes wrong gradients for this model. {advice}")


def _require_bounded(name: str, backend: GradientBackend, example: Batch, clip: float) -> None:
    """Each made-up example alone, among the others as padding: what privacy rests on, at any precision."""
    for one in torch.eye(batch_rows(example), dtype=torch.bool):
        alone = _drawn(backend.clipped_sum, example, clip, one)
        size = norm(alone.tensors)
        if not size <= clip:
            raise UnsupportedLayer(
                f"backend={name!r} lets an example contribute {size / clip:.4g} clip norms. Use backend='vmap'."
            )
