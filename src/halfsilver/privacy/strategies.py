"""How the noise of a step depends on that of earlier steps: values that a plan holds. `correlated` computes with them.

Torch is imported where it is needed, because a plan without a model should not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

from halfsilver.errors import ConfigError, require

if TYPE_CHECKING:
    from torch import Tensor


MOST_BUFFERS = 8


@dataclass(frozen=True, kw_only=True)
class Participation:
    """How often a unit may take part: in at most `most` of `rounds` rounds, any two of them `separation` apart or more.

    Args:
        rounds: Number of releases, at least 1.
        separation: Least distance of two rounds in which a unit takes part, at least 1; 1 allows every round.
        most: The largest number of rounds in which a unit takes part, at least 1. Default None: as many as fit.

    Raises:
        ConfigError: A value is out of its range.

    References:
        - Choquette-Choo et al. 2023, arXiv:2306.08153.

    >>> Participation(rounds=10, separation=4).times
    3
    """

    rounds: int
    separation: int
    most: int | None = None

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds", self.rounds, "at least 1")
        require(self.separation >= 1, "separation", self.separation, "at least 1")
        require(self.most is None or self.most >= 1, "most", self.most, "at least 1, or None")

    @property
    def times(self) -> int:
        """How often one unit can take part at most."""
        fit = math.ceil(self.rounds / self.separation)
        return fit if self.most is None else min(self.most, fit)


@final
@dataclass(frozen=True)
class Banded:
    """The first column is `coefficients`, then zeros: w_t = z_t - sum_j coefficients_j w_(t-j).

    The noise of as many steps as there are coefficients, less one, is kept.

    Args:
        coefficients: The first is 1; none is negative, and none is larger than the one before it.

    Raises:
        ConfigError: The coefficients are not such.

    References:
        - Choquette-Choo et al. 2023, arXiv:2306.08153.

    >>> Banded((1.0, 0.5)).column(4)
    tensor([1.0000, 0.5000, 0.0000, 0.0000], dtype=torch.float64)
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", _floats("coefficients", self.coefficients))
        falling = all(a >= b >= 0 for a, b in zip(self.coefficients, self.coefficients[1:], strict=False))
        require(
            len(self.coefficients) > 0 and self.coefficients[0] == 1 and falling,
            "coefficients",
            self.coefficients,
            "to begin with 1 and to fall to 0 or more",
        )

    def column(self, rounds: int) -> Tensor:
        """The first column, in float64.

        Args:
            rounds: How many numbers of it, at least 1.
        """
        import torch

        given = torch.tensor(self.coefficients[:rounds], dtype=torch.float64)
        return torch.cat([given, given.new_zeros(rounds - len(given))])


@final
@dataclass(frozen=True)
class Buffered:
    """A buffered linear Toeplitz matrix (BLT): the first column is 1, then sum_i scales_i decays_i^(t-1) at t.

    Noise costs one buffer of the model's size for each decay, whatever the number of rounds.

    Args:
        decays: In (0, 1), different from each other.
        scales: As many, none negative, with a sum of at most 1.

    Raises:
        ConfigError: The numbers are not such.

    References:
        - Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024, arXiv:2404.16706.

    >>> Buffered((0.5,), (0.25,)).column(4)
    tensor([1.0000, 0.2500, 0.1250, 0.0625], dtype=torch.float64)
    """

    decays: tuple[float, ...]
    scales: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("decays", "scales"):
            object.__setattr__(self, name, _floats(name, getattr(self, name)))
        require(all(0 < d < 1 for d in self.decays), "decays", self.decays, "in (0, 1)")
        require(
            len(self.scales) == len(self.decays) and min(self.scales, default=0) >= 0 and sum(self.scales) <= 1,
            "scales",
            self.scales,
            "as many as decays, none negative, with a sum of at most 1",
        )

    def column(self, rounds: int) -> Tensor:
        """The first column, in float64.

        Args:
            rounds: How many numbers of it, at least 1.
        """
        import torch

        decays, scales = (torch.tensor(t, dtype=torch.float64) for t in (self.decays, self.scales))
        return blt_column(decays, scales, rounds)


Strategy = Banded | Buffered  # a lower triangular Toeplitz matrix with a diagonal of ones, by its first column


@final
@dataclass(frozen=True)
class Independent:
    """Fresh noise in each step, and batches drawn by secret coins. The default, and better at small epsilon."""


INDEPENDENT = Independent()


@final
@dataclass(frozen=True, kw_only=True)
class Correlated:
    """Noise of which each step takes back a part of what earlier steps added, for data that cannot be sampled.

    Nothing about who takes part in a step is secret. Instead, a unit takes part at most once in `separation` steps. The
    records of a table take turns: record i is in the steps t with t = i modulo the number of batches in a pass.

    Guarantee: that of one Gaussian mechanism for the whole run, with the plan's noise multiplier, whatever the number
    of steps. It is spent with the first step. Two data sets are neighbours if one has a record, or user, whose place is
    empty in the other; the others keep their places.

    Args:
        separation: The least distance of two steps in which a unit takes part, at least 1. Default None:
            `PrivacyPlan.calibrate` takes the number of batches in a pass, population / batch size.
        buffers: How many copies of the model the noise keeps, from 1 to 8. Default 4. More than 4 bring little.
        strategy: The coefficients, `Banded` or `Buffered`. Default None: `PrivacyPlan.calibrate` finds the buffers with
            the least error of prefix sums, in some seconds.
        order_kept: Whether each record has the same place in the data whenever the run is resumed. Default False: then
            a run that is resumed skips `separation` - 1 steps, because a record could come early otherwise. Set it to
            True if the data come in a fixed order, such as that of a file, and keep enough `spare_steps` if not.
            For devices that come when they can, who took part is on record, and nothing is skipped.

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> import halfsilver as hs
        >>> plan = hs.PrivacyPlan.calibrate(
        ...     epsilon=2, delta=1e-5, population=1000, batch_size=100, epochs=2, noise=hs.Correlated(buffers=1)
        ... )
        >>> plan.noise.separation, plan.sampler
        (10, 'separated')

    References:
        - Choquette-Choo et al. 2023, arXiv:2306.08153, for the guarantee under a minimum separation.
        - McMahan, Xu and Zhang 2024, arXiv:2408.08868, for buffers under a minimum separation.
    """

    separation: int | None = None
    buffers: int = field(default=4, compare=False)  # of no account once there is a strategy
    strategy: Strategy | None = None
    order_kept: bool = False

    def __post_init__(self) -> None:
        kinds = Strategy | None
        require(isinstance(self.strategy, kinds), "strategy", self.strategy, "to be Banded, Buffered or None")
        require(type(self.order_kept) is bool, "order_kept", self.order_kept, "to be True or False")
        whole = self.separation is None or (type(self.separation) is int and self.separation >= 1)
        require(whole, "separation", self.separation, "to be a whole number >= 1, or None")
        require(
            type(self.buffers) is int and 1 <= self.buffers <= MOST_BUFFERS,
            "buffers",
            self.buffers,
            f"in [1, {MOST_BUFFERS}]",
        )

    def fitted(self, rounds: int, passes_of: int) -> Correlated:
        """The same with a separation and coefficients, where it has none.

        Args:
            rounds: The largest number of steps.
            passes_of: Number of batches in a pass over the data.
        """
        fixed = replace(self, separation=self.separation or passes_of)
        if fixed.strategy is not None:
            return fixed
        from halfsilver.privacy.correlated import buffered

        return replace(fixed, strategy=buffered(fixed.participation(rounds), buffers=self.buffers))

    def participation(self, rounds: int) -> Participation:
        """How often a unit takes part.

        Args:
            rounds: The largest number of steps.
        """
        if self.separation is None:
            raise ConfigError("Expected Correlated(separation=...) to be given. PrivacyPlan.calibrate finds it.")
        return Participation(rounds=rounds, separation=self.separation)

    def sensitivity(self, rounds: int) -> float:
        """How far one unit can move what the noise hides, in clip norms.

        Args:
            rounds: The largest number of steps.
        """
        from halfsilver.privacy.correlated import sensitivity

        return float(sensitivity(self.coefficients.column(rounds), self.participation(rounds)))

    @property
    def coefficients(self) -> Strategy:
        """The strategy.

        Raises:
            ConfigError: There is none yet.
        """
        if self.strategy is None:
            raise ConfigError("Expected Correlated(strategy=...) to be given. PrivacyPlan.calibrate finds it.")
        return self.strategy

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        found, plain = self.coefficients, {"separation": self.separation, "order_kept": self.order_kept}
        if isinstance(found, Banded):
            return {**plain, "coefficients": list(found.coefficients)}
        return {**plain, "decays": list(found.decays), "scales": list(found.scales)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Correlated:
        """What `to_dict` wrote.

        Args:
            values: What `to_dict` returned.

        Raises:
            ConfigError: It is not such.
        """
        try:
            given = {name: value for name, value in values.items() if name not in ("separation", "order_kept")}
            strategy = Banded(**given) if "coefficients" in given else Buffered(**given)
            return cls(separation=values["separation"], order_kept=values["order_kept"], strategy=strategy)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"Not correlated noise: {error!r}.") from error


Noise = Independent | Correlated


def _floats(name: str, values: Any) -> tuple[float, ...]:
    try:
        return tuple(map(float, values))
    except (TypeError, ValueError):
        raise ConfigError(f"Expected {name}={values!r} to be numbers.") from None


def blt_column(decays: Tensor, scales: Tensor, rounds: int) -> Tensor:
    """1, then sum_i scales_i decays_i^(t-1) at t; differentiable."""
    import torch

    powers = decays[None, :] ** torch.arange(rounds - 1, dtype=decays.dtype)[:, None]
    return torch.cat([decays.new_ones(1), powers @ scales])
