"""`Selection`: what it costs to train a random number of runs and to publish the best one alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any, ClassVar

from halfsilver.errors import require
from halfsilver.privacy.accounting import Accountant, MechanismCount, Trials, epsilon_of
from halfsilver.privacy.entropy import Entropy
from halfsilver.privacy.plan import PrivacyPlan, Unit, least_noise

_MOST_TRIALS = 1000.0
_MOST_ETA = 10.0
_DIGITS = 50  # of the chances of K; the bits of a draw are fewer
_BITS = 126
_NEVER = Decimal("1e-45")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A random number K of runs of one plan, of which only the best is published.

    K has the truncated negative binomial distribution on 1, 2, 3, ...:

        P[K = k] = (1 - gamma)^k / (gamma^-eta - 1) * prod_{l=0}^{k-1} (l + eta) / (l + 1),

    where gamma in (0, 1) is such that the mean is `trials`. For eta = 0 it is the logarithmic distribution
    P[K = k] = (1 - gamma)^k / (k log(1 / gamma)), and for eta = 1 the geometric one.

    Guarantee: let one run be (lambda, r(lambda))-RDP for every order lambda. Then the best of K independent runs, by a
    score that is computed from public rows and the model, is RDP of every order lambda > 1 with

        r(lambda) + (1 + eta) min_h [ (1 - 1/h) r(h) + log(1 / gamma) / h ] + log(E[K]) / (lambda - 1),

    as long as neither K nor any other run becomes known. No other accountant than RDP is known to cover this.

    Args:
        each: The plan of one run.
        trials: The expected number of runs, E[K], above 1 and at most 1000. The actual number varies widely; see
            `quantile`.
        eta: The shape of the distribution, in [0, 10]. Default 0, which costs least. A larger one makes very few and
            very many runs rarer, and costs more.

    Raises:
        ConfigError: If a value is out of range.

    References:
        - Papernot and Steinke 2022, Hyperparameter Tuning with Renyi Differential Privacy, arXiv:2110.03620,
          Definition 1 and Theorem 2.

    Example:
        >>> from halfsilver import PrivacyPlan
        >>> from halfsilver.privacy.selection import Selection
        >>> each = PrivacyPlan(
        ...     steps=1000, sampling_rate=0.01, expected_batch_size=500, noise_multiplier=1.5132, delta=1e-5
        ... )
        >>> round(each.epsilon(accountant="rdp"), 2), round(Selection(each=each, trials=10).epsilon(), 2)
        (1.0, 1.76)
    """

    each: PrivacyPlan
    trials: float
    eta: float = 0.0

    accountants: ClassVar[tuple[Accountant, ...]] = ("rdp",)
    steps: ClassVar[int] = 1  # the whole selection is one step of the ledger
    max_releases: ClassVar[int] = 1

    def __post_init__(self) -> None:
        require(isinstance(self.each, PrivacyPlan), "each", self.each, "to be a PrivacyPlan, that of one run")
        require(1 < self.trials <= _MOST_TRIALS, "trials", self.trials, f"in (1, {_MOST_TRIALS:g}]")
        require(0 <= self.eta <= _MOST_ETA, "eta", self.eta, f"in [0, {_MOST_ETA:g}]")
        object.__setattr__(self, "trials", float(self.trials))
        object.__setattr__(self, "eta", float(self.eta))

    @property
    def gamma(self) -> float:
        """The parameter of the distribution, in (0, 1). The mean at it is at most `trials`."""
        return math.exp(-_log_gamma(self.trials, self.eta))

    @property
    def delta(self) -> float | None:
        """That of the plan of one run."""
        return self.each.delta

    @property
    def unit(self) -> Unit:
        return self.each.unit

    @property
    def sampler(self) -> str:
        return self.each.sampler

    @property
    def population(self) -> float:
        return self.each.population

    def check_delta(self, delta: float) -> None:
        """Refuse a `delta` above 1 / population, as `PrivacyPlan.check_delta` does.

        Args:
            delta: The delta of the statement.

        Raises:
            ConfigError: `delta` is outside (0, 1), or above 1 / population.
        """
        self.each.check_delta(delta)

    def count(self, selections: int | None = None) -> MechanismCount:
        """The selection, so many times, as the accountant takes it.

        Args:
            selections: How many (default: one).
        """
        trials = Trials(self.each.count().count, self.trials, self.eta)
        return replace(self.each.count(), count=1 if selections is None else selections, trials=trials)

    def epsilon(self, delta: float | None = None, accountant: Accountant = "rdp") -> float:
        """Epsilon of the whole selection, whatever K is.

        Args:
            delta: In (0, 1) (default: that of the plan of one run).
            accountant: Only "rdp" can count a selection.

        Raises:
            ConfigError: No `delta` is given and the plan has none, or the accountant is another.
        """
        return epsilon_of([self.count()], self.each.delta_or(delta), accountant)

    def quantile(self, share: float) -> int:
        """The number of runs that is not exceeded with a given probability: how long a selection may take.

        Args:
            share: The probability, in (0, 1).

        Returns:
            The smallest k with P[K <= k] >= share.
        """
        require(0 < share < 1, "share", share, "in (0, 1)")
        return self._first_at(Decimal(share))

    def draw(self, entropy: Entropy) -> int:
        """Draw K. Its distribution is within 1e-30 of the one above in total variation.

        Args:
            entropy: Where the randomness comes from.
        """
        with localcontext(prec=_DIGITS):
            share = (_bits(entropy) + 1) / Decimal(2**_BITS)  # in (0, 1]
        return self._first_at(share)

    def draw_setting(self, settings: int, entropy: Entropy) -> int:
        """Draw one of so many settings uniformly, to within 2^-100.

        Args:
            settings: How many there are, at least 1.
            entropy: Where the randomness comes from.
        """
        return _bits(entropy) * settings >> _BITS

    def _first_at(self, share: Decimal) -> int:
        with localcontext(prec=_DIGITS):
            total = Decimal(0)
            for k, chance in enumerate(self._chances(), start=1):
                total += chance
                # The chances fall at least geometrically by then, so what follows is out of reach of any draw.
                if total >= share or chance < _NEVER:
                    return k
        raise AssertionError("the chances never end")

    def _chances(self) -> Iterator[Decimal]:
        """P[K = 1], P[K = 2], ..., each from the one before."""
        chance, shrink, eta = _first_chance(self.gamma, self.eta), 1 - Decimal(self.gamma), Decimal(self.eta)
        for k in itertools.count(1):
            yield chance
            chance *= shrink * (k + eta) / (k + 1)

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        delta: float,
        trials: float,
        population: float,
        batch_size: float,
        epochs: float | None = None,
        steps: int | None = None,
        max_grad_norm: float = 1.0,
        unit: Unit = "example",
        spare_steps: int | None = None,
        eta: float = 0.0,
    ) -> Selection:
        """The selection with the least noise in each run whose epsilon, for everything together, is at most `epsilon`.

        Args:
            epsilon: The most that the whole selection may spend, above 0.
            delta: Probability with which the bound may fail, below 1 / population.
            trials: The expected number of runs, above 1 and at most 1000.
            population: The declared number of private units. See `PrivacyPlan.calibrate`.
            batch_size: Expected number of units per step, at most `population`.
            epochs: How often each unit is drawn on average in one run. Give this or `steps`.
            steps: Number of updates of one run. Give this or `epochs`.
            max_grad_norm: Clip norm. It does not change epsilon, so it may be one of the settings.
            unit: "example" or "user".
            spare_steps: Releases of one run that are kept in hand for repeats after a crash. A run that lacks them
                cannot be resumed, and the selection would have to be paid for again (default: one per 50 steps).
            eta: The shape of the distribution, in [0, 10].

        Returns:
            The selection. Give its `each` to the trainers.

        Raises:
            ConfigError: A value is out of its range, or no noise multiplier in [0.01, 1e6] reaches `epsilon`.

        Example:
            >>> from halfsilver.privacy.selection import Selection
            >>> plan = Selection.calibrate(epsilon=2, delta=1e-5, trials=10, population=1200, batch_size=120, steps=50)
            >>> plan.epsilon() <= 2, plan.each.epsilon() < 1.1
            (True, True)
        """
        each = PrivacyPlan.calibrate(
            epsilon=epsilon,
            delta=delta,
            population=population,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            max_grad_norm=max_grad_norm,
            unit=unit,
            spare_steps=spare_steps,
            accountant="rdp",
        )

        def of(sigma: float) -> Selection:
            return cls(each=replace(each, noise_multiplier=sigma), trials=trials, eta=eta)

        return of(least_noise(lambda s: of(s).epsilon(), epsilon, start=each.noise_multiplier, step=1.5))

    def to_dict(self) -> dict[str, Any]:
        """The plan of one run as JSON, with `trials` and `eta` beside its fields."""
        return {**self.each.to_dict(), "trials": self.trials, "eta": self.eta}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Selection:
        """The selection that `to_dict` wrote.

        Args:
            values: What `to_dict` returned.

        Raises:
            ConfigError: A field is missing, unknown or out of its range.
        """
        rest = dict(values)
        own = {name: rest.pop(name, None) for name in ("trials", "eta")}
        for name, value in own.items():
            require(type(value) is float, name, value, "to be a number")
        return cls(each=PrivacyPlan.from_dict(rest), **own)

    def fingerprint(self) -> str:
        """sha256 of the selection; ledger and checkpoint carry it."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


Plan = PrivacyPlan | Selection


def plan_from_dict(values: Mapping[str, Any]) -> Plan:
    """What `to_dict` of a plan or of a selection wrote. Versions that know no selections refuse its fields."""
    return (Selection if "trials" in values else PrivacyPlan).from_dict(values)


@lru_cache(maxsize=64)
def _first_chance(gamma: float, eta: float) -> Decimal:
    """P[K = 1]."""
    with localcontext(prec=_DIGITS):
        g, shape = Decimal(gamma), Decimal(eta)
        return (1 - g) / -g.ln() if eta == 0 else shape * (1 - g) / (g**-shape - 1)


def _bits(entropy: Entropy) -> int:
    """Uniform on 0 .. 2^126 - 1."""
    high, low = (int(word) & (2**63 - 1) for word in entropy.words(2))
    return high << 63 | low


@lru_cache(maxsize=64)
def _log_gamma(trials: float, eta: float) -> float:
    """x = log(1 / gamma), from below: there the mean is at most `trials`.

    The mean is (e^x - 1) / x for eta = 0, and eta (e^x - 1) / (1 - e^(-eta x)) otherwise. It grows with x.
    """

    def mean(x: float) -> float:
        return math.expm1(x) / x if eta == 0 else eta * math.expm1(x) / -math.expm1(-eta * x)

    low, high = 0.0, 50.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if mean(middle) <= trials else (low, middle)
    return low
