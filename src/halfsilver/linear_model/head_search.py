"""The start and the settings of a private classifier, from public rows and the plan's noise alone.

Public rows are few and a start that was fitted to rows has no gradient there. So every figure comes from rows that
neither the start nor the coordinates have seen, and no run is simulated: a simulated run would fit the few rows that
stand in for the private ones, and would stop too early. Instead the loss after a run is forecast in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from halfsilver.linear_model.axes import PublicAxes

Array = np.ndarray[Any, Any]

# What "auto" tries. Rows have norm at most 1, which makes these numbers nearly universal.
DAMPINGS = (1.0, 3.0, 10.0)
CLIPS = (1.0, 0.5, 0.25)
SHARES = tuple(2.0**-k for k in range(6, -3, -1))  # path / reach: the noise that a run leaves on a logit
RIDGES = tuple(4.0**-k for k in range(2, 11))  # of the public start, from strong to weak
# Where public rows have no labels, or fewer than `FEWEST`. Damping and share are the best for accuracy on features of
# EMNIST and on digits: see docs/heads.md.
USUAL_DAMPING, USUAL_CLIP, USUAL_SHARE, USUAL_RIDGE = 1.0, 1.0, 0.5, 4.0**-6
FEWEST = 60
FOLDS = 3
PLAIN = 1e9  # a damping that leaves all axes alike
MOST_AXES = 2000
FEWEST_STEPS, USUAL_STEPS, MOST_STEPS = 32, 64, 200


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """Public rows with the numbers of their classes and a weight for each row.

    Args:
        x: Of shape (rows, features), or mapped.
        labels: From 0 to `classes` - 1.
        weights: What multiplies a row's loss.
        classes: The number of classes.
    """

    x: Array
    labels: Array
    weights: Array
    classes: int

    def take(self, rows: Array) -> Labelled:
        """Some of the rows."""
        return Labelled(x=self.x[rows], labels=self.labels[rows], weights=self.weights[rows], classes=self.classes)

    def at(self, x: Array) -> Labelled:
        """The same rows with other features."""
        return Labelled(x=x, labels=self.labels, weights=self.weights, classes=self.classes)

    def loss(self, logits: Array) -> float:
        """The weighted mean cross-entropy."""
        each = -log_softmax(logits)[np.arange(len(self.labels)), self.labels]
        return float(each @ self.weights / self.weights.sum())

    def gradients(self, logits: Array) -> Array:
        """The derivative of each row's weighted loss by its logits."""
        found = np.exp(log_softmax(logits))
        found[np.arange(len(self.labels)), self.labels] -= 1
        weighted: Array = found * self.weights[:, None]
        return weighted

    def split(self) -> list[tuple[Labelled, Labelled]]:
        """Pairs of other rows and held-out rows, such that each row is held out once."""
        parts = folds_of(self.labels)
        return [(self.take(np.setdiff1d(np.arange(len(self.labels)), part)), self.take(part)) for part in parts]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of the whole run.

    Args:
        rows: The number n of private rows.
        mu: The parameter of Gaussian differential privacy, sqrt(steps) / noise multiplier.
    """

    rows: float
    mu: float

    @property
    def reach(self) -> float:
        """mu n. A run whose learning rate times steps is s leaves noise of s * clip norm / (mu n) on each weight."""
        return self.rows * self.mu


@dataclass(frozen=True, kw_only=True)
class Given:
    """Settings of the user; None for those that are chosen here."""

    steps: int | None
    learning_rate: float | None
    max_grad_norm: float | None
    damping: float | None
    rank: int | None
    ridge: float | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All settings of a run, and how they came about.

    Args:
        steps: Number of steps.
        learning_rate: Of each step.
        max_grad_norm: Clip norm, for rows of norm at most 1.
        damping: Of the whitening, in mean variances.
        rank: Number of axes.
        ridge: Regularisation of the public start.
        reason: A sentence.
        start_loss: The loss of the public start on held-out public rows, if that is known.
        forecast: The figure by which the setting was chosen, if it was: a loss after the run that is good for comparing
            settings, and too low for long paths.
    """

    steps: int
    learning_rate: float
    max_grad_norm: float
    damping: float
    rank: int
    ridge: float
    reason: str
    start_loss: float | None = None
    forecast: float | None = None


def log_softmax(logits: Array) -> Array:
    """log softmax of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def solution(rows: Labelled, ridge: float, start: Array | None = None, steps: int = 60) -> Array:
    """argmin over W of the weighted mean cross-entropy of x W^T plus ridge / 2 |W|^2, of shape (classes, width).

    Args:
        rows: Mapped rows.
        ridge: Above 0.
        start: Where the search starts (default: zero).
        steps: The most steps of L-BFGS. A start need not be exact.
    """
    shape = (rows.classes, rows.x.shape[1])
    total = rows.weights.sum()

    def objective(flat: Array) -> tuple[float, Array]:
        logits = rows.x @ flat.reshape(shape).T
        slope = rows.gradients(logits).T @ rows.x / total
        return rows.loss(logits) + ridge / 2 * float(flat @ flat), slope.ravel() + ridge * flat

    first = np.zeros(shape) if start is None else start
    found = minimize(objective, first.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": steps})
    answer: Array = found.x.reshape(shape)
    return answer


def folds_of(labels: Array, folds: int = FOLDS) -> list[Array]:
    """Disjoint parts with nearly the same share of every class, the same for the same labels."""
    mixed = np.random.default_rng(0).permutation(len(labels))
    order = mixed[np.argsort(labels[mixed], kind="stable")]
    return [np.sort(order[k::folds]) for k in range(folds)]


def choose(
    axes: PublicAxes,
    public: Labelled | None,
    *,
    classes: int,
    given: Given,
    noise: Noise,
    whiten: bool,
    start: bool,
    constant: bool,
) -> Choice:
    """The settings of a run: those that are given, and for the others the best forecast on public rows.

    Args:
        axes: Those of all public rows.
        public: Labelled public rows, or None.
        classes: The number of classes.
        given: What the user set.
        noise: Of the plan.
        whiten: Whether rows are whitened.
        start: Whether the run starts from the public solution.
        constant: Whether there is an intercept.
    """
    rank = min(given.rank or MOST_AXES, axes.rank) if whiten else axes.rank
    dampings = [PLAIN] if not whiten else DAMPINGS if given.damping is None else [given.damping]
    clips = CLIPS if given.max_grad_norm is None else [given.max_grad_norm]
    ridges = RIDGES if given.ridge is None else [given.ridge]
    if public is None or len(public.labels) < FEWEST or len(np.unique(public.labels)) < 2:
        usual = Trial(
            damping=_given(given.damping, USUAL_DAMPING) if whiten else PLAIN,
            clip=_given(given.max_grad_norm, USUAL_CLIP),
            ridge=_given(given.ridge, USUAL_RIDGE),
            path=USUAL_SHARE * noise.reach,
        )
        reason = f"fewer than {FEWEST} public labels, so usual values" if public is not None else "usual values"
        return _choice(usual, axes, classes, given, rank, constant, reason)
    paths = [share * noise.reach for share in SHARES]
    if given.learning_rate is not None and given.steps is not None:
        paths = [given.learning_rate * given.steps]
    trials: list[Trial] = []
    folds = [(train, held, PublicAxes.of(train.x, rank, axes.unit)) for train, held in public.split()]
    for damping in dampings:
        spaces = [own.whitened(damping=damping, rank=rank, constant=constant) for _, _, own in folds]
        pairs = [
            (train.at(space.rows), held.at(space.row_map(held.x)))
            for (train, held, _), space in zip(folds, spaces, strict=True)
        ]
        ridge, weights, loss = _best_start(pairs, ridges) if start else _zero_start(pairs, ridges[0])
        for clip in clips:
            gains = [
                forecast_gains(held, weight, paths, noise, clip)
                for (_, held), weight in zip(pairs, weights, strict=True)
            ]
            trials += [
                Trial(damping=damping, clip=clip, ridge=ridge, path=path, start_loss=loss, forecast=loss - gain)
                for path, gain in zip(paths, np.mean(gains, axis=0).tolist(), strict=True)
            ]
    best = min(trials, key=lambda trial: trial.forecast)
    reason = f"best of {len(trials)} forecasts on held-out public rows"
    return _choice(best, axes, classes, given, rank, constant, reason)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One setting, and what held-out public rows say of it. `path` is learning rate times steps."""

    damping: float
    clip: float
    ridge: float
    path: float
    start_loss: float = math.nan
    forecast: float = math.nan


Pairs = Sequence[tuple[Labelled, Labelled]]


def _best_start(pairs: Pairs, ridges: Sequence[float]) -> tuple[float, list[Array], float]:
    """The ridge with the least loss on held-out rows, the starts of all folds, and that loss."""
    found: list[tuple[float, float, list[Array]]] = []
    weights: list[Array | None] = [None] * len(pairs)
    for ridge in ridges:
        fitted = [solution(train, ridge, weight) for (train, _), weight in zip(pairs, weights, strict=True)]
        loss = _held_loss(pairs, fitted)
        found.append((loss, ridge, fitted))
        if loss > 1.02 * min(found)[0]:
            break
        weights = list(fitted)
    loss, ridge, fitted = min(found, key=lambda one: one[0])
    return ridge, fitted, loss


def _zero_start(pairs: Pairs, ridge: float) -> tuple[float, list[Array], float]:
    weights = [np.zeros((held.classes, held.x.shape[1])) for _, held in pairs]
    return ridge, weights, _held_loss(pairs, weights)


def _held_loss(pairs: Pairs, weights: Sequence[Array]) -> float:
    losses = [held.loss(held.x @ weight.T) for (_, held), weight in zip(pairs, weights, strict=True)]
    return float(np.mean(losses))


def forecast_gains(held: Labelled, weight: Array, paths: Sequence[float], noise: Noise, clip: float) -> Array:
    """How far the loss is expected to fall in a private run from `weight`, for each path.

    In whitened coordinates the Hessian is nearly diagonal. With h_j its entry, g_j the gradient and s the path, steps
    move coordinate j by -q_j g_j, where q_j = (1 - e^(-s h_j)) / h_j, and leave noise of variance
    v_j = (s C / (mu n))^2 (1 - e^(-2 s h_j)) / (2 s h_j). The loss falls by
    sum_j (q_j - h_j q_j^2 / 2) g_j^2 - h_j v_j / 2. The squares g_j^2 are means over pairs of *different* rows, so the
    few rows do not look like a gradient by chance. Where rows are clipped, g_j^2 is replaced by its product with the
    clipped gradient, and by the square of that, as they occur.

    Args:
        held: Mapped rows that `weight` has not seen.
        weight: The start, of shape (classes, width).
        paths: Values of learning rate times steps.
        noise: Of the plan.
        clip: Clip norm C.

    Returns:
        One number for each path.
    """
    logits, rows = held.x @ weight.T, len(held.x)
    residual = held.gradients(logits)
    lengths = np.linalg.norm(held.x, axis=1) * np.linalg.norm(residual, axis=1)
    clipped = residual * np.minimum(1, clip / np.maximum(lengths, 1e-12))[:, None]
    squares = np.square(held.x)
    whole, cut = residual.T @ held.x, clipped.T @ held.x
    pairs = rows * (rows - 1)
    along = ((whole * cut).sum(axis=0) - squares.T @ (residual * clipped).sum(axis=1)) / pairs
    moved = (np.square(cut).sum(axis=0) - squares.T @ np.square(clipped).sum(axis=1)) / pairs
    spread = squares.mean(axis=0)
    unsure = _unsure(held, logits)
    usual = unsure / (held.classes - 1)
    bend = np.maximum(np.clip(_bend_along(held.x, clipped, logits, spread), usual, 0.5) * spread, 1e-12)
    every = np.maximum(usual * spread, 1e-12)
    gains = []
    for path in paths:
        move = -np.expm1(-path * bend) / bend
        left = (path * clip / noise.reach) ** 2 * -np.expm1(-2 * path * every) / (2 * path * every)
        gains.append(float((move * along - bend * move**2 * moved / 2).sum() - unsure * spread @ left / 2))
    return np.array(gains)


def curvature(rows: Labelled, logits: Array) -> Array:
    """The mean second derivative of the loss along each coordinate: E[1 - |p|^2] / (classes - 1) * E[x_j^2]."""
    found: Array = _unsure(rows, logits) / (rows.classes - 1) * np.square(rows.x).mean(axis=0)
    return found


def _unsure(rows: Labelled, logits: Array) -> float:
    """The weighted mean of 1 - |p|^2, the trace of a row's Hessian by logits."""
    return float((1 - np.exp(2 * log_softmax(logits)).sum(axis=1)) @ rows.weights / len(logits))


def _bend_along(x: Array, residual: Array, logits: Array, spread: Array) -> float:
    """The curvature by logits along the gradient: E var_p(G x) / sum_j E[x_j^2] |G_j|^2, with gradient and curvature
    from different rows.

    Classes that are often taken for each other have more of the gradient and more curvature than the mean class.
    """
    parts = [np.arange(k, len(x), 3) for k in range(3)]
    slopes = [residual[rows].T @ x[rows] / len(rows) for rows in parts]
    p = np.exp(log_softmax(logits))
    above = below = 0.0
    for first, second, third in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        rows, a, b = parts[third], slopes[first], slopes[second]
        one, other = x[rows] @ a.T, x[rows] @ b.T
        above += float(((p[rows] * one * other).sum(1) - (p[rows] * one).sum(1) * (p[rows] * other).sum(1)).mean())
        below += float((spread * a * b).sum())
    return above / below if below > 0 and above > 0 else 0.0


def _choice(
    best: Trial,
    axes: PublicAxes,
    classes: int,
    given: Given,
    rank: int,
    constant: bool,
    reason: str,
) -> Choice:
    """Steps so many that the learning rate is stable, and the learning rate that gives the path."""
    space = axes.whitened(damping=best.damping, rank=rank, constant=constant)
    stable = classes / space.steepest  # the mean over rows of p (1 - p) is about 1 / classes at most
    steps = given.steps or max(FEWEST_STEPS, min(MOST_STEPS, math.ceil(best.path / stable)))
    rate = given.learning_rate if given.learning_rate is not None else min(best.path / steps, stable)
    return Choice(
        steps=steps,
        learning_rate=rate,
        max_grad_norm=best.clip,
        damping=best.damping,
        rank=rank,
        ridge=best.ridge,
        reason=reason,
        start_loss=None if math.isnan(best.start_loss) else best.start_loss,
        forecast=None if math.isnan(best.forecast) else best.forecast,
    )


def _given(value: float | None, usual: float) -> float:
    return usual if value is None else value


def temperature(logits: Array, rows: Labelled) -> float:
    """The factor 1 / temperature in [1/4, 4] on logits that makes the loss of these rows least.

    References:
        - Guo, Pleiss, Sun and Weinberger 2017, On Calibration of Modern Neural Networks, arXiv:1706.04599.
    """
    found = minimize_scalar(lambda t: rows.loss(logits * math.exp(t)), bounds=(-math.log(4), math.log(4)))
    return math.exp(-float(found.x))
