"""Every reader of halfsilver on damaged files, each for so many seconds: what comes out is data or a typed error.

    python -m benchmarks.robustness.fuzz --seconds 120 --json
    python -m benchmarks.robustness.fuzz --only ledger checkpoint --seconds 600 --seed 7

A case is a valid file with a few edits: bits, lengths, pieces of it, values of another kind, numbers without end, deep
nesting; in a ledger also with all hashes made right again. Ends with 1 if any error was not a `HalfsilverError`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.robustness.fuzz import datasets, records
from benchmarks.robustness.fuzz.run import Target, fuzz
from benchmarks.show import show

TARGETS: Mapping[str, Callable[[], Target]] = {
    make.__name__: make
    for make in (
        *(datasets.cifar10, datasets.emnist, datasets.wikitext, datasets.stackexchange),
        *(datasets.jsonl, datasets.sqlite, datasets.tf_example),
        *(records.ledger, records.checkpoint, records.verify, records.resume, records.report),
        *(records.plan, records.recipe, records.enrolment),
    )
}


def run(name: str, seconds: float, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target, started = TARGETS[name](), time.monotonic()
        tally = fuzz(target, Path(folder), lambda _: time.monotonic() - started > seconds, seed)
        return {"target": name, **tally.row(), "errors": dict(tally.errors.most_common(20))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [run(name, asked.seconds, asked.seed) for name in asked.only]
    totals = {name: sum(row[name] for row in rows) for name in ("cases", "untyped")}
    if asked.json:
        print(json.dumps({**totals, "targets": rows}, indent=1))
    else:
        show(f"{totals['cases']:,} damaged files", rows, [c for c in rows[0] if c != "errors"])
        for row in rows:
            print(*(f"{row['target']}: {count} x {error}\n" for error, count in row["errors"].items()), sep="", end="")
    return 1 if totals["untyped"] else 0


if __name__ == "__main__":
    sys.exit(main())
