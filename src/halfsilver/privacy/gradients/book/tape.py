"""What one pass over a batch writes down: for each parameter, how it enters each example's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from halfsilver._core.tensors import Tensors
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.book.example_gradients import ExampleGradients
from halfsilver.privacy.gradients.book.outer import LARGEST, added, combine


@final
class Tape:
    """Collects contributions while one backward pass runs from the losses to the *outputs* of the layers.

    Weights are no part of that pass, so no weight gradient is computed by it. Each kernel calls `tap` on its output and
    adds its contributions once the gradient there is known.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._found: dict[Tensor, list[ExampleGradients]] = {}

    def tap(self, out: Tensor, then: Callable[[Tensor], None]) -> Tensor:
        """`out` itself, with `then` called on its gradient during the backward pass."""
        if out._is_view():  # an operation in place on a view would leave the hook behind
            out = torch.ops.aten._unsafe_view(out, out.shape)
        if not out.requires_grad:  # the first layer: its input is data
            out = _Root.apply(out, self.anchor)  # type: ignore[no-untyped-call]
        out.register_hook(lambda g: then(g.detach()))  # type: ignore[no-untyped-call]
        return out

    def add(self, parameter: Tensor | None, contribution: Callable[[], ExampleGradients]) -> None:
        """Note a contribution to `parameter`, unless that is None or frozen."""
        if parameter is None or not parameter.requires_grad:
            return
        found = contribution()
        if found.rows != self.rows:
            raise UnsupportedLayer(
                f"A layer saw {found.rows} examples in a batch of {self.rows}: the model folds another dimension into "
                "the batch, or leaves out that of the examples (give positions as torch.arange(T).expand(len(x), T)). "
                "Use backend='vmap'."
            )
        self._found.setdefault(parameter, []).append(found)

    def backward(self, losses: Tensor, parameters: Sequence[Tensor] = ()) -> None:
        """Run to the taps. A parameter that the losses still depend on was used past its module, and would be lost."""
        if losses.requires_grad:
            missed = torch.autograd.grad(losses.sum(), [self.anchor, *parameters], allow_unused=True)[1:]
            if any(g is not None for g in missed):
                raise UnsupportedLayer("A weight is used outside of its module. Use backend='vmap'.")

    def add_up(self) -> None:
        """Replace what was noted for each parameter by its sum, unless that takes too much memory. Keeps no factors."""
        for parameter, parts in self._found.items():
            if self.rows * parameter.numel() <= LARGEST:
                self._found[parameter] = [added(parts, parameter.dtype)]

    def contributions(self, parameters: Tensors) -> list[ExampleGradients | None]:
        """One contribution a parameter, over all uses of it; None where the losses do not depend on it."""
        if not self._found.keys() <= set(parameters):
            raise UnsupportedLayer("A module's weights were exchanged while it ran. Use backend='vmap'.")
        return [combine(self._found[p], p.dtype) if p in self._found else None for p in parameters]


class _Root(torch.autograd.Function):
    """Makes a layer's output part of the graph, in place, though nothing before it needs a gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[None, None]:
        return None, None


class Unchanged:
    """A layer's input, kept for later; autograd no longer watches over it, so this does."""

    def __init__(self, t: Tensor) -> None:
        self._tensor, self._version = t.detach(), t._version

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise UnsupportedLayer("A layer's input is changed in place after it was used. Use backend='vmap'.")
        return self._tensor


def detached(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.detach()
