"""How much a private step costs: ratio to a plain SGD step on the same batch, layout, dtype and threads.

    python -m benchmarks.speed                      all models, one thread, below 25 minutes
    python -m benchmarks.speed --json --out FILE    the same as JSON
    python -m benchmarks.speed --models cifar,gpt --contenders halfsilver,opacus_hooks
    python -m benchmarks.speed --models emnist,wikitext --batches 8,32,128,512
    python -m benchmarks.speed --full               two threads and peak memory as well

Each contender has a process of its own. They take turns, and a ratio is taken within a repetition. Before any step is
timed, each contender's clipped sum is held against one-example-at-a-time gradients in float64. One whose sum is wrong
is not timed; unless it is a known fault of a rival, the exit status is 1 then. It is 1 as well where ours cannot run.
Rows of "<model>+pda" are steps with half of the batch private and half public, relative to plain SGD on both halves.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import show
from benchmarks.speed.contenders import BASE, CONTENDERS, Options
from benchmarks.speed.full import add_peaks, two_threads
from benchmarks.speed.models import HIDDEN, WORKLOADS, workload
from benchmarks.speed.race import Report, Row, race

LEAST_REPS = 7


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    torch.set_num_threads(1)  # of this process, which only waits for the contenders and forks them
    started = time.monotonic()
    report = Report()
    for race_of_one in _races(args):
        report.add(race_of_one)
        _keep(report, args, started)  # a long run that is stopped leaves what it has
    if args.full:
        report.add(two_threads(args))
        add_peaks(report, args.threads, Options(backend=args.backend), say)
    result = _keep(report, args, started)
    print(json.dumps(result)) if args.json else _print(result)
    return 1 if _failed(report) else 0


def _keep(report: Report, args: argparse.Namespace, started: float) -> Row:
    """The report with its circumstances, written to the file that was asked for."""
    result = {
        "rows": report.rows,
        "skipped": report.skipped,
        "wrong": report.wrong,
        **circumstances(threads=args.threads, reps=args.reps, backend=args.backend),
        "minutes": round((time.monotonic() - started) / 60, 2),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _failed(report: Report) -> bool:
    """Whether a clipped sum is wrong that should be right, or ours did not run at all."""
    missing = any(row["contender"].startswith("halfsilver") for row in report.skipped)
    return missing or any(not row["known"] for row in report.wrong)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_among({**WORKLOADS, **HIDDEN}), default=list(WORKLOADS))
    parser.add_argument("--batches", type=_sizes, default=[], help="rows of the batch (default: those of the paper)")
    parser.add_argument("--contenders", type=_among(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--backend", default="auto", help="of halfsilver, for Performance(backend=...)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reps", type=int, default=LEAST_REPS)
    parser.add_argument("--quick", action="store_true", help="exactly --reps repetitions, which may be fewer than 7")
    parser.add_argument("--pda", action="store_true", help="the second table only")
    parser.add_argument("--full", action="store_true", help="also two threads, and peak memory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the JSON to this file as well")
    args = parser.parse_args(arguments)
    if args.reps < LEAST_REPS and not args.quick:
        parser.error(f"--reps {args.reps}: at least {LEAST_REPS}, or say --quick")
    if args.pda:
        args.contenders = [n for n in args.contenders if CONTENDERS[n].pda or n.startswith("opacus_")]
    return args


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _among(known: Any) -> Any:
    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            raise argparse.ArgumentTypeError(f"{text!r}: expected names out of {', '.join(known)}")
        return found

    return names


def _races(args: argparse.Namespace) -> Iterator[Report]:
    for name in [f"{model}@{rows}" for model in args.models for rows in args.batches] or args.models:
        task = workload(name)
        chosen = [n for n in args.contenders if not (task.linear and CONTENDERS[n].pda)]
        options = Options(backend=args.backend)
        report = race(task, chosen, args.reps, options, say, exactly=args.quick, threads=args.threads)
        for row in (*report.rows, *report.skipped, *report.wrong):
            row["threads"] = args.threads
        yield report


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def circumstances(**options: Any) -> Row:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **options,
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _processor() -> str:
    """The model's name as Linux tells it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "halfsilver", "opacus", "jax", "jax-privacy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _print(result: Row) -> None:
    mirror = [r for r in result["rows"] if r["model"].endswith("+pda")]
    show.show(f"Cost of a step, relative to {BASE}", [r for r in result["rows"] if r not in mirror])
    show.show("Half private, half public: relative to plain SGD on both halves", mirror)
    show.show("Skipped", result["skipped"], ("model", "contender", "reason"))
    show.show("Wrong clipped sums: not timed", result["wrong"], ("model", "contender", "error", "tolerance", "known"))


if __name__ == "__main__":
    sys.exit(main())
