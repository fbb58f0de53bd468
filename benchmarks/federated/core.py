"""A round in which clients cost nothing, against a plain loop over the same arrays."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import halfsilver as hs
from benchmarks.federated.rounds import Row, Spent, middle, timed, timed_rounds
from halfsilver._core.tensors import Tensors, trainable, unflatten
from halfsilver.federated import Contribution, Round
from halfsilver.mirror import PublicLoss
from halfsilver.privacy.entropy import OsEntropy
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.noise import noisy_mean

ARRAYS = 100
CLIP, SIGMA = 1.0, 1.0  # those of the plan


def network(hidden: int = 512) -> nn.Module:
    """500,416 parameters."""
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 192))


class Ready:
    """An engine whose users have their updates at hand; `vectors` are the same numbers, each update in one piece."""

    def __init__(self, population: int, model: nn.Module, arrays: int = ARRAYS) -> None:
        params = trainable(model)
        size = sum(p.numel() for p in params)
        generator = torch.Generator().manual_seed(0)
        self.population, self.drawn = population, torch.empty(0, dtype=torch.int64)
        self.vectors = [torch.randn(size, generator=generator) * 1e-3 * (1 + i % 3) for i in range(arrays)]
        self._updates = [unflatten(v, params) for v in self.vectors]  # views, as far as torch has it

    def contributions(self, round: Round) -> Iterator[Contribution]:
        self.drawn = round.users
        for user in round.users.tolist():
            yield Contribution(self._updates[user % len(self._updates)])

    def asked(self) -> list[Tensor]:
        """The vectors of those drawn last."""
        return [self.vectors[user % len(self.vectors)] for user in self.drawn.tolist()]


class ReadyPublic(PublicLoss):
    """A public gradient that is there already: what it costs to make one is a matter of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, lambda m, batch: m(batch[0]).mean(1), (torch.zeros(1, 784),))
        self._gradient = [torch.ones_like(p) for p in trainable(model)]

    def gradient(self, params: Tensors | None = None, *, step: int | None = None) -> Tensors:
        return self._gradient


def plain(vectors: list[Tensor], expected: float) -> Tensor:
    """Clip, sum and noise as one would write them without a library, all in float32."""
    total = torch.zeros_like(vectors[0])
    for v in vectors:
        total.add_(v, alpha=min(1.0, CLIP / float(torch.linalg.vector_norm(v))))
    return total.add_(torch.randn_like(total), alpha=SIGMA * CLIP).div_(expected)


def measure(population: int, *, rounds: int, cohort: int = 100, hidden: int = 512) -> Row:
    """Round and loop in turns, in one process; the ratio is taken within each turn."""
    model = network(hidden)
    engine, loops = Ready(population, model, min(ARRAYS, cohort)), list[Spent]()
    spent = timed_rounds(
        model,
        lambda m, batch: m(batch[0]).mean(1),
        engine,
        rounds=rounds,
        cohort=cohort,
        mirror=hs.FirstOrder(0.7),
        public=ReadyPublic(model),
        between=lambda: loops.append(timed(lambda: plain(engine.asked() or engine.vectors[:1], cohort))),
    )
    pairs = list(zip(spent, loops[1:], strict=True))
    return {
        "users": population,
        "cohort": cohort,
        "parameters": len(engine.vectors[0]),
        "ratio": middle([a.wall / b.wall for a, b in pairs]),
        "cpu_ratio": middle([a.cpu / b.cpu for a, b in pairs]),
        "round_seconds": middle([a.wall for a in spent]),
        "round_cpu_seconds": middle([a.cpu for a in spent]),
        "plain_seconds": middle([b.wall for _, b in pairs]),
        "plain_cpu_seconds": middle([b.cpu for _, b in pairs]),
        **_noise(len(engine.vectors[0]), rounds),
    }


def _noise(size: int, reps: int) -> Row:
    """How much of both is noise: from the operating system and added exactly, or torch.randn."""

    def ours() -> None:
        total = ClippedSum([torch.zeros(size, dtype=torch.float64)], CLIP)
        noisy_mean(total, SIGMA, OsEntropy(), expected=1.0, dtypes=[torch.float32])

    return {
        "noise_cpu_seconds": middle([timed(ours).cpu for _ in range(reps)]),
        "randn_cpu_seconds": middle([timed(lambda: torch.randn(size)).cpu for _ in range(reps)]),
    }
