"""Small users, and engines that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core.distributed import World
from halfsilver.federated import Contribution, LocalTraining, PrivateUsers, Round, TensorUsers
from halfsilver.privacy.entropy import Entropy, OsEntropy
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.users import Engine, UserUpdates

LOCAL = LocalTraining(lr=0.1, batch_size=4)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def columns(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator).to(dtype)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def users(count: int = 20, rows_each: int = 6) -> PrivateUsers:
    keys = [u for u in range(count) for _ in range(rows_each)]
    return PrivateUsers(TensorUsers(columns(count * rows_each), users=keys))


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(6, 3)


def plan(**changes: Any) -> hs.PrivacyPlan:
    values: dict[str, Any] = {
        "steps": 5,
        "sampling_rate": 0.5,
        "expected_batch_size": 10.0,
        "noise_multiplier": 1.0,
        "unit": "user",
    }
    return hs.PrivacyPlan(**(values | changes))


def source(
    folder: Path, engine: Engine, p: hs.PrivacyPlan, model: nn.Module, entropy: Entropy | None = None, **more: Any
) -> UserUpdates:
    ledger = Ledger.open(folder / "ledger.jsonl", unit="user")
    return UserUpdates(
        model,
        loss_fn,
        engine,
        p,
        ledger=ledger,
        run_id="run",
        entropy=entropy or OsEntropy(),
        world=World(),
        step=lambda: 0,
        folder=folder / "attendance",
        **more,
    )


class Answers:
    """An engine whose users send whatever `answer` makes for them; None is no reply."""

    def __init__(self, population: int, answer: Callable[[int, Round], Sequence[Tensor] | None]) -> None:
        self.population, self._answer = population, answer
        self.asked: list[list[int]] = []

    def contributions(self, round: Round) -> Iterator[Contribution]:
        self.asked.append(round.users.tolist())
        replies = ((self._answer(user, round)) for user in round.users.tolist())
        yield from (Contribution(reply) for reply in replies if reply is not None)
