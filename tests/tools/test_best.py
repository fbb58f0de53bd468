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


def test_the_picture_of_the_steps_is_that_of_the_figures(tmp_path: Path) -> None:
    found = steps.steps()
    assert [one["accuracy"] for one in found] == sorted(one["accuracy"] for one in found)
    row = next(row for row in best.rows() if row.task.startswith("CIFAR-10") and row.epsilon == 4)
    assert found[5]["accuracy"] == pytest.approx(100 * row.figures["whitened"]["accuracy"])
    steps.draw(found, tmp_path / "steps.svg")
    assert (tmp_path / "steps.svg").read_bytes() == steps.PICTURE.read_bytes(), "make it again: python -m tools.steps"
