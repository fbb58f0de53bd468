"""What it costs a private step to leave the model as it was.

    python -m benchmarks.speed.boundary                     every model of the speed benchmark, one thread
    python -m benchmarks.speed.boundary --models cifar,wikitext --reps 15 --json --out FILE

Steps with the check and steps without it take turns on one object, so both have the same model, data and kernels. The
ratio is taken within a repetition; the share is the time spent in the check itself, as a part of the same steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.show import show
from benchmarks.speed.__main__ import circumstances, say
from benchmarks.speed.contenders import Options
from benchmarks.speed.contenders.ours import Ours
from benchmarks.speed.models import HIDDEN, WORKLOADS, Workload, workload

_SAMPLE_SECONDS = 0.5


class Off:
    """In the place of a `ModelState`: looks at nothing."""

    def record(self) -> None:
        pass

    def put_back(self, *, values: bool) -> list[str]:
        return []


class Timed:
    """A `ModelState` with a stopwatch."""

    def __init__(self, real: Any) -> None:
        self._real, self.seconds = real, 0.0

    def record(self) -> None:
        self._clocked(self._real.record)

    def put_back(self, *, values: bool) -> list[str]:
        found: list[str] = self._clocked(lambda: self._real.put_back(values=values))
        return found

    def _clocked(self, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        found = call()
        self.seconds += time.perf_counter() - started
        return found


def cost(task: Workload, reps: int) -> dict[str, Any]:
    """Medians over `reps` pairs of samples, which change places in every other pair."""
    ours = Ours(task, task.model(), Options())
    states: dict[str, Any] = {"with": Timed(ours._source._passes._state), "without": Off()}
    ours.step()
    started = time.perf_counter()
    ours.step()
    steps = max(1, round(_SAMPLE_SECONDS / (time.perf_counter() - started)))
    ratios, shares = [], []
    for rep in range(reps):
        seconds: dict[str, float] = {}
        states["with"].seconds = 0.0
        for name in sorted(states, reverse=bool(rep % 2)):
            ours._source._passes._state = states[name]
            started = time.perf_counter()
            for _ in range(steps):
                ours.step()
            seconds[name] = time.perf_counter() - started
        ratios.append(seconds["with"] / seconds["without"])
        shares.append(states["with"].seconds / seconds["with"])
    return {
        "model": task.name,
        "parameters": sum(p.numel() for p in ours._model.parameters()),
        "rows": task.rows,
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "share": statistics.median(shares),
        "reps": reps,
        "steps": steps,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--reps", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    unknown = set(args.models) - {*WORKLOADS, *HIDDEN}
    if unknown:
        parser.error(f"--models: unknown {sorted(unknown)}; expected names out of {sorted({*WORKLOADS, *HIDDEN})}")
    torch.set_num_threads(args.threads)
    rows = []
    for name in args.models:
        say(f"{name} ...")
        rows.append(cost(workload(name), args.reps))
    result = {"rows": rows, **circumstances(threads=args.threads, reps=args.reps)}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result)) if args.json else show("Leaving the model as it was", rows, list(rows[0]))


if __name__ == "__main__":
    main()
