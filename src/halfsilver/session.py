"""One run on disk: its folder, its place in the ledger, its checkpoints and its statement."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfsilver import checkpoint
from halfsilver.errors import CheckpointCorrupt
from halfsilver.privacy.ledger import Head, Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs import RunFolder, write_json
from halfsilver.state import Parts
from halfsilver.statement import default_delta, make_statement


@dataclass(kw_only=True)
class Session:
    """What `Trainer.fit` needs to survive a kill: open it, load what is there, save, finish."""

    folder: RunFolder
    ledger: Ledger
    run_id: str
    plan: PrivacyPlan
    delta: float
    stamps: Sequence[str]
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
        stamps: Sequence[str],
    ) -> Iterator[Session]:
        """Lock the run folder, and make or check its config. A run that has begun must find its ledger again."""
        folder = RunFolder(run_dir)
        delta = delta or default_delta(plan)
        with folder.locked():
            if not isinstance(ledger, Ledger):
                begun = folder.config.exists()
                ledger = Ledger.open(ledger or folder.ledger, unit=plan.unit, create=not begun)
            asked = {"plan": plan.to_dict(), "ledger": str(ledger.path), "delta": delta, **config}
            run_id = folder.claim(asked)["run_id"]
            yield cls(folder=folder, ledger=ledger, run_id=run_id, plan=plan, delta=delta, stamps=stamps)

    @property
    def finished(self) -> bool:
        run = self.ledger.runs.get(self.run_id)
        return run is not None and run.closed is not None

    def load(self) -> Parts | None:
        """The latest checkpoint, checked against plan and ledger; None for a run that has none yet."""
        if not self.folder.checkpoint.exists():
            return None
        tensors, about = checkpoint.read(self.folder.checkpoint)
        mine = {"run_id": self.run_id, "plan_hash": self.plan.fingerprint()}
        if {name: about.get(name) for name in mine} != mine:
            raise CheckpointCorrupt(f"{self.folder.checkpoint} belongs to another run or plan. Use another run_dir.")
        check_head(self.ledger, self.run_id, about)
        return tensors, about

    def save(self, parts: Parts, head: Head | None) -> None:
        tensors, about = parts
        about = {"run_id": self.run_id, "plan_hash": self.plan.fingerprint(), "ledger_head": head, **about}
        checkpoint.write(self.folder.checkpoint, tensors, about)
        self.saved_at = time.monotonic()

    def write_statement(self) -> dict[str, Any]:
        """Put the statement of this moment beside the checkpoint."""
        statement = make_statement(self.plan, self.ledger, self.run_id, delta=self.delta, stamps=self.stamps)
        write_json(self.folder.statement, statement)
        return statement


def check_head(ledger: Ledger, run_id: str, about: Mapping[str, Any]) -> None:
    """Refuse a ledger that is older than, shorter than or foreign to a checkpoint."""
    head, step = about.get("ledger_head"), about.get("step")
    run = ledger.runs.get(run_id)
    if head is not None:
        ledger.verify_head(int(head[0]), str(head[1]))
    counted = run.spent if run else 0
    if not isinstance(step, int) or not 0 <= step <= counted:
        raise CheckpointCorrupt(
            f"The checkpoint claims step={step!r}, but the ledger counts {counted} steps for run {run_id!r}."
        )
