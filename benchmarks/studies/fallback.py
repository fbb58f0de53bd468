"""What `FallBack` saves where the public labels are wrong, and what it costs where they are right: EMNIST.

    python -m benchmarks.studies.fallback --out DIR [--json]   runs what is missing in DIR, and writes DIR/fallback.json
    python -m benchmarks.studies.fallback --plot                 draws the picture from the committed figures

Two studies: DP-SGD and the mirror with and without the guard on the public labels as they are, and both mirrors on
labels permuted over the public rows. All start from the weights that the right labels gave, so that only the mirror is
in question, and have the learning rate of the mirror and the same noise and samples of private rows (unsafe seeds):
what differs between two of them is due to the public gradient alone. Nothing is chosen by the test rows on which they
are scored.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.show import show
from benchmarks.studies.ablation import SETTINGS
from benchmarks.studies.given import share_starts, shortened
from halfsilver._core import checkpoint
from halfsilver.report.looks import looks_of
from halfsilver.report.plots import saved, style
from halfsilver.runs.folder import RunFolder, read_json, versions, write_json
from halfsilver.study.method import COLD, GUARDED, PDA, WARM, Method
from halfsilver.study.problem import Problem, Setting
from halfsilver.study.study import Request, Study
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "results" / "fallback.json"
PICTURE = ROOT / "docs" / "pictures" / "fallback.png"
LABELS: dict[str, dict[Method, str]] = {  # the arms by the public labels that they see
    "honest": {WARM: "warm", PDA: "honest", GUARDED: "honest+guard"},
    "permuted": {PDA: "permuted", GUARDED: "permuted+guard"},
}
ARMS = tuple(arm for arms in LABELS.values() for arm in arms.values())
LOOKS = {"warm": WARM, "honest": PDA, "honest+guard": PDA, "permuted": COLD, "permuted+guard": COLD}
WORDS = {"warm": "DP-SGD", "honest": "mirror, right labels", "permuted": "mirror, permuted labels"}


@dataclass(frozen=True)
class Labelled:
    """Opens the task with its public labels as they are, or permuted; worker processes can be sent it."""

    source: TaskSource
    permute: bool

    def __call__(self) -> Problem:
        return permuted(self.source(), 0) if self.permute else self.source()


def studies(args: argparse.Namespace) -> dict[str, Study]:
    """One for each kind of labels, at the recipe's clip norm or another; learning rate times clip norm stays."""
    source = TaskSource.of("emnist", args.data, {})
    recipe, more = load("emnist", args.recipe)
    recipe = replace(recipe, max_grad_norm=args.clip or recipe.max_grad_norm)
    recipe = shortened(recipe, source().population, args.epsilon, more["delta"], args.share)
    known = SETTINGS["emnist"][PDA]
    setting = Setting(known.lr / recipe.max_grad_norm, args.alpha_end or known.alpha_end)
    return {
        labels: Study(
            folder=args.out / labels,
            request=Request(
                task="emnist",
                recipe=recipe,
                epsilon=None,
                delta=more["delta"],
                methods=tuple(arms),
                seeds={method.name: args.seeds for method in arms},
                settings={m.name: setting if m.searches_alpha else Setting(setting.lr) for m in arms},
                options={"labels": labels},
            ),
            source=Labelled(source, permute=labels == "permuted"),
            unsafe_seeds=True,
        )
        for labels, arms in LABELS.items()
    }


def runs_of(study: Study, labels: str) -> Iterator[dict[str, Any]]:
    """The runs of a finished study under the names of the arms, with the trust at their end."""
    for run in study.summary().runs:
        (method,) = (method for method in LABELS[labels] if method.name == run.method)
        folder = study.folder / "runs" / f"{run.method}-seed-{run.seed}"
        figures = {"final": run.final, "curve": run.curve, "trust": trust(folder), "plan": run.plan}
        yield {"arm": LABELS[labels][method], "seed": run.seed, **figures}


def trust(folder: Path) -> list[dict[str, float]]:
    """What was left of the trust in the public gradient when the run ended; nothing for a run without a guard."""
    tensors, about = checkpoint.read(RunFolder(folder).checkpoint)
    evidence = [tensor.tolist() for name, tensor in tensors.items() if name.endswith("evidence")]
    return [
        {"step": about["step"], "score": total / squares**0.5 if squares else 0.0, "trust": left}
        for total, squares, left in evidence
    ]


def permuted(problem: Problem, seed: int) -> Problem:
    """The problem with its public labels dealt out at random over the public rows."""
    images, labels = problem.public
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return replace(problem, public=(images, labels[order]))


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
    colours = looks_of([])
    with style():
        from matplotlib.figure import Figure  # `style` has said what is missing if it is

        figure = Figure(figsize=(9, 4.3), layout="constrained")
        loss, trust = figure.subplots(1, 2)
        for arm, method in LOOKS.items():
            guard = arm.endswith("guard")
            label = WORDS[arm.removesuffix("+guard")] + (", guarded" if guard else "")
            # Where the guard never acts, its line lies on the other one: thin on broad, both are seen.
            how: dict[str, Any] = {"linestyle": "--", "linewidth": 1.5} if guard else {"linewidth": 4.5, "alpha": 0.4}
            how |= {"color": colours[method.name].colour, "label": label}
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


def main() -> None:
    args = arguments()
    if args.plot is not None:
        plot(read_json(args.out / "fallback.json" if args.out else FIGURES), args.plot)
        return
    tell = partial(print, flush=True) if not args.json else lambda _: None
    honest, wrong = (study for study in studies(args).values())
    first, second = (wrong, honest) if args.bad_start else (honest, wrong)
    first.go(workers_count=args.workers, tell=tell)
    share_starts(first.folder, second.folder)
    second.go(workers_count=args.workers, tell=tell)
    runs = [*runs_of(honest, "honest"), *runs_of(wrong, "permuted")]
    request = honest.request
    result = {
        "epsilon": args.epsilon,
        "clip": request.recipe.max_grad_norm,
        "setting": request.settings[PDA.name].to_json(),
        "share": args.share,
        "seeds": args.seeds,
        "bad_start": args.bad_start,
        "versions": versions(),
        **summary(runs),
        "runs": runs,
    }
    write_json(args.out / "fallback.json", result)
    rows = [{"arm": arm, "loss": result["loss"][arm]} for arm in ARMS]
    print(json.dumps(result)) if args.json else show("Test loss, mean over seeds", rows, ("arm", "loss"))


if __name__ == "__main__":
    main()
