"""The command line: privacy figures without writing code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from halfsilver.__main__ import main
from halfsilver.errors import ConfigError, MissingExtra, require

if TYPE_CHECKING:
    from halfsilver.privacy.plan import PrivacyPlan

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from typer.core import TyperCommand
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingExtra("typer", "cli") from error

from halfsilver.cli import audit as cli_audit
from halfsilver.cli import doctor as cli_doctor
from halfsilver.cli import ledger as cli_ledger
from halfsilver.cli import overlap as cli_overlap
from halfsilver.cli import studies as cli_studies

__all__ = ["app", "main"]

_NAMED = 5  # run folders in a message

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


class _Command(TyperCommand):
    """A command whose help has plain brackets. Typer escapes them for rich, which is not used for help here."""

    def get_help(self, ctx: Any) -> str:
        return str(super().get_help(ctx)).replace(r"\[", "[")


SamplingRate = Annotated[
    float, typer.Option(help="Probability that an example is in a step's batch, in (0, 1]. 1 uses every example.")
]
Steps = Annotated[int, typer.Option(help="Number of private steps, at least 1.")]
Delta = Annotated[float, typer.Option(help="Delta of the guarantee, well below 1 / number of records.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(version("halfsilver"))
        raise typer.Exit


@app.callback()
def _app(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Train models with differential privacy and public data, and check the result.

    Exit codes: 0 success, 1 a failed check or an alarm, 2 wrong usage, 3 overlap detected.
    """


@app.command(cls=_Command)
def epsilon(
    noise_multiplier: Annotated[float, typer.Option(help="Standard deviation of the noise divided by the clip norm.")],
    sampling_rate: SamplingRate,
    steps: Steps,
    delta: Delta,
    as_json: Json = False,
) -> None:
    """Compute the epsilon of a run, by PLD (tight, the one to report) and by RDP (as in older papers)."""
    from halfsilver.privacy.plan import PrivacyPlan

    plan = PrivacyPlan(
        steps=steps, sampling_rate=sampling_rate, expected_batch_size=1.0, noise_multiplier=noise_multiplier
    )
    figures = {"pld": plan.epsilon(delta), "rdp": plan.epsilon(delta, "rdp")}
    out = {"epsilon": figures, "delta": delta, **_asked(plan)}
    _show(
        out,
        as_json,
        "Epsilon",
        {"epsilon (PLD)": figures["pld"], "epsilon (RDP)": figures["rdp"], "delta": delta},
    )


@app.command(cls=_Command)
def calibrate(
    epsilon: Annotated[float, typer.Option(help="Largest epsilon that the run may spend.")],
    delta: Delta,
    population: Annotated[float | None, typer.Option(help="Number of private records, as you declare it.")] = None,
    batch_size: Annotated[float | None, typer.Option(help="Expected records per step, at most the population.")] = None,
    epochs: Annotated[
        float | None, typer.Option(help="How often a record is drawn on average. Or give --steps.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of private steps. Or give --epochs.")] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(help="Batch size / population, in (0, 1]. Replaces these two.")
    ] = None,
    spare_steps: Annotated[
        int, typer.Option(help="Further steps to reserve for repeats after a crash. In Python: one per 50 steps.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compute the smallest noise that keeps a run within epsilon."""
    from halfsilver.privacy.plan import PrivacyPlan

    if sampling_rate is None:
        plan = PrivacyPlan.calibrate(
            epsilon=epsilon,
            delta=delta,
            population=population,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            spare_steps=spare_steps,
        )
    else:
        if population is not None or batch_size is not None or epochs is not None or steps is None:
            raise ConfigError(
                "Expected --sampling-rate with --steps, and without --population, --batch-size, --epochs."
            )
        start = PrivacyPlan(
            steps=steps,
            sampling_rate=sampling_rate,
            expected_batch_size=1.0,
            noise_multiplier=1.0,
            spare_steps=spare_steps,
            delta=delta,
        )
        plan = start.with_least_noise(epsilon)
    reached = plan.epsilon()
    out = {"epsilon": {"pld": reached, "rdp": plan.epsilon(accountant="rdp")}, "delta": delta, **_asked(plan)}
    rows = {
        "noise multiplier": plan.noise_multiplier,
        "epsilon (PLD)": reached,
        "delta": delta,
        "steps": plan.steps,
        "sampling rate": plan.sampling_rate,
    }
    _show(out, as_json, "Calibrated plan", rows)


@app.command(cls=_Command)
def verify(
    run: Annotated[Path, typer.Argument(help="Run folder to check.")],
    ledger: Annotated[Path | None, typer.Option(help="Ledger of the data set, if it has moved.")] = None,
    head_file: Annotated[Path | None, typer.Option(help="Copy of the ledger's head that is kept elsewhere.")] = None,
    as_json: Json = False,
) -> None:
    """Recompute the epsilon of a run from its ledger, and check that ledger, checkpoint and statement agree."""
    from halfsilver.runs.verify import BEHIND
    from halfsilver.runs.verify import verify as check

    _require_run(run)
    report = check(run, ledger, head_file)
    statement = report["statement"]
    by = "pld" if "pld" in statement["epsilon_planned"] else "rdp"  # of a selection only RDP is known
    rows = {
        "run": report["run_id"],
        "steps counted": report["spent_now"]["steps"],
        "finished": report["finished"],
        f"epsilon, planned ({by.upper()})": statement["epsilon_planned"][by],
        "delta": statement["delta"],
        "all runs, in the statement": _total(statement["all_runs_on_this_data"]),
        "all runs, in the ledger now": _total(report["all_runs_now"]),
        "all runs, budget": _budget(report["all_runs_now"]["budget"]),
        "unit": statement["unit"],
        "not private because": "; ".join(statement["not_private_because"]) or "-",
        "remarks": "; ".join([*statement.get("remarks", ()), *report["notices"]]) or "-",
    }
    agree = "Verified: ledger, checkpoint and statement agree"
    _show(report, as_json, agree if report["ok"] else f"Not verified: {BEHIND}", rows)
    if not report["ok"]:
        raise typer.Exit(1)


@app.command(cls=_Command)
def statement(
    run: Annotated[Path, typer.Argument(help="Run folder whose guarantee is stated.")],
    html: Annotated[bool, typer.Option("--html", help="Write a page, statement.html in the run folder.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the page to this file instead.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="Ledger of the data set, if it has moved.")] = None,
    head_file: Annotated[Path | None, typer.Option(help="Copy of the ledger's head that is kept elsewhere.")] = None,
    as_json: Json = False,
) -> None:
    """Check a run, and say in plain words what it guarantees, what was spent, and what is not covered."""
    from halfsilver.report.statement_page import PlainStatement, write_statement

    _require_run(run)
    if html or out is not None:
        file = write_statement(run, out, ledger=ledger, head_file=head_file)
        typer.echo(json.dumps({"page": str(file)}) if as_json else str(file))
        return
    found = PlainStatement.of(run, ledger, head_file)
    typer.echo(json.dumps(found.checked) if as_json else str(found))


for command in (
    cli_studies.advise,
    cli_studies.compare,
    cli_studies.run,
    cli_studies.report,
    cli_ledger.ledger,
    cli_overlap.overlap,
    cli_audit.audit,
    cli_doctor.doctor,
):
    app.command(cls=_Command)(command)


def _require_run(path: Path) -> None:
    """Refuse what is no run folder, and name those below it: of a study, say."""
    below = [str(config.parent) for config in sorted(path.glob("*/**/config.json"))] if path.is_dir() else []
    names = ", ".join(below[:_NAMED]) + (f" and {len(below) - _NAMED} more" if len(below) > _NAMED else "")
    hint = f"Below it there are the run folders {names}." if below else ""
    require((path / "config.json").is_file(), "run", str(path), "to be a run folder, which has a config.json", hint)


def _asked(plan: PrivacyPlan) -> dict[str, Any]:
    names = ("noise_multiplier", "sampling_rate", "steps", "spare_steps")
    return {name: getattr(plan, name) for name in names}


def _total(total: Mapping[str, Any]) -> str:
    epsilon = math.inf if total["epsilon"] is None else total["epsilon"]
    elsewhere = f", elsewhere {len(total['external'])}" if "external" in total else ""
    return f"epsilon {epsilon:.6g}, delta {total['delta']:.6g}, runs {total['runs']}{elsewhere}"


def _budget(budget: Mapping[str, float] | None) -> str:
    return f"epsilon {budget['epsilon']:.6g}, delta {budget['delta']:.6g}" if budget else "none"


def _show(out: Mapping[str, Any], as_json: bool, title: str, rows: Mapping[str, Any]) -> None:
    if as_json:
        typer.echo(json.dumps(out))
        return
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console(markup=False).print(table)  # a path may have brackets
