"""Real clients: what a round costs beyond the local training in it, and what worker processes make of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.federated.rounds import Row, Spent, middle, now, timed, timed_rounds
from halfsilver._core.tensors import Batch, trainable
from halfsilver.federated import Engine, InProcess, LocalTraining, PrivateUsers, Round
from halfsilver.privacy.users import Fold, engine
from halfsilver.privacy.users.local import descended
from halfsilver.privacy.users.workers import Workers
from halfsilver.tasks import stackexchange
from halfsilver.tasks.sentences import LENGTH, SPECIAL

LOCAL = LocalTraining(lr=0.3)
WORDS, UNITS = 4_000, 256


class MadeUp:
    """2,000 users with as many sentences as those of Stack Exchange, about: many write little, some write 256."""

    def __init__(self, words: int = WORDS, most: int = 256) -> None:
        self._words, self._most = words, most

    def size(self) -> int:
        return 2_000

    def rows(self, user: int, limit: int) -> Batch:
        generator = torch.Generator().manual_seed(user)
        count = min(self._most, limit, int(torch.randn((), generator=generator).mul(1.5).add(2.7).exp()) + 1)
        text = torch.randint(len(SPECIAL), self._words, (count, LENGTH + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def measure(data: Path | None, *, rounds: int, cohort: int, words: int = WORDS, units: int = UNITS) -> Row:
    """On the users of `data`/stackexchange, or where there are none, on made-up ones."""
    model, users = stackexchange.make_model(words, units), PrivateUsers(MadeUp(words))
    if data is not None:
        users = stackexchange.problem(data, vocabulary=words, units=units).private
    return {
        "users": "Stack Exchange" if data else "made up, of similar sizes",
        "cohort": cohort,
        "parameters": sum(p.numel() for p in trainable(model)),
        **_added(model, users, rounds, cohort),
        "workers": _workers(model, users, rounds, cohort),
    }


def _added(model: nn.Module, users: PrivateUsers, rounds: int, cohort: int) -> Row:
    """The rest of each round (read, put back, clip, fold, noise, step, ledger) over the sum of its local trainings."""
    training: list[Spent] = []
    with _watched() as local:

        def between() -> None:
            training.append(sum(local, Spent(0.0, 0.0)))
            local.clear()

        spent = timed_rounds(
            model, stackexchange.loss_fn, InProcess(users, LOCAL), rounds=rounds, cohort=cohort, between=between
        )
    pairs = list(zip(spent, training[1:], strict=True))
    return {
        "added": middle([a.wall / b.wall - 1 for a, b in pairs]),
        "cpu_added": middle([a.cpu / b.cpu - 1 for a, b in pairs]),
        "round_seconds": middle([a.wall for a in spent]),
        "training_seconds": middle([b.wall for _, b in pairs]),
    }


@contextmanager
def _watched() -> Iterator[list[Spent]]:
    """What each local training in the meantime took."""
    spent: list[Spent] = []

    def watched(*args: Any) -> Any:
        started = now()
        try:
            return descended(*args)
        finally:
            spent.append(now() - started)

    with patch.object(engine, "descended", watched):
        yield spent


def _workers(model: nn.Module, users: PrivateUsers, rounds: int, cohort: int, processes: int = 2) -> Row:
    """The same users in one process and over several, in turns; on a busy machine there is little to gain."""
    here, ratios = InProcess(users, LOCAL), []
    with Workers(users, LOCAL, processes) as spread:
        _sum(spread, _asked(model, spread.population, cohort, 0))  # starts the workers
        for step in range(1, rounds + 1):
            asked = _asked(model, here.population, cohort, step)
            one, many = timed(partial(_sum, here, asked)), timed(partial(_sum, spread, asked))
            ratios.append(one.wall / many.wall)
    return {"processes": processes, "speedup": middle(ratios)}


def _asked(model: nn.Module, population: int, cohort: int, step: int) -> Round:
    drawn = torch.randperm(population, generator=torch.Generator().manual_seed(step))[:cohort].sort().values
    return Round(step=step, model=model, loss_fn=stackexchange.loss_fn, users=drawn, max_grad_norm=1.0, seed=step)


def _sum(engine: Engine, asked: Round) -> None:
    fold = Fold(trainable(asked.model), asked.max_grad_norm, users=len(asked.users))
    for contribution in engine.contributions(asked):
        fold.add(contribution)
