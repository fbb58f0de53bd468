"""Opacus's ghost clipping: norms without gradients, then a second, weighted backward pass.

Norm and sum do not read the same tensors here: norms of layers with a time axis come from Gram matrices, which cancel,
and the second pass rounds differently. So each layer's squared norm is raised by a bound on that rounding,
k u (|a| |g|)^2 with the Frobenius norms of the layer's input and output gradient: an example whose gradient cancels is
clipped too much rather than too little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfsilver._random import own_randomness
from halfsilver._tensors import Batch, LossFn, batch_leaves, batch_rows, take_rows, trainable
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.base import (
    ClippedSum,
    clip_factors,
    margin,
    measurable,
    require_weighable,
    summable_rows,
)
from halfsilver.privacy.gradients.hooks import attached, quiet

Sampler = Callable[[nn.Module, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]

_ROUNDING_FACTOR = 8.0


@final
class OpacusGhost:
    """Less memory than `OpacusHooks`, at the price of a second backward pass."""

    name = "ghost"

    def __init__(self, model: torch.nn.Module, loss_fn: LossFn, example: Batch) -> None:
        self._model, self._loss_fn, self._example = model, loss_fn, example
        for p in trainable(model):
            require_weighable(p.dtype, self.name)
        with attached(model, "GradSampleHooksFastGradientClipping") as hooks:
            self._samplers = _cautious_samplers(hooks)
        for name, module in model.named_modules():
            owns = any(p.requires_grad for p in module.parameters(recurse=False))
            if owns and type(module) not in self._samplers:
                raise UnsupportedLayer(
                    f"No ghost norms for {type(module).__name__} at {name!r}. Use backend='hooks' or 'vmap'."
                )

    def clipped_sum(self, batch: Batch, max_grad_norm: float, rows: int | None = None) -> ClippedSum:
        params = trainable(self._model)
        total, size = ClippedSum.zeros(params, max_grad_norm), summable_rows(params[0].dtype)
        for start in range(0, batch_rows(batch) if rows is None else rows, size):
            part = take_rows(batch, slice(start, start + size))
            with torch.enable_grad(), quiet():
                total.add_(self._part(part, max_grad_norm, None if rows is None else rows - start))
        return total

    def _part(self, batch: Batch, max_grad_norm: float, rows: int | None) -> ClippedSum:
        params = trainable(self._model)
        dtype = params[0].dtype
        seed = int(torch.randint(2**62, ()))  # for dropout: the second pass must draw the masks of the first
        with own_randomness(seed, [params[0].device]):
            norms, losses = self._norms(batch)
        factors = clip_factors(norms, max_grad_norm, margin(dtype, summable_rows(dtype)), rows)
        if not torch.isfinite(norms).all():  # rows that must not enter the graph at all, because 0 * NaN is NaN
            with own_randomness(seed, [params[0].device]):
                losses = self._loss_fn(self._model, self._without(batch, ~torch.isfinite(norms)))
        weighted = (losses * factors.to(losses.dtype)).sum()
        grads = torch.autograd.grad(weighted, params, allow_unused=True, materialize_grads=True)
        return ClippedSum([g.double() for g in grads], max_grad_norm)

    def _without(self, batch: Batch, bad: Tensor) -> Batch:
        """The batch with a made-up example, which is known to have a gradient, in place of each bad one."""
        columns = zip(batch_leaves(batch), batch_leaves(self._example), strict=True)
        mended = [torch.where(_like(bad, t), e[:1], t) for t, e in columns]
        return pytree.tree_unflatten(mended, pytree.tree_structure(batch))

    def _norms(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with attached(self._model, "GradSampleHooksFastGradientClipping") as hooks:
            hooks.NORM_SAMPLERS = self._samplers
            losses = self._loss_fn(self._model, batch)
            torch.autograd.backward(losses.sum(), inputs=trainable(self._model), retain_graph=True)
            norms = [p._norm_sample for p in trainable(self._model) if hasattr(p, "_norm_sample")]
        return torch.stack(norms).norm(dim=0), losses


def _cautious_samplers(hooks: Any) -> dict[type[nn.Module], Sampler]:
    """A norm for every layer type that Opacus has a formula for, each raised by its rounding bound."""
    norms: dict[type[nn.Module], Sampler] = {t: _norms_of(f) for t, f in hooks.GRAD_SAMPLERS.items()}
    norms |= hooks.NORM_SAMPLERS
    return {t: _raised(f) for t, f in norms.items()}


def _norms_of(grad_sampler: Sampler) -> Sampler:
    def norms(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        grads = grad_sampler(layer, activations, backprops)
        return {p: torch.linalg.vector_norm(g.reshape(len(g), -1).double(), dim=1) for p, g in grads.items()}

    return norms


def _raised(sampler: Sampler) -> Sampler:
    def norms(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
        largest = _largest_norm(layer, activations[0], backprops)
        rounding = _ROUNDING_FACTOR * torch.finfo(backprops.dtype).eps * largest**2
        found = sampler(layer, [a.contiguous() for a in activations], backprops)
        # A Gram sum that rounding makes negative, or that overflows on the way, has the root NaN: take the upper bound.
        known = {p: torch.where(torch.isnan(n), largest, n.double()) for p, n in found.items()}
        return {p: (n**2 + rounding).sqrt() for p, n in known.items()}

    return norms


def _largest_norm(layer: nn.Module, activation: Tensor, backprop: Tensor) -> Tensor:
    """|a| |g| per example, which no gradient of the layer exceeds; infinite where float32 could not weigh it.

    A norm layer's input is normalised before it meets g, so at least sqrt(size) stands for |a|.
    """
    size = float(activation[0].numel()) ** 0.5
    a = torch.full((len(backprop),), size, dtype=torch.float64, device=backprop.device)
    if activation.dtype.is_floating_point:
        a = torch.maximum(a, activation.reshape(len(activation), -1).double().norm(dim=1))
    a *= math.prod(getattr(layer, "kernel_size", ())) ** 0.5  # a convolution reads an input up to once per tap
    g = backprop.reshape(len(backprop), -1).double().norm(dim=1)
    return measurable(measurable(a) * g)


def _like(mask: Tensor, t: Tensor) -> Tensor:
    return mask.reshape(-1, *[1] * (t.dim() - 1))
