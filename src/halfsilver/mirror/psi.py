"""The public loss as a mirror: its gradient, and the point of a constraint set that mirrors a dual vector.

Both classes stand for Psi^(theta) = Psi(theta) + damping/2 |theta|^2 and answer the one question that
mirror descent and dual averaging ask: argmin over C of Psi^(theta) - <dual, theta>.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from halfsilver._core.tensors import Tensors, axpy, flatten, norm, scale, unflatten
from halfsilver.errors import ConfigError, ConvergenceError
from halfsilver.mirror.public import PublicLoss
from halfsilver.mirror.sets import ConstraintSet, multipliers
from halfsilver.mirror.solvers import (
    Operator,
    conjugate_gradients,
    doubles,
    multiplier,
    plus_ridge,
    probe,
)

_ADVICE = "Is the public loss convex? Without strong convexity the step may have no solution: raise damping."


def is_quadratic(public: PublicLoss, params: Tensors, tolerance: float = 1e-6) -> bool:
    """Whether the gradient of the public loss changes along one generic direction as its Hessian says."""
    point = doubles(params)
    shift = scale(probe(point), 1 + norm(point))
    change = axpy(-1.0, public.gradient(point), public.gradient(axpy(1.0, shift, point)))
    expected = public.hvp(shift, point)
    return norm(axpy(-1.0, expected, change)) <= tolerance * max(norm(expected), norm(change))


def require_invertible(low: float, high: float, size: int, damping: float) -> None:
    """Refuse a matrix of that many eigenvalues from `low` to `high` if it is singular to rounding."""
    if low <= size * torch.finfo(torch.float64).eps * high:
        raise ConfigError(
            f"The public Hessian with damping={damping} has eigenvalues from {low:.3g} to {high:.3g}, "
            "which leaves it no stable inverse: raise damping."
        )


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class SpectralPsi:
    """A quadratic Psi = theta'H theta/2 - b'theta in the eigenbasis of H: everything in closed form."""

    values: Tensor  # eigenvalues of H
    vectors: Tensor  # eigenvectors, as columns
    linear: Tensor  # b in the eigenbasis
    damping: float

    @classmethod
    def of(cls, public: PublicLoss, params: Tensors, damping: float) -> SpectralPsi:
        """Decompose the Hessian of `public`, once; refuse a loss that is not quadratic and convex."""
        if not is_quadratic(public, params):
            raise ConfigError("Expected a quadratic public loss for quadratic=True. Use quadratic=False.")
        values, vectors = torch.linalg.eigh(public.hessian(params))
        require_invertible(float(values[0]) + damping, float(values[-1]) + damping, len(values), damping)
        point = doubles(params)
        linear = values * (vectors.T @ flatten(point)) - vectors.T @ flatten(public.gradient(point))
        return cls(values=values, vectors=vectors, linear=linear, damping=damping)

    def gradient(self, theta: Tensors) -> Tensors:
        coordinates = self.vectors.T @ flatten(theta)
        return unflatten(self.vectors @ ((self.values + self.damping) * coordinates - self.linear), theta)

    def argmin(self, dual: Tensors, start: Tensors, constraint: ConstraintSet | None) -> Tensors:
        v = self.vectors.T @ flatten(dual)
        mu, nu = (0.0, 0.0) if constraint is None else self._multipliers(v, constraint)
        return unflatten(self.vectors @ self._point(v, mu, nu), start)

    def _multipliers(self, v: Tensor, constraint: ConstraintSet) -> tuple[float, float]:
        def size(mu: float, nu: float) -> float:
            return float(self._point(v, mu, nu).norm())

        def slope(mu: float, nu: float) -> float:
            # H theta - b over the common denominator, where the large terms cancel exactly.
            residual = self.values * v - (self.damping + mu) * self.linear
            return float((residual / self._curvature(mu, nu)).norm())

        return multipliers(size, slope, constraint)

    def _point(self, v: Tensor, mu: float, nu: float) -> Tensor:
        """The minimiser of Psi^ - <v, .> + mu/2 |theta|^2 + nu/2 |grad Psi|^2."""
        return (v + self.linear + nu * self.values * self.linear) / self._curvature(mu, nu)

    def _curvature(self, mu: float, nu: float) -> Tensor:
        return self.values + self.damping + mu + nu * self.values**2


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class ConvexPsi:
    """Any convex public loss, by Newton's method with conjugate gradients in float64.

    `gradient_only` replaces Hessian-vector products by differences of gradients, for losses that cannot be
    differentiated twice; the tolerance is on the gradient and is met all the same.
    """

    public: PublicLoss
    damping: float
    tolerance: float
    max_iterations: int
    gradient_only: bool

    def gradient(self, theta: Tensors) -> Tensors:
        return axpy(self.damping, theta, self.public.gradient(theta))

    def argmin(self, dual: Tensors, start: Tensors, constraint: ConstraintSet | None) -> Tensors:
        if constraint is None:
            return self._newton(dual, start, 0.0)
        latest = start  # each multiplier is close to the one before: start from its solution

        def size(mu: float) -> float:
            nonlocal latest
            latest = self._newton(dual, latest, mu)
            return norm(latest)

        return self._newton(dual, latest, multiplier(size, constraint.radius, tolerance=1e-10))

    def _newton(self, dual: Tensors, start: Tensors, mu: float) -> Tensors:
        """Solve grad Psi^(theta) + mu theta = dual."""

        def residual(theta: Tensors) -> Tensors:
            return axpy(mu, theta, axpy(-1.0, dual, self.gradient(theta)))

        theta, error = start, residual(start)
        goal = self.tolerance * max(1.0, norm(dual))
        for _ in range(self.max_iterations):
            if norm(error) <= goal:
                return theta
            operator = plus_ridge(self._products(theta), self.damping + mu)
            forcing = max(1e-12, min(0.1, norm(error)))
            step, _ = conjugate_gradients(operator, error, tolerance=forcing, max_iterations=1_000)
            theta, error = _descend(residual, theta, error, step)
        raise ConvergenceError(
            f"The mirror step stopped at a residual of {norm(error):.1e}, above {goal:.1e}. {_ADVICE}"
        )

    def _products(self, theta: Tensors) -> Operator:
        if not self.gradient_only:
            return lambda v: self.public.hvp(v, theta)

        def differences(v: Tensors) -> Tensors:
            h = 1e-5 * (1 + norm(theta)) / norm(v)
            ahead, behind = (self.public.gradient(axpy(s, v, theta)) for s in (h, -h))
            return scale(axpy(-1.0, behind, ahead), 1 / (2 * h))

        return differences


def _descend(residual: Operator, theta: Tensors, error: Tensors, step: Tensors) -> tuple[Tensors, Tensors]:
    """Go along a Newton step as far as the residual falls; only gradients are needed to see that."""
    for halvings in range(40):
        length = 0.5**halvings
        there = axpy(-length, step, theta)
        left = residual(there)
        if norm(left) <= (1 - 1e-4 * length) * norm(error):  # false for NaN
            return there, left
    raise ConvergenceError(f"The mirror step is stuck at a residual of {norm(error):.1e}. {_ADVICE}")
