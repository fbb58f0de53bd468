"""Which of several exact ways is fastest for a layer of this shape: measured once on made-up rows, then remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from halfsilver.privacy.gradients.base import Adding, clock
from halfsilver.privacy.gradients.book.example_gradients import ExampleGradients

Result = TypeVar("Result")

_ROUNDS = 5
_choices: dict[tuple[Any, ...], str] = {}
_measuring: tuple[Adding, torch.device] | None = None


@contextmanager
def tuning(adding: Adding, device: torch.device) -> Iterator[None]:
    """Measure shapes that are met in this block. Only ever around made-up rows: private timing must decide nothing."""
    global _measuring
    _measuring = (adding, device)
    try:
        yield
    finally:
        _measuring = None


def fastest(key: tuple[Any, ...], ways: Mapping[str, Callable[[], Result]]) -> Result:
    """The result of the way that was fastest for `key`; of the first way while nothing was measured."""
    key = (*key, tuple(ways), torch.get_num_threads())
    if _measuring and key not in _choices and len(ways) > 1:
        rounds = [{name: _seconds(make, *_measuring) for name, make in ways.items()} for _ in range(_ROUNDS)]
        _choices[key] = min(ways, key=lambda name: min(times[name] for times in rounds))
    return ways[_choices.get(key, next(iter(ways)))]()


def _seconds(make: Callable[[], Any], adding: Adding, device: torch.device) -> float:
    """Of a contribution, with its use."""
    started = clock(device)
    made = make()
    if not isinstance(made, torch.Tensor):
        _use(made, adding)
    return clock(device) - started


def _use(contribution: ExampleGradients, adding: Adding) -> None:
    weights = torch.full_like(contribution.norms().squared, 0.5, dtype=torch.float64)
    contribution.weighted_sum(weights, adding)
