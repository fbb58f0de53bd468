"""What `FallBack` saves where the public labels are wrong, and what it costs where they are right: EMNIST.

    python -m benchmarks.studies.fallback --out DIR [--json]   runs what is missing in DIR, and writes DIR/fallback.json
    python -m benchmarks.studies.fallback --plot                 draws the picture from the committed figures

Five runs a seed: DP-SGD, and the mirror with and without the guard, on public labels as they are and permuted over the
public rows. All start from the weights that the right labels gave, so that only the mirror is in question, and have the
learning rate of the mirror and the same noise and samples of private rows (an unsafe seed): what differs between two of
them is due to the public gradient alone. Nothing is chosen by the test rows on which they are scored.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.show import show
from benchmarks.studies.ablation import SETTINGS
from halfsilver.mirror import Chain, FallBack, FirstOrder, MirrorMap
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.report.plots import COLOURS, saved, style
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.arena import make_plan
from halfsilver.study.jobs import do_all, workers
from halfsilver.study.method import registered
from halfsilver.study.problem import Problem, Recipe, Setting
from halfsilver.study.run import Job, make_trainer, per_example
from halfsilver.study.sides import private_side, public_side
from halfsilver.study.start import load_start, make_start, new_model
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource
from halfsilver.trainer import StepReport, Trainer

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "results" / "fallback.json"
PICTURE = ROOT / "docs" / "pictures" / "fallback.png"
ARMS = ("warm", "honest", "honest+guard", "permuted", "permuted+guard")
POINTS = 20  # of a curve


@dataclass(frozen=True)
class Bench:
    """The runs of all arms and seeds at one epsilon; a job is (arm, seed)."""

    source: TaskSource
    out: Path
    recipe: Recipe
    setting: Setting
    epsilon: float
    delta: float
    share: float  # of the steps of a whole run
    seeds: int
    bad_start: bool  # trained on the permuted labels, for all arms

    def start(self, seed: int) -> str:
        problem = self.source()
        make_start(permuted(problem, seed) if self.bad_start else problem, self.recipe, seed, self._start(seed))
        return f"start of seed {seed}"

    def do(self, job: tuple[str, int]) -> str:
        arm, seed = job
        folder = self._folder(arm, seed)
        if not (folder / "result.json").exists():
            shutil.rmtree(folder, ignore_errors=True)  # noise from a seed must not go on where it stopped
            write_json(folder / "result.json", self._run(arm, seed, folder))
        return f"{arm}, seed {seed}: {read_json(folder / 'result.json')['final']}"

    def _run(self, arm: str, seed: int, folder: Path) -> dict[str, Any]:
        problem, recipe = self.source(), self.recipe
        if arm.startswith("permuted"):
            problem = permuted(problem, seed)
        plan = replace(self.plan(), steps=recipe.steps(problem.population, self.share))
        model, job = new_model(problem, seed), self._job(arm, seed, folder)
        load_start(model, job.start)
        trainer = make_trainer(model, problem, recipe, job, plan)
        trainer.unsafe_seed, trainer.progress = seed, False
        every, trust = max(1, plan.steps // POINTS), list[dict[str, float]]()
        if arm.endswith("guard"):
            trainer.mirror = guarded(trainer.mirror)
            trainer.callbacks = [partial(_note, trainer, trust, every)]
        result = trainer.fit(private_side(problem, recipe), public_side(model, problem, recipe), run_dir=folder,
                             delta=self.delta, test=problem.curve or problem.test, test_every=every)  # fmt: skip
        metrics = {"loss": problem.loss_fn, **problem.metrics}
        final = {name: float(per_example(model, fn, problem.test).double().mean()) for name, fn in metrics.items()}
        curve = [{k: line[k] for k in ("step", *metrics)} for line in result.history if "loss" in line]
        return {"arm": arm, "seed": seed, "final": final, "curve": curve, "trust": trust, "plan": plan.to_dict()}

    def _job(self, arm: str, seed: int, folder: Path) -> Job:
        method = "warm" if arm == "warm" else "pda"
        return Job(method=registered(method), seed=seed, setting=self.setting, folder=folder, start=self._start(seed),
                   ledger=folder / "ledger.jsonl", delta=self.delta)  # fmt: skip

    def plan(self) -> PrivacyPlan:
        """With the noise of a whole run, calibrated once."""
        path = self.out / "plan.json"
        if not path.exists():
            plan = make_plan(self.recipe, self.source().population, self.epsilon, self.delta)
            write_json(path, plan.to_dict())
        return PrivacyPlan.from_dict(read_json(path))

    def _folder(self, arm: str, seed: int) -> Path:
        return self.out / f"{arm}-seed-{seed}"

    def _start(self, seed: int) -> Path:
        return self.out / "start" / f"seed-{seed}.safetensors"

    def jobs(self) -> list[tuple[str, int]]:
        return [(arm, seed) for seed in range(self.seeds) for arm in ARMS]

    def runs(self) -> list[dict[str, Any]]:
        return [read_json(self._folder(*job) / "result.json") for job in self.jobs()]


def permuted(problem: Problem, seed: int) -> Problem:
    """The problem with its public labels dealt out at random over the public rows."""
    images, labels = problem.public
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return replace(problem, public=(images, labels[order]))


def guarded(mirror: MirrorMap) -> MirrorMap:
    """The same mirror with the guard around its first-order part."""
    if isinstance(mirror, Chain):
        return Chain(tuple(guarded(part) for part in mirror.maps))
    return FallBack(mirror) if isinstance(mirror, FirstOrder) else mirror


def _note(trainer: Trainer, notes: list[dict[str, float]], every: int, report: StepReport) -> None:
    if report.step % every == 0:
        (evidence,) = (t for name, t in trainer.state_dict()[0].items() if name.endswith("evidence"))
        total, squares, trust = evidence.tolist()
        notes.append({"step": report.step, "score": total / squares**0.5 if squares else 0.0, "trust": trust})


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The two excesses over warm DP-SGD with permuted labels, and the share of the honest gain that the guard costs."""
    losses = {arm: [r["final"]["loss"] for r in runs if r["arm"] == arm] for arm in ARMS}
    mean = {arm: sum(values) / len(values) for arm, values in losses.items()}
    gain, cost = mean["warm"] - mean["honest"], mean["honest+guard"] - mean["honest"]
    return {
        "loss": mean,
        "losses": losses,
        "permuted_over_warm": mean["permuted"] / mean["warm"] - 1,
        "permuted_guarded_over_warm": mean["permuted+guard"] / mean["warm"] - 1,
        "honest_gain": gain,
        "honest_cost": cost,
        "honest_cost_share_of_gain": cost / gain,
        "honest_cost_share_of_loss": cost / mean["honest"],
    }


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Test loss over the run for each arm, and the trust of both guarded ones: means over seeds."""
    look = {"warm": "warm", "honest": "pda", "honest+guard": "pda", "permuted": "cold", "permuted+guard": "cold"}
    words = {"warm": "DP-SGD", "honest": "mirror, right labels", "permuted": "mirror, permuted labels"}
    with style():
        from matplotlib.figure import Figure  # `style` has said what is missing if it is

        figure = Figure(figsize=(9, 4.3), layout="constrained")
        loss, trust = figure.subplots(1, 2)
        for arm, colour in look.items():
            guard = arm.endswith("guard")
            label = words[arm.removesuffix("+guard")] + (", guarded" if guard else "")
            # Where the guard never acts, its line lies on the other one: thin on broad, both are seen.
            how: dict[str, Any] = {"linestyle": "--", "linewidth": 1.5} if guard else {"linewidth": 4.5, "alpha": 0.4}
            how |= {"color": COLOURS[colour], "label": label}
            loss.plot(*_mean(figures["runs"], arm, "curve", "loss"), **how)
            if guard:
                trust.plot(*_mean(figures["runs"], arm, "trust", "trust"), **how)
        loss.set(xlabel="private steps", ylabel="test loss")
        trust.set(xlabel="private steps", ylabel="trust in the public gradient", ylim=(-0.03, 1.03))
        for axes in (loss, trust):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.15)
        figure.legend(handles=loss.get_lines(), loc="outside upper center", ncols=3, fontsize=8, frameon=False)
        saved(figure, path)


def _mean(runs: Sequence[Mapping[str, Any]], arm: str, part: str, name: str) -> tuple[list[int], list[float]]:
    lines = [r[part] for r in runs if r["arm"] == arm]
    points = list(zip(*lines, strict=True))
    return [p[0]["step"] for p in points], [sum(line[name] for line in p) / len(p) for p in points]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=25.8)
    parser.add_argument("--recipe", default="workstation")
    parser.add_argument("--clip", type=float, help="another clip norm than the recipe's")
    parser.add_argument("--alpha-end", type=float, help="another end of alpha than the study chose")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of a whole run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bad-start", action="store_true", help="train the start on the permuted labels too")
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", nargs="?", type=Path, const=PICTURE, help="only draw, here or where it belongs")
    args = parser.parse_args()
    if args.plot is None and (args.out is None or args.data is None):
        parser.error("--out, and --data or HALFSILVER_DATA, are needed to run anything")
    return args


def bench_of(args: argparse.Namespace) -> Bench:
    """The recipe as it is, or with another clip norm; learning rate times clip norm stays."""
    recipe, more = load("emnist", args.recipe)
    recipe = replace(recipe, max_grad_norm=args.clip or recipe.max_grad_norm)
    setting = SETTINGS["emnist"]["pda"]
    setting = Setting(setting.lr / recipe.max_grad_norm, args.alpha_end or setting.alpha_end)
    return Bench(TaskSource.of("emnist", args.data, {}), args.out, recipe, setting, args.epsilon, more["delta"],
                 args.share, args.seeds, args.bad_start)  # fmt: skip


def main() -> None:
    args = arguments()
    if args.plot is not None:
        plot(read_json(args.out / "fallback.json" if args.out else FIGURES), args.plot)
        return
    bench, say = bench_of(args), partial(print, flush=True) if not args.json else lambda _: None
    args.out.mkdir(parents=True, exist_ok=True)
    bench.plan()
    with workers(args.workers) as pool:
        do_all(pool, bench.start, list(range(args.seeds)), say)
        do_all(pool, bench.do, bench.jobs(), say)
    runs = bench.runs()
    result = {"epsilon": args.epsilon, "clip": bench.recipe.max_grad_norm, "setting": asdict(bench.setting),
              "share": args.share, "seeds": args.seeds,
              "bad_start": args.bad_start, "versions": versions(), **summary(runs), "runs": runs}  # fmt: skip
    write_json(args.out / "fallback.json", result)
    rows = [{"arm": arm, "loss": result["loss"][arm]} for arm in ARMS]
    print(json.dumps(result)) if args.json else show("Test loss, mean over seeds", rows, ("arm", "loss"))


if __name__ == "__main__":
    main()
