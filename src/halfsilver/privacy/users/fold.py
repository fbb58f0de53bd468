"""The running sum of a round: each contribution is checked, clipped, added and then forgotten."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import final

import torch
from torch import Tensor

from halfsilver.privacy.gradients.base import Adding, ClippedSum, measuring, row_norms
from halfsilver.privacy.users.engine import Contribution

# What rounding in sums of float32 may come to, in clip norms; contributions are clipped that much shorter.
_SLACK = 4e-4
# To add to float64 costs three times as much as to float32, so that a few updates are added up in float32 first.
_MOST_TOGETHER = 16


@final
class Fold:
    """Adds up contributions in the memory of one model.

    Guarantee: a contribution of one user changes the total by at most `max_grad_norm`, whatever it holds, and one of k
    users by at most k times that. All together stand for at most `users` users: the fold counts them. A contribution
    with wrong shapes or dtypes, or one that is not finite, changes nothing. Nor does one whose number of users is
    anything but a whole number from 1 to the number of users that are left.

    The guarantee includes rounding, also that of other contributions, which can change if one comes between them: t
    updates of norm C, added one after the other in float32, are off by at most t^2 u C. So only so many of the first
    `expected` single users are added in float32 at once that all of it stays within the margin. Later users and sums
    are added in float64. `Adding` in ``privacy/gradients/base.py`` derives the margin.

    Args:
        params: The trainable parameters, for shapes and dtypes.
        max_grad_norm: The clip norm C, above 0.
        expected: A public bound on how many single users are added in float32. Default 0, which adds all in float64.
        users: How many users were drawn. Default None: any number of contributions, each of one user.

    References:
        - Higham 2002, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM, chapter 4, for the error of
          sums.
    """

    def __init__(
        self, params: Sequence[Tensor], max_grad_norm: float, *, expected: float = 0.0, users: int | None = None
    ) -> None:
        self._kinds = [(p.shape, p.dtype) for p in params]
        self._total = ClippedSum.zeros(params, max_grad_norm)
        self._latest = [torch.zeros_like(p, dtype=_working(p.dtype), requires_grad=False) for p in params]
        self._pending, self._left = 0, math.ceil(expected)
        self._most: float = 1 if users is None else users  # of one contribution
        self._unheard: float = math.inf if users is None else users
        rounding = max(torch.finfo(t.dtype).eps for t in self._latest)
        self._together = min(_MOST_TOGETHER, int(_SLACK / (rounding * max(1, self._left))))
        self._in_float64 = Adding(rows=max(1, self._left)).in_float64

    @torch.no_grad()
    def add(self, contribution: Contribution) -> None:
        tensors, users = contribution.tensors, contribution.users
        whole = isinstance(users, Integral) and not isinstance(users, bool)
        if not whole or not 1 <= users <= min(self._most, self._unheard):
            return
        self._unheard -= int(users)
        if not self._fits(tensors):
            return
        size = float(row_norms([t[None] for t in tensors]))
        if not 0 < size < math.inf:  # nor what cannot be measured
            return
        exact = all(t.dtype == torch.float64 for t in tensors)
        tau = self._in_float64 + (measuring(torch.float64) if exact else measuring(torch.float32) + _SLACK)
        factor = min(1.0, int(users) * self._total.sensitivity / (1 + tau) / size)
        together = self._left > 0 and self._together > 1 and not exact and users == 1
        for total, t in zip(self._latest if together else self._total.tensors, tensors, strict=True):
            total.add_(t.to(total.device), alpha=factor)
        if together:
            self._left, self._pending = self._left - 1, self._pending + 1
            if self._pending >= self._together:
                self._settle()

    def _settle(self) -> None:
        for total, latest in zip(self._total.tensors, self._latest, strict=True):
            total.add_(latest)
            latest.zero_()
        self._pending = 0

    def _fits(self, tensors: Sequence[Tensor]) -> bool:
        """Sums of clipped updates come in float64."""
        if not isinstance(tensors, Sequence) or len(tensors) != len(self._kinds):
            return False
        return all(
            isinstance(t, Tensor)
            and t.layout == torch.strided
            and t.shape == shape
            and t.dtype in (dtype, torch.float64)
            for t, (shape, dtype) in zip(tensors, self._kinds, strict=True)
        )

    @property
    def total(self) -> ClippedSum:
        if self._pending:
            self._settle()
        return self._total


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
