"""Paired differences between the methods of a study, with Student t-intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from halfsilver.study.method import BEST_PRIVATE, Arm, pairs_of, private_candidates, without_private
from halfsilver.study.records import Difference, Mean, Result

Values = dict[str, dict[int, float]]  # method -> seed -> one metric; runs that diverged are not in it
Diverged = dict[str, list[int]]  # method -> seeds


def t_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Two-sided Student t-interval of the mean of independent normal values; None for fewer than two, or if all agree.

    Figures that are counted, such as an accuracy, can agree by chance; an interval of no width would be sure of them.

    >>> [round(end, 3) for end in t_interval([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    """
    from scipy.special import stdtrit

    n = len(values)
    if n < 2 or len(set(values)) == 1:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # near the largest float the interval is infinite, or unknown
        half = stdtrit(n - 1, (1 + confidence) / 2) * np.std(values, ddof=1) / math.sqrt(n)
        return float(np.mean(values) - half), float(np.mean(values) + half)


def metrics(runs: Iterable[Result]) -> list[str]:
    """Names of the final figures; loss first, for it is what was trained."""
    return sorted({name for run in runs for name in run.final}, key=lambda name: (name != "loss", name))


def diverged(runs: Iterable[Result]) -> Diverged:
    """Seeds of the runs that end with a figure that is not a finite number."""
    seeds: Diverged = {}
    for run in runs:
        if not all(value is not None and math.isfinite(value) for value in run.final.values()):
            seeds.setdefault(run.method, []).append(run.seed)
    return {method: sorted(own) for method, own in seeds.items()}


def by_method(runs: Iterable[Result], metric: str, lost: Diverged) -> Values:
    """One final figure of every run that did not diverge."""
    values: Values = {}
    for run in runs:
        value = run.final.get(metric)
        if value is not None and run.seed not in lost.get(run.method, ()):
            values.setdefault(run.method, {})[run.seed] = float(value)
    return values


def mean_with_interval(by_seed: Mapping[int, float], confidence: float) -> Mean:
    """Mean over seeds, its interval (None below two seeds that differ) and n."""
    values = list(by_seed.values())
    low, high = t_interval(values, confidence) or (None, None)
    return Mean(mean=_mean(values) if values else None, low=low, high=high, n=len(values))


def finished_candidates(arms: Sequence[Arm], values: Mapping[str, Values]) -> list[str]:
    """The methods among which the best private one is picked, the last of the tables first."""
    losses = values.get("loss", {})
    return [arm.name for arm in reversed(private_candidates([arm for arm in arms if losses.get(arm.name)]))]


def differences(
    arms: Sequence[Arm], values: Mapping[str, Values], lost: Diverged, confidence: float
) -> Iterator[Difference]:
    """Every comparison and metric for which some seed has both sides.

    What private data add is shown by the method from the public start with the lowest loss, or by one from random
    weights where there is no other. Picking the best one and then testing it would be too kind, so its interval is that
    which holds for all candidates at once (Bonferroni).
    """
    candidates, public = finished_candidates(arms, values), without_private(arms)
    for metric, own in values.items():
        if candidates and public is not None:
            best = min(candidates, key=lambda name: _rank(values["loss"], name, candidates, lost))
            level = 1 - (1 - confidence) / len(candidates)
            yield from _paired(private_pair(public), metric, best, public.name, own, lost, level)
        for arm, baseline in pairs_of(arms):
            yield from _paired(arm.pair, metric, arm.name, baseline.name, own, lost, confidence)


def private_pair(public: Arm) -> str:
    """The name of the difference between the best private method and public data alone."""
    return f"{BEST_PRIVATE} - {public.name}"


def _rank(losses: Values, method: str, candidates: Sequence[str], lost: Diverged) -> tuple[int, float]:
    """Fewest runs that diverged, then the lowest mean loss over the seeds that all candidates have."""
    common = set.intersection(*(set(losses[m]) for m in candidates)) or set(losses[method])
    return len(lost.get(method, ())), _mean([losses[method][s] for s in sorted(common)])


def _paired(
    name: str, metric: str, method: str, baseline: str, values: Values, diverged: Diverged, level: float
) -> Iterator[Difference]:
    """At most one: none where no seed has both sides."""
    ours, theirs = values.get(method, {}), values.get(baseline, {})
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return
    with np.errstate(over="ignore"):
        gaps = np.subtract([ours[s] for s in seeds], [theirs[s] for s in seeds]).tolist()
    mean, base = _mean(gaps), _mean([theirs[s] for s in seeds])
    low, high = t_interval(gaps, level) or (None, None)
    lost = [f"{m} with seed {s}" for m in (method, baseline) for s in diverged.get(m, ())]
    shown = not lost and low is not None and high is not None and (low > 0 or high < 0)
    yield Difference(
        name=name, metric=metric, method=method, baseline=baseline, mean=mean, low=low, high=high, n=len(seeds),
        within_noise=not shown, relative=mean / base if base > 0 else None, baseline_mean=base, level=level, lost=lost,
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.mean(values))
