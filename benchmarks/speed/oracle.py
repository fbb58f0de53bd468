"""What every contender must compute: the sum of clipped gradients, one example at a time, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.speed.models import Workload

Named = dict[str, Tensor]

# Of the norm of the sum. Rivals clip to C / (norm + 1e-6) in float32, ours to C / (1 + margin) with a margin of 1e-3.
TOLERANCE = 2e-3
LEAST_CLIPPED = 0.25


@dataclass(frozen=True)
class Expected:
    """Clipped sums over all rows and over the first half of them, and how many rows the clipping changed."""

    total: Named
    first_half: Named
    norms: Tensor
    clip: float

    @property
    def clipped(self) -> float:
        return float((self.norms > self.clip).double().mean())


def expected(workload: Workload) -> Expected:
    """By ordinary autograd on a float64 copy: shares no code with any contender."""
    model = copy.deepcopy(workload.model()).double()
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    half: Named = {}
    norms = []
    for row, gradient in enumerate(_gradients(workload, model)):
        if row == workload.rows // 2:
            half = {name: t.clone() for name, t in total.items()}
        norm = torch.stack([g.norm() for g in gradient]).norm()
        factor = min(1.0, workload.clip / float(norm))
        for t, g in zip(total.values(), gradient, strict=True):
            t.add_(g, alpha=factor)
        norms.append(norm)
    return Expected(total, half, torch.stack(norms), workload.clip)


def _gradients(workload: Workload, model: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    parameters = list(model.parameters())
    for i in range(workload.rows):
        x, y = (t[i : i + 1] for t in workload.batch)
        batch = tuple(t.double() if t.dtype.is_floating_point else t for t in (x, y))
        yield torch.autograd.grad(workload.loss_fn(model, batch).sum(), parameters)


def relative_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Distance of two clipped sums over the norm of the right one; infinite where a parameter is missing or NaN."""
    if found.keys() != wanted.keys():
        return float("inf")
    distance = torch.stack([(found[name].double() - t).norm() for name, t in wanted.items()]).norm()
    error = float(distance / torch.stack([t.norm() for t in wanted.values()]).norm())
    return error if error == error else float("inf")
