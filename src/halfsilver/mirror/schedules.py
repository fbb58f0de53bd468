"""Schedules: the weight alpha_t of the private gradient over a run, always in [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from halfsilver.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The position in a run, in public constants only. Schedules and maps are given one in each step.

    Args:
        step: Updates before this one, at least 0.
        total_steps: Steps of the plan, at least 1.
        steps_per_epoch: Steps in which each record is drawn once on average, above 0. It is 1 / sampling_rate, a
            declared length and never a count of private rows. Default 1.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> Clock(step=30, total_steps=100, steps_per_epoch=10).step
        30
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
    """The schedule that `constant` makes.

    Args:
        value: The weight, in [0, 1].
    """

    value: float

    def __post_init__(self) -> None:
        require(0 <= self.value <= 1, "alpha", self.value, "in [0, 1]")

    def __call__(self, clock: Clock) -> float:
        return float(self.value)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """The schedule that `cosine` makes. After time `K` the weight stays 0.

    Args:
        end: The weight at the end of the run, in [0, 1].
        K: The time at which the weight reaches 0, above 0.
        unit: The unit of `K`, "epoch" or "step".
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
    """A schedule with the weight `alpha` at every step.

    Args:
        alpha: The share of the released gradient, in [0, 1].

    Returns:
        A function of a `Clock`, for `FirstOrder`. ``FirstOrder(0.9)`` is short for ``FirstOrder(constant(0.9))``.

    Raises:
        ConfigError: If `alpha` is not in [0, 1].

    Example:
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
    """A schedule that falls along a cosine from 1: ``alpha_t = cos(pi t / (2 K))``, and 0 from K on.

    Give either `end` or `K`. With `end`, K follows from the length of the run such that the weight is `end` at
    t = total_steps. The last step, t = total_steps - 1, is slightly above it.

    Args:
        end: The weight at the end of the run, in [0, 1]. It does not change with the length of the run, which makes it
            the better choice for a search. Smaller values trust the public data more. Default None.
        K: The time at which the weight reaches 0, above 0 and finite. Use it to repeat a published schedule. Default
            None.
        unit: The unit of t and `K`: "epoch", which is 1 / sampling_rate steps, or "step". Default "epoch". Ignored
            with `end`.

    Returns:
        A function of a `Clock`, for `FirstOrder`.

    Raises:
        ConfigError: If both or neither of `end` and `K` are given, or one is out of range.

    Example:
        >>> round(cosine(end=0.8)(Clock(step=10, total_steps=10)), 6)
        0.8
        >>> round(cosine(K=100, unit="epoch")(Clock(step=500, total_steps=1000, steps_per_epoch=10)), 4)
        0.7071
        >>> cosine(K=5, unit="step")(Clock(step=7, total_steps=10))
        0.0

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193,
        section 5
    """
    return Cosine(end=end, K=K, unit=unit)


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    """The learning rate of one cycle: up along half a cosine, then down along another, as a share of its peak.

    With s the share of the training that is over and w = `warm_up`, the rate is ``start + (1 - start) (1 - cos(pi s /
    w)) / 2`` up to s = w, and ``end + (1 - end) (1 + cos(pi (s - w) / (1 - w))) / 2`` after it. It is a function of
    public constants, for the `schedule` of `pretrain`.

    Args:
        warm_up: The share of the training in which the rate rises, in [0, 1). Default 0.2. Raise it if the loss
            diverges in the first epochs.
        start: The rate at the start, as a share of the peak, in [0, 1]. Default 0.04.
        end: The rate at the end, as a share of the peak, in [0, 1]. Default 0.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> [round(OneCycle()(share), 3) for share in (0.0, 0.1, 0.2, 0.6, 1.0)]
        [0.04, 0.52, 1.0, 0.5, 0.0]

    References:
        Smith and Topin, *Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates*, 2017,
        arXiv:1708.07120
    """

    warm_up: float = 0.2
    start: float = 0.04
    end: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.warm_up < 1, "warm_up", self.warm_up, "in [0, 1)")
        require(0 <= self.start <= 1, "start", self.start, "in [0, 1]")
        require(0 <= self.end <= 1, "end", self.end, "in [0, 1]")

    def __call__(self, share: float) -> float:
        if share < self.warm_up:
            return self.start + 1 - falling(share / self.warm_up, self.start)
        return falling((share - self.warm_up) / (1 - self.warm_up), self.end)


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
