"""The wage example in a short form, on the real data, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.nightly
def test_wages_two_splits(data_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "wages.py"), "--splits", "2", "--epsilon", "1", "--json"]
    command += ["--data", str(data_dir), "--plot", str(tmp_path / "wages.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=ONE_THREAD)
    out = json.loads(done.stdout)
    r2 = {(row["method"], row["epsilon"]): row["r2"] for row in out["rows"]}
    private = {(method, 1.0) for method in ("cold", "warm", "pda", "whitened")}
    assert set(r2) == private | {("nonprivate", None), ("public", None)}
    assert all(len(row["splits"]) == 2 and row["ci95"] >= 0 for row in out["rows"])
    assert out["config"]["n_private"] + out["config"]["n_public"] < out["config"]["n"] == 61_395
    assert len(out["gains"]) == 8
    assert r2["pda", 1.0] >= r2["public", None] - 0.01
    assert r2["whitened", 1.0] >= r2["public", None]
    assert max(r2.values()) < 0.35  # log earnings are not that predictable: more would be a leak of test rows
    assert (tmp_path / "wages.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.nightly
def test_brackets_one_split(data_dir: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "brackets.py"), "--splits", "1", "--json"]
    command += ["--data", str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=ONE_THREAD)
    found = {(row["method"], row["epsilon"]): row for row in json.loads(done.stdout)["rows"]}
    assert len(found) == 8
    assert found["whitened", 1.0]["accuracy"] > found["public", 0.0]["accuracy"]
    assert found["whitened", 1.0]["loss"] < found["public", 0.0]["loss"]
    assert found["whitened", 1.0]["accuracy"] < 0.5, "earnings are not that predictable"


def test_the_page_has_the_figures_of_the_brackets() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "brackets.json").read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
    assert len(rows) == 8
    for row in rows:
        assert f"{100 * row['accuracy']:.1f} % / {row['loss']:.3f}" in page
