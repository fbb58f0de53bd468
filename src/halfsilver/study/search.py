"""The grid: which settings are tried for each method, and which one is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from halfsilver.runs.folder import read_json
from halfsilver.study.problem import Grid, Setting, better

SEARCHED = ("cold", "warm", "pda")
_WIDENED_AT_MOST = 2  # times, and for each method


def first_settings(grid: Grid, method: str) -> list[Setting]:
    """The grid as the recipe gives it."""
    if method == "pda":
        return [Setting(lr, alpha) for alpha in grid.alpha_end or (None,) for lr in grid.pda]
    return [Setting(lr) for lr in getattr(grid, method)]


def settings_wanted(grid: Grid, method: str, costs: Mapping[Setting, float], widen: bool) -> list[Setting]:
    """All settings to try, given the costs so far: the grid, and neighbours of a best point that lies at its edge.

    A point is widened around at most twice, so that a cost that falls for ever cannot make the search endless.
    """
    wanted = first_settings(grid, method)
    if not widen:
        return wanted
    for _ in range(_WIDENED_AT_MOST):
        if not all(s in costs for s in wanted):
            return wanted
        best = min(wanted, key=lambda s: costs[s])
        wanted += [s for s in neighbours(best, wanted) if s not in wanted]
    return wanted


def neighbours(point: Setting, among: Sequence[Setting]) -> list[Setting]:
    """The next learning rate, and the next alpha end, beyond an edge of `among` on which `point` lies.

    >>> neighbours(Setting(2.0), [Setting(0.5), Setting(1.0), Setting(2.0)])
    [Setting(lr=4.0, alpha_end=None)]
    >>> neighbours(Setting(1.0), [Setting(0.5), Setting(1.0), Setting(2.0)])
    []
    """
    found = [Setting(lr, point.alpha_end) for lr in _beyond_rates(point.lr, sorted({s.lr for s in among}))]
    ends = sorted({s.alpha_end for s in among if s.alpha_end is not None})
    return found + [Setting(point.lr, end) for end in _beyond_ends(point.alpha_end, ends)]


def _beyond_rates(rate: float, rates: Sequence[float]) -> list[float]:
    below = [rates[0] * rates[0] / rates[1] if len(rates) > 1 else rates[0] / 2] if rate == rates[0] else []
    above = [rates[-1] * rates[-1] / rates[-2] if len(rates) > 1 else rates[-1] * 2] if rate == rates[-1] else []
    return [_rounded(r) for r in below + above]


def _beyond_ends(end: float | None, ends: Sequence[float]) -> list[float]:
    """Twice as far from 1, or half as far."""
    below = [max(0.0, 1 - 2 * (1 - end))] if end is not None and end == ends[0] and end > 0 else []
    above = [1 - (1 - end) / 2] if end is not None and end == ends[-1] else []
    return [_rounded(e) for e in below + above if e != end]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def costs_of(folder: Path, settings: Sequence[Setting], score: str = "loss") -> dict[Setting, float]:
    """The score of each setting whose run is finished, turned so that less is better; infinite where it diverged."""
    found = {}
    for setting in settings:
        result = folder / setting.label / "result.json"
        if result.exists():
            final = read_json(result)["final"]
            found[setting] = math.inf if None in final.values() else -better(score) * final[score]
    return found


def choose(folder: Path, settings: Sequence[Setting], score: str = "loss") -> dict[str, Any]:
    """The best setting by `score`, with what was tried and how sure the choice is.

    `difference` says by how much it is ahead of the runner-up. Its standard error is paired over the scored rows: it
    says how much the choice depends on which rows were scored, and nothing about the noise of a run.
    """
    costs = costs_of(folder, settings, score)
    ranked = sorted(costs, key=lambda s: costs[s])
    best = ranked[0]
    choice: dict[str, Any] = {
        "setting": asdict(best),
        "score": score,
        "tried": [{"setting": asdict(s), **read_json(folder / s.label / "result.json")["final"]} for s in settings],
        "at_edge": bool(neighbours(best, settings)),
    }
    if len(ranked) > 1 and math.isfinite(costs[ranked[1]]):  # a run that diverged has no scores
        ahead = better(score) * (_scored(folder, best, score) - _scored(folder, ranked[1], score))
        choice["runner_up"] = asdict(ranked[1])
        choice["difference"] = float(ahead.mean())
        choice["standard_error"] = float(ahead.std() / len(ahead) ** 0.5)
    return choice


def broken_start(choices: Mapping[str, Mapping[str, Any]]) -> str:
    """A remark where the search saw the public start lose against random weights; else nothing."""
    if not {"cold", "warm"} <= set(choices):
        return ""
    score = choices["warm"]["score"]
    cold, warm = (_of_chosen(choices[method])[score] for method in ("cold", "warm"))
    if None in (cold, warm) or better(score) * (warm - cold) >= 0:
        return ""
    return (
        f"In the search warm is behind cold ({score} {warm:.4g} against {cold:.4g}): the public start is worse than "
        "random weights. Mend pretraining before you trust this study."
    )


def _of_chosen(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    (found,) = (tried for tried in choice["tried"] if tried["setting"] == choice["setting"])
    return found  # type: ignore[no-any-return]


def _scored(folder: Path, setting: Setting, score: str) -> torch.Tensor:
    return load_file(folder / setting.label / "scored.safetensors")[score].double()
