"""What keeping freed memory saves: steps of fresh processes with and without it, taking turns.

    python -m benchmarks.speed.freed [--model wikitext] [--contender halfsilver] [--reps 5] [--json]

Worker processes of a study call `system.keep_freed_memory`. CPU seconds of a step, those of the kernel included; the
ratio is taken inside each repetition. Linux with glibc only.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.speed.contenders import CONTENDERS, Options
from benchmarks.speed.models import workload
from benchmarks.speed.race import build
from halfsilver._core import system

_WARM_UP, _STEPS = 2, 6
_SECONDS = 900


def step_seconds(model: str, contender: str, keep: bool) -> float:
    """CPU seconds of a step in this process, whose memory may not have been used before."""
    if keep:
        system.keep_freed_memory()
    made = build(contender, workload(model), Options())
    for _ in range(_WARM_UP):
        made.step()
    started = _cpu_seconds()
    for _ in range(_STEPS):
        made.step()
    return (_cpu_seconds() - started) / _STEPS


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _in_fresh_process(model: str, contender: str, which: str) -> float:
    command = [
        sys.executable,
        "-m",
        "benchmarks.speed.freed",
        "--model",
        model,
        "--contender",
        contender,
        "--one",
        which,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], timeout=_SECONDS
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wikitext")
    parser.add_argument("--contender", default="halfsilver", choices=CONTENDERS)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=["kept", "given back"], help="for the processes that are started")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(step_seconds(args.model, args.contender, args.one == "kept"))
        return
    pairs = [
        {which: _in_fresh_process(args.model, args.contender, which) for which in ("kept", "given back")}
        for _ in range(args.reps)
    ]
    ratios = [pair["kept"] / pair["given back"] for pair in pairs]
    found = {"model": args.model, "contender": args.contender, "reps": args.reps, "cpu_seconds": pairs}
    found |= {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    text = "{model}, {contender}: {ratio:.2f} of the CPU time ({least:.2f} to {most:.2f}, {reps} repetitions)"
    print(json.dumps(found) if args.json else text.format(**found))


if __name__ == "__main__":
    main()
