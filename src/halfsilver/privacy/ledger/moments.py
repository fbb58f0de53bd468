"""What a ledger held at earlier moments: a statement speaks of one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from halfsilver.privacy.accounting import Count, merged
from halfsilver.privacy.ledger.history import History, Run
from halfsilver.privacy.ledger.ledger import Ledger


class Moment(NamedTuple):
    """The number of runs that were registered, all that was spent by distinct mechanism, and how often elsewhere."""

    runs: int
    counts: tuple[Count, ...]
    external: int


@dataclass(frozen=True)
class Lost:
    """What a ledger held at least at a moment that a compaction summed up, and runs that it knew for certain."""

    counts: tuple[Count, ...]
    runs: tuple[str, ...]


def moments(ledger: Ledger, run_id: str, spent: int) -> tuple[list[Moment], Lost | None]:
    """All that the ledger held while the run had spent so much; of a finished run, from its finish until now.

    Read from the file, record by record. Where the finish of the run was summed up, the moments from there to the
    summary are lost, and `Lost` bounds them from below.
    """
    history, found = History(ledger.path), list[Moment]()
    finished = ledger.runs[run_id].closed is not None
    with open(ledger.path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                history.feed(line)
                run = history.runs.get(run_id)
                if run and run.spent == spent and finished == (run.closed is not None):
                    found.append(Moment(len(history.runs), merged(history.counts()), len(history.external)))
    now = ledger.counts()  # with what a torn record is charged with
    if ledger.runs[run_id].spent == spent:
        found.append(Moment(len(ledger.runs), now, len(ledger.externals)))
    return found, _lost(history, ledger.runs[run_id])


def _lost(history: History, run: Run) -> Lost | None:
    """Runs whose last step came before the finish count in full; of the others nothing is known."""
    if run.closed is None or run.closed.seq >= history.floor:
        return None
    ends = {other.run_id: other.last or other.closed for other in history.runs.values()}
    sure = [name for name, end in ends.items() if name == run.run_id or (end is not None and end.seq < run.closed.seq)]
    counts = merged([history.runs[name].plan.count(history.runs[name].spent) for name in sure])
    return Lost(counts, tuple(sure))
