"""`halfsilver verify`: check a run folder with nothing but its files and dp-accounting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halfsilver import checkpoint
from halfsilver.errors import CheckpointCorrupt, LedgerCorrupt
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs import UNSAFE, RunFolder, read_json
from halfsilver.session import check_head
from halfsilver.statement import make_statement, stamps


def verify(run_dir: str | Path, ledger_path: str | Path | None = None) -> dict[str, Any]:
    """Recompute the run's statement from its ledger and compare; raise a typed error at the first thing that is wrong.

    Checks the ledger's chain, that the run is in it under this plan, that the checkpoint's place in the ledger exists,
    and that the statement on disk is what plan, config and ledger give. The weights themselves are not signed.
    """
    folder = RunFolder(run_dir)
    config = read_json(folder.config)
    try:
        plan = PrivacyPlan.from_dict(config["plan"])
        run_id, delta, recorded = str(config["run_id"]), float(config["delta"]), Path(config["ledger"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{folder.config} lacks a valid plan, run_id, delta or ledger: {error!r}.") from error
    ledger = Ledger.open(ledger_path or folder.path / recorded, create=False)
    _check_run(ledger, run_id, plan)
    _, about = checkpoint.read(folder.checkpoint)
    if about.get("run_id") != run_id or about.get("plan_hash") != plan.fingerprint():
        raise CheckpointCorrupt(f"{folder.checkpoint} belongs to another run or plan.")
    check_head(ledger, run_id, about)
    found = read_json(folder.statement)
    if (config.get("unsafe_seed") is not None) != run_id.startswith(UNSAFE):
        raise CheckpointCorrupt(f"{folder.config} and the run's name disagree on whether it had a known seed.")
    _compare(found, make_statement(plan, ledger, run_id, delta=delta, stamps=stamps(config)))
    finished = ledger.runs[run_id].closed is not None
    return {"ok": True, "run_id": run_id, "step": about["step"], "finished": finished, "statement": found}


def _check_run(ledger: Ledger, run_id: str, plan: PrivacyPlan) -> None:
    run = ledger.runs.get(run_id)
    if run is None:
        raise LedgerCorrupt(f"{ledger.path} does not know run {run_id!r}: it is not this run's ledger.")
    if run.plan_hash != plan.fingerprint():
        raise LedgerCorrupt(f"{ledger.path} has run {run_id!r} under another plan than its config.")


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fields of the run itself must agree; other runs, and later steps of this one, may have been added since."""
    expected = json.loads(json.dumps(expected))
    moving = {"spent_so_far", "all_runs_on_this_data"}
    for name in expected.keys() - moving:
        if found.get(name) != expected[name]:
            raise CheckpointCorrupt(
                f"The statement says {name}={found.get(name)!r}, but plan and ledger give {expected[name]!r}."
            )
    for name in moving:
        if not _within(found.get(name), expected[name]):
            raise CheckpointCorrupt(
                f"The statement says {name}={found.get(name)!r}, more than the ledger's {expected[name]!r}: "
                "ledger and statement are not of one run."
            )


def _within(found: Any, expected: dict[str, Any]) -> bool:
    """Every number found is at most the one expected (up to rounding), since a ledger only grows."""
    if not isinstance(found, dict) or found.keys() != expected.keys():
        return False
    numbers = [k for k, v in expected.items() if isinstance(v, int | float)]
    return all(isinstance(found[k], int | float) and found[k] <= expected[k] * (1 + 1e-9) for k in numbers)
