"""The search of a study: which rows it sees, what is tried, and what is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halfsilver.errors import ConfigError
from halfsilver.study.arena import make_plan, search_arena
from halfsilver.study.method import WARM
from halfsilver.study.problem import Setting
from halfsilver.study.records import Choice
from halfsilver.study.search import broken_start, choose, neighbours, settings_wanted
from halfsilver.study.study import Study
from halfsilver.study.summary import ledger_totals
from tests.study.small_study import GRID, RECIPE, Forbidden, problem, request, scored_losses

# ---- what a search sees


def test_public_search_reads_no_private_row_and_keeps_the_noise_of_the_real_plan() -> None:
    own = problem(private=Forbidden(), validation=Forbidden())
    plan = make_plan(RECIPE, own.population, 5.0, 1e-4)
    arena = search_arena(own, RECIPE, plan, "public search")
    assert not arena.spends
    same = ("noise_multiplier", "expected_batch_size", "max_grad_norm", "unit")
    assert {n: getattr(arena.plan, n) for n in same} == {n: getattr(plan, n) for n in same}
    assert arena.plan.steps == round(0.2 * plan.steps)
    parts = [arena.problem.private[0], arena.problem.public[0], arena.problem.test[0]]
    rows = [{tuple(row) for row in part.tolist()} for part in parts]
    assert [len(part) for part in rows] == [16, 16, 8]
    assert set.union(*rows) == {tuple(row) for row in own.public[0].tolist()}
    assert sum(map(len, rows)) == 40, "the parts overlap"


def test_stand_in_rows_are_repeated_until_a_batch_can_be_drawn() -> None:
    own, recipe = problem(), replace(RECIPE, batch_size=50)
    arena = search_arena(own, recipe, make_plan(recipe, 200, 5.0, 1e-4), "public search")
    assert len(arena.problem.private[0]) == 64  # 16 rows, four times: 50 can be expected
    assert arena.plan.sampling_rate * len(arena.problem.private[0]) == pytest.approx(arena.plan.expected_batch_size)


def test_a_whole_public_search_with_private_rows_that_explode(tmp_path: Path) -> None:
    own = problem(private=Forbidden())
    made = Study(folder=tmp_path, request=request(), source=lambda: own)
    with pytest.raises(AssertionError, match="private row"):  # not before the first real run
        made.go()
    assert (tmp_path / "search" / "pda" / "choice.json").exists()
    assert ledger_totals(tmp_path / "ledger.jsonl", 1e-4)["runs"] == 0


def test_paper_search_needs_rows_set_aside(tmp_path: Path) -> None:
    own = problem(validation=None)
    made = Study(folder=tmp_path, request=request(search="paper search"), source=lambda: own)
    with pytest.raises(ConfigError, match="set-aside"):
        made.go()


# ---- what is tried and chosen


def test_the_grid_is_widened_at_an_edge_only_and_not_for_ever() -> None:
    def loss(s: Setting, best: float) -> float:
        return float(abs(np.log2(s.lr / best)))

    def search(best: float) -> list[float]:
        tried: list[Setting] = []
        while True:
            wanted = settings_wanted(GRID, WARM, {s: loss(s, best) for s in tried}, widen=True)
            if wanted == tried:
                return sorted(s.lr for s in tried)
            tried = wanted

    assert search(best=2.0) == [0.5, 1.0, 2.0, 4.0]  # 4 shows that 2 is no longer at the edge
    assert search(best=1000.0) == [0.5, 1.0, 2.0, 4.0]
    wide = replace(GRID, warm=(0.5, 1.0, 2.0))
    losses = {s: loss(s, 1.0) for s in WARM.settings_in(wide)}
    assert settings_wanted(wide, WARM, losses, widen=True) == WARM.settings_in(wide)


def test_neighbours_of_alpha_go_towards_one_and_away() -> None:
    among = [Setting(1.0, 0.8), Setting(1.0, 0.9), Setting(2.0, 0.9)]
    assert Setting(1.0, 0.6) in neighbours(among[0], among)
    assert Setting(2.0, 0.95) in neighbours(among[2], among)


@pytest.mark.paper
def test_the_choice_has_the_paired_standard_error(tmp_path: Path) -> None:
    own = problem()
    made = Study(folder=tmp_path, request=request(), source=lambda: own)
    made.go()
    folder, settings = tmp_path / "search" / "warm", WARM.settings_in(GRID)
    choice = choose(folder, settings)
    losses = [scored_losses(folder / s.label) for s in settings]
    order = np.argsort([v.mean() for v in losses])
    assert choice.setting == settings[order[0]]
    difference = losses[order[1]] - losses[order[0]]
    assert choice.difference == pytest.approx(difference.mean(), rel=1e-5)
    assert choice.standard_error == pytest.approx(difference.std(ddof=1) / len(difference) ** 0.5, rel=1e-5)


@pytest.mark.parametrize(("score", "cold", "warm", "broken"), [
    ("loss", 6.4, 6.6, True),
    ("loss", 6.4, 5.8, False),
    ("loss", 6.4, None, False),  # diverged: said elsewhere
    ("accuracy", 0.5, 0.4, True),
    ("accuracy", 0.5, 0.6, False),
])  # fmt: skip
def test_a_start_that_loses_against_random_weights_is_called_broken(
    score: str, cold: float, warm: float | None, broken: bool
) -> None:
    def choice(figure: float | None) -> Choice:
        tried = [{"setting": {"lr": lr}, score: value} for lr, value in ((1.0, 9.0), (2.0, figure))]
        return Choice.from_json({"setting": {"lr": 2.0}, "score": score, "tried": tried})

    remark = broken_start({"cold": choice(cold), "warm": choice(warm)})
    assert ("worse than random weights" in remark) == broken
    assert not broken_start({"warm": choice(warm)})
