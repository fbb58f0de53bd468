"""What a task's network learns without privacy: the ceiling beside its private methods.

    python -m benchmarks.studies.ceilings wikitext2 --recipe both --epochs 3 --out DIR

The network starts where `warm` does. AdamW then trains it on all rows, private and public, at the learning rate of the
recipe's pretraining, with early stopping on a twentieth of the rows. One setting is tried, so it may lie higher.
Writes DIR/TASK-RECIPE-seedN.json. A killed run resumes after the last epoch.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

from halfsilver._core.tensors import Batch, trainable
from halfsilver.mirror import pretrain
from halfsilver.privacy.users import PrivateUsers
from halfsilver.runs.folder import versions, write_json
from halfsilver.study.problem import Problem, Recipe
from halfsilver.study.run import per_example
from halfsilver.study.start import load_start, make_start, new_model
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

HOLDOUT = 0.05


def all_rows(problem: Problem, recipe: Recipe) -> Batch:
    """Private and public rows in one batch. Nothing here is private: the model that learns them is never released."""
    private, public = problem.private, problem.public
    if isinstance(private, PrivateUsers) and recipe.local is not None:
        store = private._open()
        batches = [store.rows(user, recipe.local.max_examples) for user in range(store.size())]
        private = tuple(torch.cat(columns) for columns in zip(*batches, strict=True))
    return tuple(torch.cat(columns) for columns in zip(private, public, strict=True))


def ceiling(task: str, recipe_name: str, *, seed: int, epochs: int, data: Path, out: Path) -> dict[str, Any]:
    """Train without privacy, and return the figures on the test rows."""
    recipe, more = load(task, recipe_name)
    problem = TaskSource.of(task, data, more.get("task", {}))()
    stem = f"{task}-{recipe_name}-seed{seed}"
    make_start(problem, recipe, seed, out / f"{stem}-start.safetensors")
    model = new_model(problem, seed)
    load_start(model, out / f"{stem}-start.safetensors")
    rows, begun = all_rows(problem, recipe), time.monotonic()
    result = pretrain(
        model,
        problem.loss_fn,
        rows,
        optimizer=torch.optim.AdamW(trainable(model), lr=recipe.pretrain.lr),
        epochs=epochs,
        patience=2,
        holdout=HOLDOUT,
        batch_size=recipe.pretrain.batch_size,
        seed=seed,
        transform=problem.augment if recipe.pretrain.augment else None,
        lr_end=0.05,
        checkpoint=out / f"{stem}.checkpoint",
        after_epoch=lambda epoch, train, held_out: print(
            f"{stem} epoch {epoch}: {train:.4f} {held_out:.4f}", flush=True
        ),
    )
    metrics = {"loss": problem.loss_fn, **problem.metrics}
    return {
        "task": task,
        "recipe": recipe_name,
        "seed": seed,
        "rows": len(rows[0]),
        "epochs": epochs,
        "best_epoch": result.best_epoch,
        "lr": recipe.pretrain.lr,
        "final": {name: float(per_example(model, fn, problem.test).double().mean()) for name, fn in metrics.items()},
        "seconds": round(time.monotonic() - begun),
        "versions": versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--recipe", default="workstation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = ceiling(args.task, args.recipe, seed=args.seed, epochs=args.epochs, data=args.data, out=args.out)
    write_json(args.out / f"{args.task}-{args.recipe}-seed{args.seed}.json", found)
    print(found["final"])


if __name__ == "__main__":
    main()
