"""Engines: where users train. One that trains them here, one after the other, stands in this file."""

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
    """What an engine is asked for: the updates of these users to the model as it is now.

    `users` are distinct numbers below the engine's population, in rising order: the Poisson sample, perhaps an empty
    one. `step` counts the updates that the model has had. `seed` is fresh in every round, for dropout and the like.
    """

    step: int
    model: nn.Module
    loss_fn: LossFn
    users: Tensor
    max_grad_norm: float
    seed: int


@dataclass(frozen=True)
class Contribution:
    """theta - theta_local of one user, or the sum of such updates of several `users`, each clipped by who summed them.

    Whoever sends a sum is trusted to have clipped. `users` is how many users the sender was asked for in this round,
    which the engine knows, and never a number that the sender states.
    """

    tensors: Sequence[Tensor]
    users: int = 1


@runtime_checkable
class Engine(Protocol):
    """Brings the contributions of a round, in any order. Users that do not answer are missing, and count as zeros.

    `population` is the number of enrolled users, whether they can be reached or not. No error that an engine raises
    may depend on what users hold or send.
    """

    @property
    def population(self) -> int: ...

    def contributions(self, round: Round) -> Iterator[Contribution]: ...


@final
class InProcess:
    """Trains the drawn users one after the other, in this process."""

    def __init__(self, users: PrivateUsers, local: LocalTraining) -> None:
        self._users, self._store, self._local = users, users._open(), local

    def shares_rows_with(self, data: Any) -> bool:
        return self._users.shares_rows_with(data)

    @property
    def population(self) -> int:
        return self._store.size()

    def contributions(self, round: Round) -> Iterator[Contribution]:
        require_unchanged(self._store)
        for user in round.users.tolist():
            update = update_of(self._store, user, round.model, round.loss_fn, self._local, round.seed)
            if update is not None:
                yield Contribution(update)


def update_of(
    store: UserStore, user: int, model: nn.Module, loss_fn: LossFn, local: LocalTraining, seed: int
) -> Tensors | None:
    """The update of one user; None where the user has no rows, or rows that cannot be used.

    Whatever goes wrong with a user's rows, a lack of memory included, would tell about them, so nothing is said, nor
    warned of. Randomness is of the user alone.
    """
    device = trainable(model)[0].device
    # What puts the model back stands outside: nothing may keep it from doing so, or keep quiet about it.
    with untouched(model), silent(), own_randomness((seed + user) % 2**63, [device]):
        rows = store.rows(user, local.max_examples)
        if batch_rows(rows):
            return descended(model, loss_fn, map_batch(lambda t: t.to(device), rows), local)
    return None
