"""The gradient at the input of a convolution with a stride, for which libraries have slow kernels.

The input gradient of a convolution is a transposed convolution. With strides s, output position a s + r of it sees only
the taps r, r + s, r + 2 s, ... of the kernel. So each remainder r is a convolution with stride 1 of the output gradient
with a part of the kernel, and all remainders together are one convolution with more channels.

References:
    - Shi, Caballero, Huszar, Totz, Aitken, Bishop, Rueckert and Wang 2016, Real-Time Single Image and Video
      Super-Resolution Using an Efficient Sub-Pixel Convolutional Neural Network, arXiv:1609.05158, for transposed
      convolutions as convolutions whose channels are put side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfsilver.privacy.gradients.book.tune import fastest


def strided(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """`F.conv1d` or `F.conv2d` without dilation or groups. Its backward pass takes the way that was fastest."""
    out: Tensor = _Strided.apply(x, weight, bias, tuple(stride), tuple(padding))  # type: ignore[no-untyped-call]
    return out


class _Strided(torch.autograd.Function):
    """(input, weight, bias, stride, padding) -> output, of which only the input gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any) -> Tensor:
        ctx.x, ctx.weight, ctx.stride, ctx.padding = (x.shape, x.dtype), weight, stride, padding
        return (F.conv1d if x.dim() == 3 else F.conv2d)(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return (None,) * 5
        shape, dtype = ctx.x
        (g,), weight = gradients, ctx.weight.to(gradients[0].dtype)
        ways: dict[str, Callable[[], Tensor]] = {
            "library": lambda: _by_library(g, weight, shape, ctx.stride, ctx.padding),
            "remainders": lambda: by_remainders(g, weight, shape, ctx.stride, ctx.padding),
        }
        key = ("input gradient", g.dtype, tuple(shape), tuple(weight.shape), ctx.stride, ctx.padding, g.stride(1))
        return (fastest(key, ways).to(dtype), None, None, None, None)


def _by_library(
    g: Tensor, weight: Tensor, shape: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    like, none = g.new_empty(()).expand(shape), [0] * len(stride)  # its numbers are not read
    out: Tensor = torch.ops.aten.convolution_backward(
        g, like, weight, None, stride, padding, [1] * len(stride), False, none, 1, [True, False, False]
    )[0]
    return out


def by_remainders(
    g: Tensor, weight: Tensor, shape: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """The input gradient, of this shape, in the layout of `g`.

    Args:
        g: Gradient at the output, [rows, out, *positions].
        weight: [out, in, *kernel].
        shape: Of the input, [rows, in, *size].
        stride: One per dimension.
        padding: Zeros on each side, one per dimension.
    """
    if g.dim() == 3:  # an image of one line
        flat = by_remainders(
            g.unsqueeze(2), weight.unsqueeze(2), (*shape[:2], 1, shape[2]), (1, *stride), (0, *padding)
        )
        return flat.squeeze(2)
    (down, across), taps = stride, [math.ceil(k / s) for k, s in zip(weight.shape[2:], stride, strict=True)]
    # [down, across, in, out, *taps]: for each remainder its part of the kernel, turned around
    more = [n * s - k for n, s, k in zip(taps, stride, weight.shape[2:], strict=True)]
    parts = F.pad(weight, (0, more[1], 0, more[0])).view(*weight.shape[:2], taps[0], down, taps[1], across)
    parts = parts.flip(2, 4).permute(3, 5, 1, 0, 2, 4).reshape(-1, len(weight), *taps)
    last = g.stride(1) == 1 and g.shape[1] > 1
    if last:
        parts = parts.contiguous(memory_format=torch.channels_last)
    seen = F.conv2d(g, parts, padding=(taps[0] - 1, taps[1] - 1))
    seen = seen.view(len(g), down, across, shape[1], *seen.shape[2:])
    sizes = [max(n * s, p + size) for n, s, p, size in zip(seen.shape[4:], stride, padding, shape[2:], strict=True)]
    layout = torch.channels_last if last else torch.contiguous_format
    whole = torch.empty((*shape[:2], *sizes), dtype=g.dtype, device=g.device, memory_format=layout)
    for i, j in product(range(down), range(across)):
        covered = (slice(i, seen.shape[4] * down, down), slice(j, seen.shape[5] * across, across))
        whole[:, :, *covered] = seen[:, i, j]
    whole[:, :, seen.shape[4] * down :] = 0.0  # positions that no output sees
    whole[:, :, :, seen.shape[5] * across :] = 0.0
    return whole[:, :, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]
