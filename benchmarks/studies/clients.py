"""How users should train, chosen on public users alone: the learning rate on the device, and the clip norm.

    python -m benchmarks.studies.clients --epsilon 8 --out DIR [--json]

Some public users stand in for the private ones, others score (a public search: no private row is read). Runs are a
fifth of a whole one and have its noise. First, learning rates are tried at the recipe's clip norm; then clip norms with
the best of them, learning rate of the server times clip norm held fixed, so that the noise that reaches the weights is
the same. Whatever lies in DIR is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.show import show
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.arena import make_plan, search_arena
from halfsilver.study.jobs import do_all, workers
from halfsilver.study.method import WARM
from halfsilver.study.problem import Recipe, Setting
from halfsilver.study.run import Job, run
from halfsilver.study.start import make_start
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

TASK = "stackexchange"
CLIENT_RATES = (0.03, 0.1, 0.3)  # at 1 the public users' own training diverges
CLIP_NORMS = (0.1, 1.0)  # beside the recipe's


@dataclass(frozen=True)
class Point:
    """One way to train: on the device, and what is kept of it; the server's rate goes with the clip norm."""

    client_rate: float
    clip_norm: float
    server_rate: float

    @property
    def label(self) -> str:
        return f"client={self.client_rate:g},clip={self.clip_norm:g},server={self.server_rate:g}"


@dataclass(frozen=True)
class Choice:
    """Where the runs are, and what they have in common."""

    source: TaskSource
    out: Path
    epsilon: float
    delta: float
    base: Recipe

    def do(self, point: Point) -> str:
        local = self.base.local
        assert local is not None
        # Public users were picked for having written much; with fewer rows they are more like the private ones.
        local = replace(local, lr=point.client_rate, max_examples=self.base.public_examples or local.max_examples)
        recipe = replace(self.base, max_grad_norm=point.clip_norm, local=local)
        problem = self.source()
        plan = make_plan(recipe, problem.population, self.epsilon, self.delta)
        arena = search_arena(problem, recipe, plan, "public search")
        start = self.out / "start.safetensors"
        make_start(arena.problem, recipe, 100, start)  # from the public users that neither stand in nor score
        made = Job(method=WARM, seed=100, setting=Setting(point.server_rate), folder=self.out / point.label,
                   start=start, ledger=self.out / "ledger.jsonl", delta=self.delta)  # fmt: skip
        run(arena, recipe, made, curve_points=0)
        return f"{point.label}: {self.final(point)}"

    def final(self, point: Point) -> dict[str, Any]:
        return dict(read_json(self.out / point.label / "result.json")["final"])

    def best(self, points: Sequence[Point]) -> Point:
        return min(points, key=lambda p: self.final(p)["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--server-rate", type=float, default=1.0, help="at the recipe's clip norm")
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    recipe, more = load(TASK, "workstation")
    choice = Choice(TaskSource.of(TASK, args.data, {}), args.out, args.epsilon, more["delta"], recipe)
    args.out.mkdir(parents=True, exist_ok=True)
    norm, rate = recipe.max_grad_norm, args.server_rate
    points = [Point(client, norm, rate) for client in CLIENT_RATES]
    with workers(args.workers) as pool:
        do_all(pool, choice.do, points[:1], _say)  # makes the start that all share
        do_all(pool, choice.do, points[1:], _say)
        client = choice.best(points).client_rate
        points += [Point(client, clip, rate * norm / clip) for clip in CLIP_NORMS]
        do_all(pool, choice.do, points, _say)
    rows = [{**asdict(p), **choice.final(p)} for p in points]
    result = {"task": TASK, "epsilon": args.epsilon, "delta": more["delta"], "recipe": asdict(recipe), "rows": rows,
              "scored": "public users", "best": asdict(choice.best(points)), "versions": versions()}  # fmt: skip
    write_json(args.out / "clients.json", result)
    columns = ("client_rate", "clip_norm", "server_rate", "accuracy", "loss")
    print(json.dumps(result)) if args.json else show("How users should train", rows, columns)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
