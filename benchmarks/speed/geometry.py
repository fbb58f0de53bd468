"""What a whitened step costs against a plain private step.

    python -m benchmarks.speed.geometry                     every network of the speed benchmark, one thread
    python -m benchmarks.speed.geometry --models cifar,wikitext --reps 9 --json --out FILE

Plain and whitened steps take turns. Ratios are taken within a repetition, of wall time and of processor time; the
latter hardly changes when other processes keep the machine busy. `numbers` counts the entries of the frozen factors as
a share of the parameters: the memory that they take.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.show import show
from benchmarks.speed.__main__ import circumstances, say
from benchmarks.speed.contenders import Options
from benchmarks.speed.contenders.ours import Ours
from benchmarks.speed.models import HIDDEN, WORKLOADS, Workload, workload
from halfsilver import Whitened
from halfsilver.mirror.geometry import Factor

_SAMPLE_SECONDS = 0.5
MODELS = ("cifar", "emnist", "wikitext", "stackoverflow", "gpt")


def cost(task: Workload, reps: int) -> dict[str, Any]:
    """Medians over `reps` pairs of samples, which change places in every other pair."""
    shaped = Whitened(rows=64).shape(task.model(), task.loss_fn, task.batch).model
    steps_of = {"plain": Ours(task, task.model(), Options()), "whitened": Ours(task, shaped, Options())}
    steps = 1
    for ours in steps_of.values():
        ours.step()
        started = time.process_time()
        ours.step()
        steps = max(steps, round(_SAMPLE_SECONDS / max(time.process_time() - started, 1e-4)))
    wall, processor = [], []
    for rep in range(reps):
        seconds: dict[str, tuple[float, float]] = {}
        for name in sorted(steps_of, reverse=bool(rep % 2)):
            started, busy = time.perf_counter(), time.process_time()
            for _ in range(steps):
                steps_of[name].step()
            seconds[name] = time.perf_counter() - started, time.process_time() - busy
        wall.append(seconds["whitened"][0] / seconds["plain"][0])
        processor.append(seconds["whitened"][1] / seconds["plain"][1])
    parameters = sum(p.numel() for p in shaped.parameters())
    factors = sum(b.numel() for m in shaped.modules() if isinstance(m, Factor) for b in m.buffers())
    return {
        "model": task.name,
        "parameters": parameters,
        "numbers": factors / parameters,
        "wall": statistics.median(wall),
        "processor": statistics.median(processor),
        "least": min(processor),
        "most": max(processor),
        "reps": reps,
        "steps": steps,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--reps", type=int, default=7)
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
    print(json.dumps(result)) if args.json else show("A whitened step", rows, list(rows[0]))


if __name__ == "__main__":
    main()
