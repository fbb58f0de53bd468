"""Wall and CPU time of steps, contenders taking turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.speed.contenders import BASE, Contender, Named

# A sample takes several steps where one is too short for the scheduler's noise to average out.
_SAMPLE_SECONDS = 0.25
_MOST_STEPS = 16

# Short rounds are repeated more often than asked for, while that is cheap: they are the noisy ones.
_CHEAP_SECONDS = 20.0
_MOST_OFTEN = 3


@dataclass(frozen=True)
class Sample:
    """Seconds per step."""

    wall: float
    cpu: float


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A contender's time over that of the base in the same repetition: median and range over the repetitions."""

    median: float
    least: float
    most: float
    cpu: float
    seconds: float
    reps: int


def measure(
    take: Mapping[str, Callable[[int], Sample]], first: Mapping[str, float], reps: int, *, exactly: bool = False
) -> dict[str, list[Sample]]:
    """At least `reps` samples of each contender. In each repetition all take their turn, each time from another start.

    The base has two turns a repetition, because everything is divided by it. `take` says how to time a number of steps.
    `first` says how many seconds the warm-up took: how many steps make a sample depends on it.
    """
    steps = {name: _steps(first[name]) for name in take}
    seconds = sum(first[name] * steps[name] for name in take)
    samples: dict[str, list[Sample]] = {name: [] for name in take}
    for rep in range(reps if exactly else _repetitions(reps, seconds)):
        turns: dict[str, list[Sample]] = {name: [] for name in take}
        for name in _turns(list(take), rep):
            turns[name].append(take[name](steps[name]))
        for name, taken in turns.items():
            samples[name].append(_mean(taken))
    return samples


def warm_up(contender: Contender) -> tuple[Named | None, float]:
    """One gradient, to be held against the oracle, and the seconds it took; a whole step where nothing is clipped."""
    started = time.perf_counter()
    found = contender.clipped_sum()
    if found is None:
        contender.step()
    return found, time.perf_counter() - started


def _repetitions(least: int, seconds: float) -> int:
    return max(least, min(_MOST_OFTEN * least, int(_CHEAP_SECONDS / max(seconds, 1e-6))))


def _steps(seconds: float) -> int:
    return max(1, min(_MOST_STEPS, math.ceil(_SAMPLE_SECONDS / max(seconds, 1e-6))))


def _turns(names: list[str], start: int) -> list[str]:
    order = [names[(i + start) % len(names)] for i in range(len(names))]
    opposite = (order.index(BASE) + len(order) // 2 + 1) % (len(order) + 1)
    return [*order[:opposite], BASE, *order[opposite:]]


def _mean(samples: list[Sample]) -> Sample:
    return Sample(statistics.fmean(s.wall for s in samples), statistics.fmean(s.cpu for s in samples))


def sample(contender: Contender, steps: int) -> Sample:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contender.step()
    return Sample((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)


def ratios(samples: Mapping[str, list[Sample]]) -> dict[str, Ratio]:
    """Each contender against the base, repetition by repetition: what slowed down both cancels."""
    return {name: _ratio(own, samples[BASE]) for name, own in samples.items()}


def _ratio(own: list[Sample], base: list[Sample]) -> Ratio:
    wall = [a.wall / b.wall for a, b in zip(own, base, strict=True)]
    return Ratio(
        median=statistics.median(wall),
        least=min(wall),
        most=max(wall),
        cpu=statistics.median(a.cpu / b.cpu for a, b in zip(own, base, strict=True)),
        seconds=statistics.median(a.wall for a in own),
        reps=len(own),
    )
