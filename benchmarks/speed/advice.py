"""How long advice takes for the networks of the benchmark tasks.

    python -m benchmarks.speed.advice --tasks cifar10,emnist --out FILE

Each network is new, because its weights do not change the time. A fifth of the public rows is held out. The recipe's
epochs and the task's population are used, with epsilon 3.51. The processor time is that of all threads.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import halfsilver as hs
from halfsilver.mirror.pretrain import held_out_rows
from halfsilver.mirror.rows import PublicRows
from halfsilver.runs.folder import versions, write_json
from halfsilver.study.arena import rows_at
from halfsilver.study.start import new_model
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

EPSILON, HELD_OUT = 3.51, 0.2


def advice_time(task: str, data: Path) -> dict[str, Any]:
    """Advice for one network, with its time."""
    recipe, more = load(task, "workstation")
    problem = TaskSource.of(task, data, {**more.get("task", {}), "validation": 0})()
    train, held_out = held_out_rows(len(PublicRows(problem.public)), HELD_OUT, 0)
    clock, processor = time.perf_counter(), time.process_time()
    advice = hs.advise(
        new_model(problem, 0),
        problem.loss_fn,
        rows_at(problem.public, train),
        rows_at(problem.public, held_out),
        population=problem.population,
        epsilon=EPSILON,
        delta=float(more["delta"]),
        epochs=recipe.steps(problem.population) * recipe.batch_size / problem.population,
        metrics=problem.metrics,
    )
    return {
        "task": task,
        "seconds": time.perf_counter() - clock,
        "processor seconds": time.process_time() - processor,
        "threads": torch.get_num_threads(),
        "rehearsals": len(advice.tried),
        "held-out rows": len(held_out),
        "plan": advice.plan.to_dict(),
        "tried": [{**asdict(one), "geometry": repr(one.geometry)} for one in advice.tried],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="cifar10,emnist")
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for task in args.tasks.split(","):
        rows.append(advice_time(task, args.data))
        print({name: rows[-1][name] for name in ("task", "seconds", "processor seconds", "rehearsals")}, flush=True)
        write_json(args.out, {"epsilon": EPSILON, "versions": versions(), "rows": rows})


if __name__ == "__main__":
    main()
