"""The running sum of a round: each contribution is checked, clipped and added, and then forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from halfsilver._tensors import norm
from halfsilver.privacy.gradients.base import ClippedSum, clip_factors, margin, measurable
from halfsilver.privacy.users.engine import Contribution


@final
class Fold:
    """Adds up contributions in the memory of one model.

    Guarantee: a contribution of one user changes the total by at most `max_grad_norm`, whatever it holds; one of k
    users by at most k times that. One that has the wrong shapes or dtypes, or that is not finite, changes nothing.
    """

    def __init__(self, params: Sequence[Tensor], max_grad_norm: float) -> None:
        self._kinds = [(p.shape, p.dtype) for p in params]
        self._total = ClippedSum.zeros(params, max_grad_norm)

    @torch.no_grad()
    def add(self, contribution: Contribution) -> None:
        tensors = contribution.tensors
        if not self._fits(tensors):
            return
        limit = contribution.users * self._total.sensitivity
        size = measurable(torch.tensor([norm(tensors)], dtype=torch.float64))
        factor = float(clip_factors(size, limit, margin(torch.float64)))  # norm and sum are both in float64
        if factor > 0:  # not for NaN and infinities: 0 * NaN is NaN
            for total, t in zip(self._total.tensors, tensors, strict=True):
                total.add_(t.to(total.device), alpha=factor)

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        """Sums of clipped updates come in float64."""
        if len(tensors) != len(self._kinds):
            return False
        return all(
            isinstance(t, Tensor) and t.shape == shape and (t.dtype == dtype or t.dtype == total.dtype)
            for t, (shape, dtype), total in zip(tensors, self._kinds, self._total.tensors, strict=True)
        )

    @property
    def total(self) -> ClippedSum:
        return self._total
