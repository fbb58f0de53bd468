"""The report of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halfsilver.report.figures import Picture
from halfsilver.report.load import OneRun
from halfsilver.report.page import Html, facts, page, section, tag
from halfsilver.report.parts import digits, gallery, guarantee, ledger_part, stamp_box, stamp_line
from halfsilver.report.words import flat, plain


def run_page(run: OneRun, pictures: Mapping[str, Sequence[Picture]]) -> Html:
    """Statement first, then curves, ledger and configuration."""
    statement = run.statement
    stamps = [str(stamp) for stamp in statement.get("not_private_because") or ()]
    planned, delta = statement.get("epsilon_planned") or {}, statement.get("delta")
    claim = f"({digits(planned.get('pld'))}, {plain(delta)})"
    said = f"This run was planned to be {claim}-differentially private."
    verdict = f"{said} But it is not private: see below." if stamps else said
    return page(
        f"Run {run.name}",
        tag("h1", f"Run {run.name}"),
        tag("p", verdict, class_="verdict"),
        stamp_line(stamps),
        _statement(run, stamps + _behind(run)),
        section("curves", "Curves", gallery(pictures.get("curves", ()))),
        ledger_part(statement.get("all_runs_on_this_data") or {}),
        section("schedules", "Learning rate and released gradient", gallery(pictures.get("schedules", ()))),
        _configuration(run),
    )


def _behind(run: OneRun) -> list[str]:
    """A statement is written at the start and the end of a run, so between them the ledger knows more."""
    written = (run.statement.get("spent_so_far") or {}).get("steps") or 0
    logged = max((line.get("step") or 0 for line in run.history), default=0)
    if logged <= written:
        return []
    note = f"the run has logged step {logged}, but its statement and the totals are those of step {written}"
    return [f"not finished: {note}. halfsilver verify tells what the ledger counts now."]


def _statement(run: OneRun, stamps: Sequence[str]) -> Html:
    statement = run.statement
    spent = statement.get("spent_so_far") or {}
    used = [
        ("steps counted so far", plain(spent.get("steps"))),
        ("epsilon of those", f"{digits(spent.get('epsilon_pld'))} by PLD"),
        ("mechanism", plain(statement.get("mechanism"))),
        ("sampler", plain(statement.get("sampler"))),
    ]
    plan, epsilon = statement.get("plan") or {}, statement.get("epsilon_planned") or {}
    figures = guarantee(plan, epsilon, statement.get("delta"), str(statement.get("adjacency", "")))
    return section("privacy", "Privacy statement", stamp_box(stamps), figures, facts(used))


def _configuration(run: OneRun) -> Html:
    shown = {name: value for name, value in run.config.items() if name not in ("plan", "ledger")}
    check = tag("pre", f"halfsilver verify {run.name}")
    note = "To recompute the statement from the ledger, in the folder above this run:"
    return section("configuration", "Configuration and versions", facts(flat(shown)), tag("p", note), check)
