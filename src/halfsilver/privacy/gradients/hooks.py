"""Per-example gradients by Opacus's hooks, clipped and summed by us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, LossFn, Tensors, trainable
from halfsilver._core.warning_filters import warning_filter, warning_filters
from halfsilver.errors import MissingExtra, UnsupportedLayer
from halfsilver.privacy.gradients.base import Adding, ClippedSum, clip_and_sum


@final
class OpacusHooks:
    """Opacus materialises the gradients; norms, clipping and summing are ours, so NaN rows and margins are handled."""

    name = "hooks"

    def __init__(self, model: torch.nn.Module, loss_fn: LossFn, example: Batch) -> None:
        self._model, self._loss_fn = model, loss_fn

    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        return clip_and_sum(self.per_example(batch), max_grad_norm, counted, adding)

    def per_example(self, batch: Batch) -> Tensors:
        with attached(self._model), torch.enable_grad():
            losses = self._loss_fn(self._model, batch)
            torch.autograd.backward(losses.sum(), inputs=trainable(self._model))
            return [_take(p, len(losses)) for p in trainable(self._model)]


@contextmanager
def attached(model: torch.nn.Module) -> Iterator[None]:
    """Opacus's hooks on `model`, for this block only: the public pass over the same model must run without them.

    `.grad` and Opacus's own attributes are cleared on the way out, also after an error, so that no private gradient is
    left on the model.
    """
    try:
        from opacus.grad_sample.grad_sample_module import GradSampleHooks
    except ImportError as error:
        raise MissingExtra("opacus", "opacus") from error
    hooks = GradSampleHooks(model, loss_reduction="sum", strict=False)
    try:
        with quiet():
            yield
    finally:
        hooks.remove_hooks()
        _clean(model)


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remark that the first layer's input needs no gradient: that is so in every training run.

    Its remark on a missing batching rule becomes an error, which the check on made-up examples meets first.
    """
    with warning_filters(
        warning_filter("ignore", "Full backward hook is firing", UserWarning),
        warning_filter("error", "There is a performance drop", UserWarning),
    ):
        yield


def _clean(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
        for name in ("grad_sample", "_current_grad_sample", "_forward_counter"):
            if hasattr(p, name):
                delattr(p, name)
    for module in model.modules():
        for name in ("activations", "max_batch_len"):
            if hasattr(module, name):
                delattr(module, name)


def _take(p: Any, rows: int) -> Tensor:
    """The gradients that Opacus left on a parameter; zero where the loss does not use it."""
    found = getattr(p, "grad_sample", None)
    if isinstance(found, list):  # used by several forward calls
        found = torch.stack(found).sum(0)
    if not isinstance(found, Tensor):
        return torch.zeros((rows, *p.shape), dtype=p.dtype, device=p.device)
    if len(found) != rows:  # a layer saw something else on dimension 0, and would be clipped in parts
        raise UnsupportedLayer(
            f"Opacus found {len(found)} examples in a batch of {rows}: the model folds another dimension into the "
            "batch. Use backend='vmap'."
        )
    return found.detach()
