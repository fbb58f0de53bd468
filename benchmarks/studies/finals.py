"""The final runs of a study whose search is on record: the best setting of each method, without searching again.

    python -m benchmarks.studies.finals benchmarks/results/geometry/wikitext2-eps1.71-search.json --seeds 3 --out DIR

The record names task, recipe and epsilon, and has the figures on held-out public rows of each setting that was tried.
Its `score` decides (default: the loss), and its `changes` replace fields of the recipe. The runs are those of
`halfsilver compare` at these settings, and whatever lies in DIR is not run again. `--curve-points 0` draws no curves,
which take long on many test rows. `--only 2` runs one seed and leaves the others to a later call.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfsilver.runs.folder import read_json
from halfsilver.study.method import resolve
from halfsilver.study.problem import Setting, better
from halfsilver.study.run import CURVE_POINTS
from halfsilver.study.study import Request, Study, seeds_for
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource


def best_settings(tried: Sequence[Mapping[str, Any]], score: str = "loss") -> dict[str, Setting]:
    """The setting with the best score, by method; of equal ones the first.

    >>> best_settings([{"method": "warm", "loss": loss, "setting": {"lr": lr}} for lr, loss in ((1, 3.0), (2, 2.5))])
    {'warm': Setting(lr=2, alpha_end=None, damping=None)}
    """
    names = list(dict.fromkeys(trial["method"] for trial in tried))
    sign = better(score)
    best = {name: max((t for t in tried if t["method"] == name), key=lambda t: sign * t[score]) for name in names}
    return {name: Setting(**trial["setting"]) for name, trial in best.items()}


def finals(record: Mapping[str, Any], *, seeds: int, data: Path, out: Path, curve_points: int = CURVE_POINTS) -> Study:
    """The study of the final runs."""
    recipe, more = load(record["task"], record["recipe"])
    recipe = replace(recipe, **record.get("changes", {}))
    settings = best_settings(record["tried"], record.get("score", "loss"))
    arms, options = resolve(["public", *settings]), {**more.get("task", {}), "validation": 0}
    request = Request(
        task=record["task"],
        recipe=recipe,
        epsilon=record["epsilon"],
        delta=more["delta"],
        methods=arms,
        seeds=seeds_for(arms, seeds),
        options=options,
        settings=settings,
    )
    source = TaskSource.of(record["task"], data, options)
    return Study(folder=out, request=request, source=source, curve_points=curve_points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=int, help="one seed, below --seeds")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--curve-points", type=int, default=CURVE_POINTS)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    points = args.curve_points
    study = finals(read_json(args.record), seeds=args.seeds, data=args.data, out=args.out, curve_points=points)
    summary = study.go(workers_count=args.workers, tell=lambda text: print(text, flush=True), only=args.only)
    print(json.dumps(summary.to_json()["verdict"], indent=1))


if __name__ == "__main__":
    main()
