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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.show import show
from benchmarks.studies.given import share_starts
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.method import PDA, REGISTERED, Method, registered
from halfsilver.study.problem import Setting
from halfsilver.study.records import Choice, Summary
from halfsilver.study.study import Request, Study
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
    """What the points have in common; each is a study of one run, at the setting that the study in `study` chose."""

    source: TaskSource
    study: Path
    out: Path
    method: Method
    rounds: int
    delta: float

    def setting(self) -> Setting:
        chosen = Choice.from_json(read_json(self.study / "search" / self.method.name / "choice.json")).setting
        assert chosen is not None
        return chosen

    def run(self, point: Point, workers: int) -> None:
        recipe = replace(load("stackexchange", "workstation")[0], batch_size=point.cohort, rounds=self.rounds)
        request = Request(
            task="stackexchange",
            recipe=recipe,
            epsilon=point.epsilon,
            delta=self.delta,
            methods=(self.method,),
            seeds={self.method.name: 1},
            settings={self.method.name: self.setting()},
        )
        folder = self.out / f"{self.method.name}-{point.label}"
        share_starts(self.study, folder)
        study = Study(folder=folder, request=request, source=self.source, data_ledger=self.out / "ledger.jsonl")
        study.go(workers_count=workers, tell=partial(print, flush=True))

    def rows(self) -> list[dict[str, Any]]:
        """All points of DIR, whenever they were run."""
        files = self.out.glob(f"{self.method.name}-cohort=*/summary.json")
        rows = [_row(Summary.from_json(read_json(file))) for file in files]
        return sorted(rows, key=lambda row: (row["cohort"], row["epsilon"]))


def _row(summary: Summary) -> dict[str, Any]:
    (run,) = summary.runs
    plan = PrivacyPlan.from_dict(dict(run.plan or {}))
    cohort = round(plan.expected_batch_size)
    return {
        "epsilon": summary.study.epsilon,
        "cohort": cohort,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.sampling_rate,
        "noise_of_mean": plan.noise_multiplier * plan.max_grad_norm / cohort,
        "perplexity": math.exp(run.final["loss"] or math.nan),
        **run.final,
        "seconds": run.seconds,
    }


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
    parser.add_argument("--method", choices=sorted(REGISTERED), default=PDA.name)
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
    curve = Curve(source, args.study, args.out, registered(args.method), args.rounds, delta)
    args.out.mkdir(parents=True, exist_ok=True)
    for cohort in sorted(args.cohorts, reverse=True):
        for epsilon in args.epsilons:
            curve.run(Point(epsilon, cohort), args.workers)
    result = {
        "method": args.method,
        "rounds": args.rounds,
        "delta": delta,
        "setting": curve.setting().to_json(),
        "rows": curve.rows(),
        "versions": versions(),
    }
    write_json(args.out / f"cohorts-{args.method}.json", result)
    if args.plot is not None:
        draw(result, args.plot)
    columns = ("cohort", "epsilon", "noise_multiplier", "noise_of_mean", "accuracy", "loss", "perplexity")
    print(json.dumps(result)) if args.json else show("Users a round", result["rows"], columns)


if __name__ == "__main__":
    main()
