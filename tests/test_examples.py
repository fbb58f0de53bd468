"""Examples in their short form, on the real data, as a user runs them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_emnist_quick(data_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "emnist.py"), "--quick", "--json"]
    command += ["--data", str(data_dir), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=ONE_THREAD)
    out = json.loads(done.stdout)
    losses = {row["method"]: row["loss"] for row in out["rows"]}
    assert list(losses) == ["public", "cold", "warm", "pda"]
    assert losses["pda"] < math.log(47), "no better than guessing"
    assert all(row["epsilon"] <= 3.0 for row in out["rows"])
    assert (tmp_path / "pda" / "checkpoint.safetensors").exists()
