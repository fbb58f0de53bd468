"""`PrivacyPlan`: one frozen value that fixes sampling, clipping, noise and therefore the DP event."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from halfsilver.errors import ConfigError, require, require_numbers
from halfsilver.privacy.accounting import PLD_INTERVAL, Accountant, MechanismCount, epsilon_of
from halfsilver.privacy.strategies import INDEPENDENT, Correlated, Independent, Noise

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Unit = Literal["example", "user"]

_SIGMA_RANGE = (1e-2, 1e6)
_STEPS_PER_SPARE = 50  # 2 % more steps need at most 1 % more noise


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What will be done to the private data, and hence what it costs: sampling, clipping, noise and number of steps.

    A step draws a Poisson sample S of the private units, each with probability q, and releases

        ( sum_{i in S} clip(g_i, C) + N(0, (sigma C)^2 I) ) / B,

    where g_i is the gradient of unit i, C is `max_grad_norm`, sigma `noise_multiplier`, q `sampling_rate` and B
    `expected_batch_size`. With q = 1 every step takes all units. `calibrate` makes a plan from an epsilon, and is the
    usual way to get one; use the constructor where the noise is known. With `noise=Correlated(...)` no sample is drawn,
    and the noise of the steps is correlated: see there.

    Guarantee: a run of at most ``steps + spare_steps`` such releases is (epsilon(delta), delta)-DP under adding or
    removing one `unit`. The bound is that of the composition of subsampled Gaussian mechanisms, computed by privacy
    loss distributions (PLD) and rounded up.

    Args:
        steps: Number of updates, at least 1.
        sampling_rate: Probability, in (0, 1], that a unit takes part in a step: batch size over population.
        expected_batch_size: The public constant B that divides the noisy sum, above 0. It only scales the update. It
            is never compared with, or computed from, the size of the private set.
        noise_multiplier: Standard deviation of the noise over the clip norm, above 0. With correlated noise, that of
            the whole run over how far one unit can move all of it.
        max_grad_norm: Clip norm C, in units of the loss's gradient, above 0. Too small a value slows training down,
            too large a value adds noise. Default: 1.
        unit: Whose presence the guarantee hides: "example", or "user" where a record belongs to a person with several.
        spare_steps: Further releases that the plan pays for, so that a run which was killed can repeat those whose
            result was lost. They raise epsilon. Default: 0.
        noise: `Independent()` or `Correlated(...)`. Default: independent.
        delta: The delta at which epsilon is stated, below 1 / population. `calibrate` sets it. It is no part of the
            mechanism: plans that differ in delta alone are equal, and files store delta beside the plan.

    Raises:
        ConfigError: A value is out of its range.

    References:
        Abadi et al. (2016), Deep Learning with Differential Privacy, arXiv:1607.00133.
        Koskela et al. (2020), Computing Tight Differential Privacy Guarantees Using FFT, arXiv:1906.03049.

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
    noise: Noise = INDEPENDENT
    delta: float | None = field(default=None, compare=False)

    accountants: ClassVar[tuple[Accountant, ...]] = ("pld", "rdp")  # that can count it, the one to publish first

    def __post_init__(self) -> None:
        require(_whole(self.steps) and self.steps >= 1, "steps", self.steps, "to be a whole number >= 1")
        require(
            _whole(self.spare_steps) and self.spare_steps >= 0,
            "spare_steps",
            self.spare_steps,
            ">= 0 and whole",
        )
        names = ("sampling_rate", "expected_batch_size", "noise_multiplier", "max_grad_norm", "delta")
        require_numbers(**{name: getattr(self, name) for name in names})
        rate = "It is the chance of a record to be in a batch: the batch size over the number of records."
        require(0 < self.sampling_rate <= 1, "sampling_rate", self.sampling_rate, "in (0, 1]", rate)
        for name in ("expected_batch_size", "noise_multiplier", "max_grad_norm"):
            value = getattr(self, name)
            require(0 < value <= sys.float_info.max, name, value, "in (0, inf)")  # a whole number may be beyond
        require(self.unit in ("example", "user"), "unit", self.unit, "in ('example', 'user')")
        require(isinstance(self.noise, Noise), "noise", self.noise, "to be Independent() or Correlated(...)")
        if isinstance(self.noise, Correlated):
            least, found = self.noise.participation(self.max_releases).separation, self.batches_per_pass
            require(self.noise.strategy is not None, "strategy", None, "to be given, or found by PrivacyPlan.calibrate")
            require(least <= found, "separation", least, f"at most {found}, the number of batches in a pass")
        if self.delta is not None:
            self.check_delta(self.delta)

    @property
    def batches_per_pass(self) -> int:
        """The number of whole batches in the population."""
        return _batches_per_pass(self.sampling_rate)

    @property
    def population(self) -> float:
        """The declared number of units, expected_batch_size / sampling_rate. The library never counts them."""
        return self.expected_batch_size / self.sampling_rate

    def check_delta(self, delta: float) -> None:
        """Refuse a `delta` (a probability) above 1 / population.

        Such a guarantee would allow a mechanism that publishes one random record in full.

        Args:
            delta: The delta of the statement.

        Raises:
            ConfigError: `delta` is outside (0, 1), or above 1 / population.
        """
        require(0 < delta < 1, "delta", delta, "in (0, 1)")
        hint = f"The plan declares {self.population:.6g} {self.unit}s; a larger delta would allow to publish one."
        require(delta * self.population <= 1 + 1e-9, "delta", delta, f"at most {1 / self.population:.3g}", hint)

    @property
    def sampler(self) -> str:
        if isinstance(self.noise, Correlated):
            return "separated"
        return "poisson" if self.sampling_rate < 1 else "full"

    @property
    def max_releases(self) -> int:
        """No run of this plan touches the private data more often than this, crashes included."""
        return self.steps + self.spare_steps

    @property
    def step_noise(self) -> float:
        """Standard deviation of the noise that a step draws anew, over the clip norm."""
        if isinstance(self.noise, Independent):
            return self.noise_multiplier
        from halfsilver.privacy.noise_chain import rounding

        return self.noise_multiplier * self.noise.sensitivity(self.max_releases) * rounding(self.max_releases)

    def sum_noise(self) -> float:
        """The noise in the sum of all releases so far: the root mean square over steps of its standard deviation.

        Returns:
            A number in clip norms over the batch size. It tells which of two plans leaves less noise in a model that
            adds up releases, as SGD with a constant learning rate does.

        Example:
            >>> plan = PrivacyPlan(steps=3, sampling_rate=1.0, expected_batch_size=10, noise_multiplier=2.0)
            >>> round(plan.sum_noise() ** 2, 6)  # 4, 8 and 12
            8.0
        """
        if isinstance(self.noise, Independent):
            return self.noise_multiplier * math.sqrt((self.steps + 1) / 2)
        from halfsilver.privacy.correlated import inverse, sum_lengths

        return self.step_noise * float(sum_lengths(inverse(self.noise.coefficients.column(self.steps))))

    def sampled(self) -> PrivacyPlan:
        """The plan with Poisson samples and independent noise that has the same epsilon, for comparison.

        Returns:
            A plan with the same steps, batch and clip norm.

        Raises:
            ConfigError: This plan has no delta.
        """
        return replace(self, noise=INDEPENDENT).with_least_noise(self.epsilon())

    def count(self, steps: int | None = None) -> MechanismCount:
        """The plan's mechanism, so many times, as the accountant takes it. A run with correlated noise is one.

        Args:
            steps: Number of releases (default: all that the plan allows, spare ones included).
        """
        if isinstance(self.noise, Correlated):
            once = 1 if steps is None or steps > 0 else 0
            return MechanismCount(noise_multiplier=self.noise_multiplier, sampling_rate=1.0, count=once)
        return MechanismCount(
            noise_multiplier=self.noise_multiplier,
            sampling_rate=self.sampling_rate,
            count=self.max_releases if steps is None else steps,
        )

    def event(self) -> DpEvent:
        """The whole run as a value of dp-accounting, so that others can check it."""
        return self.count().event()

    def epsilon(self, delta: float | None = None, accountant: Accountant = "pld") -> float:
        """Epsilon of all planned steps, spare ones included.

        Args:
            delta: In (0, 1) (default: the delta that the plan was calibrated for).
            accountant: "pld" is tight, and what to publish. "rdp" gives the larger figure of Renyi DP, to compare with
                papers that used it.

        Raises:
            ConfigError: No `delta` is given and the plan has none.
        """
        return epsilon_of([self.count()], self.delta_or(delta), accountant)

    def delta_or(self, delta: float | None) -> float:
        """The given delta or, where it is None, the plan's own.

        Args:
            delta: A probability in (0, 1), or None.

        Returns:
            The delta to use.

        Raises:
            ConfigError: If both are None.
        """
        if delta is None and self.delta is None:
            raise ConfigError(
                "Expected a delta, since this plan has none. Write epsilon(delta=1e-5) or PrivacyPlan(delta=1e-5)."
            )
        return delta if delta is not None else self.delta  # type: ignore[return-value] # one of them is a number

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        delta: float,
        population: float | None = None,
        batch_size: float | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        max_grad_norm: float = 1.0,
        unit: Unit = "example",
        spare_steps: int | None = None,
        accountant: Accountant = "pld",
        after: Sequence[PrivacyPlan] = (),
        noise: Noise = INDEPENDENT,
        sampling_rate: float | None = None,
        expected_batch_size: float | None = None,
    ) -> PrivacyPlan:
        """The plan with the least noise whose epsilon is at most `epsilon`.

        The noise multiplier is the smallest one to within 0.01 %, approached from above, so epsilon is never exceeded.

        Args:
            epsilon: The most that the run may spend, above 0. About 1 is strong, 8 is common in practice.
            delta: Probability with which the bound may fail, below 1 / population. A tenth of that is a usual choice.
                The plan keeps it: `fit`, `epsilon()`, statement and report use it.
            population: The number of private units (examples or users) that you declare. Round it, because it becomes
                public. The library never counts the private set.
            batch_size: Expected number of units per step, at most `population`. Larger batches need more noise per
                step but less in total. `batch_size=population` uses all units in every step.
            epochs: How often each unit is drawn on average. Give this or `steps`.
            steps: Number of updates. Give this or `epochs`.
            max_grad_norm: Clip norm. It does not change epsilon. See `PrivacyPlan`.
            unit: "example" or "user".
            spare_steps: Releases kept in hand for repeats after a crash, which raise the noise as further steps would.
                Steps that are not repeated are not spent, so a run that nobody kills ends a little below `epsilon`
                (default: one per 50 steps; none with correlated noise, where they are spent in any case).
            accountant: "pld" (tight) or "rdp" (for comparison with papers that used it).
            after: Plans of runs on the same private data that come first. All of them together with this one spend at
                most `epsilon` (default: none).
            noise: `Independent()` (default) or `Correlated()`, whose separation and coefficients are found here.
            sampling_rate: Deprecated, goes in 0.3. Say `population` and `batch_size`.
            expected_batch_size: Deprecated, goes in 0.3. Say `batch_size`.

        Returns:
            The plan, with `delta`.

        Raises:
            ConfigError: A value is out of its range, or no noise multiplier in [0.01, 1e6] reaches `epsilon`.

        >>> plan = PrivacyPlan.calibrate(epsilon=2, delta=1e-5, population=1200, batch_size=120, epochs=10)
        >>> plan.steps, plan.sampling_rate, plan.epsilon() <= 2
        (100, 0.1, True)
        """
        if sampling_rate is not None or expected_batch_size is not None:
            warnings.warn(
                "PrivacyPlan.calibrate(sampling_rate=, expected_batch_size=) goes in version 0.3. Write "
                "calibrate(population=, batch_size=, epochs= or steps=); sampling_rate is batch_size / population.",
                DeprecationWarning,
                stacklevel=2,
            )
            require(population is None and batch_size is None, "population", population, "not to go with sampling_rate")
            rate, batch = sampling_rate, expected_batch_size
            if rate is None or batch is None:
                raise ConfigError("Expected sampling_rate and expected_batch_size together.")
        else:
            require_numbers(population=population, batch_size=batch_size, epochs=epochs, steps=steps)
            if population is None or batch_size is None:
                raise ConfigError(f"Expected population={population} and batch_size={batch_size} to be numbers.")
            require(population >= 1, "population", population, "at least 1")
            require(0 < batch_size <= population, "batch_size", batch_size, f"in (0, {population:g}], the population")
            rate, batch = batch_size / population, float(batch_size)
        if (epochs is None) == (steps is None):
            raise ConfigError(f"Expected either epochs or steps, got epochs={epochs} and steps={steps}.")
        if steps is None:
            assert epochs is not None
            require(0 < epochs < math.inf, "epochs", epochs, "above 0")
            steps = max(1, round(epochs / rate))
        if spare_steps is None:
            without = isinstance(noise, Correlated) or not _whole(steps)
            spare_steps = 0 if without else max(0, steps) // _STEPS_PER_SPARE
        if isinstance(noise, Correlated):
            noise = noise.fitted(steps + spare_steps, _batches_per_pass(rate))
        base = cls(
            steps=steps,
            sampling_rate=rate,
            expected_batch_size=batch,
            noise_multiplier=1.0,
            max_grad_norm=max_grad_norm,
            unit=unit,
            spare_steps=spare_steps,
            noise=noise,
            delta=delta,
        )
        return base.with_least_noise(epsilon, accountant, after)

    def with_least_noise(
        self, epsilon: float, accountant: Accountant = "pld", after: Sequence[PrivacyPlan] = ()
    ) -> PrivacyPlan:
        """The same plan with the smallest noise multiplier whose epsilon, at the plan's delta, is at most `epsilon`.

        Args:
            epsilon: Above 0.
            accountant: "pld" or "rdp".
            after: Plans of runs on the same private data that come first, whose epsilon is part of `epsilon`.
        """
        require_numbers(epsilon=epsilon)
        require(math.isfinite(epsilon) and epsilon > 0, "epsilon", epsilon, "in (0, inf)")
        delta, before = self.delta_or(None), [plan.count() for plan in after]
        if before:
            require(all(plan.unit == self.unit for plan in after), "unit", self.unit, "that of the plans in after")
            spent = epsilon_of(before, delta, accountant)
            require(spent < epsilon, "epsilon of the plans in after", spent, f"below epsilon={epsilon:g}")
        # A coarse PLD is a cheap upper bound, from which the fine search begins, and mostly where it ends.
        intervals = (0.0,) if accountant == "rdp" else (1e-3, PLD_INTERVAL)
        sigma, step = 1.0, 1.1
        for interval in intervals:

            def at(s: float, interval: float = interval) -> float:
                counts = [*before, replace(self, noise_multiplier=s).count()]
                return epsilon_of(counts, delta, accountant, interval=interval)

            tolerance = 1e-4 if interval == intervals[-1] else 3e-5
            sigma = least_noise(at, epsilon, start=sigma, step=step, tolerance=tolerance)
            step = 1 + (step - 1) / 10
        return replace(self, noise_multiplier=sigma)

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
        """The noise of Algorithm 1 in Amid et al. (2022), which can be checked by hand. Full batch only.

        ``sigma^2 = 8 L^2 T log(1/delta) / (epsilon n)^2`` on the mean gradient, which on the *sum*, in units of the
        clip norm L, is ``sqrt(8 T log(1/delta)) / epsilon``. `calibrate` needs about half as much noise.

        Args:
            epsilon: The most that the run may spend, above 0.
            delta: In (0, 1).
            steps: Number of updates T.
            expected_batch_size: The declared number of private units n.
            max_grad_norm: Clip norm L.

        Raises:
            ConfigError: The bound does not hold for these numbers, which happens for a large epsilon.

        References:
            Amid et al. (2022), Public Data-Assisted Mirror Descent for Private Model Training, arXiv:2112.00193.

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
            delta=delta,
        )
        if plan.epsilon() > epsilon:
            raise ConfigError(f"The closed form does not reach epsilon={epsilon} at delta={delta}; use calibrate().")
        return plan

    def to_dict(self) -> dict[str, Any]:
        """The mechanism as JSON, without delta, which files store beside it; and without noise that is independent."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("noise", "delta")}
        return {**plain, "noise": self.noise.to_dict()} if isinstance(self.noise, Correlated) else plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPlan:
        """The plan that `to_dict` wrote.

        Args:
            values: What `to_dict` returned.

        Raises:
            ConfigError: A field is missing, unknown or out of its range.
        """
        names = {f.name for f in fields(cls)} - {"delta"}
        require(set(values) <= names, "plan fields", sorted(set(values) - names), f"to be among {sorted(names)}")
        try:
            noise = {"noise": Correlated.from_dict(values["noise"])} if "noise" in values else {}
            return cls(**{**values, **noise})
        except TypeError as error:
            raise ConfigError(f"Not a privacy plan: {error}.") from error

    def fingerprint(self) -> str:
        """sha256 of the plan; ledger and checkpoint carry it."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def _batches_per_pass(rate: float) -> int:
    return max(1, math.floor(1 / rate + 1e-9))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def least_noise(
    epsilon_at: Callable[[float], float], target: float, *, start: float, step: float, tolerance: float = 1e-4
) -> float:
    """The smallest noise multiplier whose epsilon is at most `target`, from above, to a relative `tolerance` of either.

    log(epsilon) is nearly straight in log(sigma), so interpolation lands within the tolerance in a few evaluations; a
    point on either side of the guess then closes the bracket. The upper end always has an epsilon that was computed.
    """
    known = {start: epsilon_at(start)}
    if (1 - tolerance) * target <= known[start] <= target:
        return start
    known = _bracket(epsilon_at, target, known, step)
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


def _bracket(
    epsilon_at: Callable[[float], float], target: float, known: dict[float, float], step: float
) -> dict[float, float]:
    """Evaluated noise multipliers, at least one above the target epsilon and one at or below it."""
    (sigma,) = known
    factor = step if known[sigma] > target else 1 / step
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
