"""One run on disk: its folder, its place in the ledger, its checkpoints and its statement."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfsilver import checkpoint
from halfsilver.errors import CheckpointCorrupt, require
from halfsilver.privacy.accounting import epsilon_of
from halfsilver.privacy.ledger import Head, Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs import RunFolder, write_json
from halfsilver.state import Parts
from halfsilver.statement import default_delta, make_statement, stamps


@dataclass(kw_only=True)
class Session:
    """What `Trainer.fit` needs to survive a kill: open it, load what is there, save, finish."""

    folder: RunFolder
    ledger: Ledger
    run_id: str
    plan: PrivacyPlan
    delta: float
    config: Mapping[str, Any]
    saved_at: float = 0.0

    @classmethod
    @contextmanager
    def open(
        cls,
        run_dir: str | Path,
        ledger: Ledger | str | Path | None,
        plan: PrivacyPlan,
        *,
        config: Mapping[str, Any],
        delta: float | None,
    ) -> Iterator[Session]:
        """Lock the run folder, and make or check its config. A run that has begun must find its ledger again."""
        folder = RunFolder(run_dir)
        delta = default_delta(plan) if delta is None else delta
        require(0 < delta < 1, "delta", delta, "in (0, 1)")
        with folder.locked():
            if not isinstance(ledger, Ledger):
                begun = folder.config.exists()
                ledger = Ledger.open(ledger or folder.ledger, unit=plan.unit, create=not begun)
            asked = {"plan": plan.to_dict(), "ledger": _place(ledger.path, folder.path), "delta": delta, **config}
            run_id = folder.claim(asked)["run_id"]
            yield cls(folder=folder, ledger=ledger, run_id=run_id, plan=plan, delta=delta, config=config)

    @property
    def finished(self) -> bool:
        run = self.ledger.runs.get(self.run_id)
        return run is not None and run.closed is not None

    def load(self) -> Parts | None:
        """The latest checkpoint, checked against plan and ledger; None for a run that has none yet."""
        if not self.folder.checkpoint.exists():
            if self.finished:
                raise CheckpointCorrupt(f"The run in {self.folder.path} has finished, but its checkpoint is gone.")
            return None
        tensors, about = checkpoint.read(self.folder.checkpoint)
        mine = {"run_id": self.run_id, "plan_hash": self.plan.fingerprint()}
        if {name: about.get(name) for name in mine} != mine:
            raise CheckpointCorrupt(f"{self.folder.checkpoint} belongs to another run or plan. Use another run_dir.")
        check_head(self.ledger, self.run_id, about)
        self.folder.rewind(about["step"])
        return tensors, about

    def save(self, parts: Parts, head: Head | None) -> None:
        tensors, about = parts
        about = {"run_id": self.run_id, "plan_hash": self.plan.fingerprint(), "ledger_head": head, **about}
        checkpoint.write(self.folder.checkpoint, tensors, about)
        self.saved_at = time.monotonic()

    def spent(self) -> float:
        """Epsilon of the steps that the ledger counts for this run so far."""
        run = self.ledger.runs[self.run_id]
        return epsilon_of([self.plan.count(run.spent)], self.delta, "pld")

    def write_statement(self) -> dict[str, Any]:
        """Put the statement of this moment beside the checkpoint."""
        statement = make_statement(self.plan, self.ledger, self.run_id, delta=self.delta, stamps=stamps(self.config))
        write_json(self.folder.statement, statement)
        return statement


def check_head(ledger: Ledger, run_id: str, about: Mapping[str, Any]) -> None:
    """Refuse a ledger that is older than, shorter than or foreign to a checkpoint."""
    head, step = about.get("ledger_head"), about.get("step")
    run = ledger.runs.get(run_id)
    counted = run.spent if run else 0
    if not isinstance(step, int) or not 0 <= step <= counted:
        raise CheckpointCorrupt(
            f"The checkpoint claims step={step!r}, but the ledger counts {counted} steps for run {run_id!r}."
        )
    if head is not None:
        ledger.verify_head(int(head[0]), str(head[1]))
    elif step > 0:
        raise CheckpointCorrupt(f"The checkpoint claims step={step!r}, but names no record of the ledger.")


def _place(ledger: Path, folder: Path) -> str:
    """Where the ledger is: by name if it lies in the run folder, which may then be moved."""
    return ledger.name if ledger.parent == folder.resolve() else str(ledger)
