"""What more users a round buy: epsilon against perplexity for several cohorts, one line for each.

    python -m benchmarks.studies.cohorts --study STUDY --out DIR [--method pda] [--json] [--plot FILE.svg]

Fewer rounds than the study of `halfsilver compare stackexchange` in STUDY, whose start and chosen setting are used;
the noise is calibrated to each epsilon, for each cohort anew. Whatever lies in DIR is not run again, and is shown too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.show import show
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.arena import Arena, make_plan
from halfsilver.study.jobs import do_all, workers
from halfsilver.study.method import registered
from halfsilver.study.problem import Recipe, Setting
from halfsilver.study.run import Job, run
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource


@dataclass(frozen=True)
class Point:
    """One run: so many expected users a round, at this epsilon."""

    epsilon: float
    cohort: int

    @property
    def label(self) -> str:
        return f"cohort={self.cohort},eps={self.epsilon:g}"


@dataclass(frozen=True)
class Curve:
    """What the runs have in common."""

    source: TaskSource
    study: Path
    out: Path
    method: str
    rounds: int
    delta: float

    def setting(self) -> Setting:
        return Setting(**read_json(self.study / "runs" / f"{self.method}-seed-0" / "result.json")["setting"])

    def recipe(self, point: Point) -> Recipe:
        return replace(load("stackexchange", "workstation")[0], batch_size=point.cohort, rounds=self.rounds)

    def do(self, point: Point) -> str:
        problem, recipe = self.source(), self.recipe(point)
        plan = make_plan(recipe, problem.population, point.epsilon, self.delta)
        job = Job(
            method=registered(self.method),
            seed=0,
            setting=self.setting(),
            folder=self.out / f"{self.method}-{point.label}",
            start=self.study / "start" / "seed-0.safetensors",
            ledger=self.out / "ledger.jsonl",
            delta=self.delta,
        )
        run(Arena(problem=problem, plan=plan, spends=True), recipe, job, curve_points=0)
        return f"{point.label}: {self.row(point)}"

    def finished(self) -> list[Point]:
        """All points of DIR, whenever they were run."""
        plans = [read_json(path) for path in self.out.glob(f"{self.method}-cohort=*/result.json")]
        made = [Point(round(r["epsilon"]["pld"], 2), round(r["plan"]["expected_batch_size"])) for r in plans]
        return sorted(made, key=lambda point: (point.cohort, point.epsilon))

    def row(self, point: Point) -> dict[str, Any]:
        found = read_json(self.out / f"{self.method}-{point.label}" / "result.json")
        plan, final = PrivacyPlan.from_dict(found["plan"]), found["final"]
        return {**asdict(point), "noise_multiplier": plan.noise_multiplier, "sampling_rate": plan.sampling_rate,
                "noise_of_mean": plan.noise_multiplier * plan.max_grad_norm / point.cohort,
                "perplexity": math.exp(final["loss"]), **final, "seconds": found["seconds"]}  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.2, 3.4), layout="constrained")
    for cohort in sorted({row["cohort"] for row in result["rows"]}):
        rows = sorted((row for row in result["rows"] if row["cohort"] == cohort), key=lambda row: float(row["epsilon"]))
        axes.plot([r["epsilon"] for r in rows], [r["perplexity"] for r in rows], "o-", label=f"{cohort} users a round")
    axes.set(xscale="log", xlabel="epsilon of a user", ylabel="test perplexity")
    axes.set_title(f"{result['method']}, {result['rounds']} rounds, one seed", fontsize=10)
    ticks = sorted({row["epsilon"] for row in result["rows"]})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, required=True, help="folder of a finished study")
    parser.add_argument("--method", choices=["warm", "pda"], default="pda")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 2.0])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[50, 200, 400])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    delta = read_json(args.study / "study.json")["delta"]
    source = TaskSource.of("stackexchange", args.data, {})
    curve = Curve(source, args.study, args.out, args.method, args.rounds, delta)
    args.out.mkdir(parents=True, exist_ok=True)
    points = [Point(epsilon, cohort) for cohort in sorted(args.cohorts, reverse=True) for epsilon in args.epsilons]
    with workers(args.workers) as pool:
        do_all(pool, curve.do, points, _say)
    result = {"method": args.method, "rounds": args.rounds, "delta": delta, "setting": asdict(curve.setting()),
              "rows": [curve.row(p) for p in curve.finished()], "versions": versions()}  # fmt: skip
    write_json(args.out / f"cohorts-{args.method}.json", result)
    if args.plot is not None:
        draw(result, args.plot)
    columns = ("cohort", "epsilon", "noise_multiplier", "noise_of_mean", "accuracy", "loss", "perplexity")
    print(json.dumps(result)) if args.json else show("Users a round", result["rows"], columns)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
