"""Rounds of a real run, timed one by one: ledger, draw, engine, fold, noise, mirror, optimizer and log."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import halfsilver as hs
from halfsilver.federated import Engine
from halfsilver.mirror import MirrorMap, PublicLoss
from halfsilver.trainer import StepReport

Row = dict[str, Any]


@dataclass(frozen=True)
class Spent:
    """Seconds."""

    wall: float
    cpu: float

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)


def now() -> Spent:
    """Of this process alone, but for the wall clock."""
    return Spent(time.perf_counter(), time.process_time())


def timed(function: Callable[[], object]) -> Spent:
    started = now()
    function()
    return now() - started


class _Watch:
    """A callback of the trainer: a round lasts from the end of one call to the beginning of the next."""

    def __init__(self, between: Callable[[], None]) -> None:
        self.rounds: list[Spent] = []
        self._between, self._started = between, now()

    def __call__(self, report: StepReport) -> None:
        self.rounds.append(now() - self._started)
        self._between()
        self._started = now()


def timed_rounds(
    model: nn.Module,
    loss_fn: Any,
    engine: Engine,
    *,
    rounds: int,
    cohort: float,
    mirror: MirrorMap | None = None,
    public: PublicLoss | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[Spent]:
    """One run of `rounds` + 1 rounds through the trainer; the first, which also starts things, is left out.

    `between` is called after each round, the first included, and is not part of any.
    """
    watch = _Watch(between)
    plan = hs.PrivacyPlan(
        steps=rounds + 1,
        sampling_rate=min(1.0, cohort / engine.population),
        expected_batch_size=cohort,
        noise_multiplier=1.0,
        unit="user",
    )
    trainer = hs.Trainer(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        plan=plan,
        mirror=mirror or hs.Euclidean(),
        callbacks=[watch],
        progress=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer.fit(engine, public, run_dir=folder)
    return watch.rounds[1:]


def middle(values: Sequence[float]) -> Row:
    """Median, range and how many: what is reported of every measurement."""
    return {
        "median": round(statistics.median(values), 6),
        "min": round(min(values), 6),
        "max": round(max(values), 6),
        "reps": len(values),
    }
