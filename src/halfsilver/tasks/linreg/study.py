"""Search and trials of the linear regression study, resumable, one result file a trial.

The grid is searched on trials of its own and the reported trials are fresh: no figure is the best of many draws.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfsilver.runs.folder import read_json, write_json
from halfsilver.study.method import COLD, PDA, PUBLIC, WARM, registered
from halfsilver.tasks.linreg.data import make_problem, risk
from halfsilver.tasks.linreg.methods import METHODS, Point, Prepared, run

DIMS = tuple(range(500, 6001, 500))
SEARCHED = tuple(name for name in METHODS if registered(name).trains)

_SEARCH_SEEDS = (10_000, 10_001)
_STEPS = {COLD.name: (80, 160, 320), WARM.name: (80, 160, 320), PDA.name: (20, 40, 80, 160, 320)}
_START = {COLD.name: (1.25e-3, 2e-3), WARM.name: (1e-3, 5e-3), PDA.name: (2.5e-3, 2.5e-3)}  # reach, clip
_WORTH_MOVING = 0.995  # a neighbour is better if its mean risk is below this share of the centre's
_WORTH_DOUBLING = 0.99

Choice = tuple[Point, str]  # a setting, and which iterate to report


@dataclass
class Search:
    """Mean risk over the search trials of every point tried so far, for one dimension and method."""

    trials: Sequence[Prepared]
    method: str
    means: dict[Choice, float] = field(default_factory=dict)

    def evaluate(self, points: Sequence[Point]) -> None:
        """All new points as columns of one run: more columns cost next to nothing, more steps do."""
        new = [p for p in points if (p, "last") not in self.means]
        if new:
            found = [run(t, self.method, new, seed=i) for i, t in enumerate(self.trials)]
            self.means |= {choice: float(np.mean([f[choice] for f in found])) for choice in found[0]}

    def mean(self, choice: Choice) -> float:
        value = self.means[choice]
        return value if np.isfinite(value) else float("inf")

    def best_of(self, points: Sequence[Point]) -> Choice:
        return min(((p, kind) for p in points for kind in ("last", "average")), key=self.mean)

    def interior(self, start: Point) -> Choice:
        """Move the 3 x 3 grid to its best point until its centre is not worse than any neighbour."""
        centre = start
        while True:
            self.evaluate(neighbours(centre))
            best, own = self.best_of(neighbours(centre)), self.best_of([centre])
            if self.mean(best) >= _WORTH_MOVING * self.mean(own):
                return own
            centre = best[0]


def neighbours(p: Point) -> list[Point]:
    """The 3 x 3 grid around a point, by factors of two in reach and clip norm."""
    return [Point(p.steps, p.reach * a, p.clip * b) for a in (0.5, 1.0, 2.0) for b in (0.5, 1.0, 2.0)]


def search(trials: Sequence[Prepared], method: str) -> tuple[Choice, dict[Choice, float]]:
    """The best setting: no neighbour in reach or clip is better, and twice the steps (at most 320) gain under 1 %."""
    state = Search(trials, method)
    starts = [Point(steps, *_START[method]) for steps in _STEPS[method]]
    state.evaluate([p for start in starts for p in neighbours(start)])
    choice = state.interior(starts[0])
    for start in starts[1:]:
        longer = state.interior(Point(start.steps, choice[0].reach, choice[0].clip))
        if state.mean(longer) >= _WORTH_DOUBLING * state.mean(choice):
            break
        choice = longer
    return choice, state.means


def search_method(dim: int, method: str, path: Path) -> None:
    """Write the best setting of one method at one dimension."""
    torch.set_num_threads(1)
    started = time.monotonic()
    prepared = [Prepared(make_problem(dim, seed)) for seed in _SEARCH_SEEDS]
    choice, means = search(prepared, method)
    record = {"point": asdict(choice[0]), "iterate": choice[1], "mean": means[choice], "tried": len(means) // 2}
    if registered(method).has_mirror:
        eigenvalues = torch.linalg.eigvalsh(prepared[0].hessian.float())
        # The very smallest eigenvalue is that of the direction in which no row varies.
        record["eigenvalues"] = {"largest": float(eigenvalues[-1]), "smallest": float(eigenvalues[1])}
    write_json(path, {**record, "seconds": time.monotonic() - started})


def run_trial(dim: int, trial: int, out: Path) -> None:
    """Every method on one fresh trial, at the settings that the search found."""
    torch.set_num_threads(1)
    prepared = Prepared(make_problem(dim, trial))
    mse = {PUBLIC.name: float(risk(prepared.public_model[:, None], prepared.problem.theta))}
    for method in SEARCHED:
        record = read_json(_search_file(out, dim, method))
        point = Point(**record["point"])
        mse[method] = run(prepared, method, [point], seed=trial)[point, record["iterate"]]
    write_json(_trial_file(out, dim, trial), {"dim": dim, "trial": trial, "mse": mse, "torch": torch.__version__})


def _search_file(out: Path, dim: int, method: str) -> Path:
    return out / f"p{dim}-search-{method}.json"


def _trial_file(out: Path, dim: int, trial: int) -> Path:
    return out / f"p{dim}-trial{trial}.json"


def study(
    dims: Sequence[int], trials: int, out: Path, *, workers: int = 2, tell: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """Run what is missing, the largest dimensions first, and return one row per dimension and method."""
    out.mkdir(parents=True, exist_ok=True)
    order = sorted(dims, reverse=True)
    searches = [(search_method, (dim, m, _search_file(out, dim, m))) for dim in order for m in SEARCHED]
    runs = [(run_trial, (dim, trial, out)) for dim in order for trial in range(trials)]
    searches = [job for job in searches if not job[1][2].exists()]
    runs = [job for job in runs if not _trial_file(out, *job[1][:2]).exists()]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for name, jobs in (("search", searches), ("trial", runs)):
            started = time.monotonic()
            for done, job in enumerate(as_completed([pool.submit(f, *args) for f, args in jobs]), 1):
                job.result()
                tell(f"{name} {done} of {len(jobs)}, {time.monotonic() - started:.0f} s")
    return list(summarise(out, dims, trials))


def summarise(out: Path, dims: Sequence[int], trials: int) -> Iterator[dict[str, Any]]:
    """Mean and half-width of the 95 % t-interval over the trials, from the result files."""
    for dim in dims:
        records = [json.loads(_trial_file(out, dim, t).read_text()) for t in range(trials)]
        for method in METHODS:
            values = np.array([r["mse"][method] for r in records])
            yield {"dim": dim, "method": method, "mean": float(values.mean()), "ci95": _half_width(values)}


def _half_width(values: np.ndarray) -> float:
    from scipy import stats

    if len(values) < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
