"""Poisson sampling: the sampler that the accountant assumes.

Each unit is in the batch of a step with probability q, independently of all other units and steps. The code jumps from
one member to the next by geometric gaps, so time and memory grow with the batch and not with the population.

References:
    - Abadi et al. 2016, Deep Learning with Differential Privacy, arXiv:1607.00133, for Poisson batches in DP-SGD.
    - Balle, Barthe and Gaboardi 2018, Privacy Amplification by Subsampling: Tight Analyses via Couplings and
      Divergences, arXiv:1807.01647.
    - Devroye 1986, Non-Uniform Random Variate Generation, Springer, chapter X.2, for the geometric law by inversion.
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

    With rate 1 the batch holds every unit. Then the pieces are slices, which copy nothing and use no random bits.

    Args:
        population: The number of units.
        rate: The probability q of a unit to be in the batch, in (0, 1].
        chunk: The most indices per piece, at least 1.
        entropy: The source of random bits.
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


def turn_chunks(
    population: int, turns: int, chunk: int, step: int, share: tuple[int, int] = (0, 1)
) -> Iterator[Tensor]:
    """Yield the units i whose turn it is, i = step modulo turns, in pieces of at most `chunk` sorted indices.

    So a unit takes part once in `turns` steps, and its turns depend on its own place alone.

    Args:
        population: The number of units.
        turns: The number of batches in a pass, at least 1.
        chunk: The most indices per piece, at least 1.
        step: The number of the step, from 0.
        share: A rank, and the number of ranks; the units of a step are dealt out among them.

    >>> [piece.tolist() for piece in turn_chunks(10, turns=3, chunk=2, step=4)]
    [[1, 4], [7]]
    """
    rank, ranks = share
    mine = range(step % turns + rank * turns, population, turns * ranks)
    yield from (torch.tensor(mine[i : i + chunk]) for i in range(0, len(mine), chunk))


def _gaps(rate: float, n: int, population: int, entropy: Entropy) -> Tensor:
    """Distances between consecutive members, P(gap > k) = (1 - rate)^k, by inversion: 1 + floor(log U / log(1 - rate)).

    A gap past the population is as good as any larger one. Cutting it there keeps the cumulative sum within int64.

    References:
        - Devroye 1986, Non-Uniform Random Variate Generation, Springer, chapter X.2.
    """
    skipped = uniform(entropy, n).log_().div_(math.log1p(-rate)).floor_()
    return skipped.clamp_(max=float(population)).to(torch.int64) + 1
