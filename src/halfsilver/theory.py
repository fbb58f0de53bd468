"""The theory of mirror descent with public data for linear regression, as functions that can be checked.

The risk bounds are those of the theorem without what its O-tilde hides: constants, and polylogarithmic factors of the
sizes and of the smallest eigenvalue. Use them to compare methods and to see how risk scales, not to estimate an error.
`noise_shift` hides nothing: it is an equality.

References:
    - Amid et al. 2022, Public Data-Assisted Mirror Descent for Private Model Training, ICML, arXiv:2112.00193.
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
    """The cost of the geometry: the factor of ``log(1/delta) / (epsilon n_priv)^2`` in `pda_risk_bound`.

    ``chi = max(1/l_min, l_max n_pub) * sum_i min(1, log(1/delta) / (l_i^2 n_pub))`` for eigenvalues l_i of the
    population Hessian E[x x']. The sum is the squared Gaussian width of the set where public data locate the answer.

    It falls as public rows are added, up to ``n_pub = 1 / (l_min l_max)``. Beyond that it never falls, and it grows
    while some direction is still at its limit of 1. That is an artefact of the proof, because public rows may always be
    left out.

    Args:
        eigenvalues: Those of the population Hessian, all above 0.
        n_pub: The number of public rows, at least 1.
        delta: In (0, 1).

    Returns:
        The factor, above 0.

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        >>> chi([1 / 100] * 100, n_pub=1_000, delta=1e-5)  # isotropic: p^2
        10000.0

    References:
        - Amid et al. 2022, Public Data-Assisted Mirror Descent for Private Model Training, ICML, arXiv:2112.00193.
    """
    values = _spectrum(eigenvalues)
    _check_rows("n_pub", n_pub)
    _check_delta(delta)
    width = np.minimum(1.0, math.log(1 / delta) / (values**2 * n_pub)).sum()
    return float(max(1 / values.min(), values.max() * n_pub) * width)


def noise_cost_after(eigenvalues: Vector) -> float:
    """The cost of noise that is added before the mirror acts: tr(H) tr(H^-1).

    A Newton step theta - H^-1 (g + z) with isotropic z of variance s^2 raises the risk by s^2 tr(H^-1) / 2. The noise
    is s^2 = sigma^2 C^2 / n^2, and where residuals are of size 1, a clip norm that leaves gradients whole is
    ``C^2 = E |g_i|^2 = tr(H)``. So the rise is ``sigma^2 / (2 n^2)`` times this cost.

    Args:
        eigenvalues: Those of the Hessian H, all above 0.

    Returns:
        The cost, at least the square of the number of eigenvalues.

    Raises:
        ConfigError: If an eigenvalue is not above 0.

    Example:
        >>> noise_cost_after([1.0, 1.0]), noise_cost_after([1.0, 0.01])
        (4.0, 102.01)
    """
    values = _spectrum(eigenvalues)
    return float(values.sum() * (1 / values).sum())


def noise_cost_before(eigenvalues: Vector) -> float:
    """The cost of noise that is added in coordinates in which H is round: d^2, whatever the spectrum.

    The step is theta - H^-1/2 (H^-1/2 g + z). The risk rises by s^2 tr(H^-1/2 H H^-1/2) / 2 = s^2 d / 2, and the clip
    norm is ``C^2 = E |H^-1/2 g_i|^2 = d``. By the inequality of Cauchy and Schwarz this is never above
    `noise_cost_after`.

    Args:
        eigenvalues: Those of the Hessian H, all above 0.

    Returns:
        The square of their number.

    Raises:
        ConfigError: If an eigenvalue is not above 0.

    Example:
        >>> noise_cost_before([1.0, 0.01])
        4.0
    """
    return float(len(_spectrum(eigenvalues)) ** 2)


def pda_risk_bound(eigenvalues: Vector, *, n_pub: float, n_priv: float, epsilon: float, delta: float) -> float:
    """Excess population risk of mirror descent under the public loss, without constants and polylogarithmic factors.

    ``chi log(1/delta) / (epsilon n_priv)^2 + 1 / (l_min n_priv)``. The theorem assumes features and residuals of size
    at most 1, ``n_priv >= n_pub``, and ``n_pub`` of the order of ``log(p/delta) / l_min`` or more. None of this is
    checked. The first two are up to you, and the third has an unknown constant.

    Args:
        eigenvalues: Those of the population Hessian, all above 0.
        n_pub: The number of public rows, at least 1.
        n_priv: The number of private rows, at least 1.
        epsilon: Above 0 and finite.
        delta: In (0, 1).

    Returns:
        The scale of the excess risk.

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        >>> half = pda_risk_bound([0.5, 0.1], n_pub=100, n_priv=5_000, epsilon=1.0, delta=1e-5)
        >>> pda_risk_bound([0.5, 0.1], n_pub=100, n_priv=10_000, epsilon=1.0, delta=1e-5) < half
        True

    References:
        - Amid et al. 2022, Public Data-Assisted Mirror Descent for Private Model Training, ICML, arXiv:2112.00193.
    """
    return _bound(chi(eigenvalues, n_pub, delta), eigenvalues, n_priv, epsilon, delta)


def dpsgd_risk_bound(eigenvalues: Vector, *, n_priv: float, epsilon: float, delta: float) -> float:
    """Excess population risk of DP-SGD without public data: `pda_risk_bound` with ``p / l_min`` in place of chi.

    Run the theorem's proof with ``Psi = |theta|^2 / 2`` on a ball of radius 1. The squared Gaussian width of the ball
    is p, Psi is 1-strongly convex, and the loss is l_min-strongly convex with respect to Psi. The width over the last
    of these is p / l_min. It is p^2 where all eigenvalues are 1/p, and p^2.5 where one of them is p^-1.5.

    The bound does not depend on where DP-SGD starts, so it does not show the effect of a start at the public minimum.

    Args:
        eigenvalues: Those of the population Hessian, all above 0.
        n_priv: The number of private rows, at least 1.
        epsilon: Above 0 and finite.
        delta: In (0, 1).

    Returns:
        The scale of the excess risk.

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        >>> size = {"n_priv": 5_000, "epsilon": 1.0, "delta": 1e-5}
        >>> pda_risk_bound([1.0] * 99 + [0.01], n_pub=1_000, **size) < dpsgd_risk_bound([1.0] * 99 + [0.01], **size)
        True

    References:
        - Amid et al. 2022, Public Data-Assisted Mirror Descent for Private Model Training, ICML, arXiv:2112.00193.
        - Bassily, Smith and Thakurta 2014, Private Empirical Risk Minimization: Efficient Algorithms and Tight Error
          Bounds, arXiv:1405.7085, for DP-SGD on convex losses.
    """
    values = _spectrum(eigenvalues)
    return _bound(len(values) / float(values.min()), eigenvalues, n_priv, epsilon, delta)


def noise_shift(eigenvalues: Vector, coefficients: Vector, lr: float, sigma: float) -> float:
    """How far one step's noise moves the next iterate along a direction, in expectation.

    ``E|<theta_noisy - theta_quiet, v>| = lr sigma sqrt(2/pi sum_i (a_i / l_i)^2)`` for a direction v with coefficients
    a_i on the eigenvectors of the public Hessian. It follows from theta_noisy - theta_quiet = -lr H^-1 b with b ~ N(0,
    sigma^2 I) and E|N(0, s^2)| = s sqrt(2/pi). It is exact for a step without a constraint set.

    Args:
        eigenvalues: The l_i, all above 0. `Bregman` has the eigenvalues of the public Hessian (plus its damping),
            `Quadratic` those divided by the smallest, and DP-SGD has all ones, so that every unit direction moves
            alike.
        coefficients: The a_i, one per eigenvalue.
        lr: The learning rate, at least 0.
        sigma: Standard deviation of the noise on the mean gradient, at least 0.

    Returns:
        The expected distance.

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        >>> round(noise_shift([0.5, 0.25], [0.0, 1.0], lr=1.0, sigma=1.0), 4)
        3.1915

    References:
        - Amid et al. 2022, Public Data-Assisted Mirror Descent for Private Model Training, ICML, arXiv:2112.00193.
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
