"""halfsilver audit: attack the mechanism in the training of a task, or in any training loop of the library."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from halfsilver.cli.studies import Data, Epsilon, Json, RecipeName, data_folder

if TYPE_CHECKING:
    from halfsilver.auditing.report import AuditReport


def audit(
    task: Annotated[
        str, typer.Argument(help="A task such as emnist, or the name of a training loop. 'loops' lists the loops.")
    ],
    epsilon: Epsilon = None,
    delta: Annotated[float, typer.Option(help="Delta of the bound.")] = 1e-5,
    recipe: RecipeName = "workstation",
    canaries: Annotated[
        int, typer.Option(help="Number of canaries in the data. As many again are left out for comparison.")
    ] = 1000,
    steps: Annotated[int, typer.Option(help="Number of steps of the plan to run.")] = 100,
    rows: Annotated[
        int, typer.Option(help="Number of public rows of the task to train on, besides the canaries.")
    ] = 200,
    confidence: Annotated[float, typer.Option(help="Confidence of the lower bound, in (0, 1).")] = 0.95,
    figure: Annotated[Path | None, typer.Option(help="PNG or SVG file to plot the scores of the canaries in.")] = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Attack the mechanism with canaries, and compare a lower bound on epsilon with the claim. Reads no private row.

    Exit code: 0 no alarm, 1 an alarm.
    """
    from halfsilver.auditing.loops import LOOPS, audit_loop
    from halfsilver.auditing.task import audit_of_task

    if task == "loops":
        typer.echo("\n".join(LOOPS))
        return
    asked: dict[str, Any] = {"canaries": canaries, "steps": steps, "delta": delta, "confidence": confidence}
    if task in LOOPS:
        with tempfile.TemporaryDirectory() as folder:
            report = audit_loop(task, folder=Path(folder), **asked)
    else:
        report = audit_of_task(task, data=data_folder(data), recipe=recipe, epsilon=epsilon, rows=rows, **asked)
    written = None if figure is None else str(report.figure(figure))
    if as_json:
        typer.echo(json.dumps({**report.to_dict(), "figure": written}))
    else:
        show(report)
    if report.alarms:
        raise typer.Exit(1)


def show(report: AuditReport) -> None:
    console, plan = Console(markup=False), report.observation.plan
    table = Table(title=f"Audit of {report.observation.loop}", show_header=False)
    table.add_row("epsilon claimed for these steps", f"{report.claimed:.4g}")
    table.add_row(f"lower bound, confidence {report.confidence:g}", f"{report.lower_bound:.4g}")
    table.add_row("tightness", f"{report.tightness:.2f}")
    table.add_row("delta", f"{report.delta:g}")
    steps = f"{plan.steps}, {plan.sampling_rate:.4g}, {plan.noise_multiplier:.4g}"
    table.add_row("steps, rate, noise multiplier", steps)
    console.print(table)
    tests = Table("instrument", "test", "value", "limit", "", title=f"{len(report.alarms)} alarms")
    for f in report.findings:
        found = f"{'p = ' if f.kind == 'p' else ''}{f.value:.3g}"
        tests.add_row(f.instrument, f.test, found, f"{f.limit:.3g}", "ALARM" if f.alarm else "")
    console.print(tests)
    console.print("What this does not prove:")
    for line in report.not_proved:
        console.print(f"- {line}", highlight=False, markup=False)
