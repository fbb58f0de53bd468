"""One run on disk: its folder, its place in the ledger, its checkpoints and its statement."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from halfsilver._core import checkpoint
from halfsilver._core.distributed import World
from halfsilver.errors import CheckpointCorrupt
from halfsilver.privacy.accounting import epsilon_of
from halfsilver.privacy.ledger import Head, Ledger
from halfsilver.privacy.ledger.records import is_head
from halfsilver.privacy.selection import Plan
from halfsilver.runs.folder import RunFolder, read_json, write_json
from halfsilver.runs.state import Parts
from halfsilver.runs.statement import default_delta, make_statement, stamps


@dataclass(kw_only=True)
class Session:
    """What `Trainer.fit` needs to survive a kill: open it, load what is there, save, finish.

    Only rank 0 of `world` touches folder and ledger, which it alone has. Every method is called on all ranks, and
    gives all of them the same answer or the same error.
    """

    folder: RunFolder
    ledger: Ledger | None
    run_id: str
    finished: bool
    plan: Plan
    delta: float
    config: Mapping[str, Any]
    world: World
    owner: str
    taken_over: bool

    @classmethod
    @contextmanager
    def open(
        cls,
        run_dir: str | Path,
        ledger: Ledger | str | Path | None,
        plan: Plan,
        *,
        config: Mapping[str, Any],
        delta: float | None,
        world: World | None = None,
    ) -> Iterator[Session]:
        """Lock the run folder, and make or check its config. A run that has begun must find its ledger again."""
        folder, world = RunFolder(run_dir), world or World()
        if delta is not None:
            plan.check_delta(delta)
        mine: Ledger | None = None

        def claim() -> tuple[str, float, bool, str, bool]:
            nonlocal mine
            held.enter_context(folder.locked())
            mine = ledger if isinstance(ledger, Ledger) else _open_ledger(ledger, folder, plan)
            fixed = _delta_of(folder, plan) if delta is None else delta
            asked = {"plan": plan.to_dict(), "ledger": _place(mine.path, folder.path), "delta": fixed, **config}
            run_id = folder.claim(asked)["run_id"]
            plan.check_delta(fixed)
            mine.counts()  # reads what others have added since it was opened
            run, owner = mine.runs.get(run_id), secrets.token_hex(16)
            finished = run is not None and run.closed is not None
            taken = not finished and folder.take(owner, run.owner if run else "")
            return run_id, fixed, finished, owner, taken

        with ExitStack() as held:
            run_id, fixed, finished, owner, taken = world.from_lead(claim)
            yield cls(
                folder=folder,
                ledger=mine,
                run_id=run_id,
                finished=finished,
                plan=plan,
                delta=fixed,
                config=config,
                world=world,
                owner=owner,
                taken_over=taken,
            )

    def load(self) -> Parts | None:
        """The latest checkpoint, checked against plan and ledger; None for a run that has none yet."""
        tensors: dict[str, Tensor] = {}

        def read() -> dict[str, Any] | None:
            found = self._read()
            if found is None:
                return None
            tensors.update(found[0])
            return found[1]

        about = self.world.from_lead(read)
        return None if about is None else (self.world.tensors_from_lead(tensors), about)

    def _read(self) -> Parts | None:
        if not self.folder.checkpoint.exists():
            if self.finished:
                raise CheckpointCorrupt(f"The run in {self.folder.path} has finished, but its checkpoint is gone.")
            return None
        tensors, about = checkpoint.read(self.folder.checkpoint)
        mine = {"run_id": self.run_id, "plan_hash": self.plan.fingerprint()}
        if {name: about.get(name) for name in mine} != mine:
            raise CheckpointCorrupt(f"{self.folder.checkpoint} belongs to another run or plan. Use another run_dir.")
        check_head(self._ledger, self.run_id, about)
        self.folder.rewind(about["step"])
        return tensors, about

    def save(self, parts: Parts, head: Head | None) -> float:
        """Write a checkpoint. Returns the seconds that the write took rank 0."""
        tensors, about = parts
        about = {"run_id": self.run_id, "plan_hash": self.plan.fingerprint(), "ledger_head": head, **about}

        def write() -> float:
            started = time.monotonic()
            checkpoint.write(self.folder.checkpoint, tensors, about)
            return time.monotonic() - started

        return self.world.from_lead(write)

    def log(self, record: Mapping[str, Any]) -> None:
        self.world.from_lead(lambda: self.folder.log(record))

    def history(self) -> list[dict[str, Any]]:
        return self.world.from_lead(self.folder.history)

    def finish(self, updates: int) -> None:
        self.world.from_lead(lambda: self._ledger.finish(self.run_id, updates, self.folder.settle()))

    def spent(self) -> float:
        """Epsilon of the steps that the ledger counts for this run so far; for the progress bar, on rank 0 only."""
        run = self._ledger.runs[self.run_id]
        return epsilon_of([self.plan.count(run.spent)], self.delta, self.plan.accountants[0])

    def write_statement(self, remarks: Sequence[str] = ()) -> dict[str, Any]:
        """Put the statement of this moment beside the checkpoint."""
        return self.world.from_lead(lambda: self._write_statement(remarks))

    def _write_statement(self, remarks: Sequence[str]) -> dict[str, Any]:
        made = make_statement(
            self.plan, self._ledger, self.run_id, delta=self.delta, stamps=stamps(self.config), remarks=remarks
        )
        write_json(self.folder.statement, made)
        return made

    @contextmanager
    def stated(self) -> Iterator[None]:
        """An error in the block leaves a statement of all that the ledger counts by then. No rank waits for another."""
        try:
            yield
        except BaseException:
            if self.world.leads and not self.finished:
                with suppress(Exception):  # the error in the block tells more
                    self._write_statement(())
            raise

    @property
    def _ledger(self) -> Ledger:
        assert self.ledger is not None, "rank 0 has the ledger"
        return self.ledger


def check_head(ledger: Ledger, run_id: str, about: Mapping[str, Any]) -> None:
    """Refuse a ledger that is older than, shorter than or foreign to a checkpoint."""
    head, step = about.get("ledger_head"), about.get("step")
    run = ledger.runs.get(run_id)
    counted = run.spent if run else 0
    if type(step) is not int or not 0 <= step <= counted:
        raise CheckpointCorrupt(
            f"The checkpoint claims step={step!r}, but the ledger counts {counted} steps for run {run_id!r}."
        )
    if head is not None:
        if not is_head(head):
            raise CheckpointCorrupt(f"The checkpoint names ledger_head={head!r}, which is no place in a ledger.")
        ledger.verify_head(*head)
    elif step > 0:
        raise CheckpointCorrupt(f"The checkpoint claims step={step!r}, but names no record of the ledger.")


def _open_ledger(path: str | Path | None, folder: RunFolder, plan: Plan) -> Ledger:
    begun = folder.config.exists()
    return Ledger.open(path or folder.ledger, unit=plan.unit, create=not begun)


def _delta_of(folder: RunFolder, plan: Plan) -> float:
    """What the run that lies there began with; else the plan's own delta, or the default."""
    found = read_json(folder.config).get("delta") if folder.config.exists() else None
    return found if type(found) is float and 0 < found < 1 else plan.delta or default_delta(plan)


def _place(ledger: Path, folder: Path) -> str:
    """Where the ledger is: by name if it lies in the run folder, which may then be moved."""
    return ledger.name if ledger.parent == folder.resolve() else str(ledger)
