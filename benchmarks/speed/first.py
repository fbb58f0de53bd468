"""How long a command takes until it has answered, in a new process each time.

    python -m benchmarks.speed.first --reps 5 --out FILE

The settings are the six of the paper: noise and steps for ``epsilon``, epsilon and epochs for ``calibrate``. All
commands take turns. The processor time is that of all threads, and does not depend on what else runs.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halfsilver.runs.folder import versions, write_json

# Epsilon, delta, population, batch size and epochs.
PAPER = {
    "EMNIST 0.48": (0.48, 1e-6, 670_015, 500, 50),
    "EMNIST 25.8": (25.8, 1e-6, 670_015, 500, 50),
    "CIFAR-10 0.19": (0.19, 1e-5, 48_000, 500, 100),
    "CIFAR-10 3.51": (3.51, 1e-5, 48_000, 500, 100),
    "WikiText-2 1.71": (1.71, 1e-5, 46_800, 250, 20),
    "WikiText-2 15.7": (15.7, 1e-5, 46_800, 250, 20),
}


def commands() -> dict[str, Sequence[str]]:
    """What is timed, by name."""
    halfsilver = [sys.executable, "-m", "halfsilver"]
    step = ("--noise-multiplier", "1.51", "--sampling-rate", "0.0104", "--steps", "9600", "--delta", "1e-5")
    found: dict[str, Sequence[str]] = {
        "import torch": [sys.executable, "-c", "import torch"],
        "import halfsilver": [sys.executable, "-c", "import halfsilver; halfsilver.Trainer"],
        "--help": [*halfsilver, "--help"],
        "epsilon, CIFAR-10 3.51": [*halfsilver, "epsilon", *step],
    }
    names = ("--epsilon", "--delta", "--population", "--batch-size", "--epochs")
    for name, values in PAPER.items():
        words = [word for pair in zip(names, map(str, values), strict=True) for word in pair]
        found[f"calibrate, {name}"] = [*halfsilver, "calibrate", *words]
    return found


def seconds(command: Sequence[str]) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(timed: dict[str, Sequence[str]], reps: int) -> dict[str, Any]:
    """Medians and ranges of each."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    for _ in range(reps):
        for name, command in timed.items():
            taken[name].append(seconds(command))
    return {
        name: {"clock": _spread([wall for wall, _ in both]), "processor": _spread([own for _, own in both])}
        for name, both in taken.items()
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = measure(commands(), args.reps)
    write_json(args.out, {"reps": args.reps, "versions": versions(), "seconds": found})
    for name, times in found.items():
        print(f"{name:28} {times['clock']['median']:6.2f} s, processor {times['processor']['median']:6.2f} s")


if __name__ == "__main__":
    main()
