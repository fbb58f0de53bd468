"""Training on the rows of one private user."""

from __future__ import annotations

from torch import nn

from halfsilver._core.local_training import LocalTraining, descend
from halfsilver._core.model_state import untouched
from halfsilver._core.tensors import Batch, LossFn, Tensors, batch_rows, take_rows, trainable


def local_update(model: nn.Module, loss_fn: LossFn, rows: Batch, local: LocalTraining) -> Tensors:
    """theta - theta_local: what a user asks the server to subtract. The model is left as it was, to the bit.

    A step of SGD takes the mean of the losses of `batch_size` rows, in the order in which they come. With one row, one
    epoch and ``lr=1`` the update is the gradient.

    Guarantee: nothing that the user's rows make the model write survives: neither weights, frozen ones included, nor
    buffers, modes or attributes. A running mean, say, would carry one user's rows to all that follow.
    """
    with untouched(model):
        return descended(model, loss_fn, rows, local)


def descended(model: nn.Module, loss_fn: LossFn, rows: Batch, local: LocalTraining) -> Tensors:
    """The same, with the model left where training ended: for whoever puts it back."""
    losses = (loss_fn(model, take_rows(rows, batch)).mean() for batch in local.slices(batch_rows(rows)))
    return descend(trainable(model), losses, local.lr)
