"""How many examples a private pass takes at once: which numbers are fastest."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch

from halfsilver._core.tensors import Batch, batch_leaves, trainable
from halfsilver.privacy.gradients.base import Adding, GradientBackend, Tunable, clock
from halfsilver.privacy.pieces import GROUP
from halfsilver.privacy.plan import PrivacyPlan

# Per-example gradients that may exist at once, in numbers: 1 GB in float64.
_MATERIALISED = 2**27

# Below 64 rows, one is as likely as another to round all of them alike; these make little padding, and few pieces.
_SMALL, _SIZES = (8, 16, 32), (64, 128, 256, 512)
# Once a piece takes so long, larger ones have nothing left to gain, but take more memory.
_LONG_SECONDS = 0.25
_ROUNDS = 4
_LEAST_SECONDS, _SHARE_OF_PLAN = 1.0, 0.01

_measured: dict[tuple[Any, ...], list[int]] = {}


def most_rows(model: torch.nn.Module) -> int:
    """As many as may be in memory at once if each had a gradient of its own, but no more than 512."""
    parameters = sum(p.numel() for p in trainable(model))
    return max(1, min(512, _MATERIALISED // max(parameters, 1)))


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
    backend: GradientBackend, model: torch.nn.Module, made_up: Callable[[int], Batch], plan: PrivacyPlan, share: float
) -> list[int]:
    """Numbers of rows, that for which a step is fastest first, padding included: measured on made-up rows, remembered.

    `share` is the part of the plan's batch that is drawn here. A short plan is not worth long measurements.
    """
    expected, most = share * plan.expected_batch_size, most_rows(model)
    sizes = _sizes(expected, plan.sampling_rate, most)
    if not isinstance(backend, Tunable):
        wanted = min(expected, default_rows(model, expected))
        return sorted((n for n in {*sizes, 1} if n <= most), key=lambda n: (n < wanted, abs(n - wanted)))
    shapes = [(tuple(t.shape), t.dtype, t.device.type) for t in (*trainable(model), *batch_leaves(made_up(1)))]
    key = (*shapes, plan.expected_batch_size, plan.sampling_rate, share, torch.get_num_threads())
    if key not in _measured:
        _measured[key] = _by_speed(backend, made_up, plan, share, sizes)
    return _measured[key]


def _by_speed(
    backend: Any, made_up: Callable[[int], Batch], plan: PrivacyPlan, share: float, sizes: list[int]
) -> list[int]:
    """From small to large, until steps have become clearly slower twice, or measuring costs too much of the plan."""
    costs: dict[int, float] = {}
    expected, started = share * plan.expected_batch_size, time.monotonic()
    adding = Adding.of(plan.expected_batch_size, plan.sampling_rate)
    for rows in sizes:
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
    # The smallest that is nearly the fastest first: it takes less memory, and measurements are noisy.
    found = sorted(costs, key=lambda rows: (costs[rows] > 1.05 * best, costs[rows] if costs[rows] > 1.05 * best else 0))
    return [*found, *(rows for rows in sizes if rows not in costs), 1]


def _sizes(expected: float, sampling_rate: float, most: int) -> list[int]:
    """Sizes to try: up to the first that takes nearly every batch in one piece, which is itself one of them.

    With several threads, each takes its part of a kernel's numbers, and the groups are those of a part.
    """
    whole = max(2, math.ceil(expected + 2.5 * math.sqrt(expected * (1 - sampling_rate))))
    small = {*_SMALL, 8 * math.ceil(whole / 8)} if whole <= 2 * GROUP or most < GROUP else set[int]()
    whole = GROUP * math.ceil(whole / GROUP)
    large = {*_SIZES, whole, GROUP * torch.get_num_threads()}
    return sorted(
        {*(n for n in small if n < min(whole, GROUP)), *(min(n, whole) for n in large if n <= max(most, GROUP))}
    )


def _seconds(backend: GradientBackend, batch: Batch, adding: Adding) -> float:
    times, device = [], batch_leaves(batch)[0].device
    for _ in range(_ROUNDS):
        started = clock(device)
        backend.clipped_sum(batch, 1.0, adding=adding)
        times.append(clock(device) - started)
    return min(times)
