"""Constraint sets for the exact mirror step, and the multipliers of their Bregman projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

from halfsilver.errors import require
from halfsilver.mirror.solvers import multiplier


class ConstraintSet(Protocol):
    """The protocol of a set: ``{theta : |theta| <= radius and |grad Psi(theta)| <= bound}``, infinity for no limit."""

    @property
    def radius(self) -> float: ...

    @property
    def bound(self) -> float: ...


@final
@dataclass(frozen=True)
class L2Ball:
    """The parameters of Euclidean norm at most `radius`: ``{theta : |theta| <= radius}``.

    Args:
        radius: The largest norm of all trainable parameters together, above 0.

    Raises:
        ConfigError: If `radius` is not above 0.

    Example:
        >>> from halfsilver.mirror import Bregman
        >>> Bregman(constraint=L2Ball(2.0)).constraint
        L2Ball(radius=2.0)
    """

    radius: float
    bound: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        require(self.radius > 0, "radius", self.radius, "above 0")


@final
@dataclass(frozen=True)
class GradientBall:
    """The parameters at which the public loss is nearly flat: ``{theta : |grad Psi(theta)| <= bound}``.

    Psi is the public loss without damping. The set is convex if Psi is quadratic, so the maps take it only with
    ``quadratic=True``.

    Args:
        bound: The largest norm of the public gradient, above 0. Too small a value holds the parameters at the public
            optimum.

    Raises:
        ConfigError: If `bound` is not above 0.

    Example:
        >>> from halfsilver.mirror import Bregman
        >>> Bregman(quadratic=True, constraint=GradientBall(0.1)).constraint
        GradientBall(bound=0.1)

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193,
        section 4
    """

    bound: float
    radius: ClassVar[float] = math.inf

    def __post_init__(self) -> None:
        require(self.bound > 0, "bound", self.bound, "above 0")


@final
@dataclass(frozen=True)
class Intersection:
    """The parameters that lie in both sets, as in the theorem on linear regression of Amid et al.

    Args:
        ball: The limit of the norm of the parameters.
        gradient_ball: The limit of the norm of the public gradient.

    Example:
        >>> Intersection(L2Ball(1.0), GradientBall(0.1)).bound
        0.1

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193,
        section 4
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
