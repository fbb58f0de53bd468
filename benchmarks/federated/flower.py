"""Flower's own simulation beside ours, in whichever Python has Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.federated.rounds import Row, middle

_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
_SECONDS = 900


def measure(python: str | None, *, nodes: int, rounds: int, parameters: int) -> Row:
    """Seconds a round of clients that only answer; or why it was not run."""
    if python is None and not (importlib.util.find_spec("ray") and importlib.util.find_spec("flwr")):
        return {"not_run": "ray is not installed here; give --flower-python a Python with flwr[simulation]==1.41.0"}
    script = Path(__file__).with_name("flower_app.py")
    command = [python or sys.executable, str(script), "--nodes", str(nodes), "--rounds", str(rounds + 1)]
    command += ["--parameters", str(parameters)]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, **_QUIET, "FLWR_HOME": home}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as problem:
            return {"not_run": str(problem)[:400]}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"not_run": (done.stderr.strip().splitlines() or ["no message"])[-1][:400]}
    found = json.loads(lines[-1])
    if any(count != nodes for count in found["replies"]):
        return {"not_run": f"replies of {nodes} nodes: {found['replies']}"}
    return {
        "nodes": nodes,
        "parameters": parameters,
        "round_seconds": middle(found["seconds"][1:]),
        "first_round_seconds": round(found["seconds"][0], 3),
        "versions": found["versions"],
    }
