"""`PrivacyPlan`: one frozen value that fixes sampling, clipping, noise and therefore the DP event."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import dp_accounting as dpa

from halfsilver.errors import ConfigError, require
from halfsilver.privacy.accounting import PLD_INTERVAL, Accountant, MechanismCount, epsilon_of

Unit = Literal["example", "user"]

_SIGMA_RANGE = (1e-2, 1e6)


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What will be done to the private data, and hence what it costs.

    Guarantee: a run of at most ``steps + spare_steps`` releases, each the sum over a Poisson sample (rate
    ``sampling_rate``; all rows when it is 1) of gradients clipped to ``max_grad_norm``, plus Gaussian noise of standard
    deviation ``noise_multiplier * max_grad_norm``, is (epsilon(delta), delta)-DP under adding or removing one `unit`.

    ``expected_batch_size`` is a public constant that you declare. It only scales the update, and it is never compared
    with, or computed from, the size of the private set.

    >>> plan = PrivacyPlan(steps=9600, sampling_rate=500 / 48_000, expected_batch_size=500, noise_multiplier=1.51)
    >>> round(plan.epsilon(1e-5), 2)
    3.23
    """

    steps: int
    sampling_rate: float
    expected_batch_size: float
    noise_multiplier: float
    max_grad_norm: float = 1.0
    unit: Unit = "example"
    spare_steps: int = 0

    def __post_init__(self) -> None:
        require(_whole(self.steps) and self.steps >= 1, "steps", self.steps, "to be a whole number >= 1")
        require(
            _whole(self.spare_steps) and self.spare_steps >= 0,
            "spare_steps",
            self.spare_steps,
            ">= 0 and whole",
        )
        rate = "It is the chance of a record to be in a batch: the batch size over the number of records."
        require(0 < self.sampling_rate <= 1, "sampling_rate", self.sampling_rate, "in (0, 1]", rate)
        for name in ("expected_batch_size", "noise_multiplier", "max_grad_norm"):
            value = getattr(self, name)
            require(0 < value <= sys.float_info.max, name, value, "in (0, inf)")  # a whole number may be beyond
        require(self.unit in ("example", "user"), "unit", self.unit, "in ('example', 'user')")

    @property
    def population(self) -> float:
        """How many units the declared constants speak of: expected_batch_size / sampling_rate. Nobody counts them."""
        return self.expected_batch_size / self.sampling_rate

    def check_delta(self, delta: float) -> None:
        """Refuse a delta above 1 / population: publishing one record in full, drawn at random, would be within it."""
        require(0 < delta < 1, "delta", delta, "in (0, 1)")
        hint = (
            f"The plan speaks of {self.population:.6g} {self.unit}s; with more, a guarantee would allow to publish one."
        )
        require(delta * self.population <= 1 + 1e-9, "delta", delta, f"at most {1 / self.population:.3g}", hint)

    @property
    def sampler(self) -> str:
        return "poisson" if self.sampling_rate < 1 else "full"

    @property
    def max_releases(self) -> int:
        """No run of this plan touches the private data more often than this, crashes included."""
        return self.steps + self.spare_steps

    def count(self, steps: int | None = None) -> MechanismCount:
        """`steps` (default: all planned) of this plan's mechanism, for the accountant."""
        return MechanismCount(
            noise_multiplier=self.noise_multiplier,
            sampling_rate=self.sampling_rate,
            count=self.max_releases if steps is None else steps,
        )

    def event(self) -> dpa.DpEvent:
        """The whole run as dp-accounting's own type, so that others can check it."""
        return self.count().event()

    def epsilon(self, delta: float, accountant: Accountant = "pld") -> float:
        """Epsilon of all planned steps, spare ones included."""
        return epsilon_of([self.count()], delta, accountant)

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        delta: float,
        steps: int,
        sampling_rate: float,
        expected_batch_size: float,
        max_grad_norm: float = 1.0,
        unit: Unit = "example",
        spare_steps: int = 0,
        accountant: Accountant = "pld",
    ) -> PrivacyPlan:
        """The plan with the least noise (to 0.01 %) whose epsilon is at most `epsilon`; never above it."""
        require(math.isfinite(epsilon) and epsilon > 0, "epsilon", epsilon, "in (0, inf)")
        base = cls(
            steps=steps,
            sampling_rate=sampling_rate,
            expected_batch_size=expected_batch_size,
            noise_multiplier=1.0,
            max_grad_norm=max_grad_norm,
            unit=unit,
            spare_steps=spare_steps,
        )
        base.check_delta(delta)
        # Cheap accountants, never below the exact one, find the neighbourhood for the dear ones.
        stages: list[tuple[Accountant, float]] = [("rdp", 0.0), ("pld", 1e-3), ("pld", PLD_INTERVAL)]
        sigma, step = 1.0, 1.1
        for name, interval in stages[:1] if accountant == "rdp" else stages:

            def at(s: float, name: Accountant = name, interval: float = interval) -> float:
                return epsilon_of([replace(base, noise_multiplier=s).count()], delta, name, interval=interval)

            sigma, step = _least_noise(at, epsilon, start=sigma, step=step), 1 + (step - 1) / 10
        return replace(base, noise_multiplier=sigma)

    @classmethod
    def closed_form(
        cls,
        *,
        epsilon: float,
        delta: float,
        steps: int,
        expected_batch_size: float,
        max_grad_norm: float = 1.0,
    ) -> PrivacyPlan:
        """Algorithm 1's own noise, ``sigma^2 = 8 L^2 T log(1/delta) / (epsilon n)^2`` on the mean gradient.

        Full batch only. On the *sum*, in units of L, that is ``sqrt(8 T log(1/delta)) / epsilon``. It is checkable by
        hand and about twice as much noise as `calibrate` finds necessary.

        >>> plan = PrivacyPlan.closed_form(epsilon=1.0, delta=1e-5, steps=100, expected_batch_size=10_000)
        >>> plan.epsilon(1e-5) < 1.0
        True
        """
        require(math.isfinite(epsilon) and epsilon > 0, "epsilon", epsilon, "in (0, inf)")
        require(0 < delta < 1, "delta", delta, "in (0, 1)")
        sigma = math.sqrt(8 * steps * math.log(1 / delta)) / epsilon
        plan = cls(
            steps=steps,
            sampling_rate=1.0,
            expected_batch_size=expected_batch_size,
            noise_multiplier=sigma,
            max_grad_norm=max_grad_norm,
        )
        if plan.epsilon(delta) > epsilon:
            raise ConfigError(f"The closed form does not reach epsilon={epsilon} at delta={delta}; use calibrate().")
        return plan

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        names = {f.name for f in fields(cls)}
        require(set(values) <= names, "plan fields", sorted(set(values) - names), f"to be among {sorted(names)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"Not a privacy plan: {error}.") from error

    def fingerprint(self) -> str:
        """sha256 of the plan; ledger and checkpoint carry it."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _least_noise(
    epsilon_at: Callable[[float], float], target: float, *, start: float, step: float, tolerance: float = 1e-4
) -> float:
    """The smallest noise multiplier whose epsilon is at most `target`, from above, to a relative `tolerance`.

    log(epsilon) is nearly straight in log(sigma), so interpolation lands within the tolerance in a few evaluations; a
    point on either side of the guess then closes the bracket. The upper end always has an epsilon that was computed.
    """
    known = _bracket(epsilon_at, target, start, step)
    while True:
        low = max(s for s, e in known.items() if e > target)
        high = min(s for s, e in known.items() if e <= target)
        if high <= low * (1 + tolerance):
            return high
        guess = _interpolate((low, known[low]), (high, known[high]), target)
        middle = math.sqrt(low * high)  # keeps halving the bracket where the curve is not straight
        nudge = 1 + tolerance / 3
        points = (guess / nudge, guess * nudge) if len(known) < 12 else (middle,)
        known |= {s: epsilon_at(s) for s in points if low < s < high} or {middle: epsilon_at(middle)}


def _interpolate(low: tuple[float, float], high: tuple[float, float], target: float) -> float:
    (s0, e0), (s1, e1) = low, high
    e1 = max(e1, 1e-12)
    share = (math.log(e0) - math.log(target)) / (math.log(e0) - math.log(e1))
    return math.exp(math.log(s0) + share * (math.log(s1) - math.log(s0)))


def _bracket(epsilon_at: Callable[[float], float], target: float, start: float, step: float) -> dict[float, float]:
    """Evaluated noise multipliers, at least one above the target epsilon and one at or below it."""
    known = {start: epsilon_at(start)}
    factor = step if known[start] > target else 1 / step
    sigma = start
    while (known[sigma] > target) == (factor > 1):
        sigma = min(max(sigma * factor, _SIGMA_RANGE[0]), _SIGMA_RANGE[1])
        if sigma in known:
            raise ConfigError(
                f"No noise_multiplier in {_SIGMA_RANGE} meets epsilon={target} closely; "
                "change the number of steps or the sampling rate."
            )
        known[sigma] = epsilon_at(sigma)
        factor *= factor
    return known
