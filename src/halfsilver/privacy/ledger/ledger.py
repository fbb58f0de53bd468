"""The privacy ledger: every use of a private data set is written to disk before it happens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from halfsilver._core import system
from halfsilver.errors import BudgetExceeded, ConfigError, LedgerCorrupt, RunFolderBusy, require
from halfsilver.privacy.accounting import (
    Accountant,
    Count,
    MechanismCount,
    PairCount,
    epsilon_of,
    merged,
    total_accountant,
)
from halfsilver.privacy.ledger.budget import Budget, BudgetFilter
from halfsilver.privacy.ledger.history import WAY_OUT, External, History, Run, event_of
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
from halfsilver.privacy.plan import Unit
from halfsilver.privacy.selection import Plan

if TYPE_CHECKING:
    from dp_accounting import DpEvent

__all__ = ["Budget", "External", "Grant", "Head", "Ledger", "Run"]


@dataclass(frozen=True)
class Grant:
    """Permission to use the private data `count` times; (`seq`, `head`) identifies the record that grants it."""

    count: int
    seq: int
    head: str


class Ledger:
    """The privacy account of one private data set, in a file to which any number of runs and processes append.

    Create or open one with `Ledger.open`. Share one ledger between all runs on the same private data, because epsilon
    adds up over them.

    Guarantees, each from the file alone:

    - A step is on disk before `intend` returns, so a crash never loses one.
    - The total of all steps stays within the budget.
    - A file that was damaged, shortened or replaced is refused, and so is one with several hard links. A record that a
      crash cut short counts as a whole block.

    The records form a hash chain without a secret key. The chain detects accidents and stale copies. It does not detect
    someone who rewrites the ledger and every checkpoint together. A file beside the ledger, ``<ledger>.head``, detects
    a ledger that was cut back at the end of a record. A `head_file` in another place also detects that both were
    restored.

    The object holds no open file between calls. Use one object per thread.

    Args:
        path: The ledger file. Users do not call this constructor but `Ledger.open`, which checks the file first.
        head_file: A second copy of the head, or None.
        history: What was read from the file.

    Example:
        >>> import tempfile
        >>> import halfsilver as hs
        >>> plan = hs.PrivacyPlan(steps=10, sampling_rate=0.1, expected_batch_size=50, noise_multiplier=2.0)
        >>> path = tempfile.mkdtemp() + "/ledger.jsonl"
        >>> ledger = hs.Ledger.open(path, budget=hs.Budget(epsilon=2.0, delta=1e-5))
        >>> run = ledger.register_run("first", plan, block_max=5)
        >>> ledger.intend("first", 5).count
        5
        >>> ledger.spent() < 2.0
        True

    References:
        - Rogers, Roth, Ullman and Vadhan 2016, Privacy Odometers and Filters: Pay-as-you-Go Composition,
          arXiv:1605.08294.
        - Feldman and Zrnic 2021, Individual Privacy Accounting via a Renyi Filter, arXiv:2008.11193.
    """

    def __init__(self, path: Path, head_file: Path | None, history: History) -> None:
        """For use inside the library; see `Ledger.open`."""
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
        """Open a ledger and check all of it, or create one.

        Args:
            path: The ledger file, usually ``ledger.jsonl`` beside the private data. Its folder is created if needed.
            budget: The most that all runs may spend together. Default None, which means no limit for a new ledger and
                "whatever was fixed" for an existing one. It is fixed at creation; given later, it must be equal.
            unit: Whose privacy the ledger counts, "example" or "user". Default None, which means "example" for a new
                ledger. It is fixed at creation; given later, it must be equal.
            head_file: Another file to which the last record's number and hash are written after each append. Default
                None. Set it to a place that backups of the ledger do not touch, and name it in every process that opens
                the ledger.
            create: Whether to create the ledger if there is none. Default True. Set it to False to open an existing one
                only.

        Returns:
            The ledger.

        Raises:
            LedgerCorrupt: If the file is damaged, or if it lacks a record that either head file names.
            ConfigError: If `budget` or `unit` differ from those of the existing ledger.
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
        """Number and hash of the last record that this object has read or written."""
        return self._history.head

    @property
    def runs(self) -> Mapping[str, Run]:
        """All runs that this object has read, by name, in the order of registration."""
        return MappingProxyType(self._history.runs)

    def register_run(self, run_id: str, plan: Plan, *, block_max: int = 1, whole: bool = False) -> Run:
        """Enter a run, which may then take the steps of its plan.

        Registering a run again with the same plan, as on resuming it, changes nothing.

        Args:
            run_id: The name of the run, a non-empty text that is unique within the ledger.
            plan: What the run will do per step, and how often. A selection is one step. It cannot change later.
            block_max: The most steps per call of `intend`, a whole number of at least 1. Default 1. A larger block
                needs fewer writes to disk, but a crash costs up to one block of steps.
            whole: Whether to refuse a run that has not begun and whose plan does not fit beside what is spent. Default
                False, which grants the steps that fit. Nothing is reserved for steps that other runs may still take.

        Returns:
            The registered run.

        Raises:
            BudgetExceeded: With `whole`, if the plan does not fit. Nothing is written then.
            ConfigError: If a run of that name has another plan, or if the plan's unit is not that of the ledger.
        """
        require(bool(run_id), "run_id", run_id, "to be a non-empty text")
        require(is_whole(block_max, 1), "block_max", block_max, "to be a whole number >= 1")
        require(plan.unit == self.unit, "unit", plan.unit, f"to be that of the ledger, {self.unit!r}")
        new = Run(run_id=run_id, plan=plan, plan_hash=plan.fingerprint(), block_max=block_max)
        with self._writing():
            run = self._history.runs.get(run_id, new)
            if whole and not run.spent and not run.closed and not self._filter.has_room(self._history, run):
                what = f"The plan of the new run {run_id!r} does not fit beside what is spent."
                advice = f"{self._filter.advice(self._history, run)} Nothing was spent."
                raise BudgetExceeded(f"{self.path} has {self.budget}. {what} {advice}")
            if run_id not in self._history.runs:
                fields = {"plan": plan.to_dict(), "plan_hash": new.plan_hash, "block_max": block_max}
                self._append("run", {"run_id": run_id, **fields})
            run = self._history.runs[run_id]
        if run.plan != plan:
            raise ConfigError(
                f"Run {run_id!r} is registered in {self.path} with another plan: {run.plan}. "
                "A plan cannot change; start a run with a new name."
            )
        return run

    def intend(self, run_id: str, wanted: int = 1, *, owner: str = "") -> Grant:
        """Write to disk that a run is about to take steps. Touch the private data only after this returns.

        Args:
            run_id: The name of a registered run.
            wanted: How many steps, a whole number of at least 1. Default 1.
            owner: Who takes them, a text that is new each time a run is opened. Default "". Another owner than that of
                the last steps takes the run over, and that one is refused from then on.

        Returns:
            The `Grant`, with as many steps as the run's `block_max`, its plan and the budget allow.

        Raises:
            BudgetExceeded: If not even one step is allowed. Nothing is written then.
            RunFolderBusy: If another owner has taken the run over.
            ConfigError: If the run is not registered.
        """
        require(is_whole(wanted, 1), "wanted", wanted, "to be a whole number >= 1")
        with self._writing():
            run = self._registered(run_id)
            if owner in run.replaced:
                raise RunFolderBusy(taken_over(run_id))
            count = self._filter.admit(self._history, run, min(wanted, run.block_max))
            if not count:
                raise BudgetExceeded(self._refusal(run))
            head = self._append("intent", {**run.steps(count), **({"owner": owner} if owner else {})})
        return Grant(count, *head)

    def finish(self, run_id: str, updates: int, files: Mapping[str, str] | None = None) -> Head:
        """Close a run, so that it takes no further step and can be compacted.

        Args:
            run_id: The name of a registered run.
            updates: How many updates the model received, from 0 to the number of steps the run has spent.
            files: SHA-256 digests of files of the run, by name, so that later changes of these files are noticed
                (default: none).

        Returns:
            Number and hash of the record that closes the run.

        Raises:
            ConfigError: If the run is not registered, or if `updates` is out of range.
        """
        with self._writing():
            run = self._registered(run_id)
            possible = is_whole(updates) and updates <= run.spent
            require(possible, "updates", updates, f"in [0, {run.spent}], the steps of run {run_id!r}")
            fields = {"run_id": run_id, "updates": updates, "totals": self._history.total_list()}
            fields |= {"files": dict(files)} if files else {}
            head = run.closed or self._append("finish", fields)
            with system.confirmed(self.path):
                uses_of(self.path, run_id).unlink(missing_ok=True)
            return head

    def external(self, event: tuple[float, float] | DpEvent, why: str) -> Head:
        """Record privacy that was spent on the same data elsewhere: synthetic data, another tool, a published table.

        It counts from then on against the budget, and in every total, statement and report. It is a fact, so it is
        recorded even if it exceeds the budget, and then no further step is granted. Each call counts anew.

        In a ledger with a budget, record an (epsilon, delta) before the first step. Recorded later, one with a delta
        above 0 ends all grants, because the rule by which the budget holds was fixed without it. Another Gaussian
        mechanism can be recorded at any time.

        Args:
            event: What was spent, under adding or removing one `unit` of this ledger. Either a pair (epsilon, delta)
                with epsilon at least 0 and delta in [0, 1); or, which is tighter, an event of dp-accounting:
                ``GaussianDpEvent``, ``PoissonSampledDpEvent`` of one, or ``SelfComposedDpEvent`` of either, such as
                `PrivacyPlan.event` returns.
            why: The reason, a non-empty text. It is kept in the ledger and shown in statements, so it must not tell
                anything private.

        Returns:
            Number and hash of the record.

        Raises:
            ConfigError: If the event is of another kind or out of range, or if there is no reason.

        Example:
            >>> import tempfile
            >>> ledger = Ledger.open(tempfile.mkdtemp() + "/ledger.jsonl")
            >>> head = ledger.external((1.0, 1e-6), "synthetic table of 2025, by another tool")
            >>> round(ledger.spent(delta=1e-5), 3)
            1.0

        References:
            - Kairouz, Oh and Viswanath 2017, The Composition Theorem for Differential Privacy, arXiv:1311.0776.
        """
        require(isinstance(why, str) and why.strip() != "", "why", why, "to be a non-empty text")
        spent = _spent_elsewhere(event)
        fields = event_of(spent)
        with self._writing():
            return self._append("external", {"why": why, "event": fields, "count": spent.count})

    @property
    def externals(self) -> tuple[External, ...]:
        """What was spent elsewhere, as far as this object has read, in the order of recording."""
        return tuple(self._history.external)

    def counts(self) -> tuple[Count, ...]:
        """Count all that was spent: steps that any run may have taken, a torn record included, and `external` events.

        Returns:
            One entry per distinct mechanism, and one per distinct (epsilon, delta).
        """
        self._refresh()
        torn = self._torn_steps()
        return merged([*self._history.counts(), *([torn[0].charge(torn[1])] if torn else [])])

    def spent(self, delta: float | None = None, accountant: Accountant | None = None) -> float:
        """Epsilon of all steps so far: an odometer.

        The reading takes the steps as fixed in advance. If later plans were chosen after earlier outputs had been seen,
        it is too small to be a guarantee. The budget holds in that case too.

        Args:
            delta: The delta at which epsilon is computed, in (0, 1). Default None, which takes the budget's delta.
            accountant: "pld" or "rdp". Default None, which uses PLD while all steps have one mechanism and RDP
                otherwise.

        Returns:
            Epsilon, at least 0.

        Raises:
            ConfigError: If `delta` is None and the ledger has no budget.

        References:
            - Rogers, Roth, Ullman and Vadhan 2016, Privacy Odometers and Filters: Pay-as-you-Go Composition,
              arXiv:1605.08294.
        """
        if delta is None and self.budget:
            delta = self.budget.delta
        if delta is None:
            raise ConfigError(f"{self.path} has no budget, so delta is needed, in (0, 1): spent(delta=...).")
        counts = self.counts()
        return epsilon_of(counts, delta, accountant or total_accountant(counts))

    def verify_head(self, seq: int, head: str) -> None:
        """Read the whole file again and refuse it unless one record has the given hash.

        A checkpoint calls this to recognise its ledger. A foreign, older or shortened ledger lacks the record. After a
        compaction, the last intent and the finish of each run are still known.

        Args:
            seq: The number of the record, from 0.
            head: Its hash, as 64 hexadecimal digits.

        Raises:
            LedgerCorrupt: If the file does not hold that record, or if it is damaged.
        """
        fresh = History.load(self.path, watch=seq)
        found = fresh.hash_of_watched()
        if found != head:
            why = "compacted it away" if found is None and seq <= fresh.floor else "does not hold it"
            raise LedgerCorrupt(f"Record {seq} with hash {head} was in use, but {self.path} {why}. {WAY_OUT}")

    def compact(self) -> bool:
        """Replace all records before the first unfinished run by one summary, to keep a long-lived ledger small.

        The other records keep their hashes, so checkpoints of unfinished runs stay valid.

        Returns:
            True if records were replaced, False if there were none to replace.
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
            external = [entry.to_dict() for entry in history.external if entry.head.seq <= seq]
            fields |= {"external": external} if external else {}
            summary = encode(fields, seq=seq, prev=history.header["hash"])
            header_end = len(line_of(history.header))
            self._publish_head()  # one that lags behind might name a record that is about to go
            system.splice_atomically(self.path, header_end, history.cut_end, summary)
            self._refresh()
        return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Exclude other writers, also those who know the file by another path, and start from what they wrote."""
        with system.lock_file(_lock_of(self.path), blocking=True):
            self._refresh()  # refuses a ledger that is gone, which the next lock would make
            with system.lock_file(self.path, blocking=True):
                if (links := self.path.stat().st_nlink) > 1:
                    raise LedgerCorrupt(
                        f"{self.path} has {links} hard links, and under each name the budget could be spent once more. "
                        "Find the others with find -samefile and delete them. A backup must be a copy, not a link."
                    )
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
        if self._history.schema < SCHEMA_VERSION and kind != "schema":  # from here on, older versions refuse the file
            self._append("schema", {"schema_version": SCHEMA_VERSION})
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
        """The run and the number of steps to which a torn record is charged: the last registered run that can continue.

        The steps were never taken, because `intend` had not returned. The charge covers a disk that lost what it had
        confirmed. It is never more than `intend` could have granted.
        """
        if not self._history.torn:
            return None
        runs = (self._history.runs[run_id] for run_id in reversed(self._history.open))
        charges = ((run, self._filter.admit(self._history, run, run.block_max)) for run in runs)
        return next((charge for charge in charges if charge[1]), None)

    def _publish_head(self) -> None:
        """Write both heads. Either may lag behind, so the one beside the ledger needs no sync of its name."""
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


def _spent_elsewhere(event: Any) -> Count:
    """The event as the ledger counts it."""
    if isinstance(event, tuple | list) and len(event) == 2:
        epsilon, delta = map(float, event)
        require(0 <= epsilon < math.inf, "epsilon", epsilon, "in [0, inf)")
        require(0 <= delta < 1, "delta", delta, "in [0, 1)")
        return PairCount(epsilon=epsilon, delta=delta, count=1)
    import dp_accounting as dpa  # whoever has an event has it loaded

    given, count, rate = event, 1, 1.0
    if isinstance(event, dpa.SelfComposedDpEvent):
        event, count = event.event, event.count
    if isinstance(event, dpa.PoissonSampledDpEvent):
        event, rate = event.event, float(event.sampling_probability)
    kinds = "an (epsilon, delta), or a Gaussian event of dp-accounting, Poisson-sampled and self-composed or not"
    require(isinstance(event, dpa.GaussianDpEvent), "event", given, f"to be {kinds}")
    sigma = float(event.noise_multiplier)
    require(0 < sigma < math.inf, "noise_multiplier", sigma, "in (0, inf)")
    require(0 < rate <= 1, "sampling_probability", rate, "in (0, 1]")
    require(is_whole(count, 1), "count", count, "to be a whole number >= 1")
    return MechanismCount(noise_multiplier=sigma, sampling_rate=rate, count=count)


def taken_over(run_id: str) -> str:
    """What an owner is told whom another one has replaced."""
    where = "in another process, or in a copy of its folder or of this process, which has taken it over"
    return f"Run {run_id!r} goes on {where}. No step is taken here. To go on here, end that one and call fit again."


def uses_of(path: Path, run_id: str) -> Path:
    """Where an unfinished run says which step was used last; not synced, as it is for processes that live."""
    return path.with_name(f"{path.name}.{hashlib.sha256(run_id.encode()).hexdigest()[:16]}.used")


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
