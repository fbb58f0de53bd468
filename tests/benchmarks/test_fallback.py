"""The benchmark of the guard: what it compares, and how it adds up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import halfsilver as hs
from benchmarks.studies import fallback
from halfsilver.runs.folder import read_json
from halfsilver.study.method import GUARDED, PDA, Conditions
from halfsilver.study.problem import Problem, Setting
from halfsilver.tasks import source
from tests.study.small_study import RECIPE, problem


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
    at = Conditions(setting=Setting(1.0, 0.9), recipe=RECIPE)
    mirror = PDA.mirror_at(at)
    assert isinstance(mirror, hs.FirstOrder)
    assert GUARDED.mirror_at(at) == hs.FallBack(mirror)
    assert GUARDED.rates_in(RECIPE.grid) == PDA.rates_in(RECIPE.grid)


@pytest.mark.paper
def test_both_studies_of_a_small_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same start, noise and samples: without the mirror, labels make no difference, and with it they do."""
    source._opened.cache_clear()
    monkeypatch.setattr(source, "TASKS", {"emnist": lambda data, **options: problem(validation=None)})
    monkeypatch.setattr(fallback, "load", lambda task, name: (RECIPE, {"delta": 1e-4}))
    out = tmp_path / "out"
    command = ["fallback", "--out", str(out), "--data", str(tmp_path), "--seeds", "1", "--workers", "1"]
    monkeypatch.setattr("sys.argv", [*command, "--epsilon", "5", "--json"])
    fallback.main()
    found = read_json(out / "fallback.json")
    assert {run["arm"] for run in found["runs"]} == set(fallback.ARMS)
    first = {run["arm"]: run["curve"][0]["loss"] for run in found["runs"]}
    assert len(set(first.values())) == 1, "all start from the same weights"
    assert found["loss"]["honest"] != found["loss"]["permuted"]
    assert [bool(run["trust"]) for run in found["runs"]] == [run["arm"].endswith("guard") for run in found["runs"]]
    stamps = read_json(out / "honest" / "summary.json")["stamps"]
    assert any("unsafe_seed" in stamp for stamp in stamps)


def test_labels_are_dealt_out_anew_and_stay_as_many_of_each() -> None:
    rows = torch.arange(50), torch.arange(50) % 7
    labelled = Problem(
        make_model=torch.nn.Identity, loss_fn=lambda m, b: b, private=0, public=rows, test=1, population=1
    )
    images, labels = fallback.permuted(labelled, 0).public
    assert torch.equal(images, rows[0])
    assert not torch.equal(labels, rows[1])
    assert torch.equal(labels.sort()[0], rows[1].sort()[0])


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    fallback.plot({"runs": runs()}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
