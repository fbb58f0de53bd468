"""nn.RNN: one gate, tanh or relu.

References:
    - Elman 1990, Finding Structure in Time, Cognitive Science 14(2).
"""

from __future__ import annotations

from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from halfsilver.privacy.gradients.book.recurrent.layer import Found, Weights, recurrent
from halfsilver.privacy.gradients.book.tape import Tape


def elman(module: nn.RNN, tape: Tape, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out, (h,) = recurrent(module, tape, input, hx, partial(_Cell, module.nonlinearity == "tanh"))
    return out, h


@final
class _Cell:
    """h' = act(x + p), with p the projected state."""

    def __init__(self, tanh: bool, weights: Weights) -> None:
        self._tanh, self._weights = tanh, weights

    def bias(self) -> Tensor | None:
        return self._weights.both_biases()

    def forward(self, projected: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
        self._h, self._h_before = self._weights.slots(start[0], len(projected))
        x, h, before, hh = projected.unbind(), self._h.unbind(), self._h_before.unbind(), self._weights.hh.detach().t()
        for t in self._weights.times(len(x)):
            torch.addmm(x[t], before[t], hh, out=h[t])
            h[t].tanh_() if self._tanh else h[t].relu_()
        return (self._h,)

    def backward(self, *gradients: Tensor | None) -> Found:
        dh, dh_before, start = self._weights.gradient_slots(self._h)
        dh.zero_() if gradients[0] is None else dh.copy_(gradients[0])
        slopes = self._h.square().neg_().add_(1.0) if self._tanh else (self._h > 0).to(dh.dtype)
        after, before, pre, hh = dh.unbind(), dh_before.unbind(), slopes.unbind(), self._weights.hh.detach()
        for t in reversed(self._weights.times(len(pre))):
            before[t].addmm_(pre[t].mul_(after[t]), hh)
        return Found(inputs=slopes, states=slopes, before=self._h_before, start=(start,))
