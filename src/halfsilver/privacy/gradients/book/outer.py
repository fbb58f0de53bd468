"""Gradients that are sums over time of outer products: G_i = sum_t l_it r_it^T.

Linear layers, embeddings and the matrices of recurrent layers have this form. Norms come from the T x T Gram matrices
of the factors, |G_i|^2 = sum_st <l_s, l_t> <r_s, r_t>, and the weighted sum is one matrix product. Both are in float64,
because the terms of a row may be far longer than their sum, and float32 would round by their length.

References:
    - Li, Tramer, Liang and Hashimoto 2022, Large Language Models Can Be Strong Differentially Private Learners,
      arXiv:2110.05679, for the norm by Gram matrices.
    - Bu, Wang, Zha and Karypis 2023, Differentially Private Optimization on Large Model at Small Cost,
      arXiv:2210.00038, for the weighted sum from the same factors.
    - Bu, Mao and Xu 2022, Scalable and Efficient Training of Large Convolutional Neural Networks with Differential
      Privacy, arXiv:2205.10683, for the choice per layer between Gram matrices and materialised gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from halfsilver.privacy.gradients.base import Adding, at_least_float32, lengths_from, measurable, squared_lengths
from halfsilver.privacy.gradients.book.example_gradients import (
    Addable,
    ExampleGradients,
    Materialised,
    SquaredNorms,
    one_by_one,
)
from halfsilver.privacy.gradients.book.tune import fastest

# Width of factors, and number of terms, that are converted to float64 at once.
_WIDTH, _TERMS = 1024, 512
# Numbers of one Gram matrix, or of materialised gradients, that may exist at once: 256 MB in float32.
LARGEST = 2**26


@final
class OneHot:
    """Left factors that pick one row of the parameter each: tokens of an embedding."""

    def __init__(self, index: Tensor, size: int) -> None:
        self.index, self.size = index, size


@final
class SharedLeft:
    """Left factors of several parameters: their Gram matrix is computed once for all."""

    def __init__(self, values: Tensor) -> None:
        self.values = at_least_float32(values)

    @cached_property
    def gram(self) -> Tensor:
        return _inner_products(self.values, self.values)


Left = Tensor | OneHot


@final
class Outer:
    """Factors `left` [rows, T, p] and `right` [rows, T, q] of a parameter with p x q entries."""

    def __init__(self, left: Left | SharedLeft, right: Tensor, shape: Sequence[int]) -> None:
        self.shared = left if isinstance(left, SharedLeft) else None
        left = left.values if isinstance(left, SharedLeft) else left
        self.left = left if isinstance(left, OneHot) else at_least_float32(left)
        self.right = at_least_float32(right)
        self.shape = tuple(shape)
        self.parts = [t for t in (self.left, self.right) if isinstance(t, Tensor)]

    @property
    def rows(self) -> int:
        return len(self.right)

    def of_rows(self, chosen: slice) -> Outer:
        left = OneHot(self.left.index[chosen], self.left.size) if isinstance(self.left, OneHot) else self.left[chosen]
        return Outer(left, self.right[chosen], self.shape)

    def plus(self, other: ExampleGradients) -> Outer | None:
        """The terms of both, if they are alike and no more numbers than the gradients themselves."""
        if not isinstance(other, Outer) or isinstance(self.left, OneHot) != isinstance(other.left, OneHot):
            return None
        lefts = [part.left.index if isinstance(part.left, OneHot) else part.left for part in (self, other)]
        terms = self.right.shape[1] + other.right.shape[1]
        if terms * (self.right.shape[2] + math.prod(lefts[0].shape[2:])) > math.prod(self.shape):
            return None
        left = torch.cat(lefts, dim=1)
        kind = OneHot(left, self.left.size) if isinstance(self.left, OneHot) else left
        return Outer(kind, torch.cat([self.right, other.right], dim=1), self.shape)

    def norms(self) -> SquaredNorms:
        if self.right.shape[1] == 1:
            return self._single()
        return _norms_of([self])

    def _single(self) -> SquaredNorms:
        """One outer product: its norm is the product of two norms, and nothing cancels.

        One of the two may overflow where the product is ordinary, so each falls out of the range without a jump.
        """
        factors = [self.right] if isinstance(self.left, OneHot) else [self.left, self.right]
        squares = [measurable(lengths_from(squared_lengths(t[:, 0]), t.dtype, t.shape[2])).square() for t in factors]
        squared = squares[0] if len(squares) == 1 else squares[0].mul_(squares[1])
        return SquaredNorms(squared, torch.zeros_like(squared))

    def weighted_sum(self, weights: Tensor, adding: Adding) -> Tensor:
        if adding.exact and self.right.shape[1] > 1:
            return one_by_one(self, weights)
        width = self.left.size if isinstance(self.left, OneHot) else self.left.shape[2]
        total = self.right.new_zeros((width, self.right.shape[2]), dtype=torch.float64)
        size = max(1, _TERMS // max(1, self.right.shape[1]))
        for i in range(0, len(weights), size):
            self._add(total, slice(i, min(i + size, len(weights))), weights[i : i + size])
        return total.reshape(self.shape)

    def _add(self, total: Tensor, chosen: slice, weights: Tensor) -> None:
        left = self.left
        if isinstance(left, OneHot):
            right = weighted(self.right[chosen].double(), weights)
            total.index_add_(0, left.index[chosen].flatten(), right.flatten(0, 1))
            return
        left, right = left[chosen], self.right[chosen]
        if left.shape[2] < right.shape[2]:
            _add_products(total.T, right, left, weights)
        else:
            _add_products(total, left, right, weights)

    def gradients(self, chosen: slice, dtype: torch.dtype) -> Tensor:
        right = self.right[chosen].to(dtype)
        if isinstance(self.left, OneHot):
            index = self.left.index[chosen]
            out = right.new_zeros((len(right), self.left.size, right.shape[2]))
            out.scatter_add_(1, index[:, :, None].expand_as(right), right)
        else:
            out = self.left[chosen].to(dtype).transpose(1, 2) @ right
        return out.reshape(len(right), *self.shape)


def _add_products(total: Tensor, wide: Tensor, narrow: Tensor, weights: Tensor) -> None:
    """Add sum_it weights_i wide_it narrow_it^T in float64.

    The wide factor is converted a part at a time: as a whole it would be so large that its memory goes back to the
    system and is taken anew, page by page, in each step. Weights go to the narrow factor, because that is less work,
    but bad rows are taken out of both.
    """
    right = weighted(narrow.double(), weights).flatten(0, 1)
    for i in range(0, wide.shape[2], _WIDTH):
        left = without_bad(wide[:, :, i : i + _WIDTH].double(), weights)
        total[i : i + _WIDTH].addmm_(left.flatten(0, 1).T, right)


def combine(parts: Sequence[ExampleGradients], dtype: torch.dtype) -> ExampleGradients:
    """All uses of one parameter: one, or several where weights are tied or a module is called more than once."""
    outers = [part for part in parts if isinstance(part, Outer)]
    if len(parts) == 1:
        return _fastest(outers[0]) if outers else parts[0]
    if len(outers) == len(parts):
        return OuterSum(outers)
    return added(parts, dtype)


def added(parts: Sequence[ExampleGradients], dtype: torch.dtype) -> ExampleGradients:
    """The sum of all parts as one. Gradients that are multiplied out and added in `dtype` are rounded, but norm and sum
    read the same numbers.
    """
    total = parts[0]
    for part in parts[1:]:
        alike = total.plus(part) if isinstance(total, Addable) else None
        total = alike or Materialised(total.gradients(slice(None), dtype) + part.gradients(slice(None), dtype))
    return total


def _fastest(factors: Outer) -> ExampleGradients:
    """The factors as they are, or multiplied out where that is measured to be faster."""
    left, right, entries = factors.left, factors.right, math.prod(factors.shape)
    rows, steps, width = right.shape
    ways: dict[str, Callable[[], ExampleGradients]] = {"gram": lambda: factors}
    if steps > 1 and isinstance(left, Tensor) and rows * entries <= LARGEST // 2:
        ways["multiply"] = lambda: Materialised(factors.gradients(slice(None), right.dtype))
        if rows * steps**2 > LARGEST or steps * (left.shape[2] + width) > entries:
            ways = dict(reversed(ways.items()))
    return fastest(("outer", right.dtype, tuple(right.shape), factors.shape), ways)


@final
class OuterSum:
    """Several sums of outer products for one parameter: |sum_k G_k|^2 = sum_kl <G_k, G_l>."""

    def __init__(self, parts: Sequence[Outer]) -> None:
        self._parts = parts
        self.parts = [factor for part in parts for factor in part.parts]

    @property
    def rows(self) -> int:
        return self._parts[0].rows

    def norms(self) -> SquaredNorms:
        return _norms_of(self._parts)

    def weighted_sum(self, weights: Tensor, adding: Adding) -> Tensor:
        if adding.exact:
            return one_by_one(self, weights)
        return torch.stack([part.weighted_sum(weights, adding) for part in self._parts]).sum(0)

    def gradients(self, chosen: slice, dtype: torch.dtype) -> Tensor:
        return torch.stack([part.gradients(chosen, dtype) for part in self._parts]).sum(0)


def _norms_of(parts: Sequence[Outer]) -> SquaredNorms:
    """|sum_k G_k|^2 and a bound on its rounding, over blocks of rows whose Gram matrices take bounded memory."""
    rows, longest = parts[0].rows, max(part.right.shape[1] for part in parts)
    size = max(1, LARGEST // (4 * longest**2))
    if rows <= size:
        return _norms_of_block(parts)
    blocks = [slice(i, i + size) for i in range(0, rows, size)]
    found = [_norms_of_block([part.of_rows(block) for part in parts]) for block in blocks]
    return joined(found)


def _norms_of_block(parts: Sequence[Outer]) -> SquaredNorms:
    """From the Gram matrices of all pairs of parts."""
    squared, lengths, entries = [], [], math.prod(parts[0].shape)
    for i, one in enumerate(parts):
        for other in parts[: i + 1]:
            left, right = _left_gram(one, other), _inner_products(one.right, other.right)
            same = one is other
            squared.append((left * right).sum((1, 2)) * (1 if same else 2))
            if same:
                diagonals = [gram.diagonal(dim1=1, dim2=2) for gram in (left, right)]
                lengths.append([lengths_from(squares, torch.float64, entries) for squares in diagonals])
    lefts, rights = (torch.cat(side, dim=1) for side in zip(*lengths, strict=True))
    return gram_norms(torch.stack(squared).sum(0), lefts, rights, entries)


def joined(found: Sequence[SquaredNorms]) -> SquaredNorms:
    """The norms of several blocks of rows as those of all rows."""
    squared, slack = torch.cat([n.squared for n in found]), torch.cat([n.slack for n in found])
    return SquaredNorms(squared, slack, torch.cat([n.terms for n in found if n.terms is not None]), found[0].steps)


def _left_gram(one: Outer, other: Outer) -> Tensor:
    """<l_s, l'_t> for all s, t: a match of tokens, an entry looked up at a token, or an inner product."""
    if one.shared is not None and one.shared is other.shared:
        return one.shared.gram
    a, b = one.left, other.left
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.index[:, :, None] == b.index[:, None, :]).double()
    if isinstance(a, OneHot):
        return _left_gram(other, one).mT
    if isinstance(b, OneHot):
        return a.gather(2, b.index[:, None, :].expand(-1, a.shape[1], -1)).double()
    return _inner_products(a, b)


def _inner_products(a: Tensor, b: Tensor) -> Tensor:
    """<a_s, b_t> for all s, t, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for i in range(0, a.shape[2], _WIDTH):
        part = a[:, :, i : i + _WIDTH].double()
        other = part if a is b else b[:, :, i : i + _WIDTH].double()
        total = part @ other.mT if i == 0 else total.baddbmm_(part, other.mT)
    return total


def gram_norms(squared: Tensor, left: Tensor, right: Tensor, entries: int) -> SquaredNorms:
    """The squared norms from Gram matrices with their slack, given the lengths of all factors, [rows, terms] each."""
    terms = (left * right).sum(1).square()
    return SquaredNorms(squared.clamp_(min=0.0), gram_slack(left, right, entries), terms, left.shape[1])


def gram_slack(left: Tensor, right: Tensor, entries: int) -> Tensor:
    """An upper bound on what rounding and underflow can take from a Gram norm.

    Inner products of p and of q numbers, their product, and the sum of T^2 of these: each term is off by at most p + q
    + T^2 roundings, and all terms together have the length (sum_t |l_t| |r_t|)^2.

    References:
        - Higham 2002, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM, chapter 3, for inner products.
    """
    steps, kind = left.shape[1], torch.finfo(torch.float64)
    rounding = (entries + steps**2 + 8) * kind.eps * (left * right).sum(1).square()
    lost = left.sum(1).square() + right.sum(1).square() + steps**2
    return rounding + entries * kind.tiny * lost


def weighted(t: Tensor, weights: Tensor) -> Tensor:
    return without_bad(t, weights) * _beside(weights, t).to(t.dtype)


def without_bad(t: Tensor, weights: Tensor) -> Tensor:
    """Rows of weight zero taken out, because 0 * NaN is NaN."""
    return t if weights.all() else torch.where(_beside(weights, t) != 0, t, 0.0)


def _beside(weights: Tensor, t: Tensor) -> Tensor:
    return weights.view(-1, *[1] * (t.dim() - 1))
