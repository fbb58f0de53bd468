"""Recurrent layers: one loop over time forward, one back, and no weight gradient in either.

The loops only have to compute the gradients at the pre-activations, [T, rows, gates]. With the layer's input and its
earlier states, these are the factors of the matrices' gradients: G_i = sum_t d_it x_it^T. The input is projected
outside the loops, for all times at once. Inside, time comes first, so that each step works on contiguous memory.

References:
    - Werbos 1990, Backpropagation Through Time: What It Does and How to Do It, Proceedings of the IEEE 78(10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.book.example_gradients import Materialised
from halfsilver.privacy.gradients.book.outer import Outer, SharedLeft
from halfsilver.privacy.gradients.book.tape import Tape, Unchanged


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parameters of one layer in one direction, under the names that torch gives them."""

    ih: Tensor
    hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    hr: Tensor | None
    reverse: bool

    @classmethod
    def of(cls, module: nn.RNNBase, layer: int, reverse: bool) -> Weights:
        suffix = f"_l{layer}" + ("_reverse" if reverse else "")
        names = {"ih": "weight_ih", "hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh", "hr": "weight_hr"}
        found: dict[str, Any] = {field: getattr(module, name + suffix, None) for field, name in names.items()}
        return cls(**found, reverse=reverse)

    def times(self, steps: int) -> range:
        """Times in the order in which the states follow each other."""
        return range(steps - 1, -1, -1) if self.reverse else range(steps)

    def both_biases(self) -> Tensor | None:
        return None if self.b_ih is None or self.b_hh is None else self.b_ih.detach() + self.b_hh.detach()

    def slots(self, start: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Room for the state after each time, and the same memory one step off: the state before each time."""
        buffer = start.new_empty((steps + 1, *start.shape))
        buffer[-1 if self.reverse else 0] = start
        first, second = buffer[:-1], buffer[1:]
        return (first, second) if self.reverse else (second, first)

    def gradient_slots(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Room for the gradient at the state after each time, the same one step off, and its zeros at the start."""
        after, before = self.slots(torch.zeros_like(states[0]), len(states))
        return after, before, before[self.times(len(states))[0]]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a loop back over time finds; all but `start` is [T, rows, ...]."""

    inputs: Tensor  # gradient at what the input projection gave
    states: Tensor  # gradient at what the state's projection gave; may be the same tensor
    before: Tensor  # state before each time
    start: tuple[Tensor, ...]  # gradients at the initial states
    projection: tuple[Tensor, Tensor] | None = None  # factors of weight_hr


class Cell(Protocol):
    """The two loops of one layer in one direction. Keeps, from the first to the second, what that needs."""

    def bias(self) -> Tensor | None:
        """What is added to the projected input."""
        ...

    def forward(self, projected: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
        """States after each time [T, rows, width], then further last states; may use up `projected`."""
        ...

    def backward(self, *gradients: Tensor | None) -> Found:
        """From the gradients at what `forward` returned, None for zeros."""
        ...


def recurrent(
    module: nn.RNNBase,
    tape: Tape,
    x: Tensor | PackedSequence,
    hx: Tensor | tuple[Tensor, ...] | None,
    cell: Callable[[Weights], Cell],
) -> tuple[Tensor, list[Tensor]]:
    """All layers and directions: the output, and the last states, each [layers * directions, rows, width]."""
    x = _checked(module, x)
    start = _start(module, x, hx)
    sequence = x.transpose(0, 1) if module.batch_first else x
    last: list[list[Tensor]] = []
    for layer in range(module.num_layers):
        if layer and module.dropout and module.training:
            sequence = F.dropout(sequence, module.dropout, training=True)
        outputs = []
        for reverse in (False, True)[: 1 + module.bidirectional]:
            weights = Weights.of(module, layer, reverse)
            begin = [states[len(last)] for states in start]
            out, *others = _direction(_Pass(tape, weights, cell(weights)), sequence, tape.anchor, *begin)
            outputs.append(out)
            last.append([out[0 if reverse else -1], *others])
        sequence = torch.cat(outputs, dim=2) if module.bidirectional else outputs[0]
    out = sequence.transpose(0, 1).contiguous() if module.batch_first else sequence
    return out, [torch.stack(states) for states in zip(*last, strict=True)]


def _checked(module: nn.RNNBase, x: Tensor | PackedSequence) -> Tensor:
    name = type(module).__name__
    if isinstance(x, PackedSequence):
        raise UnsupportedLayer(f"{name} is given a PackedSequence. Give padded sequences, or use backend='vmap'.")
    if x.dim() != 3:
        raise UnsupportedLayer(
            f"{name} is given {x.dim()} dimensions, not 3. Keep the one for the examples, also of one."
        )
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(module.all_weights[0][0].dtype)  # the loops run in the precision of the weights
    module.check_input(x, None)
    return x


def _start(module: nn.RNNBase, x: Tensor, hx: Tensor | tuple[Tensor, ...] | None) -> list[Tensor]:
    """Initial states, [layers * directions, rows, width] each."""
    if hx is not None:
        module.check_forward_args(x, hx, None)  # type: ignore[arg-type] # LSTM: two tensors
        return [states.to(x.dtype) for states in ((hx,) if isinstance(hx, Tensor) else hx)]
    shapes = [module.get_expected_hidden_size(x, None)]
    if isinstance(module, nn.LSTM):
        shapes.append(module.get_expected_cell_size(x, None))
    return [x.new_zeros(shape) for shape in shapes]


@final
class _Pass:
    """One use of one layer in one direction: forward, then at most once back."""

    def __init__(self, tape: Tape, weights: Weights, cell: Cell) -> None:
        self._tape, self._weights, self._cell = tape, weights, cell

    def forward(self, x: Tensor, start: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x = x.contiguous()
        with torch.autocast(x.device.type, enabled=False):
            projected = F.linear(x, self._weights.ih.detach(), self._cell.bias())
            out, *last = self._cell.forward(projected, *start)
        out = torch.ops.aten._unsafe_view(out, out.shape)  # a result of its own, with a version of its own
        self._kept = [Unchanged(x), Unchanged(out)]
        return (out, *last)

    def backward(self, gradients: Sequence[Tensor | None], needs_input: bool) -> tuple[Tensor | None, ...]:
        x, _ = (kept.get() for kept in self._kept)
        with torch.autocast(x.device.type, enabled=False):
            found = self._cell.backward(*gradients)
            self._record(found, x)
            dx = found.inputs @ self._weights.ih.detach() if needs_input else None
        return (dx, None, *found.start)

    def _record(self, found: Found, x: Tensor) -> None:
        add, w = self._tape.add, self._weights
        inputs = SharedLeft(found.inputs.transpose(0, 1))
        states = inputs if found.states is found.inputs else SharedLeft(found.states.transpose(0, 1))
        before = found.before.transpose(0, 1)
        add(w.ih, lambda: Outer(inputs, x.transpose(0, 1), w.ih.shape))
        add(w.hh, lambda: Outer(states, before, w.hh.shape))
        add(w.b_ih, lambda: Materialised(found.inputs.sum(0)))
        add(w.b_hh, lambda: Materialised(found.states.sum(0)))
        if found.projection is not None:
            left, right = (t.transpose(0, 1) for t in found.projection)
            add(w.hr, lambda: Outer(left, right, (left.shape[2], right.shape[2])))


class _Direction(torch.autograd.Function):
    """(pass, sequence, anchor, *initial states) -> (states after each time, *further last states)."""

    @staticmethod
    def forward(ctx: Any, one: _Pass, x: Tensor, anchor: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.one = one
        return one.forward(x, start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.one is None:
            raise UnsupportedLayer("The loss differentiates a recurrent layer more than once. Use backend='vmap'.")
        one, ctx.one = ctx.one, None  # frees what the loops kept
        return (None, *one.backward(gradients, ctx.needs_input_grad[1]))


def _direction(one: _Pass, x: Tensor, anchor: Tensor, *start: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _Direction.apply(one, x, anchor, *start)  # type: ignore[no-untyped-call]
    return found


def by_gate(t: Tensor, gates: int) -> Tensor:
    """[T, rows, gates, width] of what has the gates side by side."""
    return t.view(*t.shape[:2], gates, t.shape[2] // gates)
