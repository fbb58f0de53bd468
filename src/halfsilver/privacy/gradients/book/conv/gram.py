"""Norms of a convolution's gradients without the gradients: for small images with many channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from halfsilver.privacy.gradients.base import Adding, lengths_from
from halfsilver.privacy.gradients.book.conv.lines import patches
from halfsilver.privacy.gradients.book.conv.ways import Geometry, Products, row_blocks, weight_gradient
from halfsilver.privacy.gradients.book.example_gradients import SquaredNorms, one_by_one
from halfsilver.privacy.gradients.book.outer import gram_norms, joined, weighted, without_bad

# Numbers of Gram matrices that may exist at once, and examples that are converted to float64 at once.
_LARGEST, _EXAMPLES = 2**22, 64


def gram_is_small(products: Products) -> bool:
    """Whether the Gram matrices of one row are no larger than its gradient."""
    entries = products.g.shape[1] * products.x.shape[1] * products.geometry.taps
    return _numbers(products) <= entries


def _numbers(products: Products) -> int:
    return max(math.prod(t.shape[2:]) for t in (products.x, products.g)) ** 2


@final
class Gram:
    """Norms as sum_st <g_s, g_t> <a_s, a_t> over positions s, t, and the sum as one weight gradient of weighted g.

    Here a_s is the patch of the input that output position s sees. <a_s, a_t> is the sum over taps of <x_(s + tap),
    x_(t + tap)>, which are blocks of one Gram matrix, that of the raw input. Both are in float64, because the terms of
    a row may be far longer than their sum.

    References:
        - Bu, Mao and Xu 2022, Scalable and Efficient Training of Large Convolutional Neural Networks with Differential
          Privacy, arXiv:2205.10683, for the norm from Gram matrices of patches.
    """

    def __init__(self, products: Products, examples: int, shape: Sequence[int]) -> None:
        self._products, self._examples, self._shape = products, examples, tuple(shape)
        self.parts = [t.reshape(examples, -1) for t in (products.x, products.g)]

    @property
    def rows(self) -> int:
        return self._examples

    def norms(self) -> SquaredNorms:
        size = max(1, _LARGEST // _numbers(self._products))
        found = joined([_norms(self._products.part(block)) for block in row_blocks(len(self._products.x), size)])
        assert found.terms is not None
        squared, slack, terms = (t.view(self._examples, -1).sum(1) for t in (found.squared, found.slack, found.terms))
        return SquaredNorms(squared, slack, terms, found.steps)

    def weighted_sum(self, weights: Tensor, adding: Adding) -> Tensor:
        """Always over all rows, for the library plans its kernels by shape; rows of padding have weight zero."""
        if adding.exact:
            return one_by_one(self, weights)
        x, g = self._products.x, self._products.g
        x, g = (t.reshape(self._examples, -1, *t.shape[2:]) for t in (x, g))
        weights = torch.cat([weights, weights.new_zeros(self._examples - len(weights))])
        shape = (g.shape[1], self._products.x.shape[1], *self._products.geometry.kernel)
        total = g.new_zeros(shape, dtype=torch.float64)
        for block in row_blocks(self._examples, _EXAMPLES):
            seen, at = without_bad(x[block].double(), weights[block]), weighted(g[block].double(), weights[block])
            total += weight_gradient(seen, at, shape, self._products.geometry)
        return total.reshape(self._shape)

    def gradients(self, chosen: slice, dtype: torch.dtype) -> Tensor:
        groups = len(self._products.x) // self._examples
        start, stop, _ = chosen.indices(self._examples)
        part = self._products.part(slice(start * groups, stop * groups)).to(dtype)
        found = patches(part).view(-1, *self._shape[2:], part.x.shape[1])  # as patches have them: inputs last
        return found.movedim(-1, 1 - len(self._shape)).reshape(stop - start, *self._shape)


def _norms(products: Products) -> SquaredNorms:
    x, g, geometry = products.x.flatten(2).double(), products.g.flatten(2).double(), products.geometry
    (height, width), (down, across) = products.x.shape[2:], products.g.shape[2:]
    left, right = g.mT @ g, (x.mT @ x).view(-1, height, width, height, width)
    right = _over_taps(right, 2, across, geometry)
    right = _over_taps(right, 1, down, geometry).reshape(left.shape)
    entries = g.shape[1] * x.shape[1] * geometry.taps
    diagonals = [gram.diagonal(dim1=1, dim2=2) for gram in (left, right)]
    of_g, of_x = (lengths_from(squares, squares.dtype, entries) for squares in diagonals)
    return gram_norms(right.mul_(left).flatten(1).sum(1), of_g, of_x, entries)


def _over_taps(gram: Tensor, dim: int, size: int, geometry: Geometry) -> Tensor:
    """Entries at the inputs of one kernel tap for two outputs, summed over the taps along `dim` and `dim` + 2."""
    shape = list(gram.shape)
    shape[dim] = shape[dim + 2] = size
    out, length = gram.new_zeros(shape), gram.shape[dim]
    stride, side = geometry.stride[dim - 1], geometry.padding[dim - 1]
    for tap in range(geometry.kernel[dim - 1]):
        offset = tap * geometry.dilation[dim - 1] - side
        first, last = max(0, -(offset // stride)), min(size - 1, (length - 1 - offset) // stride)
        if first <= last:  # else this tap sees padding only
            seen, into = slice(first * stride + offset, last * stride + offset + 1, stride), slice(first, last + 1)
            _both(out, dim, into).add_(_both(gram, dim, seen))
    return out


def _both(t: Tensor, dim: int, chosen: slice) -> Tensor:
    index = [slice(None)] * t.dim()
    index[dim] = index[dim + 2] = chosen
    return t[tuple(index)]
