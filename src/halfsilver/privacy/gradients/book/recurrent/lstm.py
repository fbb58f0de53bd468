"""LSTM: the two loops over time, for all options of nn.LSTM.

References:
    - Hochreiter and Schmidhuber 1997, Long Short-Term Memory, Neural Computation 9(8).
    - Sak, Senior and Beaufays 2014, Long Short-Term Memory Based Recurrent Neural Network Architectures for Large
      Vocabulary Speech Recognition, arXiv:1402.1128, for the projection of the state.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from halfsilver.privacy.gradients.book.recurrent.layer import Found, Weights, by_gate, recurrent
from halfsilver.privacy.gradients.book.tape import Tape, detached


def lstm(
    module: nn.LSTM, tape: Tape, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    out, (h, c) = recurrent(module, tape, input, hx, _Cell)
    return out, (h, c)


@final
class _Cell:
    """Gates i, f, g, o in torch's order; c' = f c + i g, m = o tanh(c'), and h' = m or its projection."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self._hr = weights, detached(weights.hr)

    def bias(self) -> Tensor | None:
        return self._weights.both_biases()

    def forward(self, projected: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
        (h, c), steps = start, len(projected)
        self._projected = projected
        self._gates = by_gate(projected, 4).unbind(2)
        self._h, self._h_before = self._weights.slots(h, steps)
        self._c, self._c_before = self._weights.slots(c, steps)
        self._tanh = torch.empty_like(self._c)
        self._m = self._h if self._hr is None else torch.empty_like(self._c)
        self._loop_forward()
        return self._h, self._c[self._weights.times(steps)[-1]].clone()

    def _loop_forward(self) -> None:
        i, f, g, o = (gate.unbind() for gate in self._gates)
        pre, i_and_f = self._projected.unbind(), self._projected[..., : 2 * self._c.shape[2]].unbind()
        h, h_before, c, c_before = (t.unbind() for t in (self._h, self._h_before, self._c, self._c_before))
        tanh, m, hh = self._tanh.unbind(), self._m.unbind(), self._weights.hh.detach().t()
        for t in self._weights.times(len(pre)):
            pre[t].addmm_(h_before[t], hh)
            i_and_f[t].sigmoid_()
            g[t].tanh_()
            o[t].sigmoid_()
            torch.mul(f[t], c_before[t], out=c[t]).addcmul_(i[t], g[t])
            torch.mul(o[t], torch.tanh(c[t], out=tanh[t]), out=m[t])
            if self._hr is not None:
                torch.mm(m[t], self._hr.t(), out=h[t])

    def backward(self, *gradients: Tensor | None) -> Found:
        dh, dh_before, start = self._weights.gradient_slots(self._h)
        self._slopes(dh if self._hr is None else torch.empty_like(self._c))
        dh.zero_() if gradients[0] is None else dh.copy_(gradients[0])
        dc = torch.zeros_like(self._c[0]) if gradients[1] is None else gradients[1].clone()
        dc = self._loop_back(dh, dh_before, dc)
        projection = None if self._hr is None else (dh, self._m)
        found, before = self._projected, self._h_before
        return Found(inputs=found, states=found, before=before, start=(start, dc), projection=projection)

    def _slopes(self, scratch: Tensor) -> None:
        """Derivatives that the loop back only has to scale, for all times at once, each in the place of what it needs.

        At the pre-activations: of i, of g and (where c was) of f, by dc; of o, by dm. And of c by dm, where tanh was.
        New memory would cost more than the arithmetic.
        """
        i, f, g, o = self._gates
        torch.mul(i, g, out=scratch)
        torch.addcmul(i, scratch, g, value=-1, out=g)
        torch.addcmul(scratch, scratch, i, value=-1, out=i)
        self._c_before.mul_(f).addcmul_(self._c_before, f, value=-1)
        torch.addcmul(o, self._m, self._tanh, value=-1, out=self._tanh)
        torch.addcmul(self._m, self._m, o, value=-1, out=o)

    def _loop_back(self, dh: Tensor, dh_before: Tensor, dc: Tensor) -> Tensor:
        """Turns slopes into gradients at the pre-activations and dh into those at the states; the last dc."""
        pre, i_and_g = self._projected.unbind(), by_gate(self._projected, 4)[:, :, ::2].unbind()
        f, o, by_f, by_m = (t.unbind() for t in (self._gates[1], self._gates[3], self._c_before, self._tanh))
        after, before, hh, spare = dh.unbind(), dh_before.unbind(), self._weights.hh.detach(), torch.empty_like(dc)
        for t in reversed(self._weights.times(len(pre))):
            dm = after[t] if self._hr is None else after[t] @ self._hr
            dc.addcmul_(dm, by_m[t])
            i_and_g[t].mul_(dc[:, None])
            torch.mul(dc, f[t], out=spare)
            torch.mul(dc, by_f[t], out=f[t])
            o[t].mul_(dm)
            before[t].addmm_(pre[t], hh)
            dc, spare = spare, dc
        return dc
