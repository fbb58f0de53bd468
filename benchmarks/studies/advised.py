r"""The adviser against a recipe made by hand: the same start, rows, epsilon and number of epochs.

    python -m benchmarks.studies.advised emnist --epsilon 0.48 --seed 0 --out DIR
    python -m benchmarks.studies.advised stackexchange --epsilon 8 --hand 6 --out DIR
    python -m benchmarks.studies.advised cifar10 --recipe fifth --epsilon 3.51 --holdout 0.2 --pretrain-epochs 50 \
        --hand 0.12 --out DIR

Advice comes from the public rows that pretraining held out. Then one run is trained as advised, finished with a
temperature from the same held-out rows, and scored on the test rows before and after. Beside it stands the run of
`warm` with the same seed from the committed study of that task and epsilon. Its settings were made by hand, and its
learning rate was searched by private runs, for which that epsilon does not pay. With `--hand`, such a run is trained
here, with the settings of the recipe and this learning rate. Starts, runs and a ledger are kept in DIR, and a command
that was killed resumes where it was.

`--advice FILE` takes the advice of another seed, as a study does for all its seeds. `--all-users` trains from a start
that has seen the held-out users too, as the recipe by hand does. They are held out for the advice alone, and no user is
left for a temperature.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import halfsilver as hs
from benchmarks.studies.finish import scores, train
from halfsilver.errors import require
from halfsilver.mirror.rows import PublicRows
from halfsilver.mirror.users import pooled
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.advice import Advice
from halfsilver.study.arena import make_plan
from halfsilver.study.auto import advise_problem, parts, starting
from halfsilver.study.method import registered
from halfsilver.study.problem import Problem, Recipe, Setting
from halfsilver.study.run import Job, without_held_out
from halfsilver.study.sides import private_side
from halfsilver.study.start import load_start, make_start, new_model, precision
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

STUDIES = Path(__file__).parents[1] / "results" / "studies"


def advised(
    task: str,
    recipe: Recipe,
    more: dict[str, Any],
    epsilon: float,
    seed: int,
    out: Path,
    data: Path,
    hand: float | None,
    given: Path | None = None,
    all_users: bool = False,
) -> dict[str, Any]:
    """Advice, the advised run, and its figures."""
    set_aside = {} if recipe.local else {"validation": 0}  # users are set aside by a hash of their names
    problem = TaskSource.of(task, data, {**more.get("task", {}), **set_aside})()
    delta = float(more["delta"])
    start = out / "start" / f"seed-{seed}.safetensors"
    make_start(starting(problem), recipe, seed, start)  # before the clock starts
    folder = out / f"{task}-eps{epsilon:g}-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    kept = given or folder / "advice.json"
    if not kept.exists():
        advice = advise_problem(
            problem,
            recipe,
            epsilon=epsilon,
            delta=delta,
            start=start,
            seed=seed,
            tell=lambda text: print(text, flush=True),
        )
        write_json(kept, {**advice.to_json(), "seconds": time.monotonic() - started})
    advice, seconds = Advice.from_json(read_json(kept)), read_json(kept)["seconds"]
    print(advice, flush=True)
    known, unknown = parts(problem, recipe, seed)
    by_user = problem.public_users is not None
    public, held_out = (pooled(known), pooled(unknown)) if by_user else (known, unknown)
    if all_users:
        require(by_user, "--all-users", task, "a task whose records are users")
        start, public = out / "start" / f"all-seed-{seed}.safetensors", problem.public
        make_start(problem, recipe, seed, start)
    first, model = (new_model(problem, seed) for _ in range(2))
    for one in (first, model):
        load_start(one, start)
    trainer = advice.trainer(model, problem.loss_fn, metrics=problem.metrics, performance=precision(recipe))
    private = private_side(problem, recipe)
    trainer.fit(private, public, run_dir=folder / "run", ledger=out / "ledger.jsonl", delta=delta)
    results: dict[str, Any] = {"start": scores(first, problem), "advised": scores(model, problem)}
    ended, name = model, "advised"
    if not all_users:
        done = hs.Finish().fit(model, problem.loss_fn, held_out)
        ended, name = done.model, "advised and finished"
        results[name] = {**scores(ended, problem), "temperature": done.temperature}
    if by_user:  # as the forecast has it; the others are means over words
        results[f"{name}, by sentence"] = scores(ended, replace(problem, test=problem.test[:2]))
    if hand is not None:
        results |= _trained_by_hand(problem, recipe, epsilon, delta, seed, folder, start, out, hand)
    return {
        "task": task,
        "recipe": recipe.name,
        "pretrain": asdict(recipe.pretrain),
        "epsilon": epsilon,
        "delta": delta,
        "seed": seed,
        "held_out": 0 if all_users else len(PublicRows(held_out)),
        "versions": versions(),
        "advice": {**advice.to_json(), "seconds": seconds, "norms": len(advice.norms)},
        "by hand": _by_hand(task, epsilon, seed),
        "results": results,
    }


def _trained_by_hand(
    problem: Problem,
    recipe: Recipe,
    epsilon: float,
    delta: float,
    seed: int,
    folder: Path,
    start: Path,
    out: Path,
    lr: float,
) -> dict[str, Any]:
    job = Job(
        method=replace(registered("warm"), finish=hs.Finish()),  # so that the held-out rows are left for it
        seed=seed,
        setting=Setting(lr),
        folder=folder / "by-hand",
        start=start,
        ledger=out / "ledger.jsonl",
        delta=delta,
    )
    if problem.public_users is None:
        rest, held_out = without_held_out(problem, recipe, job)
    else:
        rest, held_out = starting(problem), pooled(parts(problem, recipe, seed)[1])
    plan = make_plan(recipe, problem.population, epsilon, delta)
    model = new_model(problem, seed)
    load_start(model, start)
    train(model, rest, recipe, job, plan)
    done = hs.Finish().fit(model, problem.loss_fn, held_out)
    return {
        "by hand": {**scores(model, problem), "learning rate": lr},
        "by hand and finished": {**scores(done.model, problem), "temperature": done.temperature},
    }


def _by_hand(task: str, epsilon: float, seed: int) -> dict[str, Any] | None:
    """The run of `warm` with this seed in the study of the task, where there is one."""
    path = STUDIES / f"{task}-eps{epsilon:g}.json"
    if not path.exists():
        return None
    runs = read_json(path)["runs"]
    return next((run["final"] for run in runs if (run["method"], run["seed"]) == ("warm", seed)), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--recipe", default="workstation")
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--holdout", type=float, help="share of public rows to hold out, if not that of the recipe")
    parser.add_argument("--pretrain-epochs", type=int, help="length of pretraining, if not that of the recipe")
    parser.add_argument("--hand", type=float, help="also train by hand, with this learning rate")
    parser.add_argument("--advice", type=Path, help="advice.json of another seed")
    parser.add_argument("--all-users", action="store_true", help="start from all public users, after the advice")
    args = parser.parse_args()
    recipe, more = load(args.task, args.recipe)
    given = {"holdout": args.holdout, "epochs": args.pretrain_epochs}
    pretrain = replace(recipe.pretrain, **{name: value for name, value in given.items() if value is not None})
    recipe = replace(recipe, pretrain=pretrain)
    record = advised(
        args.task,
        recipe,
        more,
        args.epsilon,
        args.seed,
        args.out,
        args.data,
        args.hand,
        given=args.advice,
        all_users=args.all_users,
    )
    write_json(args.out / f"{args.task}-eps{args.epsilon:g}-seed{args.seed}.json", record)
    print(json.dumps({"by hand": record["by hand"], **record["results"]}))


if __name__ == "__main__":
    main()
