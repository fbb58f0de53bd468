"""`halfsilver ledger`: all runs on a private data set, and what is left of its budget."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from halfsilver.errors import require

if TYPE_CHECKING:
    from halfsilver.privacy.ledger import Ledger
    from halfsilver.privacy.ledger.ledger import Run


def ledger(
    path: Annotated[Path, typer.Argument(help="A ledger file, or a run folder with its ledger in it.")],
    delta: Annotated[
        float | None,
        typer.Option(help="Delta of all figures (default: the budget's, or 1e-5, or less for many records)."),
    ] = None,
    head_file: Annotated[Path | None, typer.Option(help="Copy of the ledger's head that is kept elsewhere.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List all runs on a private data set, what they spent, and what is left of the budget."""
    from halfsilver.privacy.ledger import Ledger
    from halfsilver.runs.folder import UNSAFE

    file = path / "ledger.jsonl" if path.is_dir() else path
    require(file.is_file(), "path", str(path), "to be a ledger, or a run folder with a file ledger.jsonl")
    found = summary(Ledger.open(file, head_file=head_file, create=False), delta)
    if as_json:
        typer.echo(json.dumps(found))
        return
    console = Console(markup=False)
    table = Table("run", "steps", "of", "noise", "sampling rate", "epsilon", "state", title=f"Ledger {file}")
    for run in found["runs"]:
        noise, rate, epsilon = (_number(run[name]) for name in ("noise_multiplier", "sampling_rate", "epsilon"))
        state = run["state"] + (", known seed: not private" if run["unsafe"] else "")
        name = run["run_id"].removeprefix(UNSAFE)[:8]
        table.add_row(name, str(run["steps"]), str(run["planned"]), noise, rate, epsilon, state)
    for entry in found["external"]:
        table.add_row("elsewhere", str(entry["count"]), "", "", "", "", entry["why"])
    console.print(table)
    budget, left = found["budget"], found["left"]
    console.print(
        f"In all: epsilon {_number(found['epsilon'])} at delta {found['delta']:g}, one {found['unit']} protected "
        f"({found['adjacency']}). "
        + (
            f"Budget: epsilon {budget['epsilon']:g} at delta {budget['delta']:g}, left {left:.4g}. The next step is "
            "granted by a stricter rule."
            if budget
            else "No budget is set."
        )
    )


def summary(ledger: Ledger, delta: float | None) -> dict[str, Any]:
    """The ledger as plain values, all figures at one delta; an epsilon of None is infinite."""
    from halfsilver.privacy.selection import Selection
    from halfsilver.runs.statement import default_delta, total_now

    ledger.counts()  # reads what others have appended
    plans = [run.plan.each if isinstance(run.plan, Selection) else run.plan for run in ledger.runs.values()]
    usual = ledger.budget.delta if ledger.budget else min(map(default_delta, plans), default=1e-5)
    at = usual if delta is None else delta
    require(0 < at < 1, "delta", at, "in (0, 1)")
    total = total_now(ledger, at)
    return {
        "ledger": str(ledger.path),
        "unit": ledger.unit,
        "adjacency": total.get("adjacency", ledger.adjacency),
        "delta": at,
        "epsilon": total["epsilon"],
        "accountant": total["accountant"],
        "budget": total["budget"],
        "left": max(0.0, ledger.budget.epsilon - ledger.spent()) if ledger.budget else None,
        "runs": [_run(run, at) for run in ledger.runs.values()],
        "external": total.get("external", []),
    }


def _run(run: Run, delta: float) -> dict[str, Any]:
    from halfsilver.runs.folder import UNSAFE
    from halfsilver.runs.statement import spent_by

    noise, rate, *_ = run.mechanism
    by = run.plan.accountants[0]
    epsilon = spent_by(run.plan, run.spent, delta)[f"epsilon_{by}"] if run.spent else 0.0
    return {
        "run_id": run.run_id,
        "steps": run.spent,
        "planned": run.plan.steps,
        "noise_multiplier": noise,
        "sampling_rate": rate,
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "state": f"finished, {run.updates} updates" if run.closed else "open",
        "unsafe": run.run_id.startswith(UNSAFE),
    }


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4g}"
