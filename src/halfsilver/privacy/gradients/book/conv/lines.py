"""Per-example gradients of a convolution's weight from an input with the channels of a pixel next to each other.

`lines` unfolds the input along its lines only, and takes one product for each line of the kernel. `patches` unfolds it
along both, which takes more memory and one product in all.

References:
    - Chellapilla, Puri and Simard 2006, High Performance Convolutional Neural Networks for Document Processing, IWFHR,
      for convolutions as matrix products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from halfsilver.privacy.gradients.book.conv.ways import Geometry, Products


@dataclass(frozen=True)
class Tap:
    """Lines of the kernel that one product serves: they see the strips from `line` on, of which they use `strips`."""

    line: int
    first: int
    strips: int


def lines(products: Products) -> Tensor:
    """[taps, rows, out, strips * width * in], with the taps of `taps_down`.

    The input is unfolded along its lines, `stride` lines side by side: [rows, lines, width', stride * width * in]. A
    tap that lies further down sees the same numbers from a later line on, which is a view.
    """
    geometry, (outs, height, width) = products.geometry, products.g.shape[1:]
    taps, across = taps_down(geometry), geometry.kernel[1] * products.x.shape[1]
    out = products.g.new_empty((len(taps), len(products.g), outs, taps[0].strips * across))
    needed = height + taps[-1].line
    for block in products.blocks(needed * width * geometry.stride[0] * across):
        part = products.part(block)
        unfolded, g = _along_lines(part, needed), part.g.flatten(2)
        for tap, into in zip(taps, out, strict=True):
            seen = unfolded[:, tap.line * width : (tap.line + height) * width]
            torch.bmm(g, seen[:, :, tap.first * across : (tap.first + tap.strips) * across], out=into[block])
    return out


def taps_down(geometry: Geometry) -> list[Tap]:
    """The kernel's lines from top to bottom, those together that lie within one stride if that comes out even."""
    height, stride, dilation = geometry.kernel[0], geometry.stride[0], geometry.dilation[0]
    if dilation > 1 or height % stride:
        return [Tap(*divmod(i * dilation, stride), 1) for i in range(height)]
    return [Tap(line, 0, stride) for line in range(height // stride)]


# Numbers that lie next to each other from which on copying them as runs is faster than picking them one by one.
_RUN = 32


def patches(products: Products) -> Tensor:
    """[rows, out, height * width * in]: what each output position sees, line by line, in one product per row."""
    positions, inputs = math.prod(products.g.shape[2:]), products.x.shape[1] * products.geometry.taps
    out = products.g.new_empty((len(products.g), products.g.shape[1], inputs))
    places = _places(products)
    for block in products.blocks(positions * inputs):
        part = products.part(block)
        x = _padded(part)
        seen = _windows(part, x) if places is None else x.flatten(1).index_select(1, places)
        torch.bmm(part.g.flatten(2), seen.reshape(len(x), positions, inputs), out=out[block])
    return out


def _padded(products: Products) -> Tensor:
    """[rows, height, width, in]"""
    x, (top, side) = products.x.permute(0, 2, 3, 1), products.geometry.padding
    return (F.pad(x, (0, 0, side, side, top, top)) if top or side else x).contiguous()


def _windows(products: Products, x: Tensor) -> Tensor:
    """[rows, *positions, *kernel, in], as a view of the padded input."""
    geometry, (b, h, w, c) = products.geometry, x.stride()
    (down, right), (below, beside) = geometry.stride, geometry.dilation
    size = (len(x), *products.g.shape[2:], *geometry.kernel, x.shape[3])
    return x.as_strided(size, (b, h * down, w * right, h * below, w * beside, c))


def _places(products: Products) -> Tensor | None:
    """Where the numbers of all windows lie within a padded row; None where copying runs of them is faster."""
    channels, geometry = products.x.shape[1], products.geometry
    run = channels * geometry.kernel[1] if geometry.dilation[1] == 1 else channels
    if run >= _RUN:
        return None
    shape = [1, *(size + 2 * side for size, side in zip(products.x.shape[2:], geometry.padding, strict=True)), channels]
    return _windows(products, torch.arange(math.prod(shape), device=products.x.device).view(shape)).flatten()


def _along_lines(products: Products, needed: int) -> Tensor:
    """[rows, needed * width', stride * width * in]: the channels of a pixel are next to each other in memory."""
    geometry, x = products.geometry, products.x.permute(0, 2, 3, 1)
    (top, side), (down, right) = geometry.padding, geometry.stride
    below = needed * down - top - x.shape[1]
    if top or side or below:
        x = F.pad(x, (0, 0, side, side, top, below))
    x = x.contiguous()
    b, h, w, c = x.stride()
    size = (len(x), needed, products.g.shape[3], down, geometry.kernel[1], x.shape[3])
    seen = x.as_strided(size, (b, h * down, w * right, h, w * geometry.dilation[1], c))
    return seen.reshape(len(x), needed * products.g.shape[3], -1)
