"""halfsilver doctor: is this installation fit to be trusted?"""

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
    folder: Annotated[Path, typer.Argument(help="Where run folders and ledgers will lie.")] = Path("."),
    as_json: Json = False,
) -> None:
    """What is installed, which gradient backends work, is the noise healthy, is the folder safe for a ledger."""
    from halfsilver.cli.self_test import examine

    checks = examine(folder)
    healthy = all(check.ok for check in checks)
    if as_json:
        typer.echo(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}))
    else:
        table = Table("check", "", "found", title="Healthy" if healthy else "NOT HEALTHY")
        for check in checks:
            table.add_row(check.name, "ok" if check.ok else "FAILED", check.found)
        Console(markup=False).print(table)
    if not healthy:
        raise typer.Exit(1)
