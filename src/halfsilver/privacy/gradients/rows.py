"""How many examples a private pass takes at once: the one shape that every private batch is padded to."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch

from halfsilver._core.model_state import without_dropout
from halfsilver._core.tensors import Batch, batch_leaves, take_rows, trainable
from halfsilver._core.views import unchanged_views
from halfsilver.privacy.gradients.base import Adding, GradientBackend, Tunable, clock
from halfsilver.privacy.plan import PrivacyPlan

# Per-example gradients that may exist at once, in numbers: 1 GB in float64.
_MATERIALISED = 2**27

# Libraries compute rows in groups, and one that is left over in another way. At a multiple of this many rows, all of
# them are rounded alike, wherever they stand.
GROUP = 16
# Small batches are filled up to fewer rows, if these are rounded alike on this machine.
_SMALL_GROUP, _SMALL_BATCH = 8, 64
_TRIED, _LEAST_NORM = 2, 1e-9
_SIZES = (16, 32, 64, 128, 256, 512)
# Once a piece takes so long, larger ones have nothing left to gain, but take more memory.
_LONG_SECONDS = 0.25
_ROUNDS = 4
_LEAST_SECONDS, _SHARE_OF_PLAN = 1.0, 0.01

_measured: dict[tuple[Any, ...], int] = {}


def most_rows(model: torch.nn.Module) -> int:
    """As many as may be in memory at once if each had a gradient of its own, but no more than 512."""
    parameters = sum(p.numel() for p in trainable(model))
    return max(1, min(512, _MATERIALISED // max(parameters, 1)) // GROUP * GROUP)


def padded_rows(rows: int, group: int = GROUP) -> int:
    """How many rows a piece of `rows` is filled up to: a whole number of groups, or a single row.

    >>> [padded_rows(rows) for rows in (1, 2, 16, 17)], padded_rows(17, 8)
    ([1, 16, 16, 32], 24)
    """
    return 1 if rows == 1 else group * math.ceil(rows / group)


def rows_in_group(
    backend: GradientBackend, model: torch.nn.Module, made_up: Callable[[int], Batch], expected: float
) -> int:
    """The number of rows of whose multiples a piece may be: 8 for a small batch, if the machine passes a check.

    One made-up row stands at all places of a batch of 8 rows, and of 24. Its gradient norms must be the same to the
    last bit. They are sums over all numbers of the gradient, so hardly any difference in rounding is missed.
    """
    if expected > _SMALL_BATCH or not isinstance(backend, Tunable):
        return GROUP
    some = made_up(_TRIED)
    with without_dropout(model), unchanged_views():
        for row in range(_TRIED):
            for rows in (_SMALL_GROUP, GROUP + _SMALL_GROUP):
                norms = backend.norms(take_rows(some, torch.full((rows,), row)))
                if not ((norms == norms[0]) & (norms > _LEAST_NORM) & torch.isfinite(norms)).all():
                    return GROUP
    return _SMALL_GROUP


def default_rows(model: torch.nn.Module, expected: float) -> int:
    """An eighth of the expected batch, if memory allows: larger pieces would mean more padding."""
    return min(GROUP * math.ceil(expected / (8 * GROUP)), most_rows(model))


def expected_pieces(rows: int, expected: float, sampling_rate: float) -> float:
    """Pieces of `rows` examples, the last one padded, that a Poisson sample fills on average.

    >>> round(expected_pieces(64, 500, 0.01), 1), expected_pieces(50, 500, 1.0)
    (8.3, 10.0)
    """
    batch = NormalDist(expected, math.sqrt(expected * (1 - sampling_rate)) + 1e-6)
    terms = (1 - batch.cdf(k * rows + 0.5) for k in itertools.count())
    return max(1.0, sum(itertools.takewhile(lambda p: p > 1e-3, terms)))


def fastest_rows(
    backend: GradientBackend,
    model: torch.nn.Module,
    made_up: Callable[[int], Batch],
    plan: PrivacyPlan,
    share: float,
    group: int = GROUP,
) -> int:
    """The number for which a step is fastest, padding included: measured on made-up rows and remembered.

    `share` is the part of the plan's batch that is drawn here. A short plan is not worth long measurements.
    """
    if not isinstance(backend, Tunable):
        return default_rows(model, share * plan.expected_batch_size)
    shapes = [(tuple(t.shape), t.dtype) for t in (*trainable(model), *batch_leaves(made_up(1)))]
    key = (*shapes, plan.expected_batch_size, plan.sampling_rate, share, group, torch.get_num_threads())
    if key not in _measured:
        most = max(GROUP, most_rows(model))  # a backend with a choice of ways need not hold a gradient for each row
        _measured[key] = _fastest(backend, made_up, plan, share, most, group)
    return _measured[key]


def _fastest(
    backend: Any, made_up: Callable[[int], Batch], plan: PrivacyPlan, share: float, most: int, group: int
) -> int:
    """From small to large, until steps have become clearly slower twice, or measuring costs too much of the plan."""
    costs: dict[int, float] = {}
    expected, started = share * plan.expected_batch_size, time.monotonic()
    adding = Adding.of(plan.expected_batch_size, plan.sampling_rate)
    for rows in _sizes(expected, plan.sampling_rate, most, group):
        batch = made_up(rows)
        backend.tune(batch, adding)
        seconds = _seconds(backend, batch, adding)
        costs[rows] = seconds * expected_pieces(rows, expected, plan.sampling_rate)
        best = min(costs.values())
        slower = all(cost > 1.1 * best for cost in list(costs.values())[-2:])
        if (
            slower
            or seconds > _LONG_SECONDS
            or time.monotonic() - started > max(_LEAST_SECONDS, _SHARE_OF_PLAN * plan.steps * best)
        ):
            break
    # The smallest that is nearly the fastest: it takes less memory, and measurements are noisy.
    return next(rows for rows, cost in costs.items() if cost <= 1.05 * min(costs.values()))


def _sizes(expected: float, sampling_rate: float, most: int, group: int) -> list[int]:
    """Sizes to try: up to the first that takes nearly every batch in one piece, which is itself one of them."""
    spread = math.sqrt(expected * (1 - sampling_rate))
    whole = padded_rows(max(2, math.ceil(expected + 2.5 * spread)), group)
    return sorted({min(size, whole, most) for size in (group, *_SIZES, whole)})


def _seconds(backend: GradientBackend, batch: Batch, adding: Adding) -> float:
    times = []
    for _ in range(_ROUNDS):
        started = clock()
        backend.clipped_sum(batch, 1.0, adding=adding)
        times.append(clock() - started)
    return min(times)
