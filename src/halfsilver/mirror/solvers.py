"""Small numerical tools on lists of float64 tensors: conjugate gradients, Lanczos, a scalar root."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from halfsilver._core.tensors import Tensors, axpy, dot, norm, scale
from halfsilver.errors import ConvergenceError

Operator = Callable[[Tensors], Tensors]


def doubles(tensors: Tensors) -> Tensors:
    """Detached copies or views in float64, in which the exact maps compute."""
    return [t.detach().double() for t in tensors]


def plus_ridge(apply: Operator, ridge: float) -> Operator:
    """The operator A + ridge * I."""
    return lambda vectors: axpy(ridge, vectors, apply(vectors))


def conjugate_gradients(
    apply: Operator, rhs: Tensors, *, tolerance: float, max_iterations: int
) -> tuple[Tensors, float]:
    """Solve A x = rhs for a positive definite A; also returns the relative residual that was reached.

    Stops at a relative residual of `tolerance`, or where A turns out not to be positive definite.
    """
    x, residual, direction = scale(rhs, 0.0), rhs, rhs
    start = square = dot(rhs, rhs)
    for _ in range(max_iterations):
        if square <= tolerance**2 * start:
            break
        image = apply(direction)
        curvature = dot(direction, image)
        if curvature <= 0:
            break
        step = square / curvature
        x, residual = axpy(step, direction, x), axpy(-step, image, residual)
        square, before = dot(residual, residual), square
        direction = axpy(square / before, direction, residual)
    return x, math.sqrt(square / start) if start else 0.0


def extreme_eigenvalues(apply: Operator, like: Tensors, *, max_iterations: int = 2_000) -> tuple[float, float]:
    """The smallest and largest eigenvalue of a symmetric A by Lanczos, aimed at a precise smallest one.

    Keeps three vectors. Lost orthogonality only repeats Ritz values that have converged, so the extreme
    ones stay right. For A = I both are exactly 1.
    """
    vector, previous, beta, next_look = probe(like), scale(like, 0.0), 0.0, 10
    diagonal: list[float] = []
    off: list[float] = []
    for count in range(1, max_iterations + 1):
        image = apply(vector)
        diagonal.append(dot(vector, image) / dot(vector, vector))
        image = axpy(-beta, previous, axpy(-diagonal[-1], vector, image))
        beta = norm(image)
        if count >= next_look or count == max_iterations or beta <= 1e-13 * max(map(abs, diagonal)):
            low, high, error = _ritz(diagonal, off, beta)
            if error <= max(1e-9 * abs(low), 1e-13 * high):
                return low, high
            next_look = count + 1 + count // 4  # the look costs count^3
        off.append(beta)
        previous, vector = vector, scale(image, 1 / beta)
    raise ConvergenceError(
        f"The smallest eigenvalue of the public Hessian was not found in {max_iterations} products: "
        "raise damping or max_iterations."
    )


def _ritz(diagonal: list[float], off: list[float], beta: float) -> tuple[float, float, float]:
    """Extreme eigenvalues of the tridiagonal matrix, and the error bound of the smallest."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    side = torch.diag(torch.tensor(off, dtype=torch.float64), 1) if off else torch.zeros_like(matrix)
    values, vectors = torch.linalg.eigh(matrix + side + side.T)
    return float(values[0]), float(values[-1]), beta * abs(float(vectors[-1, 0]))


def probe(like: Tensors) -> Tensors:
    """A fixed unit vector in general position, the same on every machine and device."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device) for t in like]
    return scale(vectors, 1 / norm(vectors))


def multiplier(size: Callable[[float], float], limit: float, tolerance: float = 1e-14) -> float:
    """The m >= 0 with size(m) = limit, to a relative `tolerance`; 0 where size(0) is within the limit.

    `size` falls, and 1 / size is nearly linear, in a Lagrange multiplier: a bracketed secant is quick.
    """
    if math.isinf(limit) or size(0.0) <= limit:
        return 0.0

    def excess(m: float) -> float:
        return limit / size(m) - 1

    low, high = 0.0, 1.0
    while excess(high) < 0:
        low, high = high, 10 * high
        if high > 1e20:
            raise ConvergenceError("No point satisfies the constraint set: enlarge its radius or bound.")
    return _increasing_root(excess, low, high, tolerance)


def _increasing_root(f: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """A point of [low, high] with |f| <= tolerance, or the closest in float64, by the Illinois method."""
    f_low, f_high = f(low), f(high)
    for _ in range(200):
        middle = high - f_high * (high - low) / (f_high - f_low)
        if not low < middle < high:
            break
        value = f(middle)
        if abs(value) <= tolerance:
            return middle
        if value < 0:  # the end that stays counts half, or it would never move
            low, f_low, f_high = middle, value, f_high / 2
        else:
            high, f_high, f_low = middle, value, f_low / 2
    return high
