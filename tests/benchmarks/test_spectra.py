"""What a geometry saves, layer by layer, and the figures of the page."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks.studies import spectra
from halfsilver.mirror.geometry import damped, whitening
from tests.markdown import ROOT


@pytest.mark.parametrize("damping", [1.0, 0.1])
def test_the_gain_is_that_of_the_traces(damping: float) -> None:
    rows = torch.randn(500, 8, dtype=torch.float64) * torch.logspace(0, -2, 8, dtype=torch.float64)
    moment = rows.T @ rows
    values = torch.linalg.eigvalsh(damped(moment, damping, float(moment.diagonal().mean())))
    wanted = math.sqrt(float(values.sum() * (1 / values).sum())) / 8
    found = spectra.gain(whitening(moment, damping, 0), 8)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert 1 < found <= math.sqrt((1 + damping) / damping)
    assert spectra.gain(whitening(torch.eye(8), damping, 0), 8) == pytest.approx(1.0)
    assert spectra.gain_of_scales(torch.tensor([1.0, 2.0])) == pytest.approx(math.sqrt(5 * 1.25) / 2)


def test_the_page_has_the_committed_figures() -> None:
    path = ROOT / "benchmarks/results/geometry/spectra.json"
    page = (ROOT / "docs/geometry.md").read_text(encoding="utf-8")
    means = [r for r in json.loads(path.read_text(encoding="utf-8"))["rows"] if r["layer"].startswith("all")]
    assert len(means) == 2 * len(spectra.RECIPES)
    for task in spectra.RECIPES:
        one, small = (next(r["both"] for r in means if (r["task"], r["damping"]) == (task, t)) for t in (1.0, 0.1))
        assert f"| {one:.2f} | {small:.2f} |" in page
