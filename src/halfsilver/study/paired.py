"""Paired differences between the methods of a study, with Student t-intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = dict[str, dict[int, float]]  # method -> seed -> one metric; runs that diverged are not in it
Diverged = dict[str, list[int]]  # method -> seeds

PRIVATE, START, MIRROR = "private - public", "warm - cold", "pda - warm"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of `method` minus `baseline` over the `n` seeds that both have, with its interval.

    `within_noise` is False only where an interval exists, excludes 0, and no pair was lost to a run that diverged.
    `relative` is the mean in shares of `baseline_mean`, where that is above 0. `level` is that of the interval itself:
    higher than asked for where `method` was picked as the better of two, so that it covers as often as asked for.
    """

    name: str
    metric: str
    method: str
    baseline: str
    mean: float
    low: float | None
    high: float | None
    n: int
    within_noise: bool
    relative: float | None
    baseline_mean: float
    level: float
    lost: list[str]


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


def metrics(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the final figures; loss first, for it is what was trained."""
    return sorted({k for r in runs for k in r["final"]}, key=lambda k: (k != "loss", k))


def diverged(runs: Iterable[Mapping[str, Any]]) -> Diverged:
    """Seeds of the runs that end with a figure that is not a finite number."""
    found: Diverged = {}
    for run in runs:
        if not all(value is not None and math.isfinite(value) for value in run["final"].values()):
            found.setdefault(run["method"], []).append(run["seed"])
    return {method: sorted(seeds) for method, seeds in found.items()}


def by_method(runs: Iterable[Mapping[str, Any]], metric: str, lost: Diverged) -> Values:
    """One final figure of every run that did not diverge."""
    found: Values = {}
    for run in runs:
        if metric in run["final"] and run["seed"] not in lost.get(run["method"], ()):
            found.setdefault(run["method"], {})[run["seed"]] = float(run["final"][metric])
    return found


def mean_with_interval(by_seed: Mapping[int, float], confidence: float) -> dict[str, Any]:
    """Mean over seeds, its interval (None below two seeds that differ) and n."""
    values = list(by_seed.values())
    low, high = t_interval(values, confidence) or (None, None)
    return {"mean": _mean(values) if values else None, "low": low, "high": high, "n": len(values)}


def differences(values: Mapping[str, Values], lost: Diverged, confidence: float) -> Iterator[Difference]:
    """Every comparison and metric for which some seed has both sides.

    What private data add is shown by warm or pda, whichever has the lower loss, or by cold if it is alone. Picking the
    better one and then testing it would be too kind, so its interval is that which holds for both at once (Bonferroni).
    """
    finished = [m for m in ("pda", "warm", "cold") if values.get("loss", {}).get(m)]
    candidates = [m for m in finished if m != "cold"] or finished
    for metric, own in values.items():
        if candidates:
            best = min(candidates, key=lambda m: _rank(values["loss"], m, candidates, lost))
            yield from _paired(PRIVATE, metric, best, "public", own, lost, 1 - (1 - confidence) / len(candidates))
        yield from _paired(START, metric, "warm", "cold", own, lost, confidence)
        yield from _paired(MIRROR, metric, "pda", "warm", own, lost, confidence)


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
