"""Local training is tried on public rows first, because a mistake must not end as a run that releases only noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from halfsilver._core.local_training import LocalTraining
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, batch_rows, take_rows, trainable
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.users.local import local_update

_LOCAL = LocalTraining(lr=1e-2, batch_size=1, max_examples=1)


def rehearse(model: nn.Module, loss_fn: LossFn, public_rows: Batch) -> None:
    """Raise what training raises, and refuse a model that carries something from one user to the next.

    What the model carries would reach the released weights without noise. Examples are a running mean that a layer
    keeps to itself, or the state of a recurrent layer.
    """

    def update(row: int) -> Sequence[Tensor]:
        with own_randomness(0, [trainable(model)[0].device]):
            return local_update(model, loss_fn, take_rows(public_rows, slice(row, row + 1)), _LOCAL)

    first = update(0)
    update(batch_rows(public_rows) - 1)
    if not all(torch.equal(a, b) for a, b in zip(first, update(0), strict=True)):
        raise UnsupportedLayer(
            "Training on one user's rows changes what another user's training does: the model keeps something besides "
            "its parameters and buffers. Take that layer out, or clear its state in forward."
        )
