"""halfsilver doctor: tests of this installation and of the folder for ledgers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from halfsilver.cli.studies import Json


def doctor(
    folder: Annotated[Path, typer.Argument(help="The folder for run folders and ledgers.")] = Path("."),
    as_json: Json = False,
) -> None:
    """Check the installed packages, the gradient backends, the noise, and whether a folder is safe for a ledger.

    Exit code: 0 all checks passed, 1 a check failed.
    """
    from halfsilver.cli.self_test import examine

    checks = examine(folder)
    healthy = all(check.ok for check in checks)
    if as_json:
        typer.echo(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}))
    else:
        table = Table("check", "", "result", title="All checks passed" if healthy else "A CHECK FAILED")
        for check in checks:
            table.add_row(check.name, "ok" if check.ok else "FAILED", check.found)
        Console(markup=False).print(table)
    if not healthy:
        raise typer.Exit(1)
