"""The privacy ledger: what may be done to a private data set is written down before it is done."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from halfsilver._core import system
from halfsilver.errors import BudgetExceeded, ConfigError, LedgerCorrupt, require
from halfsilver.privacy.accounting import Accountant, MechanismCount, epsilon_of, merged, total_accountant
from halfsilver.privacy.ledger.budget import Budget, BudgetFilter
from halfsilver.privacy.ledger.history import WAY_OUT, History, Run
from halfsilver.privacy.ledger.records import (
    ADJACENCY,
    GENESIS,
    SCHEMA_VERSION,
    Head,
    Record,
    canonical,
    encode,
    is_head,
    is_whole,
    line_of,
)
from halfsilver.privacy.plan import PrivacyPlan, Unit

__all__ = ["Budget", "Grant", "Head", "Ledger", "Run"]


@dataclass(frozen=True)
class Grant:
    """Leave to touch the private data `count` times; (seq, head) is the record that says so."""

    count: int
    seq: int
    head: str


class Ledger:
    """The account of one private data set, in a file that any number of runs and processes append to.

    Guarantees, all from the file alone: a step is on the disk before `intend` returns, so a crash never loses
    one; the total of all steps stays within the budget; a file that was damaged, shortened or exchanged is
    refused. A record that a crash cut short counts as a whole block of steps. The object holds no open file
    between calls; use one object per thread.

    The chain has no secret: it shows accidents and stale copies, not a forger who rewrites the ledger and
    every checkpoint together. That a ledger was cut back at the end of a record, its chain cannot show either: a small
    file beside it, `<ledger>.head`, does. A `head_file` kept out of reach shows the rest.
    """

    def __init__(self, path: Path, head_file: Path | None, history: History) -> None:
        """Not for users: see `Ledger.open`."""
        header = history.header
        self.path = path
        self.budget = Budget(**header["budget"]) if header["budget"] else None
        self.unit: Unit = header["unit"]
        self.adjacency: str = header["adjacency"]
        self._head_file = head_file
        self._history = history
        self._filter = BudgetFilter(self.budget)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        budget: Budget | None = None,
        unit: Unit | None = None,
        head_file: str | Path | None = None,
        create: bool = True,
    ) -> Ledger:
        """Open the ledger at `path`, checking all of it; create it if there is none and `create` is true.

        Budget and unit ("example" by default) are fixed at creation; given later, they must agree with it.
        After each append the head also goes to `<ledger>.head` and to `head_file`, which every process that opens the
        ledger should name; a ledger that is behind either is refused.
        """
        path = Path(path).resolve()
        head_file = Path(head_file).resolve() if head_file else None
        if create and not path.exists():
            _create(path, budget, unit or "example", head_file)
        seen = _read_head(_beside(path)) if _beside(path).exists() else None  # first: the ledger may grow meanwhile
        ledger = cls(path, head_file, History.load(path, watch=seen.seq if seen else None))
        if seen:
            ledger._check_reaches(seen)
        ledger._check_terms(budget, unit)
        if head_file and head_file.exists():
            ledger.verify_head(*_read_head(head_file))
        return ledger

    @property
    def head(self) -> Head:
        """The last record that this object has read or written; a checkpoint takes that of its `Grant`."""
        return self._history.head

    @property
    def runs(self) -> Mapping[str, Run]:
        """All runs that this object has read of, in the order of registration (of compacted ones, nearly)."""
        return MappingProxyType(self._history.runs)

    def register_run(self, run_id: str, plan: PrivacyPlan, *, block_max: int = 1) -> Run:
        """Enter a run, which may then take the steps of its plan in blocks of at most `block_max`.

        To register a run again with the same plan, as on resuming it, changes nothing.
        """
        require(bool(run_id), "run_id", run_id, "to be a non-empty text")
        require(is_whole(block_max, 1), "block_max", block_max, "to be a whole number >= 1")
        require(plan.unit == self.unit, "unit", plan.unit, f"to be that of the ledger, {self.unit!r}")
        fields = {"plan": plan.to_dict(), "plan_hash": plan.fingerprint(), "block_max": block_max}
        with self._writing():
            if run_id not in self._history.runs:
                self._append("run", {"run_id": run_id, **fields})
            run = self._history.runs[run_id]
        if run.plan != plan:
            raise ConfigError(
                f"Run {run_id!r} is registered in {self.path} with another plan: {run.plan}. "
                "A plan cannot change; start a run with a new name."
            )
        return run

    def intend(self, run_id: str, wanted: int = 1) -> Grant:
        """Write down that a run is about to take `wanted` steps; touch the data only after this returns.

        Grants fewer if the run's `block_max`, its plan or the budget allows fewer. Raises `BudgetExceeded`,
        and writes nothing, if not even one is allowed.
        """
        require(is_whole(wanted, 1), "wanted", wanted, "to be a whole number >= 1")
        with self._writing():
            run = self._registered(run_id)
            count = self._filter.admit(self._history, run, min(wanted, run.block_max))
            if not count:
                raise BudgetExceeded(self._refusal(run))
            head = self._append("intent", run.steps(count))
        return Grant(count, *head)

    def finish(self, run_id: str, updates: int) -> Head:
        """Close a run that made `updates` updates: it takes no further step, and can be compacted."""
        with self._writing():
            run = self._registered(run_id)
            possible = is_whole(updates) and updates <= run.spent
            require(possible, "updates", updates, f"in [0, {run.spent}], the steps of run {run_id!r}")
            fields = {"run_id": run_id, "updates": updates, "totals": self._history.total_list()}
            return run.closed or self._append("finish", fields)

    def counts(self) -> tuple[MechanismCount, ...]:
        """All steps that any run may have taken, by distinct mechanism; a torn record counts."""
        self._refresh()
        torn = self._torn_steps()
        return merged([*self._history.counts(), *([torn[0].plan.count(torn[1])] if torn else [])])

    def spent(self, delta: float | None = None, accountant: Accountant | None = None) -> float:
        """Epsilon of all steps so far, at the budget's delta unless another is given: an odometer.

        By PLD while all steps are of one mechanism, otherwise by RDP. It takes the steps as fixed beforehand; what
        holds if later plans were chosen after earlier outputs had been seen is the budget.
        """
        if delta is None and self.budget:
            delta = self.budget.delta
        if delta is None:
            raise ConfigError(f"{self.path} has no budget, so delta is needed, in (0, 1): spent(delta=...).")
        counts = self.counts()
        return epsilon_of(counts, delta, accountant or total_accountant(counts))

    def verify_head(self, seq: int, head: str) -> None:
        """Re-read the whole file and refuse it unless record number `seq` has the hash `head`.

        So a checkpoint knows its ledger: a foreign, older or shortened one lacks the record. Of the records
        that were compacted, the last intent and the finish of each run are still known.
        """
        fresh = History.load(self.path, watch=seq)
        found = fresh.hash_of_watched()
        if found != head:
            why = "compacted it away" if found is None and seq <= fresh.floor else "does not hold it"
            raise LedgerCorrupt(f"Record {seq} with hash {head} was in use, but {self.path} {why}. {WAY_OUT}")

    def compact(self) -> bool:
        """Sum up in one record all that precedes the unfinished runs; false if there is nothing to sum up.

        The other records keep their hashes, so checkpoints of unfinished runs stay valid.
        """
        with self._writing():
            history = self._history
            seq = history.cut["seq"]
            if seq <= history.floor:
                return False
            done = [run for run in history.runs.values() if run.closed and run.closed.seq <= seq]
            # The one that took the first step comes first: a budget's rule hangs on it.
            done.sort(key=lambda run: history.first is None or run.run_id != history.first.run_id)
            fields = {"type": "summary", "finish": history.cut, "runs": [run.to_dict() for run in done]}
            summary = encode(fields, seq=seq, prev=history.header["hash"])
            header_end = len(line_of(history.header))
            self._publish_head()  # one that lags behind might name a record that is about to go
            system.splice_atomically(self.path, header_end, history.cut_end, summary)
            self._refresh()
        return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Exclude other writers, and start from what they wrote."""
        with system.lock_file(_lock_of(self.path), blocking=True):
            self._refresh()
            if self._history.torn:
                self._repair()
            yield

    def _refresh(self) -> None:
        if not self._history.follow():
            fresh = History.load(self.path, watch=self._history.head.seq)
            self._history.check_continued_by(fresh)
            self._history = fresh

    def _append(self, kind: str, fields: Record) -> Head:
        line = encode({"type": kind, **fields}, seq=self.head.seq + 1, prev=self.head.hash)
        system.append_durably(self.path, line)
        # Whoever put this file here, by creation, repair or compaction, may have died before the folder was synced.
        system.fsync_folder(self.path.parent)
        self._history.feed(line)
        self._publish_head()
        return self.head

    def _repair(self) -> None:
        """Replace a torn record by one that says so, in one atomic change."""
        torn, line = self._torn_steps(), b""
        if torn:
            fields = {"type": "torn", **torn[0].steps(torn[1])}
            line = encode(fields, seq=self.head.seq + 1, prev=self.head.hash)
        system.splice_atomically(self.path, self._history.end, None, line)
        self._refresh()
        self._publish_head()

    def _torn_steps(self) -> tuple[Run, int] | None:
        """The run and the steps to which a torn record is charged: the last registered one that can go on.

        The steps were never taken, as `intend` had not returned; the charge is for a disk that lost what it
        had confirmed. It is never more than `intend` could have granted.
        """
        if not self._history.torn:
            return None
        runs = (self._history.runs[run_id] for run_id in reversed(self._history.open))
        charges = ((run, self._filter.admit(self._history, run, run.block_max)) for run in runs)
        return next((charge for charge in charges if charge[1]), None)

    def _publish_head(self) -> None:
        """Both may lag behind the ledger, so the one beside it need not wait for the disk to know its new name."""
        text = canonical(self.head._asdict()) + b"\n"
        system.write_atomically(_beside(self.path), text, sync_name=False)
        if self._head_file:
            system.write_atomically(self._head_file, text)

    def _check_reaches(self, seen: Head) -> None:
        """Refuse a file that lacks a record it once had, unless that was summed up.

        A head is written after its record was confirmed, so a record that is torn although the head names it was cut.
        """
        found = self._history.hash_of_watched()
        if found != seen.hash and not (found is None and seen.seq <= self._history.floor):
            raise LedgerCorrupt(
                f"{_beside(self.path)} shows that {self.path} had a record {seen.seq} that it lacks: it was cut back, "
                f"replaced or restored. {WAY_OUT}"
            )

    def _registered(self, run_id: str) -> Run:
        if run_id not in self._history.runs:
            raise ConfigError(f"Run {run_id!r} is not in {self.path}. Call register_run first.")
        return self._history.runs[run_id]

    def _refusal(self, run: Run) -> str:
        if run.closed:
            return f"Run {run.run_id!r} has finished and takes no more steps. Start a run with a new name."
        if not run.remaining:
            return (
                f"Run {run.run_id!r} has used all {run.plan.max_releases} steps of its plan, those repeated "
                "after a crash included. Keep some in hand with calibrate(spare_steps=...)."
            )
        return (
            f"{self.path} has {self.budget}. One more step of run {run.run_id!r} "
            f"{self._filter.refusal(self._history, run)}. The private data was not touched; the run stops here."
        )

    def _check_terms(self, budget: Budget | None, unit: Unit | None) -> None:
        for name, given, fixed in (("budget", budget, self.budget), ("unit", unit, self.unit)):
            agrees = given is None or given == fixed
            require(agrees, name, given, f"to be {fixed!r}", f"It was fixed when {self.path} was created.")


def _create(path: Path, budget: Budget | None, unit: Unit, head_file: Path | None) -> None:
    fields = {
        "type": "header",
        "schema_version": SCHEMA_VERSION,
        "ledger_id": secrets.token_hex(16),
        "adjacency": ADJACENCY,
        "unit": unit,
        "budget": {name: float(value) for name, value in asdict(budget).items()} if budget else None,
    }
    system.make_folder(path.parent)
    with system.lock_file(_lock_of(path), blocking=True):
        if path.exists():
            return
        for head in (_beside(path), head_file):
            if head and head.exists():
                raise LedgerCorrupt(f"{path} is gone, but {head} shows that it existed. {WAY_OUT}")
        system.write_atomically(path, encode(fields, seq=0, prev=GENESIS))


def _lock_of(path: Path) -> Path:
    """The lock has a file of its own, since compaction puts a new file in the ledger's place."""
    return path.with_name(path.name + ".lock")


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def _read_head(head_file: Path) -> Head:
    try:
        fields: dict[str, Any] = json.loads(head_file.read_bytes())
        head = [fields["seq"], fields["hash"]]
        require(is_head(head), "head", head, "to be the number and the hash of a record")
        return Head(*head)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerCorrupt(f"The head file {head_file} cannot be read ({error!r}). {WAY_OUT}") from error
