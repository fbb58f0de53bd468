"""Users trained by worker processes, each of which adds up its own share of a round."""

from __future__ import annotations

import os
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from halfsilver._core.forks import Fork, shared
from halfsilver._core.local_training import LocalTraining
from halfsilver._core.tensors import LossFn, Tensors, trainable
from halfsilver.errors import ConfigError, require
from halfsilver.privacy.users.engine import Contribution, Round, around, update_of
from halfsilver.privacy.users.fold import Fold
from halfsilver.privacy.users.stores.base import PrivateUsers, UserStore, require_unchanged

_PIECES = 4  # of what is left of a round, for each worker: large at first, single users at the end
_LARGEST_PIECE = 32


@final
class Workers:
    """An engine that trains the drawn users in forked processes of one thread each, with the sums of `InProcess`.

    Guarantee: a user whose rows kill a worker changes the sum as little as any other user. The sums are in shared
    memory and outlive the worker. Another worker replaces it and takes the users that it had not begun. So no other
    user's share is lost with it, which would let one user decide over many, and no error tells of it.

    Workers start with the first round. They end with `close`, with a ``with`` block, with this object or with the
    process, also if it is killed. They start again when another round is requested.

    Workers are forked, so neither the model nor the rows have to be serialised. A worker uses one thread, and it must
    train on made-up numbers before it is given a user. Models on a GPU cannot be forked; use `InProcess` for them.

    Args:
        users: The private users.
        local: How each user trains.
        processes: The number of worker processes, at least 1. Default 2. Set it to the number of cores.

    Raises:
        ConfigError: If `processes` is below 1. In the first round, if the model is on a GPU or a fork cannot train.

    Example:
        >>> import torch
        >>> from halfsilver.federated import LocalTraining, PrivateUsers, TensorUsers
        >>> users = PrivateUsers(TensorUsers(torch.randn(60, 3), users=[i // 3 for i in range(60)]))
        >>> with Workers(users, LocalTraining(lr=0.1), processes=2) as engine:
        ...     engine.population
        20
    """

    def __init__(self, users: PrivateUsers, local: LocalTraining, processes: int = 2) -> None:
        require(processes >= 1, "processes", processes, "at least 1")
        self._users, self._store, self._local, self._processes = users, users._open(), local, processes
        self._slots: list[_Slot] = []
        self._job: _Job | None = None
        self._ends = weakref.finalize(self, _end_all, self._slots, os.getpid())

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
        """Train the users of this round and yield one sum per worker, all at the end of the round.

        The cost grows with the users of the round and not with the population.

        Args:
            round: The users, the model and the clip norm of this round.

        Returns:
            An iterator over sums of clipped updates.

        Raises:
            ConfigError: If a worker cannot be started.
            PrivateDataError: If the file of the users has changed since it was opened.
        """
        require_unchanged(self._store)
        if not len(round.users):
            return
        try:
            self._prepare(round)
            self._train(deque(round.users.tolist()), round.seed)
        except BaseException:
            self.close()  # a worker in the middle of something would answer in the next round
            raise
        yield from (Contribution(slot.fold.total.tensors, slot.asked) for slot in self._slots if slot.asked)

    def close(self) -> None:
        """End the workers and free the shared memory. A later round starts new ones."""
        _end_all(self._slots, os.getpid())
        self._job = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _prepare(self, round: Round) -> None:
        if self._job is None or not self._job.serves(round):
            self.close()
            self._job = _Job.of(round, self._store, self._local)
            self._slots.extend(_Slot(self._job) for _ in range(self._processes))
            for slot in self._slots:
                slot.await_start()
        self._job.publish(round)
        for slot in self._slots:
            slot.clear()

    def _train(self, waiting: deque[int], seed: int) -> None:
        """Hand out users in pieces that become smaller, since some have a hundred times the rows of others."""
        while waiting or any(slot.given for slot in self._slots):
            for slot in self._slots:
                if waiting and not slot.given:
                    size = min(_LARGEST_PIECE, 1 + len(waiting) // (_PIECES * self._processes))
                    slot.give([waiting.popleft() for _ in range(min(size, len(waiting)))], seed)
            busy: dict[object, _Slot] = {slot.connection: slot for slot in self._slots if slot.given}
            for ready in wait([slot.connection for slot in busy.values()]):
                waiting.extendleft(reversed(busy[ready].take_back()))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What all workers are forked with, and the shared memory through which they get the model of each round."""

    model: nn.Module
    loss_fn: LossFn
    max_grad_norm: float
    store: UserStore
    local: LocalTraining
    modes: list[bool]
    state: Tensors
    shared: Tensors
    centre: Tensors | None

    @classmethod
    def of(cls, round: Round, store: UserStore, local: LocalTraining) -> _Job:
        state = _state(round.model)
        devices = sorted({t.device.type for t in state} - {"cpu"})
        require(not devices, "model on", devices, "to be on the CPU", "Train users by InProcess on a GPU.")
        return cls(
            model=round.model,
            loss_fn=round.loss_fn,
            max_grad_norm=round.max_grad_norm,
            store=store,
            local=local,
            modes=_modes(round.model),
            state=state,
            shared=[shared(t) for t in state],
            centre=None if round.centre is None else [shared(t) for t in round.centre],
        )

    def serves(self, round: Round) -> bool:
        """Whether the workers, as they were forked, lack nothing but new values for this round."""
        same = self.model is round.model and self.loss_fn is round.loss_fn and self.max_grad_norm == round.max_grad_norm
        found = _state(round.model)
        same = same and (self.centre is None) == (round.centre is None)
        return same and self.modes == _modes(round.model) and [*map(id, found)] == [*map(id, self.state)]

    def publish(self, round: Round) -> None:
        _copy(self.state, self.shared)
        if self.centre is not None and round.centre is not None:
            _copy(round.centre, self.centre)

    def receive(self) -> None:
        _copy(self.shared, self.state)


class _Slot:
    """A place for a worker, and the sum of what it and those before it have added in this round."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self.fold = Fold(trainable(job.model), job.max_grad_norm)
        self.fold.total.tensors[:] = [shared(t) for t in self.fold.total.tensors]
        self._begun = shared(torch.zeros(1, dtype=torch.int64))  # how many of the users given it has begun
        self.given: list[int] = []
        self.asked = 0
        self._start()

    def clear(self) -> None:
        self.asked = 0
        for t in self.fold.total.tensors:
            t.zero_()

    def give(self, users: list[int], seed: int) -> None:
        self.given, self.asked = users, self.asked + len(users)
        self._begun.zero_()
        self._fork.send(array("q", [seed, *users]).tobytes())

    def take_back(self) -> list[int]:
        """Called when the worker has answered or died: the users that it was given and has not begun."""
        rest: list[int] = []
        if self._fork.answer() is None:
            rest = self.given[int(self._begun) :]
            self.asked -= len(rest)
            self.end()
            self._start()
            self.await_start()
        self.given = []
        return rest

    def _start(self) -> None:
        self._fork = Fork(self._work, _train_on_made_up_numbers)
        self.connection = self._fork.connection

    def await_start(self) -> None:
        """Return once the worker has trained on made-up numbers. No private row has been read by then."""
        if not self._fork.is_ready():
            raise ConfigError(
                "A worker process that was forked from this one cannot train, as happens once a GPU has been used. "
                "Train users by InProcess, or keep GPUs from this process with CUDA_VISIBLE_DEVICES=''."
            )

    def end(self) -> None:
        self._fork.end()

    def _work(self, connection: Connection) -> None:
        while True:
            seed, *users = array("q", connection.recv_bytes())
            self._job.receive()
            for user in users:
                self._add(user, seed)
            connection.send_bytes(b"done")

    def _add(self, user: int, seed: int) -> None:
        """Killed within the last line, it leaves some coordinates of a clipped update: no more than the whole."""
        job = self._job
        self._begun += 1
        update = update_of(job.store, user, job.model, job.loss_fn, job.local, seed)
        if update is not None:
            self.fold.add(Contribution(around(update, job.centre)))


def _train_on_made_up_numbers() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    (torch.ones(256, 64) @ weight).relu().sum().backward()  # type: ignore[no-untyped-call]


def _end_all(slots: list[_Slot], owner: int) -> None:
    if os.getpid() == owner:  # and not in a forked copy of the owner
        for slot in slots:
            slot.end()
        slots.clear()


def _state(model: nn.Module) -> Tensors:
    return [*model.parameters(), *model.buffers()]


def _modes(model: nn.Module) -> list[bool]:
    return [m.training for m in model.modules()] + [p.requires_grad for p in model.parameters()]


@torch.no_grad()
def _copy(source: Sequence[Tensor], target: Tensors) -> None:
    for s, t in zip(source, target, strict=True):
        t.copy_(s)
