"""Training on the rows of one private user."""

from __future__ import annotations

from torch import nn

from halfsilver._core.local_training import LocalTraining, descend
from halfsilver._core.model_state import untouched
from halfsilver._core.tensors import Batch, LossFn, Tensors, batch_rows, take_rows, trainable


def local_update(model: nn.Module, loss_fn: LossFn, rows: Batch, local: LocalTraining) -> Tensors:
    """Train the model on one user's rows and return the change: theta - theta_local, which the server subtracts.

    Each step is theta <- theta - lr * (mean gradient over one batch), over the rows in the order in which they come.
    With one row, one epoch and ``lr=1`` the update is the gradient.

    Guarantee: the model is left as it was, to the bit. Nothing that the user's rows make the model write survives:
    neither weights, frozen ones included, nor buffers, modes or attributes. Otherwise a running mean, for instance,
    would carry one user's rows to all users after it.

    Args:
        model: The model. Its trainable parameters are trained.
        loss_fn: A function of model and batch that returns one number per example.
        rows: The user's rows: a tensor, or a tuple or dict of tensors, with one example per entry of dimension 0.
        local: Learning rate, batch size and number of epochs.

    Returns:
        One tensor per trainable parameter. It is private and not clipped.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> loss_fn = lambda model, batch: 3 * model(batch).squeeze(1)
        >>> local_update(model, loss_fn, torch.ones(1, 1), LocalTraining(lr=1.0))[0].round().item()
        3.0

    References:
        - McMahan, Moore, Ramage, Hampson and Aguera y Arcas 2017, Communication-Efficient Learning of Deep Networks
          from Decentralized Data, arXiv:1602.05629, ClientUpdate of Algorithm 1.
    """
    with untouched(model):
        return descended(model, loss_fn, rows, local)


def descended(model: nn.Module, loss_fn: LossFn, rows: Batch, local: LocalTraining) -> Tensors:
    """As `local_update`, but the model stays where training ended, for a caller that restores it."""
    losses = (loss_fn(model, take_rows(rows, batch)).mean() for batch in local.slices(batch_rows(rows)))
    return descend(trainable(model), losses, local.lr)
