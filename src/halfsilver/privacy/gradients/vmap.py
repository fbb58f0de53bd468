"""The oracle: per-example gradients by torch.func, for any module, or one example at a time where vmap cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from halfsilver._core.tensors import Batch, LossFn, Tensors, batch_rows, take_rows
from halfsilver.privacy.gradients.base import Adding, ClippedSum, clip_and_sum

PerExample = Callable[[dict[str, Tensor], Batch], dict[str, Tensor]]


@final
class Vmap:
    """Materialises one gradient per example. Slow and memory-hungry; every other backend is held against it."""

    name = "vmap"

    def __init__(self, model: torch.nn.Module, loss_fn: LossFn, example: Batch) -> None:
        self._model = model
        self._loss_of_one = _loss_of_one(model, loss_fn)
        self._per_example = self._choose(example)
        self.one_by_one = self._per_example == self._one_by_one

    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        return clip_and_sum(self.per_example(batch), max_grad_norm, counted, adding)

    def per_example(self, batch: Batch) -> Tensors:
        """One gradient per example and trainable parameter, [B, *shape] each."""
        return list(self._per_example(self._params(), batch).values())

    def _params(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._model.named_parameters() if p.requires_grad}

    def _choose(self, example: Batch) -> PerExample:
        """vmap if it can run this module; decided on made-up input, never on private rows."""
        vectorised = vmap(grad(self._loss_of_one), in_dims=(None, 0), randomness="different")
        try:
            with warnings.catch_warnings():  # torch warns where vmap falls back to a loop inside one operator
                warnings.filterwarnings("error", message="There is a performance drop", category=UserWarning)
                vectorised(self._params(), example)
        except (RuntimeError, NotImplementedError, ValueError, UserWarning):
            return self._one_by_one
        return vectorised

    def _one_by_one(self, params: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        rows = [self._gradient(params, take_rows(batch, i)) for i in range(batch_rows(batch))]
        return {name: torch.stack([r[name] for r in rows]) for name in params}

    def _gradient(self, params: dict[str, Tensor], record: Any) -> dict[str, Tensor]:
        """By ordinary autograd: fused kernels (an LSTM's, say) have no functional transform."""
        live = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            loss = self._loss_of_one(live, record)
            grads = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(live.items(), grads, strict=True)}


def _loss_of_one(model: torch.nn.Module, loss_fn: LossFn) -> Callable[[dict[str, Tensor], Any], Tensor]:
    def loss(params: dict[str, Tensor], record: Any) -> Tensor:
        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(model, params, args, kwargs)

        return loss_fn(call, pytree.tree_map(lambda t: t.unsqueeze(0), record)).squeeze(0)

    return loss
