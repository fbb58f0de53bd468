"""Averages of the iterates: free post-processing, and what Algorithm 1 returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from halfsilver._core.sharded import local
from halfsilver._core.tensors import Tensors
from halfsilver.errors import require

AverageKind = Literal["uniform"] | float | None


@dataclass
class Average:
    """Mean of the iterates theta_1 .. theta_t: equally weighted ("uniform"), or exponential with the given decay."""

    kind: AverageKind
    count: int = 0
    tensors: Tensors = field(default_factory=list)

    def __post_init__(self) -> None:
        decay = self.kind
        valid = decay in (None, "uniform") or (isinstance(decay, float) and 0 < decay < 1)
        require(valid, "average", decay, "to be None, 'uniform' or a decay in (0, 1)")

    @torch.no_grad()
    def update(self, params: Sequence[Tensor]) -> None:
        if self.kind is None:
            return
        self.count += 1
        values = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in params]
        if not self.tensors:
            self.tensors = [v.clone() for v in values]
        else:  # in float32 or wider: a small weight vanishes in half precision
            torch._foreach_lerp_([local(t) for t in self.tensors], [local(v) for v in values], self._weight())

    def _weight(self) -> float:
        """Weight of the newest iterate. An exponential average starts as a plain one, so that it forgets its start."""
        if isinstance(self.kind, float):
            return max(1 - self.kind, 1 / self.count)
        return 1 / self.count

    @contextmanager
    def in_place_of(self, params: Sequence[Tensor]) -> Iterator[None]:
        """The model with averaged weights, for evaluation."""
        if not self.tensors:
            yield
            return
        own = [p.detach().clone() for p in params]
        copy_to(params, self.tensors)
        try:
            yield
        finally:
            copy_to(params, own)


@torch.no_grad()
def copy_to(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_([local(p) for p in params], [local(v) for v in values])
