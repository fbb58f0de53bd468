"""Outcomes as rows: mutant x instrument."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.robustness.mutants.attempt import Outcome
from benchmarks.robustness.mutants.catalogue import INSTRUMENTS, MUTANTS
from halfsilver.auditing.instruments import Finding


def row_of(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What became of one mutant. A run that failed, or in which the changed code was not called, has not killed it."""
    mutant, valid = MUTANTS[name], [o for o in outcomes if o.in_force]
    tried = {f.instrument for o in valid for f in o.findings}
    return {
        "mutant": name,
        "loop": mutant.setting.loop,
        "runs": len(outcomes),
        "killed": sum(bool(o.alarms) for o in valid),
        "instruments": {i: _said(i, valid) for i in INSTRUMENTS if i in tried},
        "expected": list(mutant.by),
        "least_calls": {change: min(o.calls[change] for o in outcomes) for change in outcomes[0].calls},
        "errors": [o.error for o in outcomes if o.error],
    }


def clean_row(loop: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "loop": loop,
        "runs": len(outcomes),
        "alarms": [
            f"{f.instrument}: {f.test} ({f.value:.3g}, limit {f.limit:.3g})" for o in outcomes for f in o.alarms
        ],
        "errors": [o.error for o in outcomes if o.error],
    }


def missed(row: Mapping[str, Any]) -> list[str]:
    """Instruments that should have found the mutant in every run and did not."""
    found = row["instruments"]
    return [i for i in row["expected"] if found.get(i, {"alarmed": 0})["alarmed"] < row["runs"]]


def _said(instrument: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """In how many runs an instrument alarmed, and of its test that did most often the weakest value."""
    heard = [[f for f in o.alarms if f.instrument == instrument] for o in outcomes]
    alarmed = sum(map(bool, heard))
    if not alarmed:
        return {"alarmed": 0}
    [(test, times)] = Counter(f.test for found in heard for f in found).most_common(1)
    weakest = min((f for found in heard for f in found if f.test == test), key=_strength)
    value = weakest.value if math.isfinite(weakest.value) else str(weakest.value)  # JSON has no name for the others
    found = {"test": test, "times": times, "kind": weakest.kind, "value": value, "limit": weakest.limit}
    return {"alarmed": alarmed, **found}


def _strength(finding: Finding) -> float:
    if finding.kind == "p":
        return -finding.value
    distance = abs(finding.value - finding.limit)
    return distance if math.isfinite(distance) else math.inf


def shown(result: Mapping[str, Any]) -> str:
    """The result as text, with the table in Markdown."""
    head = ["mutant", "loop", "killed", *INSTRUMENTS, "least calls"]
    lines = [head, ["---"] * len(head), *map(_cells, result["table"])]
    errors = [f"{row.get('mutant', 'clean')}, {row['loop']}: {e}" for row in _all_rows(result) for e in row["errors"]]
    alarms = [f"false alarm in {row['loop']}: {alarm}" for row in result["clean"] for alarm in row["alarms"]]
    late = [f"{row['mutant']}: not in every run by {', '.join(missed(row))}" for row in result["table"] if missed(row)]
    summary = (
        f"{result['killed']} of {result['total']} mutants killed in every run; {result['false_alarms']} alarms in "
        f"{result['clean_runs']} clean runs of {len(result['clean'])} loops; {result['errors']} errors; "
        f"{result['seconds']} s"
    )
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), *late, *errors, *alarms, summary])


def _all_rows(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*result["table"], *result["clean"]]


def _cells(row: Mapping[str, Any]) -> list[str]:
    said = [_cell(row["instruments"].get(i)) for i in INSTRUMENTS]
    least = min(row["least_calls"].values())
    return [row["mutant"], row["loop"], f"{row['killed']} of {row['runs']}", *said, str(least)]


def _cell(said: Mapping[str, Any] | None) -> str:
    if said is None:
        return "not run"
    if not said["alarmed"]:
        return "-"
    value, limit = float(said["value"]), f" (limit {said['limit']:.3g})"
    if said["kind"] == "p":
        return f"{said['alarmed']}: {said['test']}, p ≤ {max(value, 1e-300):.1g}"
    return f"{said['alarmed']}: {said['test']}{' ≥' if said['kind'] == 'bound' else ''} {value:.3g}{limit}"
