"""GRU: the two loops over time, for all options of nn.GRU.

References:
    - Cho et al. 2014, Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation,
      arXiv:1406.1078. torch applies the reset gate after the product with the matrix, and so does this file.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from halfsilver.privacy.gradients.book.recurrent.layer import Found, Weights, by_gate, recurrent
from halfsilver.privacy.gradients.book.tape import Tape, detached


def gru(module: nn.GRU, tape: Tape, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out, (h,) = recurrent(module, tape, input, hx, _Cell)
    return out, h


@final
class _Cell:
    """Gates r, z, n in torch's order; with p the projected state, n = tanh(x_n + r p_n) and h' = n + z (h - n)."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def bias(self) -> Tensor | None:
        return detached(self._weights.b_ih)

    def forward(self, projected: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
        self._gates, self._p = projected, torch.empty_like(projected)
        self._h, self._h_before = self._weights.slots(start[0], len(projected))
        self._loop_forward()
        return (self._h,)

    def _loop_forward(self) -> None:
        (r, z, n), (_, _, p_n) = ([gate.unbind() for gate in by_gate(t, 3).unbind(2)] for t in (self._gates, self._p))
        r_and_z, p_rz = (t[..., : -self._h.shape[2]].unbind() for t in (self._gates, self._p))
        p, h, h_before = self._p.unbind(), self._h.unbind(), self._h_before.unbind()
        hh, bias = self._weights.hh.detach().t(), detached(self._weights.b_hh)
        bias = p[0].new_zeros(p[0].shape[1]) if bias is None else bias
        for t in self._weights.times(len(h)):
            torch.addmm(bias, h_before[t], hh, out=p[t])
            r_and_z[t].add_(p_rz[t]).sigmoid_()
            n[t].addcmul_(r[t], p_n[t]).tanh_()
            torch.lerp(n[t], h_before[t], z[t], out=h[t])

    def backward(self, *gradients: Tensor | None) -> Found:
        dh, dh_before, start = self._weights.gradient_slots(self._h)
        dh.zero_() if gradients[0] is None else dh.copy_(gradients[0])
        by_n = self._slopes()
        self._loop_back(dh, dh_before)
        size = self._h.shape[2]  # the gates have served: their place is taken by the gradients
        self._gates[..., :-size] = self._p[..., :-size]
        torch.mul(by_n, dh, out=self._gates[..., -size:])
        return Found(inputs=self._gates, states=self._p, before=self._h_before, start=(start,))

    def _slopes(self) -> Tensor:
        """Derivatives that the loop back has only to scale by dh, at all times at once: at p, in its place, and x_n."""
        (r, z, n), (at_r, at_z, p_n) = by_gate(self._gates, 3).unbind(2), by_gate(self._p, 3).unbind(2)
        by_n = n.square().neg_().add_(1.0)
        by_n.addcmul_(by_n, z, value=-1)
        torch.mul(by_n, p_n, out=at_r).mul_(r).addcmul_(at_r, r, value=-1)
        torch.sub(self._h_before, n, out=at_z).mul_(z).addcmul_(at_z, z, value=-1)
        torch.mul(by_n, r, out=p_n)
        return by_n

    def _loop_back(self, dh: Tensor, dh_before: Tensor) -> None:
        """Turns slopes into gradients at p, and dh into the whole gradient at the states."""
        slopes = by_gate(self._p, 3).unbind()
        p, z, hh = self._p.unbind(), by_gate(self._gates, 3)[:, :, 1].unbind(), self._weights.hh.detach()
        after, before = dh.unbind(), dh_before.unbind()
        for t in reversed(self._weights.times(len(p))):
            slopes[t].mul_(after[t][:, None])
            before[t].addcmul_(after[t], z[t]).addmm_(p[t], hh)
