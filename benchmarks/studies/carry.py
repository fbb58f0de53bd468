"""Carry a study to another machine in one file: its summary, as far as it has come.

    python -m benchmarks.studies.carry keep STUDY benchmarks/results/studies/wikitext2-eps1.71.json
    python -m benchmarks.studies.carry restore benchmarks/results/studies/wikitext2-eps1.71.json STUDY

A restored folder holds the finished runs and the choices; the same `halfsilver compare` then does what is missing.
Starts are trained anew from their seeds. The ledger stays behind: what it had spent is kept as a total, to which that
of the new one is added (basic composition: epsilons and deltas add up).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfsilver.errors import require
from halfsilver.runs.folder import read_json, write_json
from halfsilver.study.summary import summary_of

_MADE_BY_A_SUMMARY = ("steps", "choices", "runs", "ledger", "verdict", "stamps")
_BEFORE = "spent_before"


def keep(study: Path, file: Path) -> None:
    """The summary of `study`, finished or not, with all that was spent on any machine."""
    summary = summary_of(study).to_json()
    before = summary.pop(_BEFORE, None)
    write_json(file, {**summary, "ledger": _together(before, summary["ledger"]) if before else summary["ledger"]})


def _together(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    added = {name: before[name] + now[name] for name in ("runs", "epsilon", "delta")}
    return {**added, "accountant": "pld on each machine, added up"}


def restore(file: Path, study: Path) -> None:
    """A folder for `halfsilver compare --out` to go on with."""
    require(not study.exists(), "study", study, "a folder that is not there yet")
    found = read_json(file)
    for run in found["runs"]:
        _write(study / "runs" / f"{run['method']}-seed-{run['seed']}" / "result.json", run)
    for method, choice in found["choices"].items():
        _write(study / "search" / method / "choice.json", choice)
    about = {name: value for name, value in found.items() if name not in _MADE_BY_A_SUMMARY}
    _write(study / "study.json", {**about, _BEFORE: found["ledger"]})


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["keep", "restore"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    {"keep": keep, "restore": restore}[args.what](args.source, args.target)


if __name__ == "__main__":
    main()
