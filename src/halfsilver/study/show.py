"""A summary as text: one row per method, then the verdict in words."""

from __future__ import annotations

from halfsilver.study.records import Choice, Mean, Summary
from halfsilver.study.search import broken_start


def rows(summary: Summary) -> list[list[str]]:
    """Method, its own epsilon, seeds, and each metric with the half-width of its interval."""
    epsilons = {run.method: run.epsilon_pld for run in summary.runs}
    return [
        [
            method,
            f"{epsilons.get(method, 0.0):.3g}",
            str(next(iter(means.values())).n),
            *(_with_interval(mean) for mean in means.values()),
        ]
        for method, means in summary.verdict.means.items()
    ]


def columns(summary: Summary) -> list[str]:
    metrics = dict.fromkeys(metric for means in summary.verdict.means.values() for metric in means)
    return ["method", "epsilon", "seeds", *metrics]


def _with_interval(value: Mean) -> str:
    if value.mean is None:
        return "diverged"
    if value.low is None or value.high is None:
        return f"{value.mean:.4f}"
    return f"{value.mean:.4f} ± {(value.high - value.low) / 2:.4f}"


def notes(summary: Summary) -> list[str]:
    """How settings were chosen, what was spent in all, and what takes away from the figures."""
    ledger = summary.ledger
    spent = (
        f"All {ledger['runs']} private runs in the ledger together: epsilon {ledger['epsilon']:.3g} at delta "
        f"{ledger['delta']:g} ({ledger['accountant'].upper()})."
    )
    search = summary.study.search
    choices = [f"{search}, {method}: {choice_text(choice)}" for method, choice in summary.choices.items()]
    remarks = [remark for remark in (broken_start(summary.choices, summary.arms()),) if remark]
    return [*choices, *remarks, spent, *(f"Note: {stamp}." for stamp in summary.stamps)]


def choice_text(choice: Choice) -> str:
    """The chosen setting, and how far it is ahead of the next."""
    setting = choice.setting
    if setting is None:
        return "no setting"
    alpha = "" if setting.alpha_end is None else f", alpha end {setting.alpha_end:g}"
    damping = "" if setting.damping is None else f", damping {setting.damping:g}"
    edge = ", still at the edge of the grid" if choice.at_edge else ""
    chosen = f"learning rate {setting.lr:g}{alpha}{damping}{edge}"
    if choice.difference is None or choice.standard_error is None:
        return chosen
    error = f"paired standard error {choice.standard_error:.4f}"
    return f"{chosen}; {choice.score} ahead of the next by {choice.difference:.4f} ({error})"


def as_text(summary: Summary) -> str:
    """Table, notes and verdict, in plain text."""
    table = [columns(summary), *rows(summary)]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    verdict = summary.verdict
    return "\n".join([*lines, "", *notes(summary), "", verdict.headline, "", *verdict.sentences])
