"""halfsilver overlap: for the custodian, who may read both data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from halfsilver.cli.names import MIN_WORDS

FOUND = 3
_ROWS = {"compared": "records compared", "left_aside": "skipped (short or empty)", "exact": "with an exact copy"}
_ROWS |= {"near": "with a near copy", "share": "share with a copy"}


def overlap(
    private: Annotated[
        Path,
        typer.Argument(help="Private file or folder: text with one record per line, .csv, .tsv, or CIFAR-10 .bin."),
    ],
    public: Annotated[Path, typer.Argument(help="Public file or folder of the same kind.")],
    similarity: Annotated[
        float | None,
        typer.Option(
            help="Smallest similarity of a near copy (default: 0.5 of word triples, 0.9 of cells, correlation 0.95)."
        ),
    ] = None,
    min_words: Annotated[int, typer.Option(help="Skip lines with fewer words.")] = MIN_WORDS,
    out: Annotated[Path | None, typer.Option(help="JSON file for all matches. It must not be in a run folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find private records with exact or near copies in public data. The output is outside the guarantee.

    Exit code: 0 no copies, 3 copies detected, 2 nothing to compare or wrong usage.
    """
    from halfsilver.overlap.files import outside_run_folders, overlap_of_files

    if out is not None:
        outside_run_folders(out)
    found = overlap_of_files(private, public, similarity=similarity, min_words=min_words)
    if out is not None:
        out.write_text(json.dumps(found.report()) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found.figures()))
    else:
        _show(found.figures())
    if found.private.matches:
        raise typer.Exit(FOUND)


def _show(figures: dict[str, Any]) -> None:
    table = Table("", "private", "public", title=f"Overlap of {figures['kind']}: NOT PRIVATE")
    for key, name in _ROWS.items():
        values = [figures[side][key] for side in ("private", "public")]
        table.add_row(name, *(f"{v:.2%}" if isinstance(v, float) else f"{v:,}" for v in values))
    console = Console(markup=False)
    console.print(table)
    if "columns" in figures:
        console.print(f"Compared columns: {', '.join(figures['columns'])}.", highlight=False, markup=False)
    console.print(figures["note"], highlight=False, markup=False)
