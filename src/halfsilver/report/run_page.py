"""The report of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halfsilver.report.figures import Picture, metrics_of_run, series
from halfsilver.report.load import OneRun
from halfsilver.report.page import Html, facts, page, section, tag
from halfsilver.report.parts import claim, digits, gallery, guarantee, in_words, ledger_part, stamp_box, stamp_line
from halfsilver.report.words import figure, flat, plain


def run_page(run: OneRun, pictures: Mapping[str, Sequence[Picture]]) -> Html:
    """Guarantee and outcome first, then statement, curves, ledger and configuration."""
    stamps = [str(stamp) for stamp in run.statement.not_private_because]
    return page(
        f"Run {run.name} - halfsilver",
        tag("h1", f"Run {run.name}"),
        tag("p", claim(run.statement), class_="verdict"),
        stamp_line(stamps),
        *(tag("p", tag("strong", str(remark)), class_="stamped") for remark in run.statement.remarks),
        *(tag("p", words) for words in (in_words(run.statement), _outcome(run)) if words),
        _about(run),
        _statement(run, stamps + _behind(run)),
        section("curves", "Curves", gallery(pictures.get("curves", ()))),
        ledger_part(run.statement.all_runs_on_this_data),
        section("schedules", "Learning rate and released gradient", gallery(pictures.get("schedules", ()))),
        _configuration(run),
    )


def _outcome(run: OneRun) -> str:
    last = {name: values[-1][1] for name in metrics_of_run(run.history) if (values := series(run.history, name))}
    said = ", ".join(f"{name} {figure(value, name)}" for name, value in last.items())
    return f"Last measured on test rows: {said}." if said else ""


def _about(run: OneRun) -> Html:
    """When, and what its owner says about it."""
    told = run.config.get("about")
    known = {"begun": run.config.get("begun"), **(told if isinstance(told, Mapping) else {})}
    return facts((str(name), plain(value)) for name, value in known.items() if value is not None)


def _behind(run: OneRun) -> list[str]:
    """A statement is written at the start and the end of a run, so between them the ledger knows more."""
    written = run.statement.spent_so_far.steps
    logged = max((line.get("step") or 0 for line in run.history), default=0)
    if logged <= written:
        return []
    note = f"the run has logged step {logged}, but its statement and the totals are those of step {written}"
    return [f"not finished: {note}. halfsilver verify tells what the ledger counts now."]


def _statement(run: OneRun, stamps: Sequence[str]) -> Html:
    statement, spent = run.statement, run.statement.spent_so_far
    by_pld, by_rdp = f"{digits(spent.epsilon_pld)} by PLD", f"{digits(spent.epsilon_rdp)} by RDP"
    used = [
        ("selections counted so far" if statement.selects else "steps counted so far", plain(spent.steps)),
        ("epsilon of those", by_rdp if statement.selects else by_pld),
        ("mechanism", plain(statement.mechanism)),
        ("sampler", plain(statement.sampler)),
    ]
    figures = guarantee(statement.plan, statement.epsilon_planned, statement.delta, statement.adjacency)
    return section("privacy", "Privacy statement", stamp_box(stamps), figures, facts(used))


def _configuration(run: OneRun) -> Html:
    unset = (None, "NoneType")  # the latter is the type of a scheduler that is not there
    shown = {name: v for name, v in run.config.items() if name not in ("plan", "ledger", "about") and v not in unset}
    check = tag("pre", f"halfsilver verify {run.name}")
    note = "To recompute the statement from the ledger, in the folder above this run:"
    return section("configuration", "Configuration and versions", facts(flat(shown)), tag("p", note), check)
