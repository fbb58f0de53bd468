"""Users who cannot be drawn by secret coins: what does correlated noise keep of the utility?

    python -m benchmarks.studies.arrivals --epsilon 8 --method warm --seed 0 --out DIR

Next words on Stack Exchange in sub-words, from a start on public users. Three arms at one epsilon, learning rate and
number of rounds; figures are losses per word on test users:

    sampled       users by Poisson samples, independent noise
    in turn       users in turn, independent noise, no claim on sampling
    correlated    users in turn, correlated noise

The learning rate is chosen for each arm on users who are set aside, which its epsilon does not pay for. Starts, runs
and a ledger are kept in DIR, and a command that was killed resumes where it was.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.studies.finish import train
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.strategies import INDEPENDENT, Banded, Correlated, Noise
from halfsilver.runs.folder import versions, write_json
from halfsilver.study.method import registered
from halfsilver.study.problem import Problem, Recipe, Setting
from halfsilver.study.run import Job, per_example
from halfsilver.study.start import load_start, make_start, new_model
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

ARMS: dict[str, Noise] = {
    "sampled": INDEPENDENT,
    "in turn": Correlated(strategy=Banded((1.0,))),
    "correlated": Correlated(),
}


def trained(problem: Problem, recipe: Recipe, plan: PrivacyPlan | None, job: Job) -> dict[str, float]:
    """Losses per word of one run; of its start without a plan."""
    model = new_model(problem, job.seed)
    load_start(model, job.start)
    if plan is not None:
        train(model, problem, recipe, job, plan)
    rows = {"set aside": problem.validation, "test": problem.test}
    return {name: float(per_example(model, problem.loss_fn, part).double().mean()) for name, part in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--method", choices=("warm", "pda"), default="warm")
    parser.add_argument("--alpha-end", type=float, default=0.9, help="of pda")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--rates", nargs="+", type=float, default=[1.5, 3.0, 6.0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe, more = load("stackexchange", "subwords")
    recipe = replace(recipe, rounds=args.rounds)
    problem = TaskSource.of("stackexchange", args.data, {**more["task"], "seed": args.seed})()
    start = args.out / "start" / f"seed-{args.seed}.safetensors"
    make_start(problem, recipe, args.seed, start)
    for arm in args.arms:
        name = f"{arm.replace(' ', '-')}-{args.method}-eps{args.epsilon:g}-seed{args.seed}"
        plan = PrivacyPlan.calibrate(
            epsilon=args.epsilon,
            delta=float(more["delta"]),
            population=problem.population,
            batch_size=recipe.batch_size,
            steps=args.rounds,
            max_grad_norm=recipe.max_grad_norm,
            unit="user",
            noise=ARMS[arm],
        )
        found = {}
        for rate in args.rates:
            job = Job(
                method=registered(args.method),
                seed=args.seed,
                setting=Setting(rate, args.alpha_end if args.method == "pda" else None),
                folder=args.out / "runs" / f"{name}-lr{rate:g}",
                start=start,
                ledger=args.out / "ledger.jsonl",
                delta=plan.delta_or(None),
            )
            found[rate] = trained(problem, recipe, plan, job)
            print(arm, rate, found[rate], flush=True)
        begun = trained(problem, recipe, None, job)
        best = min(found, key=lambda rate: found[rate]["set aside"])
        record = {
            "arm": arm,
            "method": args.method,
            "epsilon": args.epsilon,
            "seed": args.seed,
            "learning_rate": best,
            "loss": found[best]["test"],
            "start": begun,
            "all": {str(rate): scored for rate, scored in found.items()},
            "plan": plan.to_dict(),
            "versions": versions(),
        }
        write_json(args.out / f"{name}.json", record)


if __name__ == "__main__":
    main()
