"""The guard's benchmark: its page has the committed figures, and its sources have the shapes of the task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.studies import guard
from tests.markdown import ROOT


def test_the_page_has_the_committed_figures() -> None:
    record = json.loads((ROOT / "benchmarks/results/guard.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/geometry.md").read_text(encoding="utf-8")
    assert [row["public rows"] for row in record["rows"]] == ["right", "few", "cifar", "noise"]
    for row in record["rows"]:
        losses = {
            plain: min(t["loss"] for t in row["tried"] if (t["geometry"] == "None") == plain) for plain in (True, False)
        }
        chosen = "none" if row["chosen"] == "None" else "the geometry"
        assert f"| {losses[False]:.4f} | {losses[True]:.4f} | {chosen} |" in page


def test_every_source_has_pictures_of_the_task(data_dir: Path) -> None:
    right = torch.rand(30, 1, 28, 28), torch.arange(30)
    for name, (images, labels) in guard.sources(data_dir, right):
        assert images.shape == ((20 if name == "few" else 30), 1, 28, 28)
        assert len(labels) == len(images)
        assert 0 <= images.min() <= images.max() <= 1


def test_the_page_has_the_figures_of_the_study_of_emnist() -> None:
    path = ROOT / "benchmarks/results/geometry/emnist-eps0.48-short.json"
    verdict = json.loads(path.read_text(encoding="utf-8"))["verdict"]
    page = (ROOT / "docs/geometry.md").read_text(encoding="utf-8")
    for method in ("public", "warm", "pda", "whitened"):
        means = verdict["means"][method]
        assert f"{100 * means['accuracy']['mean']:.2f} % / {means['loss']['mean']:.4f}" in page


def test_the_page_has_the_measured_costs() -> None:
    rows = json.loads((ROOT / "benchmarks/results/geometry/cost.json").read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs/geometry.md").read_text(encoding="utf-8")
    for row in rows:
        assert f"| {row['processor']:.2f} | {row['least']:.2f} to {row['most']:.2f} | {row['numbers']:.2f} |" in page


def test_the_page_has_the_arithmetic_of_wide_layers() -> None:
    """6 n a b for a private step; 4 n d^2 for a full factor, 8 n d r for one with r directions."""
    page = (ROOT / "docs/geometry.md").read_text(encoding="utf-8")
    for a, b, rank, shown in ((256, 256, None, "133 %"), (512, 32, None, "1,071 %"), (1024, 1024, 128, "33 %")):
        added = (4 * (a**2 + b**2) if rank is None else 8 * rank * (a + b)) / (6 * a * b)
        assert f"{100 * added:,.0f} %" == shown
        assert f"| {a:,} to {b:,} |" in page
        assert shown in page


def test_the_page_has_the_search_of_wikitext2() -> None:
    path = ROOT / "benchmarks/results/geometry/wikitext2-eps1.71-search.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    best = {
        method: min(one["loss"] for one in record["tried"] if one["method"] == method)
        for method in ("warm", "whitened")
    }
    gap = record["whitened - warm"]
    assert gap["mean"] == pytest.approx(best["whitened"] - best["warm"], abs=1e-6)
    page = (ROOT / "docs/geometry.md").read_text(encoding="utf-8")
    assert f"{best['warm']:.3f} and {best['whitened']:.3f}, difference \N{MINUS SIGN}{-gap['mean']:.3f}" in page
    assert f"over {gap['rows']} rows of {gap['standard_error_over_rows']:.3f}" in page
