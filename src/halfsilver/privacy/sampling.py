"""Poisson sampling: the sampler that the accountant assumes.

Each unit is in a step's batch with probability q, independently of all others and of all other steps. Jumping from one
member to the next by geometric gaps costs time and memory in proportion to the batch, whatever the population.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from halfsilver.errors import require
from halfsilver.privacy.entropy import Entropy, uniform


def poisson_chunks(population: int, rate: float, chunk: int, entropy: Entropy) -> Iterator[Tensor | slice]:
    """Yield the batch of one step in pieces of at most `chunk` sorted indices; nothing at all for an empty batch.

    Rate 1 is the full batch: slices, so that nothing is copied and no random bits are used.
    """
    require(0 < rate <= 1, "sampling_rate", rate, "in (0, 1]")
    require(chunk >= 1, "chunk", chunk, ">= 1")
    if rate == 1:
        yield from (slice(i, min(i + chunk, population)) for i in range(0, population, chunk))
        return
    start = -1
    while start < population:
        indices = start + _gaps(rate, chunk, population, entropy).cumsum(0)
        members = indices[indices < population]
        if len(members):
            yield members
        if len(members) < chunk:
            return
        start = int(indices[-1])


def _gaps(rate: float, n: int, population: int, entropy: Entropy) -> Tensor:
    """Distances between consecutive members: P(gap > k) = (1 - rate)^k.

    A gap past the population is as good as any larger one; cutting it there keeps the cumulative sum in int64.
    """
    skipped = uniform(entropy, n).log_().div_(math.log1p(-rate)).floor_()
    return skipped.clamp_(max=float(population)).to(torch.int64) + 1
