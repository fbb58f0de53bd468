"""What benchmarks.studies.overfit and benchmarks.studies.gradients say of a study, against figures by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.studies import overfit
from benchmarks.studies.gradients import figures
from halfsilver.study.study import Study
from tests.study import small_study as small


def test_gradients_of_a_linear_model() -> None:
    """The gradient of half the squared distance to x is w - x: three test rows, two of them beyond the clip norm."""
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()

    def loss_fn(net: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        far: Tensor = net(torch.ones(len(batch[0]), 1)) - batch[0]
        return far.pow(2).sum(1) / 2

    test = (torch.tensor([[-3.0, 0.0], [0.0, -4.0], [-0.5, 0.0]]),)
    public = (torch.tensor([[-1.0, 0.0], [-3.0, 0.0], [9.0, 9.0], [70.0, 0.0]]),)  # the last is one too many
    found = figures(small.problem(loss_fn=loss_fn, test=test, public=public), model, 1.0, 3)
    assert found["row norm"] == 3
    assert found["clipped"] == pytest.approx(2 / 3)
    mean, cut = torch.tensor([3.5, 4.0]) / 3, torch.tensor([1.5, 1.0]) / 3
    assert found["bent by clipping"] == pytest.approx(float((cut - mean).norm() / mean.norm()))
    assert found["test norm"] == pytest.approx(float(mean.norm()))
    towards = torch.tensor([-5.0, -9.0]) / 3
    assert found["public norm"] == pytest.approx(float(towards.norm()))
    assert found["worth"] == pytest.approx(float(mean @ towards / (mean @ mean)))
    assert found["cosine"] == pytest.approx(float(mean @ towards / mean.norm() / towards.norm()))


@pytest.mark.paper
def test_models_are_those_that_the_study_tested(tmp_path: Path) -> None:
    """The start, and the averaged weights of each run: their losses on test rows are those in the summary."""
    own = small.problem()
    summary = Study(folder=tmp_path, request=small.request(), source=lambda: own).go().to_json()
    tested = {(r["method"], r["seed"]): r["final"]["loss"] for r in summary["runs"]}
    found = {(m, seed): overfit.figures(own, model)["test loss"] for m, seed, model in overfit.models(tmp_path, own)}
    assert sorted(found) == sorted(key for key in tested if key[0] != "cold")
    assert found == pytest.approx({key: tested[key] for key in found}, rel=1e-6)
