"""What `--full` adds: the same race with two threads, and peak memory."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.speed import memory
from benchmarks.speed.contenders import BASE, Options
from benchmarks.speed.race import Report, Row, Say

_THREADS = 2


def two_threads(args: argparse.Namespace) -> Report:
    """In a process of its own: some libraries fix the number of their threads when they are loaded."""
    command = [sys.executable, "-m", "benchmarks.speed", "--json", "--threads", str(_THREADS)]
    command += ["--models", ",".join(args.models), "--contenders", ",".join(args.contenders)]
    command += ["--batches", ",".join(map(str, args.batches))] if args.batches else []
    command += ["--backend", args.backend, "--reps", str(args.reps), *(["--quick"] if args.quick else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": str(_THREADS)}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment)
    if not done.stdout:
        raise RuntimeError(f"the run with {_THREADS} threads ended with status {done.returncode} and no result")
    found = json.loads(done.stdout)
    return Report(found["rows"], found["skipped"], found["wrong"])


def add_peaks(report: Report, threads: int, options: Options, say: Say) -> None:
    """Put "peak_mb", and "peak_ratio" to the base, into the rows with `threads` threads."""
    rows = [r for r in report.rows if r["threads"] == threads and r["contender"] != "opacus_best"]
    for row in rows:
        model, contender = _origin(row)
        say(f"{model}: memory of {contender}")
        row.update(memory.in_fresh_process(model, contender, options, threads))
    base = {r["model"]: r["peak_mb"] for r in rows if r["contender"] == BASE and "peak_mb" in r}
    for row in rows:
        model = _origin(row)[0]
        if "peak_mb" in row and base.get(model, 0) > 0:
            row["peak_ratio"] = round(row["peak_mb"] / base[model], 3)


def _origin(row: Row) -> tuple[str, str]:
    """Workload and contender that a row came from."""
    model, mirror = row["model"].removesuffix("+pda"), row["model"].endswith("+pda")
    return model, f"{row['contender']}_pda" if mirror else row["contender"]
