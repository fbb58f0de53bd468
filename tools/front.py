"""Accuracy against epsilon of private heads on CIFAR-10: the picture of docs/heads.md.

    python -m tools.front [--json]

Reads what `python -m benchmarks.studies.heads head` found for each seed, from benchmarks/results/heads. Published
figures for 2,000 public images, or without any, are marked.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from halfsilver.report.plots import COLOURS, INK, new_axes, saved, style

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "pictures" / "heads-cifar10.svg"
RESULTS = ROOT / "benchmarks" / "results" / "heads"
PATTERN = "cifar10-width24-epochs60-seed?-head-network.json"
METHODS = ("warm", "whitened")

# Test accuracy in per cent at an epsilon, as published; and ours before there were heads. The last: where the name is.
ANCHORS = (
    (2.0, 85.5, "DP-SGD after diffusion samples, 2,000 public images", -13),
    (2.0, 75.1, "DOPE-SGD, 2,000 public images", 7),
    (1.0, 72.5, "random-process pretraining, no public data", -13),
    (3.0, 69.3, "scattering and linear, no public data", -13),
    (3.51, 70.1, "this library's network, 10 epochs", 7),
    (3.51, 67.0, "PDA-DPMD as published, 2,000 public images", -13),
)


def read(pattern: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """The records of all seeds, in their order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(pattern))]


def rows_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean accuracy and loss of each method at each epsilon over the seeds that have it, and the single accuracies."""
    found: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for one in (one for record in records for one in record["results"]):
        found.setdefault((one["method"], one["epsilon"]), []).append(one)
    rows = []
    for (method, epsilon), same in found.items():
        accuracies = [100 * one["accuracy"] for one in same]
        loss = fmean(one["loss"] for one in same)
        row = {"method": method, "epsilon": epsilon, "accuracy": fmean(accuracies), "loss": loss}
        rows.append({**row, "seeds": accuracies})
    return sorted(rows, key=lambda row: row["epsilon"] or 0)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    with style():
        figure, axes = new_axes(7, 4.4)
        for method, name, line in (
            ("nonprivate", "the same head without privacy", ":"),
            ("public", "network alone", "--"),
        ):
            level = next(row["accuracy"] for row in rows if row["method"] == method)
            axes.axhline(level, color=INK, linestyle=line, linewidth=1, label=f"{name}, {level:.1f} %")
        for method in METHODS:
            own = [row for row in rows if row["method"] == method]
            at = [row["epsilon"] for row in own]
            axes.plot(at, [row["accuracy"] for row in own], color=COLOURS[method], marker="_", label=method)
            for row in own:
                axes.plot([row["epsilon"]] * len(row["seeds"]), row["seeds"], "o", color=COLOURS[method], markersize=4)
        for epsilon, accuracy, name, above in ANCHORS:
            axes.plot([epsilon], [accuracy], "D", color="#888888", markersize=5)
            axes.annotate(name, (epsilon, accuracy), (0, above), textcoords="offset points", fontsize=8, ha="center")
        axes.set_xscale("log")
        ticks = sorted({row["epsilon"] for row in rows if row["method"] in METHODS})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="epsilon (delta = 1e-5)", ylabel="test accuracy, per cent", xlim=(0.4, 10), ylim=(62.5, 87.5))
        axes.legend(frameon=False, fontsize=9, loc="lower left")
        saved(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the means, draw nothing")
    parser.add_argument("--pattern", default=PATTERN)
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args()
    records = read(args.pattern)
    if not records:
        sys.exit(f"no file {args.pattern} in {RESULTS}")
    rows = rows_of(records)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    draw(rows, args.out)


if __name__ == "__main__":
    main()
