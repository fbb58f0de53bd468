"""The theory of mirror descent with public data for linear regression, as functions that can be checked.

The risk bounds are the theorem's without what its O-tilde hides: constants and polylogarithmic factors of the sizes and
of the smallest eigenvalue. They are scales. Compare them with each other and watch how they change; as estimates of an
error they are useless. `noise_shift` hides nothing: it is an equality.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from halfsilver.errors import require

Vector = Sequence[float] | npt.NDArray[Any]


def chi(eigenvalues: Vector, n_pub: float, delta: float) -> float:
    """What the geometry costs: the factor of ``log(1/delta) / (epsilon n_priv)^2`` in `pda_risk_bound`.

    ``max(1/l_min, l_max n_pub) * sum_i min(1, log(1/delta) / (l_i^2 n_pub))`` for eigenvalues l_i of the population
    Hessian E[x x']. The sum is the squared Gaussian width of the set where public data say that the answer lies.

    It falls as public rows come in, up to ``n_pub = 1 / (l_min l_max)``. Beyond that it never falls, and it grows while
    some direction is still at its limit of 1: that is the proof's doing, since public rows may always be left out.

    >>> chi([1 / 100] * 100, n_pub=1_000, delta=1e-5)  # isotropic: p^2
    10000.0
    """
    values = _spectrum(eigenvalues)
    _check_rows("n_pub", n_pub)
    _check_delta(delta)
    width = np.minimum(1.0, math.log(1 / delta) / (values**2 * n_pub)).sum()
    return float(max(1 / values.min(), values.max() * n_pub) * width)


def pda_risk_bound(eigenvalues: Vector, *, n_pub: float, n_priv: float, epsilon: float, delta: float) -> float:
    """Excess population risk of mirror descent under the public loss, without constants and polylog factors.

    ``chi log(1/delta) / (epsilon n_priv)^2 + 1 / (l_min n_priv)``. The theorem asks for features and residuals of size
    at most 1, ``n_priv >= n_pub``, and ``n_pub`` of the order of ``log(p/delta) / l_min`` or more. The first two are
    yours to see to, and the third has a constant that nobody knows: nothing of this is checked here.
    """
    return _bound(chi(eigenvalues, n_pub, delta), eigenvalues, n_priv, epsilon, delta)


def dpsgd_risk_bound(eigenvalues: Vector, *, n_priv: float, epsilon: float, delta: float) -> float:
    """The same for DP-SGD, which has no public data: ``p / l_min`` stands where `pda_risk_bound` has chi.

    Run the theorem's proof with Psi = |theta|^2 / 2 on a ball of radius 1. The squared Gaussian width of the ball is p,
    Psi is 1-strongly convex, and the loss is l_min-strongly convex with respect to Psi; the width over the last of
    these is p / l_min. It is p^2 where all eigenvalues are 1/p, and p^2.5 where one of them is p^-1.5.

    The bound knows nothing of where DP-SGD starts, so a start at the public minimum is not in it.
    """
    values = _spectrum(eigenvalues)
    return _bound(len(values) / float(values.min()), eigenvalues, n_priv, epsilon, delta)


def noise_shift(eigenvalues: Vector, coefficients: Vector, lr: float, sigma: float) -> float:
    """By how much one step's noise moves the next iterate along a direction, in expectation, exactly.

    ``E|<theta_noisy - theta_quiet, v>| = lr sigma sqrt(2/pi sum_i (a_i / l_i)^2)`` for a direction v with coefficients
    a_i on the eigenvectors of the public Hessian and noise of standard deviation `sigma` on the mean gradient. It holds
    for the step without a constraint set. `Bregman` has the eigenvalues themselves (plus its damping), `Quadratic`
    those divided by the smallest, and DP-SGD has all ones, so that there every unit direction moves alike.

    >>> round(noise_shift([0.5, 0.25], [0.0, 1.0], lr=1.0, sigma=1.0), 4)
    3.1915
    """
    values, weights = _spectrum(eigenvalues), np.asarray(coefficients, dtype=np.float64)
    shapes = weights.shape == values.shape
    require(shapes, "coefficients.shape", weights.shape, f"to be {values.shape}, one for each eigenvalue")
    require(lr >= 0, "lr", lr, "at least 0")
    require(sigma >= 0, "sigma", sigma, "at least 0")
    return lr * sigma * math.sqrt(2 / math.pi) * float(np.linalg.norm(weights / values))


def _bound(factor: float, eigenvalues: Vector, n_priv: float, epsilon: float, delta: float) -> float:
    """What privacy costs, and what generalisation from n_priv rows costs."""
    _check_rows("n_priv", n_priv)
    _check_delta(delta)
    require(math.isfinite(epsilon) and epsilon > 0, "epsilon", epsilon, "in (0, inf)")
    smallest = float(_spectrum(eigenvalues).min())
    return factor * math.log(1 / delta) / (epsilon * n_priv) ** 2 + 1 / (smallest * n_priv)


def _spectrum(eigenvalues: Vector) -> npt.NDArray[np.float64]:
    values = np.asarray(eigenvalues, dtype=np.float64)
    require(values.ndim == 1 and values.size > 0, "eigenvalues.shape", values.shape, "to be (p,) with p at least 1")
    good = bool(np.isfinite(values).all() and values.min() > 0)
    require(good, "eigenvalues", float(values.min()), "in (0, inf), all of them")
    return values


def _check_rows(name: str, rows: float) -> None:
    require(math.isfinite(rows) and rows >= 1, name, rows, "at least 1 and finite")


def _check_delta(delta: float) -> None:
    require(0 < delta < 1, "delta", delta, "in (0, 1)")
