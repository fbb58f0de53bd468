"""Several views of a record on CIFAR-10: a run with k views against one without, from the same start.

    python -m benchmarks.studies.multiplicity --method warm --views 4 --seed 0 --out DIR

Same epsilon, steps, clip norm and learning rate; a view moves the image by up to four pixels and mirrors it at random.
With one view, records are taken as they are. `cold` starts from random weights and needs no public rows; `warm` starts
from a network that was trained on public rows, for a third of the epochs of the recipe. Starts, runs and a ledger are
kept in DIR, and a command that was killed resumes where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import halfsilver as hs
from benchmarks.studies.finish import scores, train
from halfsilver._core.tensors import Batch
from halfsilver.runs.folder import versions, write_json
from halfsilver.study.arena import make_plan
from halfsilver.study.method import registered
from halfsilver.study.problem import Setting
from halfsilver.study.run import Job
from halfsilver.study.start import load_start, make_start, new_model
from halfsilver.tasks.images import mirrored, moved
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

LEARNING_RATES = {"cold": 2.0, "warm": 0.12}  # of the recipe's grids
PRETRAIN_EPOCHS = 50
SHIFT = 4  # pixels


def view(batch: Batch) -> Batch:
    return moved(batch[0], SHIFT, mirrored, flip=True), batch[1]


def multiplicity(method: str, views: int, epsilon: float, seed: int, out: Path, data: Path) -> dict[str, Any]:
    """Train, or load what was trained, and score."""
    recipe, more = load("cifar10", "fifth")
    recipe = replace(recipe, pretrain=replace(recipe.pretrain, epochs=PRETRAIN_EPOCHS))
    problem = TaskSource.of("cifar10", data, {"validation": 0})()
    name = f"{method}-views{views}-eps{epsilon:g}-seed{seed}"
    job = Job(
        method=registered(method),
        seed=seed,
        setting=Setting(LEARNING_RATES[method]),
        folder=out / name,
        start=out / "start" / f"seed-{seed}.safetensors",
        ledger=out / "ledger.jsonl",
        delta=float(more["delta"]),
    )
    model = new_model(problem, seed)
    if method == "warm":
        make_start(problem, recipe, seed, job.start)
        load_start(model, job.start)
    elif recipe.cold_max_grad_norm is not None:
        recipe = replace(recipe, max_grad_norm=recipe.cold_max_grad_norm)
    plan = make_plan(recipe, problem.population, epsilon, job.delta)
    viewed = replace(problem, loss_fn=hs.views(problem.loss_fn, view, views)) if views > 1 else problem
    before = scores(model, problem)
    started = time.process_time()
    train(model, viewed, recipe, job, plan)
    return {
        "method": method,
        "views": views,
        "epsilon": epsilon,
        "delta": job.delta,
        "seed": seed,
        "setting": job.setting.to_json(),
        "plan": plan.to_dict(),
        "pretrain epochs": PRETRAIN_EPOCHS if method == "warm" else 0,
        "processor seconds of the last process": time.process_time() - started,
        "versions": versions(),
        "start": before,
        "results": scores(model, problem),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=tuple(LEARNING_RATES), required=True)
    parser.add_argument("--views", type=int, default=1)
    parser.add_argument("--epsilon", type=float, default=3.51)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = multiplicity(args.method, args.views, args.epsilon, args.seed, args.out, args.data)
    write_json(args.out / f"{args.method}-views{args.views}-eps{args.epsilon:g}-seed{args.seed}.json", record)
    print(json.dumps(record["results"]))


if __name__ == "__main__":
    main()
