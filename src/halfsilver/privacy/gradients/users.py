"""User-level privacy: a person's gradients are summed first and clipped as one.

References:
    - McMahan, Ramage, Talwar and Zhang 2018, Learning Differentially Private Recurrent Language Models,
      arXiv:1710.06963.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, LossFn, trainable
from halfsilver.privacy.gradients.base import Adding, ClippedSum, clip_and_sum


def clipped_user_gradient(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Batch],
    max_grad_norm: float,
    adding: Adding | None = None,
) -> ClippedSum:
    """The clipped sum of the gradients of all records of one user, who then has as much influence as one example."""
    params = trainable(model)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    with torch.enable_grad():
        for batch in batches:
            _accumulate(total, params, loss_fn(model, batch).sum())
    return clip_and_sum([t[None] for t in total], max_grad_norm, adding=adding)


def _accumulate(total: Sequence[Tensor], params: Sequence[Tensor], loss: Tensor) -> None:
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    for t, g in zip(total, grads, strict=True):
        if g is not None:
            t.add_(g.double())
