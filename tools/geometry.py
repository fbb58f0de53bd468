"""What a geometry does to noise, in two dimensions: the picture of docs/geometry.md.

    python -m tools.geometry [--json] [--draws 20]

The problem of tools/idea.py. Above: the noise of one step, scaled by the Newton step that follows it, and the noise of
one step in whitened coordinates, both for gradients of the same median norm. Below: whole runs of mirror descent and
of DP-SGD in whitened coordinates, each with the learning rate that is best for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halfsilver.report.plots import COLOURS, INK, saved, style
from tools.idea import BEST, LEARNING_RATES, STEPS, Case, Floats, case, excess, ground, paths

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "geometry.svg"
RUNS = 200


def root_of(case: Case) -> Floats:
    """The root of the mirror's matrix, scaled so that gradients keep their median norm."""
    values, vectors = np.linalg.eigh(case.mirror)
    root = (vectors * np.sqrt(values)) @ vectors.T
    residual = np.abs(case.x @ case.start - case.y)
    norms = [np.median(residual * np.linalg.norm(x, axis=1)) for x in (case.x, case.x @ root)]
    return np.asarray(root * norms[0] / norms[1])


def shaped(case: Case, root: Floats) -> Case:
    """The problem for phi, where the weights are root phi."""
    return replace(
        case, x=case.x @ root, start=np.asarray(np.linalg.solve(root, case.start), dtype=np.float64), mirror=np.eye(2)
    )


def best(case: Case, root: Floats, *, runs: int = RUNS) -> tuple[float, Floats]:
    """The learning rate with the least mean excess, and the paths of the weights on other random numbers."""

    def walk(lr: float, runs: int, seed: int) -> Floats:
        return paths(case, case.mirror, lr, runs=runs, seed=seed) @ root.T

    lr = min(LEARNING_RATES, key=lambda lr: float(excess(walk(lr, 50, 2)[-1]).mean()))
    return lr, walk(lr, runs, 1)


def figures(own: Case) -> tuple[dict[str, Any], dict[str, Floats]]:
    """Excess of the start and of both methods, and their paths."""
    root = root_of(own)
    found = {"pda": best(own, np.eye(2)), "whitened": best(shaped(own, root), root)}
    rows = {name: {"lr": lr, "excess": float(excess(walk[-1]).mean())} for name, (lr, walk) in found.items()}
    return {"start": float(excess(own.start)), **rows}, {name: walk for name, (_, walk) in found.items()}


def draw(own: Case, found: dict[str, Any], walks: dict[str, Floats], path: Path) -> None:
    """The noise of one step, and many steps: noise before the mirror, and in its norm."""
    from matplotlib.figure import Figure

    root = root_of(own)
    noise = own.noise * np.random.default_rng(3).normal(size=(RUNS, 2))
    # The noise of steps that make equal progress: a Newton step, and one in coordinates with that curvature.
    after = noise @ own.mirror.T
    before = noise @ root.T * (np.trace(own.mirror) / np.trace(root @ root.T))
    far = (own.start + (BEST - own.start) * 0.62, 0.42)
    half = 1.1 * float(np.abs(np.concatenate([after, before])).max())
    names = ("pda", "whitened")
    with style():
        figure = Figure(figsize=(8, 8.4), layout="constrained")
        panels = figure.subplots(2, 2).flat
        for axes, name, cloud in zip(panels, names, (after, before), strict=False):
            ground(axes, own, BEST, half, start=False)
            axes.plot(*(BEST + cloud).T, ".", ms=4, alpha=0.6, color=COLOURS[name])
        panels[0].set_title("1  Noise first, then the mirror:\nfar along the flat direction", loc="left")
        panels[1].set_title("2  Noise in the mirror's own norm:\nshaped like the lines of equal loss", loc="left")
        for number, axes, name in zip((3, 4), list(panels)[2:], names, strict=True):
            ground(axes, own, *far)
            axes.plot(*walks[name][:, 0].T, color=INK, lw=0.7)
            axes.plot(*walks[name][-1].T, ".", ms=4, alpha=0.6, color=COLOURS[name])
            words = "the mirror" if name == "pda" else "the geometry"
            title = f"{STEPS} steps with {words}, {RUNS} runs:\nmean excess loss {found[name]['excess']:.5f}"
            axes.set_title(f"{number}  {title}", loc="left")
        saved(figure, path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.geometry", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--draws", type=int, help="repeat on so many other draws of the rows, and draw no picture")
    options = parser.parse_args(arguments)
    if options.draws:
        drawn = [figures(case(np.random.default_rng(seed)))[0] for seed in range(1, options.draws + 1)]
        means = {name: float(np.mean([d[name]["excess"] for d in drawn])) for name in ("pda", "whitened")}
        wins = sum(d["whitened"]["excess"] < d["pda"]["excess"] for d in drawn)
        print(json.dumps({"draws": options.draws, "mean excess": means, "whitened below pda": wins}))
        return 0
    own = case(np.random.default_rng(0))
    found, walks = figures(own)
    draw(own, found, walks, PICTURE)
    print(json.dumps(found) if options.json else f"Wrote {PICTURE.name}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
