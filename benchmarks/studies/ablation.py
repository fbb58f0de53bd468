"""What each part of a recipe brings: one part changed at a time, the rest as it is.

    python -m benchmarks.studies.ablation emnist --epsilon 25.8 --out DIR [--json]

Runs have the noise of a whole run and the length of a search run (or `--length`), start from the same weights for each
seed and are scored on set-aside training rows, so nothing here looks at the test set. Whatever lies in DIR is not run
again. A run that trains on private rows is written to DIR's ledger.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.show import show
from benchmarks.studies.given import share_starts, shortened
from halfsilver.runs.folder import versions, write_json
from halfsilver.study.method import PDA, PUBLIC, WARM, Method
from halfsilver.study.paired import t_interval
from halfsilver.study.problem import Problem, Recipe, Setting
from halfsilver.study.records import Summary
from halfsilver.study.study import Request, Study
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

SETTINGS: dict[str, dict[Method, Setting]] = {  # chosen by the search of the task's first study
    "emnist": {WARM: Setting(4.0), PDA: Setting(2.0, 0.95)},
    "cifar10": {WARM: Setting(0.06), PDA: Setting(0.12, 0.995)},
}
CLIP_NORMS = (1.0, 4.0, 16.0)


@dataclass(frozen=True)
class Variant:
    """A recipe with one part changed, and the methods on which that part acts."""

    name: str
    recipe: Recipe
    methods: tuple[Method, ...]
    swapped: bool = False  # whether warm and pda have each other's learning rate


def variants(base: Recipe) -> list[Variant]:
    """The recipe, then without each of its parts."""
    start, private, mirror = (PUBLIC,), (WARM, PDA), (PDA,)

    def pretrained(name: str, **changes: Any) -> Variant:
        return Variant(name, replace(base, pretrain=replace(base.pretrain, **changes)), start)

    def trained(name: str, methods: tuple[Method, ...], **changes: Any) -> Variant:
        return Variant(name, replace(base, **changes), methods)

    return [
        Variant("as it is", base, start + private),
        pretrained("start: no augmentation", augment=False),
        pretrained("start: no averaging", average=None),
        pretrained("start: no falling learning rate", lr_end=1.0),
        pretrained("start: nothing held out, no early stop", holdout=0.0),
        trained("no averaging", private, average=None),
        trained("no falling learning rate", private, lr_end=1.0),
        trained("neither of them", private, average=None, lr_end=1.0),
        trained("mirror: no augmentation", mirror, augment_public=False),
        _other_way(base, trained),
        *(trained(f"clip norm {c:g}", private, max_grad_norm=c) for c in CLIP_NORMS if c != base.max_grad_norm),
        Variant("learning rates of warm and pda swapped", base, private, swapped=True),
    ]


def _other_way(base: Recipe, trained: Callable[..., Variant]) -> Variant:
    """The mirror's public gradient clipped where the recipe leaves it as it is, and left as it is where it clips."""
    if base.public_max_norm is None:
        return trained("mirror: public gradient clipped to 1", (PDA,), public_max_norm=1.0)
    return trained("mirror: public gradient not clipped", (PDA,), public_max_norm=None)


@dataclass(frozen=True)
class SetAside:
    """Opens the task with the set-aside training rows in place of the test set."""

    source: TaskSource

    def __call__(self) -> Problem:
        problem = self.source()
        return replace(problem, test=problem.validation, validation=None, curve=None)


@dataclass(frozen=True)
class Ablation:
    """One task at one epsilon; each variant is a study of its own."""

    task: str
    source: SetAside
    out: Path
    epsilon: float
    delta: float
    base: Recipe
    settings: Mapping[Method, Setting]
    seeds: int

    def study(self, number: int, variant: Variant) -> Study:
        own, population = variant.recipe, self.source().population
        return Study(
            folder=self.out / str(number),
            request=Request(
                task=self.task,
                recipe=shortened(own, population, self.epsilon, self.delta, own.search_share),
                epsilon=None,
                delta=self.delta,
                methods=variant.methods,
                seeds={method.name: self.seeds for method in variant.methods},
                settings={method.name: self._setting(variant, method) for method in variant.methods if method.trains},
            ),
            source=self.source,
            data_ledger=self.out / "ledger.jsonl",
        )

    def _setting(self, variant: Variant, method: Method) -> Setting:
        setting = self.settings[method]
        if variant.swapped:
            setting = replace(setting, lr=self.settings[WARM if method == PDA else PDA].lr)
        # Once all is clipped, only the product of learning rate and clip norm matters.
        return replace(setting, lr=setting.lr * self.base.max_grad_norm / variant.recipe.max_grad_norm)

    def go(self, only: str, workers: int) -> list[dict[str, Any]]:
        """Mean over seeds for each variant and method, and the paired difference to the recipe as it is."""
        rows, first = list[dict[str, Any]](), None
        for number, variant in enumerate(variants(self.base)):
            if number and only not in variant.name:
                continue
            study = self.study(number, variant)
            if variant.recipe.pretrain == self.base.pretrain:
                share_starts(self.out / "0", study.folder)
            summary = study.go(workers_count=workers, tell=partial(print, variant.name, flush=True))
            rows += [_row(variant.name, method.name, summary, first) for method in variant.methods]
            first = first or summary
        return rows


def _row(variant: str, method: str, summary: Summary, base: Summary | None) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": variant, "method": method, "seeds": len(summary.runs_of(method))}
    for metric in summary.runs[0].final:
        own = _by_seed(summary, method, metric)
        row[metric] = sum(own.values()) / len(own)
        if base is not None:
            before = _by_seed(base, method, metric)
            changes = [own[seed] - before[seed] for seed in own]
            low, high = t_interval(changes) or (None, None)
            row |= {f"{metric}_change": sum(changes) / len(own), f"{metric}_low": low, f"{metric}_high": high}
    return row


def _by_seed(summary: Summary, method: str, metric: str) -> dict[int, float]:
    finals = {run.seed: run.final[metric] for run in summary.runs_of(method)}
    return {seed: float("nan") if value is None else value for seed, value in finals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(SETTINGS))
    parser.add_argument("--recipe", default="workstation")
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--rate", type=float, default=1.0, help="times the learning rates, for other noise")
    parser.add_argument("--length", type=float, help="share of a whole run (default: that of a search run)")
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="variants with this in their name, beside the recipe as it is")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    recipe, more = load(args.task, args.recipe)
    recipe = recipe if args.length is None else replace(recipe, search_share=args.length)
    settings = {method: replace(s, lr=s.lr * args.rate) for method, s in SETTINGS[args.task].items()}
    source = SetAside(TaskSource.of(args.task, args.data, {}))
    ablation = Ablation(args.task, source, args.out, args.epsilon, more["delta"], recipe, settings, args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    result = {
        "task": args.task,
        "epsilon": args.epsilon,
        "delta": more["delta"],
        "recipe": asdict(recipe),
        "settings": {method.name: setting.to_json() for method, setting in settings.items()},
        "seeds": args.seeds,
        "scored": "set-aside training rows",
        "versions": versions(),
        "rows": ablation.go(args.only, args.workers),
    }
    write_json(args.out / "ablation.json", result)
    columns = ("variant", "method", "accuracy", "accuracy_change", "loss", "loss_change", "loss_low", "loss_high")
    print(json.dumps(result)) if args.json else show("One part changed at a time", result["rows"], columns)


if __name__ == "__main__":
    main()
