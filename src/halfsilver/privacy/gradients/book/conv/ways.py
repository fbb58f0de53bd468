"""What a convolution's gradients are made of, and the simplest way to multiply them out per example.

References:
    - Rochette, Manoel and Tramel 2019, Efficient Per-Example Gradient Computations in Convolutional Neural Networks,
      arXiv:1912.06015, for `grouped`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from halfsilver.privacy.gradients.base import Adding, squared_lengths, weighted_rows
from halfsilver.privacy.gradients.book.example_gradients import ExampleGradients, SquaredNorms

# Numbers of one unfolded input: small enough to stay in a core's cache, and for malloc to use the memory again.
_CACHED = 2**19

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """How a convolution moves over its input: kernel size, stride, padding and dilation, each (height, width)."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)


@dataclass(frozen=True)
class Products:
    """Input x [rows, in, height, width] and output gradient g [rows, out, height', width'] of a convolution.

    One row is one group of one example: a convolution with G groups is G independent ones.
    """

    x: Tensor
    g: Tensor
    geometry: Geometry

    @classmethod
    def of(cls, module: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor, padding: Sequence[int]) -> Products:
        if isinstance(module, nn.Conv1d):  # an image of one line
            x, g = x.unsqueeze(2), g.unsqueeze(2)
        geometry = Geometry(
            kernel=_pair(module.kernel_size, 1),
            stride=_pair(module.stride, 1),
            padding=_pair(padding, 0),
            dilation=_pair(module.dilation, 1),
        )
        return cls(_split(x, module.groups), _split(g, module.groups), geometry)

    def part(self, rows: slice) -> Products:
        return Products(self.x[rows], self.g[rows], self.geometry)

    def to(self, dtype: torch.dtype) -> Products:
        return Products(self.x.to(dtype), self.g.to(dtype), self.geometry)

    def blocks(self, numbers_a_row: int) -> Iterator[slice]:
        """Rows in blocks that a cache can hold. Their size follows from shapes alone."""
        blocks = math.ceil(len(self.x) * numbers_a_row / _CACHED)
        return row_blocks(len(self.x), max(1, math.ceil(len(self.x) / max(1, blocks))))


def row_blocks(rows: int, size: int) -> Iterator[slice]:
    """Slices that cover all rows: at least one, which is empty if there are none."""
    return (slice(i, min(i + size, rows)) for i in range(0, max(rows, 1), size))


def _pair(size: Sequence[int], of_one_line: int) -> Pair:
    return (size[0], size[1]) if len(size) == 2 else (of_one_line, size[0])


def _split(t: Tensor, groups: int) -> Tensor:
    return t if groups == 1 else t.reshape(len(t) * groups, t.shape[1] // groups, *t.shape[2:])


def grouped(products: Products) -> Tensor:
    """[rows, out, in, *kernel]: the library's own kernel for grouped convolutions, one group per row."""
    x, g = products.x, products.g
    shape = (len(x) * g.shape[1], x.shape[1], *products.geometry.kernel)
    out = weight_gradient(x.reshape(1, -1, *x.shape[2:]), g.reshape(1, -1, *g.shape[2:]), shape, products.geometry)
    return out.reshape(len(x), -1, *shape[1:])


def weight_gradient(x: Tensor, g: Tensor, shape: Sequence[int], geometry: Geometry) -> Tensor:
    """The gradient of a weight of this shape, summed over the rows; groups follow from the shapes."""
    weight = x.new_empty(()).expand(shape)  # its numbers are not read
    stride, padding, dilation = geometry.stride, geometry.padding, geometry.dilation
    mask, groups = [False, True, False], x.shape[1] // shape[1]
    out: Tensor = torch.ops.aten.convolution_backward(
        g, x, weight, None, stride, padding, dilation, False, [0, 0], groups, mask
    )[1]
    return out


@final
class Reordered:
    """Gradients as products leave them, [parts, rows, numbers]: norm and sum read the same numbers.

    Putting them into the parameter's order would cost another copy; only the sum, which is small, is put into it.
    """

    def __init__(self, parts: Tensor, restore: Callable[[Tensor], Tensor]) -> None:
        self._parts, self._restore = parts, restore  # restore: [parts, n, numbers] -> [n, *shape]
        self.parts = [*parts]

    @property
    def rows(self) -> int:
        return self._parts.shape[1]

    def plus(self, other: ExampleGradients) -> Reordered | None:
        """In place: products are nobody else's, and a new tensor of this size costs as much as the addition."""
        if not isinstance(other, Reordered) or other._parts.shape != self._parts.shape:
            return None
        self._parts.add_(other._parts)
        return self

    def norms(self) -> SquaredNorms:
        squared = squared_lengths(self._parts.flatten(0, 1)).view(-1, self.rows).sum(0)
        return SquaredNorms(squared, torch.zeros_like(squared))

    def weighted_sum(self, weights: Tensor, adding: Adding) -> Tensor:
        sums = [weighted_rows(weights, part[: len(weights)], adding) for part in self._parts]
        return self._restore(torch.stack(sums)[:, None])[0]

    def gradients(self, chosen: slice, dtype: torch.dtype) -> Tensor:
        return self._restore(self._parts[:, chosen].to(dtype))
