"""Public users: the mirror of a federated run is a pseudo-gradient, made as the private users make theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
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
    """The public loss of users who train locally, for federated runs.

    `gradient` returns the mean update of some users: each trains on its own rows, and the change of its weights is
    clipped to `max_norm`. Private users do the same, so that both directions have one meaning and size. Value and
    Hessian are those of the loss over all rows.

    Args:
        model: The model that is trained.
        loss_fn: A function of model and batch that returns one loss for each row.
        users: The rows of each public user, at least one user.
        local: How a user trains: learning rate, batch size, epochs. Give what the private users have.
        cohort: Users that are drawn anew for each step, at least 1. Default None, all of them.
        max_norm: The largest norm of a user's update, in the unit of the weights. Default None, no limit. Give the
            plan's ``max_grad_norm``, to which updates of private users are clipped.
        seed: Determines who is drawn, and the order of the rows. Default 0.

    Raises:
        ConfigError: If there are no users, or `cohort` is below 1.

    Example:
        >>> import torch
        >>> from halfsilver.federated import LocalTraining
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> rows = [torch.ones(2, 1), torch.ones(3, 1)]
        >>> users = PublicUsers(model, lambda model, x: model(x).squeeze(1), rows, LocalTraining(lr=0.5, batch_size=8))
        >>> users.gradient(step=0)  # one step along a gradient of 1, at a learning rate of 0.5
        [tensor([[0.5000]])]

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193
        (its federated variant)
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
    def users(self) -> Sequence[Batch]:
        """The rows of each public user."""
        return self._users

    @property
    def sources(self) -> list[Any]:
        return [*super().sources, *self._users]

    def gradient(self, params: Tensors | None = None, *, step: int | None = None) -> Tensors:
        """The mean update of the public users of one step.

        Args:
            params: Where local training starts. Default None, which means at the model's own parameters.
            step: The step whose users and orders are drawn, from 0. Default None, which draws by the seed alone.

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

    def alignment(self) -> float:
        """How far the updates of the users point the same way, in [0, 1], at the model's own parameters.

        Returns:
            The length of the mean update over the root mean square of the lengths. The first is computed from pairs of
            different users, so it needs at least two.
        """
        live = trainable(self.model)
        total, sizes = [torch.zeros_like(p) for p in live], []
        with own_randomness(derive_seed(self.seed, 0), [live[0].device]):
            for update in map(self._update, self._users):
                torch._foreach_add_(total, update)
                sizes.append(norm(update))
        return alignment(torch.tensor(sizes), total)

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


def alignment(sizes: Tensor, totals: Sequence[Tensor]) -> float:
    """|mean g| / sqrt(mean |g|^2) of at least two vectors, from their norms and their sum.

    The numerator is a mean over pairs of different vectors, so that few do not look aligned by chance. It is 0 where
    that mean is negative.
    """
    count, squares = len(sizes), float(sizes.double().square().sum())
    pairs = (sum(float(t.double().square().sum()) for t in totals) - squares) / (count * (count - 1))
    return math.sqrt(min(1.0, max(0.0, pairs) / (squares / count))) if squares else 0.0
