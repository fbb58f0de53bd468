"""The privacy statement of a run in plain words, for whoever answers for the data: one page, from checked files."""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfsilver._core import system
from halfsilver.report.load import Statement, shown
from halfsilver.report.page import Html, facts, page, section, tag
from halfsilver.report.parts import ADJACENCY, UNITS, claim, digits, in_words
from halfsilver.report.words import plain
from halfsilver.runs.folder import RunFolder, read_json
from halfsilver.runs.verify import BEHIND, verify

_WIDTH = 100
_NAMES = {"halfsilver", "dp-accounting", "torch"}
_ALARMS = 0.01


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the page: its heading, sentences, and names with values."""

    heading: str
    sentences: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, kw_only=True)
class PlainStatement:
    """What a run guarantees, in words.

    Args:
        title: The heading of the page.
        claim: The guarantee in one sentence.
        parts: What it means, what was spent, what it does not cover, and how it was checked.
        checked: What `halfsilver verify` found, and the digests of the files.
    """

    title: str
    claim: str
    parts: Sequence[Part]
    checked: Mapping[str, Any]

    @classmethod
    def of(
        cls, run_dir: str | Path, ledger: str | Path | None = None, head_file: str | Path | None = None
    ) -> PlainStatement:
        """Check a run folder, and say what it guarantees.

        Args:
            run_dir: The run folder.
            ledger: The ledger of the data set, if it has moved.
            head_file: A copy of the ledger's head that is kept elsewhere.

        Raises:
            LedgerCorrupt: The ledger is damaged, or not that of the run.
            CheckpointCorrupt: Files of the run do not fit together.
        """
        found = verify(run_dir, ledger, head_file)
        folder = RunFolder(run_dir)
        config = read_json(folder.config)
        files = (folder.config, folder.statement, folder.checkpoint, folder.weights, folder.path / config["ledger"])
        kept = [Path(ledger) if ledger and file == files[-1] else file for file in files]
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in kept if file.exists()}
        with shown(folder.path):
            # Of the ledger: the file may be older.
            statement = Statement.from_json({**found["statement"], "spent_so_far": found["spent_now"]})
            return cls(
                title=f"Privacy statement of run {folder.path.resolve().name}",
                claim=claim(statement),
                parts=[
                    _whose(statement, config),
                    _meaning(statement),
                    _spent(statement, found["all_runs_now"]),
                    _not_covered(statement, found["notices"]),
                    _made(found, config),
                    _checked(digests, found["ok"]),
                ],
                checked={**found, "sha256": digests},
            )

    def __str__(self) -> str:
        lines = [self.title, "=" * len(self.title), "", *textwrap.wrap(self.claim, _WIDTH)]
        for part in self.parts:
            lines += ["", part.heading, "-" * len(part.heading)]
            for sentence in part.sentences:
                lines += textwrap.wrap(sentence, _WIDTH, initial_indent="- ", subsequent_indent="  ")
            width = max((len(name) for name, _ in part.facts), default=0)
            lines += [f"{name:{width}}  {value}" for name, value in part.facts]
        return "\n".join(lines)

    def html(self) -> Html:
        """The page: one file, without scripts, that prints on paper."""
        parts = [
            section(
                f"part-{number}",
                part.heading,
                tag("ul", *(tag("li", sentence) for sentence in part.sentences)) if part.sentences else Html(""),
                facts(part.facts) if part.facts else Html(""),
            )
            for number, part in enumerate(self.parts)
        ]
        return page(f"{self.title} - halfsilver", tag("h1", self.title), tag("p", self.claim, class_="verdict"), *parts)


def write_statement(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    ledger: str | Path | None = None,
    head_file: str | Path | None = None,
) -> Path:
    """Check a run, and write its privacy statement in plain words as one HTML page.

    Everything on the page comes from the run's files and its ledger, which are checked first as by `halfsilver verify`.
    Browsers print it on one or two sheets of paper.

    Args:
        run_dir: The run folder.
        out: The file to write (default: ``statement.html`` in the run folder).
        ledger: The ledger of the data set, if it has moved.
        head_file: A copy of the ledger's head that is kept elsewhere.

    Returns:
        The path of the page.

    Raises:
        LedgerCorrupt: The ledger is damaged, or not that of the run.
        CheckpointCorrupt: Files of the run do not fit together.
    """
    text = PlainStatement.of(run_dir, ledger, head_file).html()
    file = Path(run_dir) / "statement.html" if out is None else Path(out)
    system.write_atomically(file, text.encode(errors="replace"))
    return file


def found_at_most(alarms: float, epsilon: float, delta: float) -> float:
    """The largest power of a test of membership whose false alarms have at most this probability.

    The definition, applied to the rejection region and to its complement: power <= e^epsilon alarms + delta, and
    1 - alarms <= e^epsilon (1 - power) + delta.

    References:
        - Kairouz, Oh and Viswanath 2015, The Composition Theorem for Differential Privacy, arXiv:1311.0776, Theorem
          2.1.

    >>> found_at_most(0.01, 0.0, 0.0), round(found_at_most(0.01, 2.0, 0.0), 4), found_at_most(0.5, 0.0, 0.5)
    (0.01, 0.0739, 1.0)
    """
    return min(1.0, math.exp(epsilon) * alarms + delta, 1 - math.exp(-epsilon) * (1 - alarms - delta))


def _whose(statement: Statement, config: Mapping[str, Any]) -> Part:
    plan, told = statement.plan, config.get("about")
    batch, rate = plan.get("expected_batch_size"), plan.get("sampling_rate")
    declared = (
        round(batch / rate) if isinstance(batch, int | float) and isinstance(rate, int | float) and rate else None
    )
    rows = [(str(name), plain(value)) for name, value in told.items()] if isinstance(told, Mapping) else []
    silent = [] if rows else ["The run does not say which data these are. Trainer(about={...}) records it."]
    rows += [
        ("protected unit", UNITS.get(statement.unit, statement.unit)),
        ("number of units, as declared", plain(declared)),
    ]
    return Part(heading="Whose data", sentences=silent, facts=rows)


def _meaning(statement: Statement) -> Part:
    epsilon = statement.epsilon
    if statement.not_private_because or epsilon is None or not math.isfinite(epsilon):
        return Part(heading="What it means", sentences=["The figures do not hold, for the reasons given below."])
    power = found_at_most(_ALARMS, epsilon, statement.delta or 0.0)
    guess = (
        f"Somebody who knows everything else tries to tell from the model whether a given {statement.unit} is in the "
        f"data. If they say so wrongly in at most {100 * _ALARMS:g} % of cases, they find out rightly in at most "
        f"{100 * power:.3g} %."
    )
    neighbours = ADJACENCY.get(statement.adjacency, statement.adjacency)
    return Part(
        heading="What it means",
        sentences=[in_words(statement), guess],
        facts=[
            ("epsilon", digits(epsilon)),
            ("delta", plain(statement.delta)),
            ("neighbouring data sets", neighbours),
            ("mechanism", plain(statement.mechanism)),
        ],
    )


def _spent(statement: Statement, now: Mapping[str, Any]) -> Part:
    own, budget, elsewhere = statement.spent_so_far, now["budget"], now.get("external", [])
    steps, planned = ("selections", 1) if statement.selects else ("steps", statement.plan["steps"])
    total = "infinite" if now["epsilon"] is None else digits(now["epsilon"])
    allowed = f"epsilon {digits(budget['epsilon'])} at delta {plain(budget['delta'])}" if budget else "none is set"
    rows = [
        (f"{steps} of this run", f"{plain(own.steps)}, planned {plain(planned)}"),
        ("epsilon of these", digits(own.epsilon_rdp if statement.selects else own.epsilon_pld)),
        ("runs on these data, today", plain(now["runs"])),
        ("epsilon of all of them, today", f"{total} at delta {plain(now['delta'])}"),
        ("budget", allowed),
        *[("spent elsewhere", plain(entry["why"])) for entry in elsewhere],
        *([("the total holds where", ADJACENCY[now["adjacency"]])] if "adjacency" in now else []),
    ]
    words = (
        "The epsilon of a run bounds what its own output reveals. Whoever sees the outputs of all runs on these data "
        "can learn as much as the total allows."
    )
    return Part(heading="What was spent", sentences=[words], facts=rows)


def _not_covered(statement: Statement, notices: Sequence[str]) -> Part:
    who = "People with several rows" if statement.unit == "example" else "Groups of users"
    return Part(
        heading="What it does not cover",
        sentences=[
            *(f"Not private: {stamp}." for stamp in statement.not_private_because),
            *(f"Remark: {remark}." for remark in (*statement.remarks, *notices)),
            f"{who}: the guarantee is for one {statement.unit}. For k of them together, epsilon is k times as large, "
            "and delta grows faster.",
            "Public rows and test rows. They are not protected, and the model may reveal them.",
            "Numbers that were declared, such as the number of units and the batch size. They are taken as public.",
            "Choices that somebody made after looking at the private rows, and other uses of these rows that the "
            "ledger does not know.",
            "What is true of everybody: the model may show that a group has a property, and with it something about "
            "people who are not in the data.",
        ],
    )


def _made(found: Mapping[str, Any], config: Mapping[str, Any]) -> Part:
    versions = config.get("versions")
    known = versions if isinstance(versions, Mapping) else {}
    rows = [
        ("begun", plain(config.get("begun"))),
        ("state", f"{'finished' if found['finished'] else 'not finished'}, {found['step']} updates"),
        ("run", found["run_id"]),
        *[(f"version of {name}", plain(known[name])) for name in sorted(known) if name in _NAMES],
    ]
    return Part(heading="What ran, and when", facts=rows)


def _checked(digests: Mapping[str, str], agree: bool) -> Part:
    words = (
        "Before this page was written, the figures were computed again from the ledger. The chain of the ledger, the "
        "checkpoint, the metrics and the statement fitted together. To repeat it, run halfsilver verify on the run "
        "folder."
    )
    late = [] if agree else [f"Steps counted after the statement was written are in these figures: {BEHIND}."]
    weights = "The model's file is not signed. Compare its digest with that of the file you use."
    return Part(
        heading="How it was checked",
        sentences=[words, *late, weights],
        facts=[(f"SHA-256 of {name}", digest) for name, digest in digests.items()],
    )
