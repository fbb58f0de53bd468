"""`halfsilver verify`: check a run folder with nothing but its files and dp-accounting."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfsilver import checkpoint
from halfsilver.errors import CheckpointCorrupt, LedgerCorrupt
from halfsilver.privacy.accounting import epsilon_of
from halfsilver.privacy.ledger import Ledger, Run
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs import UNSAFE, RunFolder, config_digest, json_text, read_json
from halfsilver.session import check_head
from halfsilver.statement import make_statement, stamps


def verify(
    run_dir: str | Path, ledger_path: str | Path | None = None, head_file: str | Path | None = None
) -> dict[str, Any]:
    """Recompute the run's statement from its ledger and compare; raise a typed error at the first thing that is wrong.

    Checks the ledger's chain (against a `head_file` kept elsewhere, if one is given), that the run is in it under this
    config and plan, that the checkpoint's place in the ledger exists and is that of its step, and that the statement on
    disk says what plan, config and ledger give, and nothing else. The weights themselves are not signed.
    """
    folder = RunFolder(run_dir)
    config, found = _as_written(folder.config), _as_written(folder.statement)
    try:
        plan = PrivacyPlan.from_dict(config["plan"])
        run_id, delta, recorded = str(config["run_id"]), float(config["delta"]), Path(config["ledger"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{folder.config} lacks a valid plan, run_id, delta or ledger: {error!r}.") from error
    if head_file is not None and not Path(head_file).exists():
        raise LedgerCorrupt(f"The head file {head_file} does not exist, so it cannot vouch for the ledger.")
    ledger = Ledger.open(ledger_path or folder.path / recorded, head_file=head_file, create=False)
    run = _registered(ledger, run_id, plan)
    _check_name(folder, config, run_id)
    _, about = checkpoint.read(folder.checkpoint)
    if about.get("run_id") != run_id or about.get("plan_hash") != plan.fingerprint():
        raise CheckpointCorrupt(f"{folder.checkpoint} belongs to another run or plan.")
    check_head(ledger, run_id, about)
    _check_step(folder, run, about["step"])
    _compare(found, make_statement(plan, ledger, run_id, delta=delta, stamps=stamps(config)), run, len(ledger.runs))
    return {
        "ok": True,
        "run_id": run_id,
        "step": about["step"],
        "finished": run.closed is not None,
        "statement": found,
    }


def _as_written(path: Path) -> dict[str, Any]:
    """A JSON file in the very bytes that halfsilver writes: a name given twice could show people another value."""
    value = read_json(path)
    if path.read_bytes() != json_text(value):
        raise CheckpointCorrupt(f"{path} was edited: it is not in the form in which halfsilver writes it.")
    return value


def _registered(ledger: Ledger, run_id: str, plan: PrivacyPlan) -> Run:
    run = ledger.runs.get(run_id)
    if run is None:
        raise LedgerCorrupt(f"{ledger.path} does not know run {run_id!r}: it is not this run's ledger.")
    if run.plan_hash != plan.fingerprint():
        raise LedgerCorrupt(f"{ledger.path} has run {run_id!r} under another plan than its config.")
    return run


def _check_name(folder: RunFolder, config: Mapping[str, Any], run_id: str) -> None:
    """The ledger knows the run by its name, and the name holds a digest of the config."""
    seeded = config.get("unsafe_seed") is not None
    if seeded != run_id.startswith(UNSAFE) or run_id.rpartition("-")[2] != config_digest(config):
        raise CheckpointCorrupt(f"{folder.config} is not the config under which run {run_id!r} is in the ledger.")


def _check_step(folder: RunFolder, run: Run, step: int) -> None:
    if step > run.plan.steps or (run.closed and step != run.updates):
        raise CheckpointCorrupt(
            f"{folder.checkpoint} is at step {step} of {run.plan.steps}, but the ledger says that the run ended with "
            f"updates={run.updates}."
        )


def _compare(found: Mapping[str, Any], expected: dict[str, Any], run: Run, runs: int) -> None:
    """The run's own figures must be those of the moment that the statement names; others may have spent since."""
    expected = json.loads(json.dumps(expected))
    if found.keys() != expected.keys():
        raise CheckpointCorrupt(f"Expected the statement to have the fields {sorted(expected)}, not {sorted(found)}.")
    now, total = expected["all_runs_on_this_data"], found["all_runs_on_this_data"]
    own = expected["spent_so_far"] = _own(found["spent_so_far"], expected["delta"], run)
    if runs == 1:
        expected["all_runs_on_this_data"] = {**now, "epsilon": own["epsilon_pld"]}
    elif _between(total, own["epsilon_pld"], now, expected["delta"]):
        expected["all_runs_on_this_data"] = total
    for name, value in expected.items():
        if not _same(found[name], value):
            raise CheckpointCorrupt(
                f"The statement says {name}={found[name]!r}, but plan and ledger give {value!r}. If the run was killed "
                "at its very end, fit writes the statement when it is called once more."
            )


def _same(found: Any, expected: Any) -> bool:
    """Up to the last digits of an epsilon, which another processor may round otherwise."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(_same(found[k], expected[k]) for k in expected)
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected, rel_tol=1e-9)
    return type(found) is type(expected) and bool(found == expected)


def _own(found: Any, delta: float, run: Run) -> dict[str, Any]:
    """What this run had spent by the steps that the statement counts, which the end of a run fixes."""
    steps = found.get("steps") if isinstance(found, dict) else None
    if type(steps) is not int or not (run.spent if run.closed else 0) <= steps <= run.spent:
        steps = run.spent
    return {"steps": steps, "epsilon_pld": epsilon_of([run.plan.count(steps)], delta, "pld")}


def _between(found: Any, least: float, now: Mapping[str, Any], delta: float) -> bool:
    """Whether a total lies between what this run alone had spent and what the ledger, which only grows, holds now."""
    if not isinstance(found, dict) or found.keys() != now.keys():
        return False
    low = {"runs": 1, "unsafe_runs": 0, "epsilon": least}
    numbers = all(
        type(found[k]) is type(now[k]) and low[k] * (1 - 1e-9) <= found[k] <= now[k] * (1 + 1e-9) for k in low
    )
    return numbers and (found["accountant"], found["delta"]) in (("pld", delta), ("rdp", 2 * delta))
