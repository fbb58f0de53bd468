"""A method with a finish in a study: rows that pretraining held out serve for it, and for nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import halfsilver as hs
from halfsilver.errors import ConfigError
from halfsilver.study.method import FINISHED, WARM
from halfsilver.study.problem import Setting
from halfsilver.study.run import Job, without_held_out
from halfsilver.study.study import Study
from tests.study.small_study import RECIPE, problem, records, request

HOLDS_OUT = replace(RECIPE, pretrain=hs.study.Pretrain(epochs=3, holdout=0.25))


def confidence(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0]).softmax(1).amax(1)  # type: ignore[no-any-return]


@pytest.mark.paper
def test_a_study_with_a_finish(tmp_path: Path) -> None:
    own = problem(public=records(160, 1), confidence=confidence)
    asked = request(recipe=HOLDS_OUT, methods=(WARM, FINISHED), seeds={"warm": 2, "finished": 2}, search="paper search")
    summary = Study(folder=tmp_path, request=asked, source=lambda: own).go()
    files = list(tmp_path.rglob("finish.json"))
    assert {path.parent.parent.name for path in files} >= {"finished"}
    done = json.loads(files[0].read_text(encoding="utf-8"))
    assert done["rows"] == 40
    assert done["loss_after"] <= done["loss_before"]
    assert "finished - warm" in {difference.name for difference in summary.verdict.differences}
    means = summary.verdict.means
    error = means["finished"]["calibration error"].mean
    assert error is not None
    assert 0 <= error <= 1
    assert means["finished"].keys() == means["warm"].keys()


def test_held_out_rows_reach_neither_mirror_nor_geometry() -> None:
    own = problem(public=records(160, 1))
    job = Job(
        method=FINISHED,
        seed=0,
        setting=Setting(1.0),
        folder=Path("unused"),
        start=Path("unused"),
        ledger=Path("unused"),
        delta=1e-4,
    )
    left, held_out = without_held_out(own, HOLDS_OUT, job)
    assert (len(left.public[1]), len(held_out[1])) == (120, 40)
    together = torch.cat([left.public[0], held_out[0]])
    assert torch.equal(together.sort(0).values, own.public[0].sort(0).values)
    assert without_held_out(own, HOLDS_OUT, replace(job, method=WARM)) == (own, None)


@pytest.mark.parametrize("holdout", [0.0, 0.25])  # a quarter of 40 rows is 10
def test_a_recipe_that_holds_too_little_out_is_refused(tmp_path: Path, holdout: float) -> None:
    """At the start, and not after private steps."""
    little = replace(RECIPE, pretrain=hs.study.Pretrain(epochs=3, holdout=holdout))
    asked = request(recipe=little, methods=(FINISHED,), seeds={"finished": 1})
    with pytest.raises(ConfigError, match="rows that the start has not seen"):
        Study(folder=tmp_path, request=asked, source=problem).go()
