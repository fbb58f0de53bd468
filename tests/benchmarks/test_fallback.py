"""The benchmark of the guard: what it compares, and how it adds up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import halfsilver as hs
from benchmarks.studies import fallback
from halfsilver.study.problem import Problem


def runs() -> list[dict[str, Any]]:
    losses = {"warm": 1.0, "honest": 0.8, "honest+guard": 0.81, "permuted": 1.5, "permuted+guard": 1.02}
    return [
        {
            "arm": arm,
            "final": {"loss": loss + shift},
            "curve": [{"step": s, "loss": loss + shift} for s in (1, 2)],
            "trust": [{"step": s, "trust": 1.0} for s in (1, 2)],
        }
        for shift in (-0.1, 0.1)
        for arm, loss in losses.items()
    ]


def test_summary_by_hand() -> None:
    found = fallback.summary(runs())
    assert found["loss"]["permuted"] == pytest.approx(1.5)
    assert found["permuted_over_warm"] == pytest.approx(0.5)
    assert found["permuted_guarded_over_warm"] == pytest.approx(0.02)
    assert found["honest_cost_share_of_gain"] == pytest.approx(0.05)


def test_the_guard_is_all_that_differs() -> None:
    mirror = hs.FirstOrder(0.9)
    assert fallback.guarded(hs.chain(hs.clip_released(1.0), mirror)) == hs.chain(
        hs.clip_released(1.0), hs.FallBack(mirror)
    )


def test_labels_are_dealt_out_anew_and_stay_as_many_of_each() -> None:
    rows = torch.arange(50), torch.arange(50) % 7
    problem = Problem(
        make_model=torch.nn.Identity, loss_fn=lambda m, b: b, private=0, public=rows, test=1, population=1
    )
    images, labels = fallback.permuted(problem, 0).public
    assert torch.equal(images, rows[0])
    assert not torch.equal(labels, rows[1])
    assert torch.equal(labels.sort()[0], rows[1].sort()[0])


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fallback.plot({"runs": runs()}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
