"""Layers that normalise within one example: LayerNorm, RMSNorm, GroupNorm.

With out = weight * z + bias and z the normalised input, the per-example gradients are sum g * z and sum g by the chain
rule, over all positions that share a weight.

References:
    - Ba, Kiros and Hinton 2016, Layer Normalization, arXiv:1607.06450.
    - Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467.
    - Wu and He 2018, Group Normalization, arXiv:1803.08494.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfsilver.privacy.gradients.base import at_least_float32
from halfsilver.privacy.gradients.book.example_gradients import Materialised
from halfsilver.privacy.gradients.book.tape import Tape, Unchanged, detached

OneNumberEach = Callable[[Tensor], Tensor]  # of an activation: [rows, *shape of the weight]


def layer_norm(module: nn.LayerNorm, tape: Tape, input: Tensor) -> Tensor:
    out = F.layer_norm(input, module.normalized_shape, detached(module.weight), detached(module.bias), module.eps)

    def normalise(x: Tensor) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)

    return _tap(module, tape, input, out, normalise, _over_leading(module.normalized_shape))


def rms_norm(module: nn.RMSNorm, tape: Tape, x: Tensor) -> Tensor:
    out = F.rms_norm(x, list(module.normalized_shape), detached(module.weight), module.eps)

    def normalise(x: Tensor) -> Tensor:
        return F.rms_norm(x, list(module.normalized_shape), None, module.eps)

    return _tap(module, tape, x, out, normalise, _over_leading(module.normalized_shape))


def group_norm(module: nn.GroupNorm, tape: Tape, input: Tensor) -> Tensor:
    out = F.group_norm(input, module.num_groups, detached(module.weight), detached(module.bias), module.eps)

    def normalise(x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, None, None, module.eps)

    def over_positions(t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:2], -1).sum(2)

    return _tap(module, tape, input, out, normalise, over_positions)


def _tap(
    module: nn.LayerNorm | nn.RMSNorm | nn.GroupNorm,
    tape: Tape,
    x: Tensor,
    out: Tensor,
    normalise: OneNumberEach,
    summed: OneNumberEach,
) -> Tensor:
    """out = weight * normalised + bias, so the gradients are sums of g * normalised and of g.

    The normalised input is computed again and not kept, because it would take the memory of one more activation.
    """
    kept, weight, bias = Unchanged(x), module.weight, getattr(module, "bias", None)

    def record(g: Tensor) -> None:
        g = at_least_float32(g)
        with torch.no_grad():
            tape.add(weight, lambda: Materialised(summed(g * normalise(at_least_float32(kept.get())))))
            tape.add(bias, lambda: Materialised(summed(g)))

    return tape.tap(out, record)


def _over_leading(shape: tuple[int, ...]) -> OneNumberEach:
    return lambda t: t.reshape(len(t), -1, *shape).sum(1)
