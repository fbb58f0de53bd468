"""`halfsilver verify`: check a run folder with nothing but its files and dp-accounting."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from halfsilver._core import checkpoint
from halfsilver.errors import CheckpointCorrupt, LedgerCorrupt
from halfsilver.privacy.accounting import Accountant, total_accountant
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.ledger.ledger import Run
from halfsilver.privacy.ledger.moments import Lost, Moment, moments
from halfsilver.privacy.selection import Plan, plan_from_dict
from halfsilver.runs.folder import UNSAFE, RunFolder, config_digest, json_text, read_json
from halfsilver.runs.session import check_head
from halfsilver.runs.statement import (
    STATEMENT_VERSION,
    diverged,
    make_statement,
    spent_by,
    stamps,
    total_now,
    total_of,
)

BEHIND = "the statement is older than the ledger. If the run was killed, fit writes a new one when it is called again"


def verify(
    run_dir: str | Path, ledger_path: str | Path | None = None, head_file: str | Path | None = None
) -> dict[str, Any]:
    """Recompute the run's statement from its ledger and compare; raise a typed error at the first thing that is wrong.

    Checks the ledger's chain (against a `head_file` kept elsewhere, if one is given), that the run is in it under this
    config and plan, that the checkpoint's place in the ledger exists and is that of its step, and that the statement on
    disk says what plan, config and ledger give, and nothing else. Its total over all runs must be what the ledger held
    at a moment at which the statement can have been written: for a finished run, at its finish or later. Since others
    may have spent after that, the total of now is returned beside it, as ``all_runs_now``. The statement of a run that
    goes on, or was killed, may count fewer steps than the ledger: then ``ok`` is false, and ``spent_now`` is what the
    ledger counts. ``notices`` say what is known to be wrong with the version that made the run. Checkpoint and metrics
    of a finished run must have the digests that the ledger holds.
    """
    folder = RunFolder(run_dir)
    config, found = _as_written(folder.config), _as_written(folder.statement)
    try:
        plan = plan_from_dict(config["plan"])
        run_id, delta, recorded = str(config["run_id"]), float(config["delta"]), Path(config["ledger"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(f"{folder.config} lacks a valid plan, run_id, delta or ledger: {error!r}.") from error
    if head_file is not None and not Path(head_file).exists():
        raise LedgerCorrupt(f"The head file {head_file} does not exist, so it cannot vouch for the ledger.")
    ledger = Ledger.open(ledger_path or folder.path / recorded, head_file=head_file, create=False)
    run = _registered(ledger, run_id, plan)
    _check_name(folder, config, run_id)
    tensors, about = checkpoint.read(folder.checkpoint)
    if about.get("run_id") != run_id or about.get("plan_hash") != plan.fingerprint():
        raise CheckpointCorrupt(f"{folder.checkpoint} belongs to another run or plan.")
    check_head(ledger, run_id, about)
    _check_step(folder, run, about["step"])
    _check_files(folder, run)
    version = 1 if found.get("statement_version") == 1 else STATEMENT_VERSION
    remarks = _remarks(found.get("remarks"), tensors, diverged(about["step"], plan))
    expected = make_statement(
        plan, ledger, run_id, delta=delta, stamps=stamps(config), remarks=remarks, version=version
    )
    _compare(found, expected, _Past.of(found, ledger, run, delta, version))
    now = spent_by(plan, ledger.runs[run_id].spent, delta)
    return {
        "ok": found["spent_so_far"]["steps"] == now["steps"],
        "run_id": run_id,
        "step": about["step"],
        "finished": run.closed is not None,
        "statement": found,
        "spent_now": now,
        "all_runs_now": total_now(ledger, delta),
        "notices": _notices(config.get("versions")),
    }


# What was wrong with a version in a way that no file of a run can show.
_NOTICES = {
    "0.1.0": [
        "made by halfsilver 0.1.0, in which a layer that writes as it runs (Embedding(max_norm=...), observers, "
        "running statistics) could carry private records past the noise; the changes of 0.1.1 say how to tell"
    ],
    "0.2.0": [
        "made by halfsilver 0.2.0, so the advisory in SECURITY.md may concern it. No file of the run answers these "
        "questions",
        "how many rows did a piece have (micro_batch_size, or a full batch below 512 rows), and were features mapped?",
        "which kernels ran (GRU, RNN or LSTM, convolutions in channels_last, bfloat16)?",
        "was it fitted through a wrapper (scikit-learn, attach_mirror, an engine of one's own), or was it a selection "
        "that went on with another score?",
        "did a copy or a fork of the run, or a ledger with hard links, go on beside it?",
    ],
}


def _notices(versions: Any) -> list[str]:
    made_by = versions.get("halfsilver") if isinstance(versions, dict) else None
    return _NOTICES.get(made_by, []) if isinstance(made_by, str) else []


def _remarks(found: Any, tensors: Mapping[str, Tensor], possible: str) -> list[str]:
    """The one remark there is, where the statement makes it and the weights bear it out."""
    weights = [t for name, t in tensors.items() if name.startswith("model.")]
    return [possible] if found == [possible] and not all(t.isfinite().all() for t in weights) else []


def _as_written(path: Path) -> dict[str, Any]:
    """A JSON file in the very bytes that halfsilver writes: a name given twice could show people another value."""
    value = read_json(path)
    if path.read_bytes() != json_text(value):
        raise CheckpointCorrupt(f"{path} was edited: it is not in the form in which halfsilver writes it.")
    return value


def _registered(ledger: Ledger, run_id: str, plan: Plan) -> Run:
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


def _check_files(folder: RunFolder, run: Run) -> None:
    """Runs of versions before have no digests in the ledger. Those of later ones may have one of the weights."""
    now = folder.digests(folder.weights)
    for name, digest in run.files.items():
        if now.get(name) != digest:
            state = "has changed" if name in now else "is gone"
            raise CheckpointCorrupt(f"{folder.path / name} {state} since the run finished. Restore it from a copy.")


def _compare(found: Mapping[str, Any], expected: dict[str, Any], past: _Past | None) -> None:
    """The figures must be those of a moment at which the statement can have been written: others may spend later."""
    expected = json.loads(json.dumps(expected))
    if found.keys() != expected.keys():
        raise CheckpointCorrupt(f"Expected the statement to have the fields {sorted(expected)}, not {sorted(found)}.")
    if past is not None:
        total = found["all_runs_on_this_data"]
        expected["spent_so_far"] = past.own()
        expected["all_runs_on_this_data"] = total if past.held(total) else past.total(past.moments[-1])
    for name, value in expected.items():
        if not _same(found[name], value):
            raise CheckpointCorrupt(
                f"The statement says {name}={found[name]!r}, but plan and ledger give {value!r}. If the run was killed "
                "at its very end, fit writes the statement when it is called once more."
            )


def _same(found: Any, expected: Any) -> bool:
    """Up to the last digits of an epsilon, which another processor, or version of this library, may round otherwise."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(_same(found[k], expected[k]) for k in expected)
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(found, expected, rel_tol=1e-5)
    return type(found) is type(expected) and bool(found == expected)


@dataclass(frozen=True)
class _Past:
    """The ledger at the moments at which a statement can have been written, by the steps that it counts for its run."""

    ledger: Ledger
    run: Run
    steps: int
    delta: float
    version: int
    moments: list[Moment]
    lost: Lost | None

    @classmethod
    def of(cls, found: Mapping[str, Any], ledger: Ledger, run: Run, delta: float, version: int) -> _Past | None:
        """None if there was no such moment."""
        own = found.get("spent_so_far")
        steps = own.get("steps") if isinstance(own, dict) else None
        known, lost = moments(ledger, run.run_id, steps) if type(steps) is int else ([], None)
        return cls(ledger, run, steps, delta, version, known, lost) if type(steps) is int and known else None

    def own(self) -> dict[str, Any]:
        """What this run itself had spent."""
        return spent_by(self.run.plan, self.steps, self.delta)

    def held(self, total: Any) -> bool:
        """Whether the ledger held just this at one of the moments."""
        if not isinstance(total, dict) or type(total.get("runs")) is not int:
            return False
        by, external = total.get("accountant"), _entries(total)
        same = (m for m in self.moments if (m.runs, m.external) == (total["runs"], external))
        alike = [m for m in same if total_accountant(m.counts) == by]
        if alike and _between(total, self.total(alike[0]), self.total(alike[-1])):
            return True
        return self.lost is not None and self._may_have_held(total, self.lost, self.moments[0])

    def _may_have_held(self, total: Mapping[str, Any], lost: Lost, then: Moment) -> bool:
        """The same for moments that were summed up, between what was certainly there and the summary."""
        external = _entries(total)
        if external > then.external:
            return False
        then = then._replace(external=external)
        for by in sorted({total_accountant(lost.counts), total_accountant(then.counts)}):
            least = self.total(Moment(len(lost.runs), lost.counts, external), by)
            least["unsafe_runs"] = sum(name.startswith(UNSAFE) for name in lost.runs)
            if _between(total, least, self.total(then, by)):
                return True
        return False

    def total(self, moment: Moment, by: Accountant | None = None) -> dict[str, Any]:
        return total_of(self.ledger, moment.counts, moment.runs, self.delta, self.version, by, external=moment.external)


def _entries(total: Mapping[str, Any]) -> int:
    """How many entries of what was spent elsewhere a total names."""
    found = total.get("external", [])
    return len(found) if isinstance(found, list) else -1


def _between(total: Mapping[str, Any], least: Mapping[str, Any], most: Mapping[str, Any]) -> bool:
    """Whether all but the amounts is the same, and these lie between, up to the last digits."""
    amounts = {name: most[name] for name in ("runs", "unsafe_runs", "epsilon")}
    if total.keys() != most.keys() or not _same({**total, **amounts}, dict(most)):
        return False
    return all(
        _is_amount(total[name], value)
        and _amount(least[name]) * (1 - 1e-9) <= _amount(total[name]) <= _amount(value) * (1 + 1e-9)
        for name, value in amounts.items()
    )


def _is_amount(found: Any, most: Any) -> bool:
    """Of the same type, or finite where the most is not."""
    return type(found) is type(most) or (most is None and type(found) is float)


def _amount(value: float | None) -> float:
    return math.inf if value is None else value
