"""The grid: which settings are tried for each method, and which one is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from halfsilver.runs.folder import read_json
from halfsilver.study.method import METHODS, Arm, Method, pairs_of
from halfsilver.study.problem import Grid, Setting, better
from halfsilver.study.records import Choice, Result, Trial

_WIDENED_AT_MOST = 2  # times, and for each method
_DAMPING_STEP = 10  # large, because results change slowly with the damping


def settings_wanted(grid: Grid, method: Method, costs: Mapping[Setting, float], widen: bool) -> list[Setting]:
    """All settings to try, given the costs so far: the grid, and neighbours of a best point that lies at its edge.

    A point is widened around at most twice, so that a cost that falls for ever cannot make the search endless.
    """
    wanted = method.settings_in(grid)
    if not widen:
        return wanted
    for _ in range(_WIDENED_AT_MOST):
        if not all(s in costs for s in wanted):
            return wanted
        best = min(wanted, key=lambda s: costs[s])
        wanted += [s for s in neighbours(best, wanted) if s not in wanted]
    return wanted


def neighbours(point: Setting, among: Sequence[Setting]) -> list[Setting]:
    """The next learning rate, alpha end and damping beyond an edge of `among` on which `point` lies.

    >>> [s.lr for s in neighbours(Setting(2.0), [Setting(0.5), Setting(1.0), Setting(2.0)])]
    [4.0]
    >>> neighbours(Setting(1.0), [Setting(0.5), Setting(1.0), Setting(2.0)])
    []
    >>> [s.damping for s in neighbours(Setting(1.0, damping=1.0), [Setting(r, damping=1.0) for r in (0.5, 1.0, 2.0)])]
    [0.1, 10.0]
    """
    rates = _beyond_rates(point.lr, sorted({s.lr for s in among}))
    ends = _beyond_ends(point.alpha_end, sorted({s.alpha_end for s in among if s.alpha_end is not None}))
    dampings = _beyond_dampings(point.damping, sorted({s.damping for s in among if s.damping is not None}))
    return [
        *(replace(point, lr=lr) for lr in rates),
        *(replace(point, alpha_end=end) for end in ends),
        *(replace(point, damping=damping) for damping in dampings),
    ]


def _beyond_rates(rate: float, rates: Sequence[float]) -> list[float]:
    below = [rates[0] * rates[0] / rates[1] if len(rates) > 1 else rates[0] / 2] if rate == rates[0] else []
    above = [rates[-1] * rates[-1] / rates[-2] if len(rates) > 1 else rates[-1] * 2] if rate == rates[-1] else []
    return [_rounded(r) for r in below + above]


def _beyond_ends(end: float | None, ends: Sequence[float]) -> list[float]:
    """Twice as far from 1, or half as far."""
    below = [max(0.0, 1 - 2 * (1 - end))] if end is not None and end == ends[0] and end > 0 else []
    above = [1 - (1 - end) / 2] if end is not None and end == ends[-1] else []
    return [_rounded(e) for e in below + above if e != end]


def _beyond_dampings(damping: float | None, dampings: Sequence[float]) -> list[float]:
    below = [damping / _DAMPING_STEP] if damping is not None and damping == dampings[0] else []
    above = [damping * _DAMPING_STEP] if damping is not None and damping == dampings[-1] else []
    return [_rounded(d) for d in below + above]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def costs_of(folder: Path, settings: Sequence[Setting], score: str = "loss") -> dict[Setting, float]:
    """The score of each setting whose run is finished, turned so that less is better; infinite where it diverged."""
    finished = [setting for setting in settings if _result_file(folder, setting).exists()]
    return {setting: _cost(_final(folder, setting), score) for setting in finished}


def _cost(final: Mapping[str, float | None], score: str) -> float:
    value = final[score]
    return math.inf if value is None or None in final.values() else -better(score) * value


def choose(folder: Path, settings: Sequence[Setting], score: str = "loss") -> Choice:
    """The best setting by `score`, with what was tried and how sure the choice is.

    `difference` says by how much it is ahead of the runner-up. Its standard error is paired over the scored rows: it
    says how much the choice depends on which rows were scored, and nothing about the noise of a run.
    """
    costs = costs_of(folder, settings, score)
    ranked = sorted(costs, key=lambda s: costs[s])
    best = ranked[0]
    choice = Choice(
        setting=best,
        score=score,
        tried=[Trial(setting=s, figures=_final(folder, s)) for s in settings],
        at_edge=bool(neighbours(best, settings)),
    )
    if len(ranked) < 2 or not math.isfinite(costs[ranked[1]]):  # a run that diverged has no scores
        return choice
    ahead = better(score) * (_scored(folder, best, score) - _scored(folder, ranked[1], score))
    error = float(ahead.std() / len(ahead) ** 0.5)
    return replace(choice, runner_up=ranked[1], difference=float(ahead.mean()), standard_error=error)


def broken_start(choices: Mapping[str, Choice], arms: Sequence[Arm] = METHODS) -> str:
    """A remark where the search saw the public start lose against random weights; else nothing."""
    for arm, baseline in pairs_of([arm for arm in arms if arm.name in choices]):
        score = choices[arm.name].score
        own, other = (choices[one.name].chosen.figures[score] for one in (arm, baseline))
        if arm.start == baseline.start or own is None or other is None or better(score) * (own - other) >= 0:
            continue
        return (
            f"In the search {arm.name} is behind {baseline.name} ({score} {own:.4g} against {other:.4g}): the public "
            "start is worse than random weights. Mend pretraining before you trust this study."
        )
    return ""


def _result_file(folder: Path, setting: Setting) -> Path:
    return folder / setting.label / "result.json"


def _final(folder: Path, setting: Setting) -> Mapping[str, float | None]:
    return Result.from_json(read_json(_result_file(folder, setting))).final


def _scored(folder: Path, setting: Setting, score: str) -> torch.Tensor:
    return load_file(folder / setting.label / "scored.safetensors")[score].double()
