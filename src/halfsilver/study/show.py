"""A summary as text: one row a method, then the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfsilver.study.search import broken_start


def rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Method, its own epsilon, seeds, and each metric with the half-width of its interval."""
    means = summary["verdict"]["means"]
    own = {run["method"]: run["epsilon"]["pld"] for run in summary["runs"]}
    found = []
    for method, values in means.items():
        seeds = str(next(iter(values.values()))["n"])
        found.append([method, f"{own.get(method, 0.0):.3g}", seeds, *(_with_interval(v) for v in values.values())])
    return found


def columns(summary: Mapping[str, Any]) -> list[str]:
    first: Mapping[str, Any] = next(iter(summary["verdict"]["means"].values()), {})
    return ["method", "epsilon", "seeds", *first]


def _with_interval(value: Mapping[str, Any]) -> str:
    if value.get("mean") is None:
        return "diverged"
    if value.get("low") is None:
        return f"{value['mean']:.4f}"
    return f"{value['mean']:.4f} ± {(value['high'] - value['low']) / 2:.4f}"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """How settings were chosen, what was spent in all, and what takes away from the figures."""
    ledger = summary["ledger"]
    spent = (
        f"All {ledger['runs']} private runs in the ledger together: epsilon {ledger['epsilon']:.3g} at delta "
        f"{ledger['delta']:g} ({ledger['accountant'].upper()})."
    )
    choices = [
        f"{summary['search']}, {method}: {_setting(choice)}{_error(choice)}"
        for method, choice in summary["choices"].items()
    ]
    remarks = [remark for remark in (broken_start(summary["choices"]),) if remark]
    return [*choices, *remarks, spent, *(f"Note: {stamp}." for stamp in summary["stamps"])]


def _setting(choice: Mapping[str, Any]) -> str:
    setting = choice["setting"]
    alpha = "" if setting["alpha_end"] is None else f", alpha end {setting['alpha_end']:g}"
    edge = ", still at the edge of the grid" if choice["at_edge"] else ""
    return f"learning rate {setting['lr']:g}{alpha}{edge}"


def _error(choice: Mapping[str, Any]) -> str:
    if "standard_error" not in choice:
        return ""
    ahead, error = choice["difference"], choice["standard_error"]
    return f"; {choice['score']} ahead of the next by {ahead:.4f} (paired standard error {error:.4f})"


def as_text(summary: Mapping[str, Any]) -> str:
    """Table, notes and verdict, in plain text."""
    table = [columns(summary), *rows(summary)]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    words = summary["verdict"]
    return "\n".join([*lines, "", *notes(summary), "", words["headline"], "", *words["sentences"]])
