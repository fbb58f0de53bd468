"""The tables of the best models are those of the committed figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import best, steps


def test_the_pages_have_the_figures() -> None:
    assert best.main(["--check"]) == 0, "make them again: python -m tools.best"


def test_means_over_seeds_against_a_calculation_by_hand() -> None:
    """CIFAR-10 at epsilon 2, whose three seeds are read here one by one."""
    stem = "heads/cifar10-width24-epochs60-seed{}-head-network.json"
    found = [one for seed in range(3) for one in best.read(stem.format(seed))["results"]]
    own = [one["accuracy"] for one in found if (one["method"], one["epsilon"]) == ("whitened", 2.0)]
    row = next(row for row in best.rows() if row.task.startswith("CIFAR-10") and row.epsilon == 2)
    assert len(own) == row.seeds == 3
    assert row.figures["whitened"]["accuracy"] == pytest.approx(sum(own) / 3)
    assert row.figures["public"]["accuracy"] < row.figures["warm"]["accuracy"] < row.figures["nonprivate"]["accuracy"]


@pytest.mark.parametrize("task", list(steps.WAYS))
def test_the_pictures_of_the_steps_are_those_of_the_figures(task: str, tmp_path: Path) -> None:
    found, way = steps.steps(task), steps.WAYS[task]
    row = next(row for row in best.rows() if row.task.startswith(way.best) and row.epsilon == way.epsilon)
    wanted = [row.figures[one["kind"]][way.metric] for one in found[3:]]
    assert [one["value"] for one in found[3:]] == pytest.approx(
        [value * (100 if way.metric == "accuracy" else 1) for value in wanted]
    )
    assert all(way.limits[0] < one["value"] < way.limits[1] for one in found)
    steps.draw(task, tmp_path / "steps.svg")
    assert (tmp_path / "steps.svg").read_bytes() == steps.picture(task).read_bytes(), "make them: python -m tools.steps"
