"""Constraint sets for the exact mirror step, and the multipliers of their Bregman projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

from halfsilver.errors import require
from halfsilver.mirror.solvers import multiplier


class ConstraintSet(Protocol):
    """{theta : |theta| <= radius and |grad Psi(theta)| <= bound}; infinity where a limit is absent."""

    @property
    def radius(self) -> float: ...

    @property
    def bound(self) -> float: ...


@final
@dataclass(frozen=True)
class L2Ball:
    """Parameters of norm at most `radius`."""

    radius: float
    bound: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        require(self.radius > 0, "radius", self.radius, "above 0")


@final
@dataclass(frozen=True)
class GradientBall:
    """Parameters where the gradient of the (undamped) public loss has norm at most `bound`.

    Convex where the public loss is quadratic, and offered only there.
    """

    bound: float
    radius: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        require(self.bound > 0, "bound", self.bound, "above 0")


@final
@dataclass(frozen=True)
class Intersection:
    """Both at once: the set of the paper's theorem on linear regression.

    >>> Intersection(L2Ball(1.0), GradientBall(0.1)).bound
    0.1
    """

    ball: L2Ball
    gradient_ball: GradientBall

    @property
    def radius(self) -> float:
        return self.ball.radius

    @property
    def bound(self) -> float:
        return self.gradient_ball.bound


def multipliers(
    size: Callable[[float, float], float],
    slope: Callable[[float, float], float],
    constraint: ConstraintSet,
) -> tuple[float, float]:
    """The Lagrange multipliers (mu, nu) of the two limits, each zero where its limit is not active.

    `size` and `slope` are |theta| and |grad Psi(theta)| at the minimiser of the Lagrangian. Its dual is
    concave, so that maximising over nu first leaves a monotone equation for mu.
    """

    def nu(mu: float) -> float:
        return multiplier(lambda n: slope(mu, n), constraint.bound)

    mu = multiplier(lambda m: size(m, nu(m)), constraint.radius)
    return mu, nu(mu)
