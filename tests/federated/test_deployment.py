"""The deployment on loopback, as a test: some minutes, and a dozen processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.federated.deployment import ROUNDS, Scene, deployment


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("database", [True, False])
def test_a_deployment_survives_the_loss_of_a_node_and_of_its_link(tmp_path: Path, database: bool) -> None:
    """The script checks itself: updates, ledger, `halfsilver verify`, and that no process is left."""
    pytest.importorskip("sklearn", reason="the example's data come with scikit-learn")
    result = deployment(Scene(folder=tmp_path, database=database), quiet=True)
    assert result["updates"] == ROUNDS < result["spent_steps"]
