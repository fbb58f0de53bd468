"""The benchmark of stops at a small size: a kill costs what it says, and planted faults are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.nightly
def test_kills_cost_what_is_said_and_planted_faults_are_found() -> None:
    """The full form is `python -m benchmarks.robustness.stops --kills 200 --planted 10 --honest 100 --json`."""
    sizes = ["--kills", "6", "--planted", "3", "--honest", "5"]
    command = [sys.executable, "-m", "benchmarks.robustness.stops", *sizes, "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout)
    assert len(found["lost"]) == 6
    assert not any(found[name] for name in ("over", "under", "noise_reused", "unreadable"))
    assert found["lost_worst"] <= found["cadence_worst"]
    for fault in found["faults"].values():
        assert fault == {"planted": 3, "found": 3, "honest": 5, "false_alarms": 0}
