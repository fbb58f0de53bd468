"""Engines: where users train. This file has the interface, and an engine that trains users in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

from torch import Tensor, nn

from halfsilver._core.local_training import LocalTraining
from halfsilver._core.model_state import untouched
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import LossFn, Tensors, batch_rows, map_batch, trainable
from halfsilver.privacy.silence import silent
from halfsilver.privacy.users.local import descended
from halfsilver.privacy.users.stores.base import PrivateUsers, UserStore, require_unchanged


@dataclass(frozen=True, kw_only=True)
class Round:
    """One request to an engine: the updates of the drawn users to the current model.

    Args:
        step: How many updates the model has received, from 0.
        model: The model. An engine may train it in place but must leave it as it was.
        loss_fn: A function of model and batch that returns one number per example.
        users: Distinct user numbers below the engine's population, in rising order, as a tensor of int64. It is the
            Poisson sample of this round, or with correlated noise those who may take part, and may be empty.
        max_grad_norm: The clip norm of one user's update, above 0. It is fixed for the whole run.
        seed: A fresh number per round, for dropout and other randomness of local training.
        centre: Public tensors, one per trainable parameter, which are subtracted from the update of each user before
            anything clips it. Default None, nothing is subtracted.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> loss_fn = lambda model, batch: model(batch).squeeze(1)
        >>> users = torch.tensor([3, 8])
        >>> Round(step=0, model=model, loss_fn=loss_fn, users=users, max_grad_norm=1.0, seed=7).users.tolist()
        [3, 8]
    """

    step: int
    model: nn.Module
    loss_fn: LossFn
    users: Tensor
    max_grad_norm: float
    seed: int
    centre: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Contribution:
    """The update of one user, or the sum of several users' clipped updates.

    An update is theta - theta_local, the parameters before local training minus those after it, and minus the centre of
    the round where it has one. `Fold` clips an update of one user. It trusts the sender of a sum to have clipped each
    update in it.

    Args:
        tensors: One tensor per trainable parameter, in the order of the model. A sum should be float64, so that
            rounding stays within the clipping margin.
        users: How many users the sender was asked for in this round, at least 1. Default 1. The engine must know this
            number by itself and never take it from the sender, because the contribution is clipped to `users` clip
            norms. What is not a whole number, or more than the users of the round who are not heard yet, adds nothing.

    Example:
        >>> import torch
        >>> Contribution([torch.zeros(1, 2), torch.zeros(1)]).users
        1
    """

    tensors: Sequence[Tensor]
    users: int = 1


@runtime_checkable
class Engine(Protocol):
    """The interface through which `Trainer.fit` reaches users. Write your own for another transport.

    An engine yields the contributions of a round in any order. A user who does not answer is missing and counts as
    zero. No error that an engine raises may depend on what users hold or send. Sampling, clipping of single updates,
    noise and the ledger are not the engine's task.

    Example:
        >>> class Nobody:
        ...     population = 100
        ...
        ...     def contributions(self, round):
        ...         return iter(())  # nobody answers
        >>> isinstance(Nobody(), Engine)
        True
    """

    @property
    def population(self) -> int:
        """The number of enrolled users, whether they can be reached or not."""
        ...

    def contributions(self, round: Round) -> Iterator[Contribution]:
        """Yield the updates of this round's users, and of nobody else, at most one per user.

        Args:
            round: The users, the model and the clip norm of this round.

        Returns:
            An iterator over contributions. Users that do not answer are missing from it.
        """
        ...


@runtime_checkable
class WithPresence(Engine, Protocol):
    """An engine that knows who can be reached now, as devices come and go.

    With correlated noise, a round then asks users who are present and have not taken part lately, instead of those
    whose turn it is.

    Example:
        >>> class AlwaysThree:
        ...     population = 100
        ...
        ...     def contributions(self, round):
        ...         return iter(())
        ...
        ...     def present(self):
        ...         return torch.tensor([4, 8, 15])
        >>> import torch
        >>> isinstance(AlwaysThree(), WithPresence)
        True
    """

    def present(self) -> Tensor:
        """Numbers of users who can be asked now, distinct, as a tensor of int64. Whoever is missing is away."""
        ...


@runtime_checkable
class WithCentre(Engine, Protocol):
    """An engine that subtracts `Round.centre` from the update of each user.

    Example:
        >>> class FromTheCentre:
        ...     population, subtracts_centre = 100, True
        ...
        ...     def contributions(self, round):
        ...         return iter(())  # nobody answers, and so counts as the centre
        >>> isinstance(FromTheCentre(), WithCentre)
        True
    """

    @property
    def subtracts_centre(self) -> bool:
        """Whether it does."""
        ...


@final
class InProcess:
    """An engine that trains the drawn users in this process, one after the other.

    Guarantee: a user whose rows cannot be used contributes zero silently, and the model is left as it was.

    Args:
        users: The private users.
        local: How each user trains.

    Example:
        >>> import torch
        >>> from halfsilver.federated import LocalTraining, PrivateUsers, TensorUsers
        >>> rows = torch.randn(60, 3), torch.randn(60)
        >>> users = PrivateUsers(TensorUsers(rows, users=[i // 3 for i in range(60)]))
        >>> InProcess(users, LocalTraining(lr=0.1)).population
        20

    References:
        - McMahan, Moore, Ramage, Hampson and Aguera y Arcas 2017, Communication-Efficient Learning of Deep Networks
          from Decentralized Data, arXiv:1602.05629.
    """

    def __init__(self, users: PrivateUsers, local: LocalTraining) -> None:
        self._users, self._store, self._local = users, users._open(), local

    def shares_rows_with(self, data: Any) -> bool:
        """Tell whether a data set that should be public holds rows of these users; see `PrivateUsers.shares_rows_with`.

        Args:
            data: The data set in question.

        Returns:
            True if both share at least one row in memory.
        """
        return self._users.shares_rows_with(data)

    @property
    def population(self) -> int:
        """The number of enrolled users."""
        return self._store.size()

    @property
    def subtracts_centre(self) -> bool:
        """Whether `Round.centre` is subtracted: it is."""
        return True

    def contributions(self, round: Round) -> Iterator[Contribution]:
        """Train the users of this round and yield one update per user.

        Args:
            round: The users, the model and the clip norm of this round.

        Returns:
            An iterator over contributions of one user each. Users without usable rows are missing from it.

        Raises:
            PrivateDataError: If the file of the users has changed since it was opened.
        """
        require_unchanged(self._store)
        for user in round.users.tolist():
            update = update_of(self._store, user, round.model, round.loss_fn, self._local, round.seed)
            if update is not None:
                yield Contribution(around(update, round.centre))


def update_of(
    store: UserStore, user: int, model: nn.Module, loss_fn: LossFn, local: LocalTraining, seed: int
) -> Tensors | None:
    """The update of one user, or None if the user has no rows or rows that cannot be used.

    Whatever goes wrong with a user's rows, a lack of memory included, would reveal something about them. So nothing is
    raised or warned of. Each user has a random generator of its own.
    """
    device = trainable(model)[0].device
    # What puts the model back stands outside: nothing may keep it from doing so, or keep quiet about it.
    with untouched(model), silent(), own_randomness((seed + user) % 2**63, [device]):
        rows = store.rows(user, local.max_examples)
        if batch_rows(rows):
            return descended(model, loss_fn, map_batch(lambda t: t.to(device), rows), local)
    return None


def around(update: Sequence[Tensor], centre: Sequence[Tensor] | None) -> Sequence[Tensor]:
    """The update relative to the centre, in its own dtype: `Fold` drops others, and a centre may travel in float32."""
    return update if centre is None else [u - c.to(u) for u, c in zip(update, centre, strict=True)]
