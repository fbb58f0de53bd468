"""Does the audit find bugs? Thirty-two of them, each put into the real code from outside, and clean runs beside them.

    python -m benchmarks.robustness.mutants [--json] [--seeds 10] [--clean 200] [--workers 2] [--only NAME ...]

A mutant is killed in a run if an instrument alarms, the changed code was called, and nothing raised an error. Each run
draws its own noise and batches from the system, so ten seeds are ten runs. The table shows, for every instrument, in
how many of them it alarmed, and of the test that alarmed most often the weakest value. Fails unless every mutant is
killed in every run, by each instrument that should, and no clean run sets off an alarm. Under 20 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.robustness.mutants.attempt import Job, Outcome, attempt
from benchmarks.robustness.mutants.catalogue import MUTANTS, Setting
from benchmarks.robustness.mutants.table import clean_row, missed, row_of, shown
from halfsilver.auditing.loops import LOOPS
from halfsilver.study.jobs import workers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each mutant")
    parser.add_argument("--clean", type=int, default=200, help="runs of the library as it is, over all loops")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument(
        "--only", choices=list(MUTANTS), nargs="+", metavar="NAME", help=f"some of: {', '.join(MUTANTS)}"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    names = args.only or list(MUTANTS)
    result = mutants(names, seeds=args.seeds, clean=args.clean, processes=args.workers, quiet=args.json)
    print(json.dumps(result, indent=1) if args.json else shown(result))
    passed = result["killed"] == result["total"] and not result["false_alarms"] and not result["errors"]
    return 0 if passed else 1


def mutants(names: Sequence[str], *, seeds: int, clean: int, processes: int, quiet: bool = False) -> dict[str, Any]:
    started = time.monotonic()
    jobs = [Job(setting=MUTANTS[name].setting, mutant=name) for name in names for _ in range(seeds)]
    jobs += [Job(setting=setting) for setting in _clean_settings(names, clean)]
    outcomes: list[Outcome] = []
    with workers(processes) as pool:
        for outcome in map(attempt, jobs) if pool is None else pool.map(attempt, jobs):
            outcomes.append(outcome)
            if not quiet and len(outcomes) % 10 == 0:
                print(f"{len(outcomes)} of {len(jobs)} runs, {time.monotonic() - started:.0f} s", file=sys.stderr)
    rows = [row_of(name, [o for o in outcomes if o.job.mutant == name]) for name in names]
    silent = [o for o in outcomes if not o.job.mutant]
    loops = dict.fromkeys(o.job.setting.loop for o in silent)
    return {
        "killed": sum(row["killed"] == row["runs"] and not missed(row) for row in rows),
        "total": len(rows),
        "false_alarms": sum(bool(o.alarms) for o in silent),
        "clean_runs": sum(not o.error for o in silent),
        "errors": sum(bool(o.error) for o in outcomes),
        "seconds": round(time.monotonic() - started),
        "table": rows,
        "clean": [clean_row(loop, [o for o in silent if o.job.setting.loop == loop]) for loop in loops],
    }


def _clean_settings(names: Sequence[str], count: int) -> Iterator[Setting]:
    """All loops in turn, and the very runs in which mutants are looked for; of some mutants, their loops alone."""
    looked = [MUTANTS[name].setting for name in names]
    own = {setting.loop for setting in looked}
    chosen = [loop for loop in LOOPS if loop in own or len(names) == len(MUTANTS)]
    loops = [Setting(loop=loop, replay=loop != "attach_mirror") for loop in chosen]  # Opacus's cannot be replayed
    distinct = list(dict.fromkeys([*loops, *looked]))
    yield from (distinct[i % len(distinct)] for i in range(count))


if __name__ == "__main__":
    sys.exit(main())
