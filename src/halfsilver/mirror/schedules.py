"""Schedules: the weight alpha_t of the private gradient over a run, always in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from halfsilver.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Where a run stands, in public constants only.

    `steps_per_epoch` is 1 / sampling_rate: an epoch is a declared length, never a count of private rows.
    """

    step: int
    total_steps: int
    steps_per_epoch: float = 1.0

    def __post_init__(self) -> None:
        require(self.step >= 0, "step", self.step, "at least 0")
        require(self.total_steps >= 1, "total_steps", self.total_steps, "at least 1")
        require(self.steps_per_epoch > 0, "steps_per_epoch", self.steps_per_epoch, "above 0")


Schedule = Callable[[Clock], float]


@dataclass(frozen=True)
class Constant:
    """The same weight at every step."""

    value: float

    def __post_init__(self) -> None:
        require(0 <= self.value <= 1, "alpha", self.value, "in [0, 1]")

    def __call__(self, clock: Clock) -> float:
        return float(self.value)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """A quarter of a cosine, from 1 at step 0 down to `end` at the last step, or to 0 at time `K`.

    Past the quarter (t > K) the weight stays 0: it neither turns negative nor rises again.
    """

    end: float | None = None
    K: float | None = None
    unit: Literal["epoch", "step"] = "epoch"

    def __post_init__(self) -> None:
        if (self.end is None) == (self.K is None):
            raise ConfigError(f"Expected either end or K, got end={self.end!r} and K={self.K!r}.")
        if self.end is not None:
            require(0 <= self.end <= 1, "end", self.end, "in [0, 1]")
        if self.K is not None:
            require(0 < self.K < math.inf, "K", self.K, "above 0 and finite")
        require(self.unit in ("epoch", "step"), "unit", self.unit, "to be 'epoch' or 'step'")

    def __call__(self, clock: Clock) -> float:
        angle = self._angle(clock)
        return math.cos(angle) if angle < math.pi / 2 else 0.0

    def _angle(self, clock: Clock) -> float:
        if self.end is not None:
            return math.acos(self.end) * clock.step / clock.total_steps
        assert self.K is not None
        time = clock.step / clock.steps_per_epoch if self.unit == "epoch" else clock.step
        return math.pi / 2 * time / self.K


def constant(alpha: float) -> Constant:
    """The weight `alpha` at every step.

    >>> constant(0.9)(Clock(step=3, total_steps=10))
    0.9
    """
    return Constant(alpha)


def cosine(
    *,
    end: float | None = None,
    K: float | None = None,
    unit: Literal["epoch", "step"] = "epoch",
) -> Cosine:
    """cos(pi t / 2K), with K given in epochs or steps, or chosen so that the run ends at `end`.

    With `end` the weight is exactly `end` at t = total_steps, so the last step (t = total_steps - 1) lies
    a hair above it. Past K the weight stays 0.

    >>> round(cosine(end=0.8)(Clock(step=10, total_steps=10)), 6)
    0.8
    >>> round(cosine(K=100, unit="epoch")(Clock(step=500, total_steps=1000, steps_per_epoch=10)), 4)
    0.7071
    >>> cosine(K=5, unit="step")(Clock(step=7, total_steps=10))
    0.0
    """
    return Cosine(end=end, K=K, unit=unit)


def weight_at(alpha: float | Schedule, clock: Clock) -> float:
    """The value of a number or schedule at `clock`, clamped to [0, 1] whatever a user's schedule returns."""
    value = alpha(clock) if callable(alpha) else alpha
    require(not math.isnan(value), "alpha", value, "in [0, 1]", "The schedule returned NaN.")
    return min(1.0, max(0.0, float(value)))


def falling(share: float, end: float) -> float:
    """Half a cosine from 1 at the start of a run to `end` at its end: the shape of a learning rate.

    >>> [round(falling(share, 0.1), 3) for share in (0.0, 0.5, 1.0)]
    [1.0, 0.55, 0.1]
    """
    return end + (1 - end) * (1 + math.cos(math.pi * min(1.0, share))) / 2
