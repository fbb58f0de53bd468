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
from halfsilver._core.tensors import Batch, LossFn, batch_leaves, batch_rows, norm, take_rows
from halfsilver._core.views import Views, unchanged_views
from halfsilver.errors import ConfigError, HalfsilverError, UnsupportedLayer, require
from halfsilver.privacy.gradients.base import Adding, ClippedSum, GradientBackend, row_norms
from halfsilver.privacy.gradients.book import BookKeeping
from halfsilver.privacy.gradients.hooks import OpacusHooks
from halfsilver.privacy.gradients.linear import LinearModel
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
    """Options that change speed and memory only. No value here can weaken the guarantee.

    Args:
        backend: How clipped gradient sums are computed: "book" (book-keeping, the fastest), "hooks" (Opacus), "vmap"
            (torch.func, the slowest and most general), or "auto", which takes the first that serves the model. A named
            backend is checked against one-example-at-a-time gradients. An object is trusted to keep the contract of
            `GradientBackend`, and the statement says so.
        micro_batch_size: Examples in memory at once, at least 1. A logical batch may have any size (default: the
            fastest size, measured on made-up examples at the start).
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
    with without_dropout(model), unchanged_views():
        oracle = Vmap(model, loss_fn, example)
        norms = row_norms(oracle.per_example(example))
        if not (torch.isfinite(norms) & (norms > 0)).all():
            raise ConfigError(
                f"Made-up examples have gradients of norm {norms.tolist()}, on which no backend can be checked. "
                "Give a made-up record that is more like yours: PrivateData(..., example=...)."
            )
        clip = 0.5 * float(norms.min())
        expected = oracle.clipped_sum(example, clip)
        _require_close(name, backend, example, clip, expected, _EXACT)
        if performance.autocast is not None:
            precise = performance.precise(loss_fn)
            backend = BACKENDS[name](model, precise, example)
            # Against the oracle at the same precision: examples with small gradients lose most of them by rounding.
            rounded = Vmap(model, precise, example).clipped_sum(example, clip)
            _require_close(name, backend, example, clip, rounded, _ROUGH)
            _require_bounded(name, backend, example, clip)
    return backend


def _require_close(
    name: str, backend: GradientBackend, example: Batch, clip: float, expected: ClippedSum, tolerance: float
) -> None:
    try:
        found = backend.clipped_sum(example, clip)
    except (RuntimeError, ValueError, AttributeError, NotImplementedError, TypeError, UserWarning) as error:
        raise UnsupportedLayer(f"backend={name!r} cannot train this model ({error}). Use backend='vmap'.") from error
    pairs = zip(found.tensors, expected.tensors, strict=True)
    if not all(float((a - b).norm()) <= tolerance * clip for a, b in pairs):
        raise UnsupportedLayer(f"backend={name!r} computes wrong gradients for this model. Use backend='vmap'.")


def _require_bounded(name: str, backend: GradientBackend, example: Batch, clip: float) -> None:
    """Each made-up example alone, among the others as padding: what privacy rests on, at any precision."""
    order = torch.arange(batch_rows(example))
    for first in order.tolist():
        alone = backend.clipped_sum(take_rows(example, order.roll(-first)), clip, rows=1)
        size = norm(alone.tensors)
        if not size <= clip:
            raise UnsupportedLayer(
                f"backend={name!r} lets an example contribute {size / clip:.4g} clip norms. Use backend='vmap'."
            )
