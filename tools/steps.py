"""What brings what: pictures of docs/results.md, from committed figures.

    python -m tools.steps [--json]

Each bar has one part more, all at one epsilon: the public start of the paper's network, private steps from it, the
paper's mirror, a better public start, private steps from that one, and the coordinates from public rows.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from halfsilver.report.plots import COLOURS, INK, new_axes, saved, style
from tools.best import read, rows

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"

Step = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a task came from the paper's start to the best model.

    Args:
        study: The study of the paper's network.
        best: The beginning of the row's name in the table of the best models.
        epsilon: Of all private steps.
        metric: What is drawn.
        limits: Of the axis.
        start: What the better start is.
        steps: What is trained from there.
    """

    study: str
    best: str
    epsilon: float
    metric: Literal["accuracy", "loss"]
    limits: tuple[float, float]
    start: str
    steps: str


WAYS = {
    "cifar10": Way(
        study="cifar10-eps3.51",
        best="CIFAR-10",
        epsilon=3.51,
        metric="accuracy",
        limits=(60, 84),
        start="better public start (batch norm)",
        steps="and a private head",
    ),
    "emnist": Way(
        study="emnist-eps0.48",
        best="EMNIST",
        epsilon=0.48,
        metric="accuracy",
        limits=(80, 92),
        start="better public start (batch norm, views)",
        steps="and a private head",
    ),
    "wikitext2": Way(
        study="wikitext2-eps1.71",
        best="WikiText-2",
        epsilon=1.71,
        metric="loss",
        limits=(4.8, 5.8),
        start="public start from other text and its own",
        steps="and private steps",
    ),
}


def steps(task: str) -> list[Step]:
    """Name, value (accuracies in per cent) and kind of each step, in order."""
    way = WAYS[task]
    scale = 100 if way.metric == "accuracy" else 1
    study = read(f"studies/{way.study}.json")["runs"]
    best = next(row for row in rows() if row.task.startswith(way.best) and row.epsilon == way.epsilon).figures

    def of_study(method: str) -> float:
        return scale * fmean(run["final"][way.metric] for run in study if run["method"] == method)

    first = [
        ("public start of the paper's network", of_study("public"), "public"),
        ("and private steps", of_study("warm"), "warm"),
        ("the same, with the paper's mirror", of_study("pda"), "pda"),
    ]
    names = {
        "public": way.start,
        "warm": way.steps,
        "whitened": "the same, in public coordinates",
        "nonprivate": "without privacy",
    }
    second = [(name, scale * best[kind][way.metric], kind) for kind, name in names.items() if kind in best]
    return [{"step": name, "value": value, "kind": kind} for name, value, kind in (*first, *second)]


def draw(task: str, file: Path) -> None:
    found, way = steps(task), WAYS[task]
    least, most = way.limits
    in_per_cent = way.metric == "accuracy"
    with style():
        figure, axes = new_axes(7, 0.9 + 0.33 * len(found))
        places = range(len(found), 0, -1)
        colours = [COLOURS.get(one["kind"], "#bbbbbb") for one in found]
        axes.barh(list(places), [one["value"] for one in found], color=colours, height=0.65)
        for place, one in zip(places, found, strict=True):
            shown = f"{one['value']:.1f} %" if in_per_cent else f"{one['value']:.3f}"
            axes.text(one["value"] + (most - least) / 120, place, shown, va="center", fontsize=9, color=INK)
        axes.set_yticks(list(places), [one["step"] for one in found])
        what = "test accuracy, per cent" if in_per_cent else "test loss, nats per word"
        axes.set(xlim=way.limits, xlabel=f"{what} at epsilon {way.epsilon:g} (axis from {least:g})")
        saved(figure, file)


def picture(task: str) -> Path:
    return PICTURES / f"steps-{task}.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures, draw nothing")
    args = parser.parse_args()
    if args.json:
        print(json.dumps({task: steps(task) for task in WAYS}, indent=1))
        return
    for task in WAYS:
        draw(task, picture(task))


if __name__ == "__main__":
    main()
