"""Linear layers, with or without a time axis, and embeddings.

References:
    - Goodfellow 2015, Efficient Per-Example Gradient Computations, arXiv:1510.01799, for layers without a time axis:
      the norm is |input| |output gradient|.
    - Li, Tramer, Liang and Hashimoto 2022, Large Language Models Can Be Strong Differentially Private Learners,
      arXiv:2110.05679, for a time axis and for embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.base import at_least_float32
from halfsilver.privacy.gradients.book.example_gradients import Materialised
from halfsilver.privacy.gradients.book.outer import OneHot, Outer
from halfsilver.privacy.gradients.book.tape import Tape, Unchanged, detached


def linear(module: nn.Linear, tape: Tape, input: Tensor) -> Tensor:
    kept, weight, bias = Unchanged(input), module.weight, module.bias

    def record(g: Tensor) -> None:
        g = at_least_float32(_with_time(g))
        tape.add(weight, lambda: Outer(g, _with_time(kept.get()), weight.shape))
        tape.add(bias, lambda: Materialised(g.sum(1)))

    return tape.tap(F.linear(input, weight.detach(), detached(bias)), record)


def embedding(module: nn.Embedding, tape: Tape, input: Tensor) -> Tensor:
    if module.scale_grad_by_freq or module.max_norm is not None:
        raise UnsupportedLayer(
            "Embedding(scale_grad_by_freq=True) mixes the examples of a batch, and Embedding(max_norm=...) changes "
            "weights as it reads them. Drop the option."
        )
    if input.dim() > 1 and len(input) == 1 < tape.rows:  # positions, given once for all examples
        input = input.expand(tape.rows, *input.shape[1:])
    kept, weight = Unchanged(input), module.weight

    def record(g: Tensor) -> None:
        index = kept.get().flatten(1) if kept.get().dim() > 1 else kept.get()[:, None]
        right = g.reshape(*index.shape, g.shape[-1])
        if module.padding_idx is not None:
            right = torch.where((index == module.padding_idx)[:, :, None], 0.0, right)
        tape.add(weight, lambda: Outer(OneHot(index, len(weight)), right, weight.shape))

    return tape.tap(F.embedding(input, weight.detach(), module.padding_idx), record)


def _with_time(t: Tensor) -> Tensor:
    """[rows, T, width], whatever number of dimensions lies between the first and the last."""
    return t.reshape(len(t), -1, t.shape[-1])
