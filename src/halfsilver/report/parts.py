"""Parts that the report of a study and that of a run share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halfsilver.report.figures import Picture, finite
from halfsilver.report.load import Statement
from halfsilver.report.looks import Look
from halfsilver.report.page import Html, facts, inline, section, tag, warning
from halfsilver.report.words import plain

UNITS = {"example": "one example (one row of the data)", "user": "one user, with all of their examples"}
ADJACENCY = {
    "add-remove-one": "two data sets are neighbours if one has one unit more than the other",
    "empty-one-place": "two data sets are neighbours if one has a unit whose place is empty in the other",
}

_COMPOSITION = {
    "filter": "The budget holds for all runs together, even if some were planned after looking at outputs of others.",
    "odometer": (
        "There is no budget, so the total is an odometer's: it holds if the runs were fixed beforehand, and is no "
        "bound if some were planned after looking at outputs of others."
    ),
}


def gallery(pictures: Sequence[Picture]) -> Html:
    """Figures side by side, or below each other where there is no room; nothing where there are none."""
    shown = [
        tag("figure", tag("h3", p.title), inline(p.svg, name=p.name, alt=p.alt), tag("figcaption", p.caption))
        for p in pictures
    ]
    return tag("div", *shown, class_="figures") if shown else Html("")


def stamp_box(stamps: Iterable[str]) -> Html:
    """What a reader must know before trusting an epsilon."""
    return warning("Read this with the epsilon:", map(str, stamps))


def stamp_line(stamps: Sequence[str]) -> Html:
    """The same in short, for the top of the page."""
    names = "; ".join(str(stamp).split(":")[0] for stamp in stamps)
    link = tag("a", "what that means", href="#privacy")
    return tag("p", tag("strong", f"Stamped: {names}"), " (", link, ")", class_="stamped") if names else Html("")


def guarantee(plan: Mapping[str, Any], epsilon: Mapping[str, Any], delta: Any, adjacency: str) -> Html:
    """The figures of the guarantee and of the mechanism behind it."""
    unit = str(plan.get("unit", "example"))
    one_run = (
        "epsilon of one run",
        f"{digits(epsilon.get('pld'))} by PLD (tight), {digits(epsilon.get('rdp'))} by RDP",
    )
    selection = [
        ("epsilon of the selection", f"{digits(epsilon.get('rdp'))} by RDP, for all of its runs together"),
        ("expected number of runs", plain(plan.get("trials"))),
    ]
    noise, correlated = plan.get("noise_multiplier"), plan.get("noise")
    apart = (
        f"each {unit} at most once in {plain(correlated.get('separation'))} steps; who takes part need not be secret"
        if isinstance(correlated, Mapping)
        else None
    )
    rows = [
        *(selection if "trials" in plan else [one_run]),
        ("delta", plain(delta)),
        ("protected unit", UNITS.get(unit, unit)),
        ("adjacency", f"{adjacency}: {ADJACENCY.get(adjacency, '')}".removesuffix(": ")),
        ("private steps of each run" if "trials" in plan else "private steps", plain(plan.get("steps"))),
        *([("sampling rate", plain(plan.get("sampling_rate")))] if apart is None else [("participation", apart)]),
        ("expected batch", plain(plan.get("expected_batch_size"))),
        ("noise multiplier" if apart is None else "noise multiplier of the whole run", plain(noise)),
        ("clip norm", plain(plan.get("max_grad_norm"))),
    ]
    return facts(rows)


def ledger_part(ledger: Mapping[str, Any]) -> Html:
    """How often this data has been used, and what all of it costs together."""
    if not ledger:
        return Html("")
    by = str(ledger.get("accountant", "")).upper()
    elsewhere, held_for = ledger.get("external"), str(ledger.get("adjacency"))
    reasons = [plain(e.get("why")) for e in elsewhere if isinstance(e, Mapping)] if isinstance(elsewhere, list) else []
    rows = [
        ("runs on this data", plain(ledger.get("runs"))),
        *([("spent elsewhere, and counted too", "; ".join(reasons))] if reasons else []),
        ("epsilon of all of them", f"{digits(ledger.get('epsilon'))} by {by}"),
        ("delta of all of them", plain(ledger.get("delta"))),
        *([("adjacency of all of them", f"{held_for}: {ADJACENCY[held_for]}")] if held_for in ADJACENCY else []),
        ("budget of all of them", plain(ledger.get("budget") or "none")),
    ]
    words = (
        "The epsilon of one run bounds what its own output reveals. Whoever sees the outputs of all runs on this data "
        "can learn as much as the total allows; the ledger counts every run, those of a search and unfinished ones too."
    )
    known = tag("p", _COMPOSITION[held]) if (held := str(ledger.get("composition"))) in _COMPOSITION else Html("")
    return section("ledger", "Ledger: all runs on this data", tag("p", words), known, facts(rows))


def claim(statement: Statement) -> str:
    """The guarantee in one sentence."""
    whole = (1 if statement.selects else statement.plan.get("steps")) == statement.spent_so_far.steps
    private = not statement.not_private_because
    verb = "is" if private and whole else "was planned to be"
    epsilon = digits(statement.epsilon)
    what = "selection" if statement.selects else "run"
    said = f"This {what} {verb} ({epsilon}, {plain(statement.delta)})-differentially private."
    return said if private else f"{said} But it is not private: see below."


def in_words(statement: Statement) -> str:
    """What the two figures promise, for readers who do not know them; nothing where they do not hold."""
    epsilon = statement.epsilon
    if statement.not_private_because or epsilon is None or not finite(epsilon):
        return ""
    factor = digits(math.exp(min(epsilon, 700)))
    return (
        f"In words: whatever is concluded from the model and this folder, with one {statement.unit} more or less it "
        f"would be at most {factor} times as likely, apart from a probability of {plain(statement.delta)}."
    )


def digits(value: Any) -> str:
    """An epsilon.

    >>> digits(3.50961), digits(0.0), digits(None)
    ('3.51', '0', '-')
    """
    return f"{value:.3g}" if isinstance(value, int | float) else plain(value)


def named(method: str, look: Look, below: str = "") -> Html:
    """A method's name with the colour of its lines, and a line of small print."""
    colour = f"background: var(--{look.variable})" if look.variable else ""
    swatch = tag("span", class_="swatch", style=colour, aria_hidden="true")
    return tag("span", swatch, method, *([tag("small", below)] if below else []))
