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
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.arena import make_plan, search_arena
from halfsilver.study.jobs import do_all, workers
from halfsilver.study.method import registered
from halfsilver.study.paired import t_interval
from halfsilver.study.problem import Recipe, Setting
from halfsilver.study.run import Job, run
from halfsilver.study.start import make_start
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

SETTINGS = {  # chosen by the search of the task's first study
    "emnist": {"warm": Setting(4.0), "pda": Setting(2.0, 0.95)},
    "cifar10": {"warm": Setting(0.06), "pda": Setting(0.12, 0.995)},
}
CLIP_NORMS = (1.0, 4.0, 16.0)


@dataclass(frozen=True)
class Variant:
    """A recipe with one part changed, and the methods on which that part acts."""

    name: str
    recipe: Recipe
    methods: tuple[str, ...]
    swapped: bool = False  # whether warm and pda have each other's learning rate


def variants(base: Recipe) -> list[Variant]:
    """The recipe, then without each of its parts."""
    start, private, mirror = ("public",), ("warm", "pda"), ("pda",)

    def pretrained(name: str, **changes: Any) -> Variant:
        return Variant(name, replace(base, pretrain=replace(base.pretrain, **changes)), start)

    def trained(name: str, methods: tuple[str, ...], **changes: Any) -> Variant:
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
        return trained("mirror: public gradient clipped to 1", ("pda",), public_max_norm=1.0)
    return trained("mirror: public gradient not clipped", ("pda",), public_max_norm=None)


@dataclass(frozen=True)
class Ablation:
    """One task at one epsilon; jobs are (variant number, method, seed)."""

    source: TaskSource
    out: Path
    epsilon: float
    delta: float
    base: Recipe
    settings: Mapping[str, Setting]
    seeds: int
    only: str

    def do(self, job: tuple[int, str, int]) -> str:
        number, method, seed = job
        variant, problem = variants(self.base)[number], self.source()
        recipe = variant.recipe
        plan = make_plan(recipe, problem.population, self.epsilon, self.delta)
        start = self.out / _start_name(self.base, recipe, number) / f"seed-{seed}.safetensors"
        make_start(problem, recipe, seed, start)
        setting = self._setting(variant, method)
        if recipe.max_grad_norm != self.base.max_grad_norm:  # once all is clipped, only their product matters
            setting = replace(setting, lr=setting.lr * self.base.max_grad_norm / recipe.max_grad_norm)
        arena = search_arena(problem, recipe, plan, "paper search")
        folder = self.out / f"{number}-{method}-seed-{seed}"
        made = Job(method=registered(method), seed=seed, setting=setting, folder=folder, start=start,
                   ledger=self.out / "ledger.jsonl", delta=self.delta)  # fmt: skip
        run(arena, recipe, made, curve_points=0)
        return f"{variant.name}, {method}, seed {seed}: {read_json(made.result)['final']}"

    def _setting(self, variant: Variant, method: str) -> Setting:
        own = self.settings.get(method, Setting(1.0))
        return replace(own, lr=self.settings[{"warm": "pda", "pda": "warm"}[method]].lr) if variant.swapped else own

    def jobs(self) -> list[tuple[int, str, int]]:
        numbered = [(i, v) for i, v in enumerate(variants(self.base)) if i == 0 or self.only in v.name]
        return [(i, m, seed) for i, v in numbered for m in v.methods for seed in range(self.seeds)]

    def rows(self) -> list[dict[str, Any]]:
        """Mean over seeds for each variant and method, and the paired difference to the recipe as it is."""
        found: dict[tuple[int, str], dict[int, Mapping[str, Any]]] = {}
        for number, method, seed in self.jobs():
            result = read_json(self.out / f"{number}-{method}-seed-{seed}" / "result.json")
            found.setdefault((number, method), {})[seed] = result["final"]
        return [self._row(key, own, found[0, key[1]]) for key, own in found.items()]

    def _row(
        self, key: tuple[int, str], own: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"variant": variants(self.base)[key[0]].name, "method": key[1], "seeds": len(own)}
        for metric in next(iter(own.values())):
            row[metric] = sum(v[metric] for v in own.values()) / len(own)
            if key[0]:
                changes = [own[s][metric] - base[s][metric] for s in own]
                low, high = t_interval(changes) or (None, None)
                row |= {f"{metric}_change": sum(changes) / len(own), f"{metric}_low": low, f"{metric}_high": high}
        return row


def _start_name(base: Recipe, recipe: Recipe, number: int) -> str:
    return "start" if recipe.pretrain == base.pretrain else f"start-{number}"


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
    study = Ablation(TaskSource.of(args.task, args.data, {}), args.out, args.epsilon, more["delta"], recipe,
                     settings, args.seeds, args.only)  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    with workers(args.workers) as pool:  # starts first: two jobs that share one must not make it at once
        do_all(pool, study.do, [job for job in study.jobs() if job[1] == "public"], partial(print, flush=True))
        do_all(pool, study.do, [job for job in study.jobs() if job[1] != "public"], partial(print, flush=True))
    result = {"task": args.task, "epsilon": args.epsilon, "delta": more["delta"], "recipe": asdict(recipe),
              "settings": {m: asdict(s) for m, s in settings.items()}, "seeds": args.seeds,
              "scored": "set-aside training rows", "versions": versions(), "rows": study.rows()}  # fmt: skip
    write_json(args.out / "ablation.json", result)
    columns = ("variant", "method", "accuracy", "accuracy_change", "loss", "loss_change", "loss_low", "loss_high")
    print(json.dumps(result)) if args.json else show("One part changed at a time", result["rows"], columns)


if __name__ == "__main__":
    main()
