"""What a finish adds to a trained network: EMNIST at the settings of its studies, before and after.

    python -m benchmarks.studies.finish --epsilon 0.48 --method warm --seed 0 --out DIR

One run of the workstation recipe, with the learning rate that the study of this epsilon chose, and without the public
rows that pretraining held out: neither the start nor the mirror sees them. Then several finishes are fitted to these
rows, and each is scored on the test rows. Starts, the run and its ledger are kept in DIR, and a command that was killed
resumes where it was. The figures go to DIR/finish-eps0.48-warm-seed0.json.

The studies chose the learning rate by private runs, for which their epsilon does not pay. With `--paid-search 5` the
run has the noise that it would have as one of 5 expected runs of `hs.select` which spend epsilon in all. It has the
best learning rate from the outset, so it shows what such a search can hope for (DIR/paid-eps0.48-warm-seed0.json).
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import halfsilver as hs
from halfsilver.privacy.selection import Selection
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.arena import Arena, make_plan
from halfsilver.study.calibration import calibration_error
from halfsilver.study.method import registered
from halfsilver.study.problem import Problem, Recipe, Setting
from halfsilver.study.run import Job, make_trainer, per_example, run, without_held_out
from halfsilver.study.sides import private_side, public_side
from halfsilver.study.start import load_start, make_start, new_model
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

STUDIES = Path(__file__).parents[1] / "results" / "studies"
DELTA = 1e-6
FINISHES = {
    "temperature": hs.Finish(),
    "temperature and biases": hs.Finish(bias=True),
    "all": hs.Finish(bias=True, shares=(0.25, 0.5, 0.75)),
}


def finish(
    epsilon: float, method: str, seed: int, out: Path, data: Path, trials: float | None = None
) -> dict[str, Any]:
    """Train, or load what was trained, and finish in several ways."""
    chosen = read_json(STUDIES / f"emnist-eps{epsilon:g}.json")["choices"][method]["setting"]
    recipe, _ = load("emnist", "workstation")
    whole = TaskSource.of("emnist", data, {})()
    start = out / "start" / f"seed-{seed}.safetensors"
    make_start(whole, recipe, seed, start)
    job = Job(
        method=registered(method),
        seed=seed,
        setting=Setting(chosen["lr"], chosen["alpha_end"]),
        folder=out / f"{'finish' if trials is None else 'paid'}-eps{epsilon:g}-{method}-seed{seed}",
        start=start,
        ledger=out / "ledger.jsonl",
        delta=DELTA,
    )
    problem, held_out = without_held_out(whole, recipe, replace(job, method=replace(job.method, finish=hs.Finish())))
    plan = make_plan(recipe, problem.population, epsilon, DELTA)
    if trials is not None:
        asked: dict[str, Any] = {"population": plan.population, "batch_size": recipe.batch_size, "steps": plan.steps}
        paid = Selection.calibrate(epsilon=epsilon, delta=DELTA, trials=trials, **asked)
        plan = replace(plan, noise_multiplier=paid.each.noise_multiplier)
    run(Arena(problem=problem, plan=plan, spends=True), recipe, job, curve_points=0, progress=None)
    first, model = (new_model(problem, seed) for _ in range(2))
    for one in (first, model):
        load_start(one, start)
    train(model, problem, recipe, job, plan)  # which is finished, so this only loads it
    results: dict[str, Any] = {"start": scores(first, problem), "none": scores(model, problem)}
    for name, how in FINISHES.items():
        done = how.fit(model, problem.loss_fn, held_out, start=first)
        results[name] = {**scores(done.model, problem), "temperature": done.temperature, "share": done.share}
    about = {"epsilon": epsilon, "delta": DELTA, "method": method, "seed": seed, "setting": job.setting.to_json()}
    about |= {"noise_multiplier": plan.noise_multiplier} | ({} if trials is None else {"expected runs": trials})
    return {**about, "held_out": len(held_out[1]), "versions": versions(), "results": results}


def train(model: nn.Module, problem: Problem, recipe: Recipe, job: Job, plan: hs.PrivacyPlan) -> None:
    """Train `model` from where it is, or load what was trained; nothing is scored."""
    make_trainer(model, problem, recipe, job, plan).fit(
        private_side(problem, recipe),
        public_side(model, problem, recipe),
        run_dir=job.folder,
        ledger=job.ledger,
        delta=job.delta,
        test_every=plan.steps,
    )


def scores(model: nn.Module, problem: Problem) -> dict[str, float]:
    """Loss and metrics of the test rows, and the calibration error where the problem can tell it."""
    metrics = {"loss": problem.loss_fn, **problem.metrics}
    values = {name: per_example(model, fn, problem.test).double() for name, fn in metrics.items()}
    found = {name: float(value.mean()) for name, value in values.items()}
    if problem.confidence is None:
        return found
    sure = per_example(model, problem.confidence, problem.test)
    return {**found, "calibration error": calibration_error(sure, values["accuracy"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, choices=(0.48, 25.8), required=True)
    parser.add_argument("--method", choices=("warm", "pda"), default="warm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--paid-search", type=float, help="expected number of runs for which epsilon pays in all")
    args = parser.parse_args()
    record = finish(args.epsilon, args.method, args.seed, args.out, args.data, args.paid_search)
    kind = "finish" if args.paid_search is None else "paid"
    write_json(args.out / f"{kind}-eps{args.epsilon:g}-{args.method}-seed{args.seed}.json", record)
    print(json.dumps(record["results"]))


if __name__ == "__main__":
    main()
