"""Do the models of a study learn the public rows by heart? Each one's figures on those rows beside those on test rows.

    python -m benchmarks.studies.overfit STUDY [--out FILE]

Means over the seeds that have a finished run of warm and of pda, in eval mode, without augmentation. Where the mirror
lowers the loss on public rows and not on test rows, it has taught the model those rows and nothing about others.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.show import show
from benchmarks.studies.guesses import load
from halfsilver.runs.folder import RunFolder, read_json, versions, write_json
from halfsilver.study.method import PDA, PUBLIC, WARM
from halfsilver.study.problem import Problem
from halfsilver.study.run import per_example
from halfsilver.study.start import load_start
from halfsilver.tasks.source import TaskSource

METHODS = (PUBLIC, WARM, PDA)


def figures(problem: Problem, model: nn.Module) -> dict[str, float]:
    metrics = {"loss": problem.loss_fn, **problem.metrics}
    parts = {"public": problem.public, "test": problem.test}
    return {
        f"{part} {name}": float(per_example(model, fn, rows).double().mean())
        for part, rows in parts.items()
        for name, fn in metrics.items()
    }


def each_model(study: Path, data: Path, figures: Callable[[Problem, nn.Module], Mapping[str, Any]]) -> dict[str, Any]:
    """What the study is, and the figures of each of its models."""
    about = read_json(study / "study.json")
    problem = TaskSource.of(about["task"], data, about["options"])()
    runs = [{"method": m, "seed": seed, **figures(problem, model)} for m, seed, model in models(study, problem)]
    kept = {name: about[name] for name in ("task", "epsilon", "delta")}
    return {**kept, "runs": runs, "versions": versions()}


def models(study: Path, problem: Problem) -> Iterator[tuple[str, int, nn.Module]]:
    """The start and the tested models of warm and pda, for each seed that has both; one model, filled anew."""
    model = problem.make_model()
    for seed in sorted(_finished(study, WARM.name) & _finished(study, PDA.name)):
        for method in METHODS:
            if not method.trains:
                load_start(model, study / "start" / f"seed-{seed}.safetensors")
            else:
                load(model, study / "runs" / f"{method.name}-seed-{seed}")
            yield method.name, seed, model


def _finished(study: Path, method: str) -> set[int]:
    """Seeds whose run has ended here; that of a study which was carried here has no weights."""
    ended = (path.parent for path in study.glob(f"runs/{method}-seed-*/result.json"))
    return {int(run.name.rpartition("-")[2]) for run in ended if RunFolder(run).checkpoint.exists()}


def means(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per method: the mean of each figure over seeds."""
    lines = []
    for method in METHODS:
        own = [run for run in runs if run["method"] == method.name]
        names = [name for name in own[0] if name not in ("method", "seed")]
        lines.append({"method": method.name, **{name: sum(run[name] for run in own) / len(own) for name in names}})
    return lines


def options(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    return parser


def tell(title: str, result: dict[str, Any], args: argparse.Namespace) -> None:
    if args.out is not None:
        write_json(args.out, result)
    rows = means(result["runs"])
    print(json.dumps(result)) if args.json else show(title, rows, list(rows[0]))


def main() -> None:
    args = options(__doc__).parse_args()
    tell("Public rows and test rows", each_model(args.study, args.data, figures), args)


if __name__ == "__main__":
    main()
