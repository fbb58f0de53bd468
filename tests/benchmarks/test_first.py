"""The benchmark of first answers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.speed import first


def test_each_command_is_timed_and_a_failing_one_is_no_answer() -> None:
    found = first.measure({"nothing": [sys.executable, "-c", "pass"]}, reps=2)
    assert 0 < found["nothing"]["clock"]["least"] <= found["nothing"]["clock"]["median"]
    assert found["nothing"]["processor"]["median"] > 0
    assert sum(name.startswith("calibrate") for name in first.commands()) == 6
    with pytest.raises(subprocess.CalledProcessError):
        first.seconds([sys.executable, "-c", "raise SystemExit(1)"])
