"""What brings what on CIFAR-10: the picture of docs/results.md, from committed figures.

    python -m tools.steps [--json]

Each bar is the test accuracy with one part more: private steps from the start of the recipe (network, epsilon 3.51), a
better public start, a private head on it (epsilon 4), and the head in coordinates from public rows (epsilon 4).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from halfsilver.report.plots import COLOURS, INK, new_axes, saved, style
from tools.best import read, rows

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "steps-cifar10.svg"


def steps() -> list[dict[str, Any]]:
    """Name, accuracy in per cent and kind of each step, in order."""
    study = read("studies/cifar10-eps3.51.json")["runs"]

    def mean(method: str) -> float:
        return 100 * fmean(run["final"]["accuracy"] for run in study if run["method"] == method)

    head = next(row for row in rows() if row.task.startswith("CIFAR-10") and row.epsilon == 4)
    of_head = {name: 100 * found["accuracy"] for name, found in head.figures.items()}
    return [
        {"step": "public start of the paper's network", "accuracy": mean("public"), "kind": "public"},
        {"step": "and private steps, epsilon 3.51", "accuracy": mean("warm"), "kind": "warm"},
        {"step": "the same, with the paper's mirror", "accuracy": mean("pda"), "kind": "pda"},
        {"step": "better public start (batch norm)", "accuracy": of_head["public"], "kind": "public"},
        {"step": "and a private head, epsilon 4", "accuracy": of_head["warm"], "kind": "warm"},
        {"step": "the same, in public coordinates", "accuracy": of_head["whitened"], "kind": "whitened"},
        {"step": "the head without privacy", "accuracy": of_head["nonprivate"], "kind": "nonprivate"},
    ]


def draw(found: list[dict[str, Any]], file: Path) -> None:
    with style():
        figure, axes = new_axes(7, 3.2)
        places = range(len(found), 0, -1)
        colours = [COLOURS.get(one["kind"], "#bbbbbb") for one in found]
        axes.barh(list(places), [one["accuracy"] for one in found], color=colours, height=0.65)
        for place, one in zip(places, found, strict=True):
            axes.text(one["accuracy"] + 0.2, place, f"{one['accuracy']:.1f} %", va="center", fontsize=9, color=INK)
        axes.set_yticks(list(places), [one["step"] for one in found])
        axes.set(xlim=(60, 84), xlabel="test accuracy, per cent (axis from 60)")
        saved(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures, draw nothing")
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args()
    print(json.dumps(steps(), indent=1)) if args.json else draw(steps(), args.out)


if __name__ == "__main__":
    main()
