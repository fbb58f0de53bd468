"""The instruments: A bounds epsilon from below, B tests sampler and noise against the plan, C replays a neighbour."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from halfsilver.auditing.observe import Array, Kind, Observation
from halfsilver.privacy.accounting import epsilon_of
from halfsilver.privacy.strategies import Correlated

Instrument = Literal["A", "B", "C", "reconciliation"]

DELTA = 1e-5

# Scores are read from float32 weights: a difference this small, in clip norms, is rounding.
_ROUNDING = 1e-3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one test of one instrument.

    Args:
        instrument: "A", "B", "C" or "reconciliation".
        test: What was tested, in words.
        kind: What `value` is: a p-value ("p"), a bound on epsilon ("bound") or a count or size ("count").
        value: The figure.
        limit: The figure at which the test raises an alarm.
        alarm: Whether it did.
    """

    instrument: Instrument
    test: str
    kind: Literal["p", "bound", "count"]
    value: float
    limit: float
    alarm: bool


def judge(observation: Observation, alpha: float, *, delta: float = DELTA) -> list[Finding]:
    """Run all tests on one observation. A correct loop raises any alarm with probability at most `alpha`.

    The level is divided over the statistical tests (Bonferroni). The others (C, reconciliation, reads) cannot err.

    Args:
        observation: The audited run.
        alpha: The probability of a false alarm, in (0, 1).
        delta: The delta of the bound on epsilon, in (0, 1). Default 1e-5.

    Returns:
        One finding per test.
    """
    chances = list(p_values(observation))
    share = alpha / (len(chances) + 1)
    bound, claimed = lower_bound(observation, share, delta), observation.plan.epsilon(delta)
    # Epsilon falls with the noise, so comparing the noise is the same, without the accountant's rounding.
    refuted = not separation(observation, share) * observation.plan.noise_multiplier <= 1
    first = Finding(instrument="A", test="epsilon", kind="bound", value=bound, limit=claimed, alarm=refuted)
    tests = [
        Finding(instrument="B", test=name, kind="p", value=p, limit=share, alarm=not p > share) for name, p in chances
    ]
    return [first, *tests, *_certain(observation)]


# ---- A


def lower_bound(observation: Observation, alpha: float, delta: float = DELTA) -> float:
    """Lower bound on the epsilon of the run, with confidence 1 - `alpha`, given Gaussian noise and the plan's q and T.

    An attacker guesses "was in the batch" wherever a score exceeds 1/2. Let a and b be upper confidence bounds on the
    two error rates of that guess. No Gaussian mechanism with separation below mu = Phi^-1(1 - a) - Phi^-1(b) has rates
    as low as these, so the noise multiplier is at most 1 / mu. The accountant turns it into epsilon. The threshold is a
    constant, because one that followed the claimed noise would follow the claim.

    Args:
        observation: The audited run.
        alpha: One minus the confidence, in (0, 1).
        delta: The delta of epsilon, in (0, 1). Default 1e-5.

    Returns:
        The bound, at least 0; infinite if a score is not finite.

    References:
        - Dong, Roth and Su 2022, Gaussian Differential Privacy, arXiv:1905.02383, for mu from two error rates.
        - Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning, arXiv:2302.07956, for its use in
          audits.
    """
    plan, mu = observation.plan, separation(observation, alpha)
    if mu <= 0:
        return 0.0
    if not math.isfinite(mu):
        return math.inf
    count = replace(plan.count(), noise_multiplier=1 / mu)
    # Ten times as coarse, and as fast, as the accountant's own. It rounds up, which shows where epsilon is small.
    rough = epsilon_of([count], delta, "pld", interval=1e-3)
    return rough if rough > 1 else epsilon_of([count], delta, "pld", interval=max(1e-5, 1e-4 * rough))


def separation(observation: Observation, alpha: float) -> float:
    """Lower confidence bound of the distance between the two kinds of scores, in standard deviations of the noise.

    References:
        - Dong, Roth and Su 2022, Gaussian Differential Privacy, arXiv:1905.02383.
    """
    seen, silent = canaries(observation)
    if not (np.isfinite(seen).all() and np.isfinite(silent).all()):
        return math.inf
    missed = _upper(int((seen <= 0.5).sum()), len(seen), alpha / 2)
    false = _upper(int((silent > 0.5).sum()), len(silent), alpha / 2)
    return float(stats.norm.isf(false) - stats.norm.ppf(missed))


def canaries(observation: Observation) -> tuple[Array, Array]:
    """Scores of canaries in releases that they took part in, and scores of numbers that no record belongs to."""
    return observation.moved(Kind.IN), observation.moved(Kind.OUT, Kind.BROKEN)


def _upper(hits: int, trials: int, alpha: float) -> float:
    """Clopper-Pearson: a rate is at most this, with confidence 1 - alpha.

    References:
        - Clopper and Pearson 1934, The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial,
          Biometrika 26(4).
    """
    return float(stats.beta.isf(alpha, hits + 1, trials - hits)) if hits < trials else 1.0


# ---- B


def p_values(observation: Observation) -> Iterator[tuple[str, float]]:
    """The probability of the observed sampling and noise, or of something further off, under the plan."""
    if observation.plan.sampler == "poisson":
        yield from _sampler(observation)
    yield from _noise(observation)


def _sampler(observation: Observation) -> Iterator[tuple[str, float]]:
    q, reads = observation.plan.sampling_rate, observation.reads.sum(0) > 0
    steps, records = reads.shape
    yield "rate", _binomial(reads.sum(), reads.size, q)
    yield "steps per record", _dispersion(reads.sum(0), steps, q)
    yield "records per step", _dispersion(reads.sum(1), records, q)
    even = reads[:, : records // 2 * 2].reshape(steps, -1, 2).all(2)
    yield "neighbouring records", _binomial(even.sum(), even.size, q**2)
    lag = reads[: steps // 2 * 2].reshape(-1, 2, records).all(1)
    yield "neighbouring steps", _binomial(lag.sum(), lag.size, q**2)


def _noise(observation: Observation) -> Iterator[tuple[str, float]]:
    noise = observation.noise / observation.plan.step_noise
    values = noise[~np.isnan(noise) | ~np.isfinite(observation.scores)]
    if not np.isfinite(values).all():
        yield "finite scores", 0.0
        return
    yield "noise mean", float(2 * stats.norm.sf(abs(values.mean()) * math.sqrt(values.size)))
    yield "noise variance", _two_sided(stats.chi2(values.size), float(np.square(values).sum()))
    yield "noise variance of each step", _scales(noise)
    yield "noise shape", float(stats.kstest(values, "norm").pvalue)
    yield "noise of neighbouring steps", _correlation(noise[:-1], noise[1:])
    yield "noise of the two layers", _at_any_distance(noise[:, :1], noise[:, 1:])
    world, width = len(observation.reads), noise.shape[2]
    piece = math.ceil(width / world)
    if world > 1:  # every process adds the noise to a piece of its own
        yield "noise of two processes", _at_any_distance(noise[:, :, :piece], noise[:, :, piece:])
    yield "cancelling canaries", _largest(observation)


def _binomial(hits: int, trials: int, rate: float) -> float:
    return _two_sided(stats.binom(trials, rate), float(hits))


def _two_sided(law: stats.rv_frozen, value: float) -> float:
    """Twice the smaller tail, at most 1; for laws on whole numbers both tails hold the value."""
    whole = isinstance(law.dist, stats.rv_discrete)
    return float(min(1.0, 2 * min(law.cdf(value), law.sf(value - 1 if whole else value))))


def _dispersion(counts: Array, trials: int, rate: float) -> float:
    """Whether independent binomial `counts` scatter as they should: neither more, nor less, as cyclic batches do.

    Their sum of squares has the law of chi-square up to its variance, which is put right by the fourth moment.
    """
    variance = trials * rate * (1 - rate)
    half = 1 + (1 - 6 * rate * (1 - rate)) / (2 * variance)
    statistic = float(np.square(counts - trials * rate).sum()) / variance
    return _two_sided(stats.chi2(len(counts) / half), statistic / half)


def _correlation(a: Array, b: Array) -> float:
    """Of noise that should be independent with mean 0 and variance 1."""
    products = (a * b)[~np.isnan(a * b)]
    return float(2 * stats.norm.sf(abs(products.sum()) / math.sqrt(max(1, products.size))))


def _at_any_distance(a: Array, b: Array) -> float:
    """Of two rows of noise that should be independent, also when shifted: a seed used twice may start elsewhere.

    Distances at which few numbers meet are left out: sums of few products are not normal.
    """
    size = a.shape[2] + b.shape[2] - 1
    values, known = (np.nan_to_num(a), np.nan_to_num(b)), (~np.isnan(a), ~np.isnan(b))
    spectra = ([np.fft.rfft(x, size) for x in pair] for pair in (values, known))
    products, pairs = (np.fft.irfft(x * y.conj(), size).sum((0, 1)) for x, y in spectra)
    enough = pairs > pairs.max() / 4
    largest = np.max(np.abs(products[enough]) / np.sqrt(pairs[enough]), initial=0.0)
    return float(min(1.0, 2 * enough.sum() * stats.norm.sf(largest)))


def _scales(noise: Array) -> float:
    """Whether the noise has one scale in all steps: a division by the size of each batch shows here."""
    squares, counts = np.nansum(noise**2, axis=(1, 2)), (~np.isnan(noise)).sum((1, 2))
    normal = stats.norm.ppf(stats.chi2(counts).cdf(squares))
    return _two_sided(stats.chi2(len(normal)), float(np.square(normal).sum()))


def _largest(observation: Observation) -> float:
    """The chance of so large a score of a canary whose gradient cancels, if none moves the sum by more than C."""
    scores = observation.moved(Kind.CANCELLING)
    if not len(scores):
        return 1.0
    excess = (float(scores.max()) - 1 - _ROUNDING) / observation.plan.noise_multiplier
    return float(min(1.0, len(scores) * stats.norm.sf(excess)))


# ---- C, reconciliation, and what else is never a matter of chance


def _certain(observation: Observation) -> Iterator[Finding]:
    for replay in observation.replays:
        allowed = replay.read.astype(float) * (replay.leaver != Kind.BROKEN)
        excess = float(np.max(replay.reach - allowed)) if replay.read.any() else math.inf  # then it shows nothing
        name = f"reach of one {replay.leaver.name.lower()} record"
        yield _count("C", name, excess, _ROUNDING, alarm=not excess <= _ROUNDING)
        for what in replay.differing:
            yield _count("C", f"{what} depends on one record", 1, 0, alarm=True)
    if observation.changed is not None:
        yield _exact("C", "directions that change when computed again", observation.changed, at_most=0)
    reads = observation.reads
    yield _exact("B", "reads of a record in one step", reads.sum(0).max(initial=0), at_most=1)
    yield _exact("B", "processes that read a record", (reads.sum(1) > 0).sum(0).max(initial=0), at_most=1)
    if isinstance(observation.plan.noise, Correlated):
        early = _early(reads.sum(0) > 0, observation.plan.noise.separation or 1)
        yield _exact("B", "records that take part again too early", early, at_most=0)
    if observation.plan.sampler == "full":
        yield _exact("B", "records left out of a full batch", (reads.sum(0) == 0).sum(), at_most=0)
    for name in ("intents", "noise_draws"):
        value, limit = getattr(observation, name), observation.releases
        yield _count("reconciliation", f"{name} = releases", value, limit, alarm=value != limit)
    planned = observation.plan.max_releases
    yield _exact("reconciliation", "releases <= planned", observation.releases, at_most=planned)


def _early(reads: Array, separation: int) -> int:
    """How many pairs of steps of one record, [T, R], are less than the separation apart."""
    return sum(int((reads[:-apart] & reads[apart:]).sum()) for apart in range(1, min(separation, len(reads))))


def _exact(instrument: Instrument, test: str, value: int, *, at_most: int) -> Finding:
    return _count(instrument, test, value, at_most, alarm=bool(value > at_most))


def _count(instrument: Instrument, test: str, value: float, limit: float, *, alarm: bool) -> Finding:
    return Finding(instrument=instrument, test=test, kind="count", value=float(value), limit=float(limit), alarm=alarm)
