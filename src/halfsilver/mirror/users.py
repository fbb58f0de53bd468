"""Public users: a pseudo-gradient for the mirror map, computed as the private users compute theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from halfsilver._core.averaging import copy_to
from halfsilver._core.local_training import LocalTraining, descend
from halfsilver._core.model_state import untouched
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, Tensors, batch_rows, map_batch, norm, scale, take_rows, trainable
from halfsilver.errors import require
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.rows import derive_seed


@final
class PublicUsers(PublicLoss):
    """The public loss of some public users, whose gradient is the mean update that their local training would make.

    In step t, `cohort` users are drawn and each trains on its own rows in a random order. The gradient is (1 / cohort)
    sum_k clip(theta - theta_k, max_norm), with theta_k the parameters after user k's training. Private users do the
    same, so both directions are of one kind and size. The value and all derivatives other than `gradient` are those of
    the loss over all rows.

    Args:
        model: The model that is trained.
        loss_fn: A function of model and batch that returns one number per example.
        users: The rows of each public user: one batch per user, at least one.
        local: How each user trains. Use that of the private users.
        cohort: How many users are drawn per step, at least 1. Default None, which takes all. Lower it to save time.
        max_norm: The clip norm of one user's update, above 0. Default None, which does not clip. Use the plan's
            ``max_grad_norm``.
        seed: Seed of the draws. Default 0. Public randomness needs no entropy of the system.

    Raises:
        ConfigError: If there are no users, or if `cohort` is below 1.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> loss_fn = lambda model, batch: 3 * model(batch).squeeze(1)
        >>> public = PublicUsers(model, loss_fn, [torch.ones(4, 1), torch.ones(2, 1)], LocalTraining(lr=1.0))
        >>> public.gradient(step=0)[0].round().item()
        3.0

    References:
        - Amid et al. 2022, Public Data-Assisted Mirror Descent for Private Model Training, ICML, arXiv:2112.00193.
        - McMahan, Moore, Ramage, Hampson and Aguera y Arcas 2017, Communication-Efficient Learning of Deep Networks
          from Decentralized Data, arXiv:1602.05629, for local training.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        users: Sequence[Batch],
        local: LocalTraining,
        *,
        cohort: int | None = None,
        max_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        require(len(users) > 0, "number of public users", 0, "at least 1")
        require(cohort is None or cohort >= 1, "cohort", cohort, "at least 1 or None")
        super().__init__(model, loss_fn, pooled(users), seed=seed)
        self._users, self._local, self._max_norm = users, local, max_norm
        self._cohort = min(cohort or len(users), len(users))

    @property
    def sources(self) -> list[Any]:
        return [*super().sources, *self._users]

    def gradient(self, params: Tensors | None = None, *, step: int | None = None) -> Tensors:
        """The mean update of the public users of one step.

        Args:
            params: Where local training starts. Default None, which means at the model's own parameters.
            step: The step whose users and orders are drawn, from 0. Default None, which draws with the seed alone.

        Returns:
            One tensor per trainable parameter.
        """
        live = trainable(self.model)
        with own_randomness(derive_seed(self.seed, step), [live[0].device]), untouched(self.model):
            copy_to(live, params or live)
            drawn = torch.randperm(len(self._users))[: self._cohort].tolist()
            total = [torch.zeros_like(p) for p in live]
            for update in (self._update(self._users[user]) for user in drawn):
                torch._foreach_add_(total, update, alpha=1 / self._cohort)
        return total

    def _update(self, rows: Batch) -> Tensors:
        params, order = trainable(self.model), torch.randperm(batch_rows(rows))
        shuffled = map_batch(lambda t: t[order].to(params[0].device), rows)
        with untouched(self.model):
            batches = (take_rows(shuffled, batch) for batch in self._local.slices(len(order)))
            losses = (self.loss_fn(self.model, batch).mean() for batch in batches)
            update = descend(params, losses, self._local.lr)
        size = norm(update)
        return update if self._max_norm is None or size <= self._max_norm else scale(update, self._max_norm / size)


def pooled(users: Sequence[Batch]) -> Batch:
    """All rows of all users, one user after the other."""
    return pytree.tree_map(lambda *columns: torch.cat(columns), users[0], *users[1:])
