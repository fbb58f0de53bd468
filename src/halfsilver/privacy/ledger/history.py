"""What a ledger file says: its lines replayed, each one checked against those before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from halfsilver.errors import ConfigError, LedgerCorrupt
from halfsilver.privacy.accounting import Count, MechanismCount, PairCount, Trials, merged
from halfsilver.privacy.ledger.records import GENESIS, FromLaterVersion, Head, Record, check_fields, decode, line_of
from halfsilver.privacy.selection import Plan, plan_from_dict

Mechanism = tuple[float, ...]  # noise multiplier, sampling rate, and of a selection its `Trials`
Pair = tuple[float, float]  # epsilon, delta

WAY_OUT = (
    "The spending it recorded is no longer certain, so nothing more is granted. "
    "Restore the newest copy of the ledger; never edit or shorten one."
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the ledger knows of one run; `spent` counts every step it may have taken."""

    run_id: str
    plan: Plan
    plan_hash: str
    block_max: int
    spent: int = 0
    updates: int | None = None
    last: Head | None = None  # its last intent
    closed: Head | None = None  # its finish record; None while it may still take steps
    files: Mapping[str, str] = field(default_factory=dict)  # digests of its files at the finish, by name
    owner: str = ""  # whoever took the last steps; "" if the records do not say
    replaced: frozenset[str] = frozenset()  # owners before, who may take no more

    @property
    def remaining(self) -> int:
        """Steps of the plan (spare ones included) that are left; none after the finish."""
        return 0 if self.closed else self.plan.max_releases - self.spent

    def charge(self, steps: int) -> MechanismCount:
        """What so many further steps add to what counts. With correlated noise the first one counts for all."""
        before, after = self.plan.count(self.spent), self.plan.count(self.spent + steps)
        return replace(after, count=after.count - before.count)

    @property
    def mechanism(self) -> Mechanism:
        step = self.plan.count()
        return float(step.noise_multiplier), float(step.sampling_rate), *step.trials

    def steps(self, count: int) -> Record:
        """The fields of a record that spends `count` steps."""
        return {
            "run_id": self.run_id,
            "plan_hash": self.plan_hash,
            "noise_multiplier": self.mechanism[0],
            "sampling_rate": self.mechanism[1],
            "sampler": self.plan.sampler,
            "count": count,
        }

    def to_dict(self) -> Record:
        known = {**{name: getattr(self, name) for name in _SUMMARY_FIELDS}, "plan": self.plan.to_dict()}
        return {**known, **({"files": dict(self.files)} if self.files else {})}

    @classmethod
    def from_dict(cls, fields: Record) -> Run:
        check_fields(fields, (*_SUMMARY_FIELDS, *({"files"} & set(fields))))
        heads = {name: Head(*fields[name]) if fields[name] else None for name in ("last", "closed")}
        return cls(**{**fields, **heads, "plan": read_plan(fields["plan"])})


_SUMMARY_FIELDS = ("run_id", "plan", "plan_hash", "block_max", "spent", "updates", "last", "closed")


@dataclass(frozen=True, kw_only=True)
class External:
    """What was spent on the same data outside the ledger's runs, and why.

    Args:
        why: The reason that was recorded.
        spent: What counts.
        head: The record that says so.
        prior: Whether it came before the first step of any run.
    """

    why: str
    spent: Count
    head: Head
    prior: bool

    def event(self) -> Record:
        """The mechanism as JSON."""
        return event_of(self.spent)

    def to_dict(self) -> Record:
        return {
            "why": self.why,
            "event": self.event(),
            "count": self.spent.count,
            "head": self.head,
            "prior": self.prior,
        }

    @classmethod
    def from_dict(cls, fields: Record) -> External:
        check_fields(fields, ("why", "event", "count", "head", "prior"))
        return cls(
            why=fields["why"],
            spent=read_event(fields["event"], fields["count"]),
            head=Head(*fields["head"]),
            prior=fields["prior"],
        )


def event_of(spent: Count) -> Record:
    """One of them, as JSON. What was spent elsewhere is never a selection of this library."""
    return {name: value for name, value in asdict(spent).items() if name not in ("count", "trials")}


def read_event(event: Record, count: int) -> Count:
    return PairCount(**event, count=count) if "epsilon" in event else MechanismCount(**event, count=count)


def read_plan(fields: dict[str, Any]) -> Plan:
    try:
        return plan_from_dict(fields)
    except ConfigError as error:
        raise ValueError(f"holds an impossible plan: {error}") from error


class History:
    """The replayed state of a ledger. Memory grows with the number of runs, not of steps."""

    def __init__(self, path: Path, watch: int | None = None) -> None:
        self.path = path
        self.head = Head(-1, GENESIS)
        self.header: Record = {}
        self.schema = 1
        self.runs: dict[str, Run] = {}
        self.open: dict[str, None] = {}  # ids of unfinished runs, in the order of registration
        self.totals: Counter[Mechanism] = Counter()  # steps of all runs
        self.external: list[External] = []
        self.pairs: Counter[Pair] = Counter()  # of them, those known by their (epsilon, delta) alone
        self.first: Run | None = None  # the run that took the first step, as it was then
        self.torn = False  # the file ends within a record
        self.floor = 0  # records up to this number are only known by the summary
        self.cut: Record = {}  # the last record after which no run was open ...
        self.cut_end = 0  # ... and the offset at which it ends
        self.start, self.line, self.lines = 0, b"", 0  # the last complete line, its offset and number
        self.watch = watch
        self.watched: str | None = None  # hash of the record numbered `watch`

    @classmethod
    def load(cls, path: Path, watch: int | None = None) -> History:
        """Replay a whole file, noting the hash of record number `watch` on the way."""
        history = cls(path, watch)
        history.follow()
        if not history.lines:
            raise LedgerCorrupt(f"{path} holds no complete header. {WAY_OUT}")
        return history

    @property
    def end(self) -> int:
        """The offset behind the last complete line."""
        return self.start + len(self.line)

    def follow(self) -> bool:
        """Replay what was appended since; false if the file no longer holds the last line that was read."""
        try:
            with open(self.path, "rb") as handle:
                handle.seek(self.start)
                if handle.read(len(self.line)) != self.line:
                    return False
                self._replay(handle)
        except FileNotFoundError as error:
            raise LedgerCorrupt(f"{self.path} does not exist (any more). {WAY_OUT}") from error
        return True

    def _replay(self, handle: BinaryIO) -> None:
        self.torn = False
        for line in handle:
            if not line.endswith(b"\n"):
                self.torn = True
                return
            self.feed(line)

    def feed(self, line: bytes) -> None:
        """Take in the next complete line, or raise `LedgerCorrupt` and stay as before."""
        try:
            record = decode(line)
            self._check_link(record)
            self._APPLY[record["type"]](self, record)
        except ValueError as error:
            hint = "" if isinstance(error, FromLaterVersion) else f". {WAY_OUT}"
            raise LedgerCorrupt(f"{self.path}, line {self.lines + 1} {error}{hint}") from error
        self.start, self.line, self.lines = self.end, line, self.lines + 1
        last: Record = record["finish"] if record["type"] == "summary" else record
        self.head = head_of(last)
        if not self.open and record["type"] != "external":  # a summary ends with a finish record, which has the totals
            self.cut, self.cut_end = last, self.end
        if self.head.seq == self.watch:
            self.watched = self.head.hash

    def _check_link(self, record: Record) -> None:
        is_summary = record["type"] == "summary"
        if (record["type"] == "header") != (self.lines == 0) or (is_summary and self.lines != 1):
            raise ValueError(f"is a {record['type']} record out of place")
        if record["prev"] != self.head.hash:
            raise ValueError("does not follow the record before it (the hash chain is broken)")
        if not is_summary and record["seq"] != self.head.seq + 1:
            raise ValueError(f"has seq={record['seq']} where {self.head.seq + 1} is expected")

    def _apply_header(self, record: Record) -> None:
        self.header, self.schema = self.header or record, record["schema_version"]

    def _apply_run(self, record: Record) -> None:
        if record["run_id"] in self.runs:
            raise ValueError(f"registers run {record['run_id']!r} a second time")
        run = Run(
            run_id=record["run_id"],
            plan=read_plan(record["plan"]),
            plan_hash=record["plan_hash"],
            block_max=record["block_max"],
            owner=record.get("owner", ""),
        )
        self.runs[run.run_id] = run
        self.open[run.run_id] = None

    def _apply_steps(self, record: Record) -> None:
        run = self._open_run(record)
        count, most = record["count"], min(run.block_max, run.remaining)
        if any(record[name] != value for name, value in run.steps(count).items()):
            raise ValueError(f"spends steps that are not those of the plan of run {run.run_id!r}")
        if count > most:
            raise ValueError(f"spends count={count} where at most {most} is possible")
        if record["type"] == "intent" and (owner := record.get("owner", "")) != run.owner:  # a takeover
            if owner in run.replaced:
                raise ValueError(f"spends steps for owner={owner!r}, whom owner={run.owner!r} has replaced")
            run = replace(run, owner=owner, replaced=run.replaced | ({run.owner} if run.spent else set()))
        self._spend(replace(run, last=head_of(record)), count)

    def _apply_finish(self, record: Record) -> None:
        run = self._open_run(record)
        if record["updates"] > run.spent:
            raise ValueError(f"claims updates={record['updates']} out of {run.spent} steps")
        if record["totals"] != self.total_list():
            raise ValueError("states other totals than the records before it add up to")
        self.runs[run.run_id] = replace(
            run, updates=record["updates"], closed=head_of(record), files=record.get("files", {})
        )
        del self.open[run.run_id]

    def _apply_external(self, record: Record) -> None:
        spent = read_event(record["event"], record["count"])
        self._spend_elsewhere(External(why=record["why"], spent=spent, head=head_of(record), prior=self.first is None))

    def _apply_summary(self, record: Record) -> None:
        for entry in map(External.from_dict, record.get("external", ())):
            self._spend_elsewhere(entry)
        for run in map(Run.from_dict, record["runs"]):
            if run.run_id in self.runs or run.spent > run.plan.max_releases:
                raise ValueError(f"holds run {run.run_id!r} twice or beyond its plan")
            self._spend(replace(run, spent=0), run.spent)
        # The last finish record is kept whole: its hash is the one that the chain goes on from, so whoever
        # knows a later head can tell that the totals were not changed.
        finish = decode(line_of(record["finish"]))
        if finish["type"] != "finish" or finish["seq"] != record["seq"] or finish["totals"] != self.total_list():
            raise ValueError("does not add up to the totals of the finish record that it ends with")
        self.floor = record["seq"]

    _APPLY: ClassVar[dict[str, Callable[[History, Record], None]]] = {
        "header": _apply_header,
        "schema": _apply_header,
        "run": _apply_run,
        "intent": _apply_steps,
        "torn": _apply_steps,
        "finish": _apply_finish,
        "external": _apply_external,
        "summary": _apply_summary,
    }

    def _open_run(self, record: Record) -> Run:
        if record["run_id"] not in self.open:
            raise ValueError(f"belongs to run {record['run_id']!r}, which is not registered or has finished")
        return self.runs[record["run_id"]]

    def _spend(self, run: Run, count: int) -> None:
        self.runs[run.run_id] = replace(run, spent=run.spent + count)
        if count:
            self.first = self.first or run
            self.totals[run.mechanism] += run.charge(count).count

    def _spend_elsewhere(self, entry: External) -> None:
        """Count it. It never becomes the first step: a budget's rule hangs on the plan of a run."""
        self.external.append(entry)
        if isinstance(entry.spent, PairCount):
            self.pairs[entry.spent.epsilon, entry.spent.delta] += entry.spent.count
        else:
            self.totals[entry.spent.noise_multiplier, entry.spent.sampling_rate] += entry.spent.count

    def counts(self) -> list[Count]:
        """All steps, by distinct mechanism, and what was spent elsewhere."""
        return self._as_counts(self.totals)

    def prior_pairs(self) -> tuple[PairCount, ...]:
        """What was known by its (epsilon, delta) before the first step of any run."""
        return tuple(c for c in merged([e.spent for e in self.external if e.prior]) if isinstance(c, PairCount))

    def total_list(self) -> list[list[Any]]:
        """The totals as JSON holds them; pairs come last, and are marked."""
        steps = sorted([*mechanism, count] for mechanism, count in self.totals.items() if count)
        return [*steps, *sorted(["pair", *pair, count] for pair, count in self.pairs.items())]

    def planned(self) -> list[Count]:
        """All steps, if every open run went on to the end of its plan."""
        totals = self.totals.copy()
        for run in map(self.runs.__getitem__, self.open):
            totals[run.mechanism] += run.charge(run.remaining).count
        return self._as_counts(totals)

    def _as_counts(self, totals: Counter[Mechanism]) -> list[Count]:
        return [
            *(
                MechanismCount(noise_multiplier=s, sampling_rate=q, count=n, trials=_trials(more))
                for (s, q, *more), n in totals.items()
                if n
            ),
            *(PairCount(epsilon=e, delta=d, count=n) for (e, d), n in self.pairs.items()),
        ]

    def hash_of_watched(self) -> str | None:
        """The hash of record number `watch`, in a line or kept by the summary; None if it is not there."""
        kept = (head for run in self.runs.values() for head in (run.last, run.closed) if head)
        return self.watched or next((head.hash for head in kept if head.seq == self.watch), None)

    def check_continued_by(self, fresh: History) -> None:
        """Refuse a file put in place of this one, unless it is the same ledger after a compaction.

        `fresh` must have been loaded with ``watch=self.head.seq``.
        """
        found = fresh.hash_of_watched()
        kept = found == self.head.hash or (found is None and self.head.seq <= fresh.floor)
        same_ledger = fresh.header["hash"] == self.header["hash"]
        kept = kept and fresh.external[: len(self.external)] == self.external
        if not (same_ledger and kept and all(map(fresh._holds, self.runs.values()))):
            raise LedgerCorrupt(f"{self.path} was replaced or shortened while in use. {WAY_OUT}")

    def _holds(self, run: Run) -> bool:
        return run.run_id in self.runs and self.runs[run.run_id].spent >= run.spent


def head_of(record: Record) -> Head:
    return Head(record["seq"], record["hash"])


def _trials(more: list[float]) -> Trials | tuple[()]:
    return Trials(int(more[0]), more[1], more[2]) if more else ()
