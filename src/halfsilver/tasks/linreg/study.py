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
from halfsilver.study.method import COLD, PDA, PUBLIC, WARM, WHITENED, registered
from halfsilver.tasks.linreg.data import make_problem
from halfsilver.tasks.linreg.methods import METHODS, Point, Prepared, run

DIMS = tuple(range(500, 6001, 500))
SEARCHED = tuple(name for name in METHODS if registered(name).trains)

_SEARCH_SEEDS = (10_000, 10_001)
_LONG, _ANY = (80, 160, 320), (20, 40, 80, 160, 320)
_STEPS = {COLD.name: _LONG, WARM.name: _LONG, PDA.name: _ANY, WHITENED.name: _ANY}
_START = {  # reach, clip
    COLD.name: (1.25e-3, 2e-3),
    WARM.name: (1e-3, 5e-3),
    PDA.name: (2.5e-3, 2.5e-3),
    WHITENED.name: (1e-2, 2.5e-3),
}
_DAMPINGS = (0.1, 0.3, 1.0)  # of a geometry
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
        for damping in sorted({p.damping for p in points}):
            new = [p for p in points if p.damping == damping and (p, "last") not in self.means]
            if not new:
                continue
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
    return [Point(p.steps, p.reach * a, p.clip * b, p.damping) for a in (0.5, 1.0, 2.0) for b in (0.5, 1.0, 2.0)]


def search(trials: Sequence[Prepared], method: str) -> tuple[Choice, dict[Choice, float]]:
    """The best setting: no neighbour in reach or clip is better, and twice the steps (at most 320) gain under 1 %."""
    state = Search(trials, method)
    dampings = _DAMPINGS if registered(method).geometry else (0.0,)
    best = min((_search_at(state, method, damping) for damping in dampings), key=state.mean)
    return best, state.means


def _search_at(state: Search, method: str, damping: float) -> Choice:
    starts = [Point(steps, *_START[method], damping) for steps in _STEPS[method]]
    state.evaluate([p for start in starts for p in neighbours(start)])
    choice = state.interior(starts[0])
    for start in starts[1:]:
        longer = state.interior(Point(start.steps, choice[0].reach, choice[0].clip, damping))
        if state.mean(longer) >= _WORTH_DOUBLING * state.mean(choice):
            break
        choice = longer
    return choice


def search_method(dim: int, method: str, path: Path, skew: float = 0.0) -> None:
    """Write the best setting of one method at one dimension."""
    torch.set_num_threads(1)
    started = time.monotonic()
    prepared = [Prepared(make_problem(dim, seed, skew=skew)) for seed in _SEARCH_SEEDS]
    choice, means = search(prepared, method)
    record = {"point": asdict(choice[0]), "iterate": choice[1], "mean": means[choice], "tried": len(means) // 2}
    if registered(method).has_mirror:
        eigenvalues = torch.linalg.eigvalsh(prepared[0].hessian.float())
        # The very smallest eigenvalue is that of the direction in which no row varies.
        record["eigenvalues"] = {"largest": float(eigenvalues[-1]), "smallest": float(eigenvalues[1])}
    write_json(path, {**record, "seconds": time.monotonic() - started})


def run_trial(dim: int, trial: int, out: Path, skew: float = 0.0) -> None:
    """Every method on one fresh trial, at the settings that the search found; those that are there are kept."""
    torch.set_num_threads(1)
    prepared, path = Prepared(make_problem(dim, trial, skew=skew)), _trial_file(out, dim, trial)
    mse: dict[str, float] = read_json(path)["mse"] if path.exists() else {}
    if PUBLIC.name not in mse:
        mse[PUBLIC.name] = float(prepared.problem.risk(prepared.public_model[:, None]))
    for method in (m for m in SEARCHED if m not in mse):
        record = read_json(_search_file(out, dim, method))
        point = Point(**record["point"])
        mse[method] = run(prepared, method, [point], seed=trial)[point, record["iterate"]]
    skewed = {"skew": skew} if skew else {}
    write_json(path, {"dim": dim, "trial": trial, "mse": mse, "torch": torch.__version__, **skewed})


def _is_whole(path: Path) -> bool:
    """Whether a trial has all methods; one of an earlier version may lack some."""
    return path.exists() and set(METHODS) <= set(read_json(path)["mse"])


def _search_file(out: Path, dim: int, method: str) -> Path:
    return out / f"p{dim}-search-{method}.json"


def _trial_file(out: Path, dim: int, trial: int) -> Path:
    return out / f"p{dim}-trial{trial}.json"


def study(
    dims: Sequence[int],
    trials: int,
    out: Path,
    *,
    skew: float = 0.0,
    workers: int = 2,
    tell: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Run what is missing, the largest dimensions first, and return one row per dimension and method.

    A folder holds the results of one `skew`.
    """
    out.mkdir(parents=True, exist_ok=True)
    order = sorted(dims, reverse=True)
    searches = [(search_method, (dim, m, _search_file(out, dim, m), skew)) for dim in order for m in SEARCHED]
    runs = [(run_trial, (dim, trial, out, skew)) for dim in order for trial in range(trials)]
    searches = [job for job in searches if not job[1][2].exists()]
    runs = [job for job in runs if not _is_whole(_trial_file(out, *job[1][:2]))]
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
        for method in (m for m in METHODS if m in records[0]["mse"]):  # earlier studies have fewer
            values = np.array([r["mse"][method] for r in records])
            yield {"dim": dim, "method": method, "mean": float(values.mean()), "ci95": _half_width(values)}


def _half_width(values: np.ndarray) -> float:
    from scipy import stats

    if len(values) < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
