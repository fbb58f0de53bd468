"""What the mirror does to noise, in two dimensions: the picture of docs/idea.md.

    python -m tools.idea [--json] [--draws 20]

A least-squares problem with two weights, 2,000 private rows and 30 public ones, at epsilon 0.5. One step: noise before
and after the mirror. Then whole runs of DP-SGD and of mirror descent from one public start, each with the learning rate
that is best for it. The mirror is the matrix that `hs.Quadratic` applies. Noise comes from numpy with a fixed seed,
which is good enough for a picture and for nothing else. `--draws` repeats the runs on other rows, without a picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import halfsilver as hs
from halfsilver.mirror import Clock, Step
from halfsilver.report.plots import COLOURS, INK, saved, style

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "idea.svg"
STEPS, RATE, BATCH, CLIP = 50, 0.1, 200, 1.0
LEARNING_RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
BEST = np.array([1.0, 0.5])
TURN = np.deg2rad(35)
AXES = np.array([[np.cos(TURN), -np.sin(TURN)], [np.sin(TURN), np.cos(TURN)]])
SPREAD = AXES @ np.diag([0.04, 1.0]) @ AXES.T  # of the features, and so the Hessian of the loss
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """Rows of both kinds, the start that public rows give, the mirror, and the scale of the noise."""

    x: Floats
    y: Floats
    start: Floats
    mirror: Floats
    noise: float


def case(rng: np.random.Generator) -> Case:
    x, y = _rows(rng, 2000)
    public = _rows(rng, 30)
    plan = hs.PrivacyPlan.calibrate(
        epsilon=0.5, delta=1e-5, steps=STEPS, population=BATCH / RATE, batch_size=BATCH, max_grad_norm=CLIP
    )
    noise = plan.noise_multiplier * CLIP / BATCH
    start = np.linalg.lstsq(*public, rcond=None)[0].astype(np.float64)
    return Case(x=x, y=y, start=start, mirror=_mirror(*public), noise=noise)


def _rows(rng: np.random.Generator, n: int) -> tuple[Floats, Floats]:
    x = rng.multivariate_normal(np.zeros(2), SPREAD, size=n)
    return x, x @ BEST + rng.normal(scale=0.5, size=n)


def _mirror(x: Floats, y: Floats) -> Floats:
    """The matrix of hs.Quadratic: what it makes of the two unit vectors."""
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    psi = hs.PublicLoss(
        model, lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square() / 2, (torch.tensor(x), torch.tensor(y))
    )
    params, clock = [model.weight.detach()], Clock(step=0, total_steps=1, steps_per_epoch=1)
    quadratic = hs.Quadratic()
    state = quadratic.init(params=params, public=psi)
    turned = [
        quadratic.direction([unit[None]], state, Step(params=params, public=psi, clock=clock, lr=1.0))[0][0][0]
        for unit in torch.eye(2, dtype=torch.float64)
    ]
    return torch.stack(turned, 1).numpy()


def released(case: Case, theta: Floats, rng: np.random.Generator) -> Floats:
    """One noisy gradient for each row of `theta`: Poisson sample, clip, sum, noise, divide by the declared size."""
    residual = theta @ case.x.T - case.y
    clipped = residual * np.minimum(1, CLIP / (np.abs(residual) * np.linalg.norm(case.x, axis=1)))
    drawn = rng.random(residual.shape) < RATE
    return np.asarray((clipped * drawn) @ case.x / BATCH + rng.normal(scale=case.noise, size=theta.shape))


def paths(case: Case, mirror: Floats, lr: float, *, runs: int, seed: int) -> Floats:
    """All iterates of all runs, (steps + 1, runs, 2), from the public start."""
    rng = np.random.default_rng(seed)
    theta = [np.tile(case.start, (runs, 1))]
    for _ in range(STEPS):
        theta.append(theta[-1] - lr * released(case, theta[-1], rng) @ mirror.T)
    return np.array(theta)


def excess(theta: Floats) -> Floats:
    """How much the expected loss exceeds that of the best weights."""
    off = theta - BEST
    return np.asarray(np.einsum("...i,ij,...j->...", off, SPREAD, off) / 2)


def best(case: Case, mirror: Floats, *, runs: int) -> tuple[float, Floats]:
    """The learning rate with the least mean excess, and the paths that it takes on other random numbers."""
    means = [excess(paths(case, mirror, lr, runs=50, seed=2)[-1]).mean() for lr in LEARNING_RATES]
    lr = LEARNING_RATES[int(np.argmin(means))]
    return lr, paths(case, mirror, lr, runs=runs, seed=1)


def figures(case: Case, *, runs: int) -> tuple[dict[str, Any], dict[str, Floats]]:
    """Excess of the start and of both methods, and their paths."""
    found = {name: best(case, mirror, runs=runs) for name, mirror in (("warm", np.eye(2)), ("pda", case.mirror))}
    rows = {name: {"lr": lr, "excess": float(excess(path[-1]).mean())} for name, (lr, path) in found.items()}
    return {"start": float(excess(case.start)), **rows}, {name: path for name, (_, path) in found.items()}


def draw(case: Case, found: dict[str, Any], walks: dict[str, Floats], path: Path) -> None:
    """One step and many, without the mirror and with it."""
    from matplotlib.figure import Figure

    once = 0.8 * released(case, np.tile(case.start, (200, 1)), np.random.default_rng(3))
    near, far = (case.start, 0.09), (case.start + (BEST - case.start) * 0.62, 0.42)
    with style():
        figure = Figure(figsize=(8, 8.4), layout="constrained")
        panels = figure.subplots(2, 2).flat
        for axes, name, step in zip(panels, ("warm", "pda"), (once, once @ case.mirror.T), strict=False):
            ground(axes, case, *near)
            axes.plot(*(case.start - step).T, ".", ms=4, alpha=0.6, color=COLOURS[name])
        panels[0].set_title("1  One step of DP-SGD, 200 times:\nnoise is round", loc="left")
        panels[1].set_title("2  The same 200 through the mirror:\nsquashed where the loss is steep", loc="left")
        for axes, (name, walk) in zip(panels[2:], walks.items(), strict=True):
            ground(axes, case, *far)
            axes.plot(*walk[:, 0].T, color=INK, lw=0.7)
            axes.plot(*walk[-1].T, ".", ms=4, alpha=0.6, color=COLOURS[name])
            words = "DP-SGD" if name == "warm" else "the mirror"
            title = f"{STEPS} steps with {words}, 200 runs:\nmean excess loss {found[name]['excess']:.5f}"
            axes.set_title(f"{3 if name == 'warm' else 4}  {title}", loc="left")
        saved(figure, path)


def ground(axes: Any, case: Case, centre: Floats, half: float, *, start: bool = True) -> None:
    """Lines of equal loss, the public start and the best point, in a square window."""
    x, y = (np.linspace(c - half, c + half, 200) for c in centre)
    loss = np.sqrt(excess(np.stack(np.meshgrid(x, y), -1)))
    axes.contour(x, y, loss, levels=12, colors=INK, alpha=0.25, linewidths=0.7)
    points = (("public start", case.start, "s", 8), ("best", BEST, "*", 14))
    for name, point, marker, size in points if start else points[1:]:
        axes.plot(*point, marker, ms=size, color=INK, zorder=3)
        axes.annotate(name, point, xytext=(-10, 8), textcoords="offset points", ha="right", annotation_clip=True)
    axes.set(xlim=x[[0, -1]], ylim=y[[0, -1]], xticks=[], yticks=[], aspect="equal")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--draws", type=int, default=0, help="other rows, instead of the picture")
    args = parser.parse_args(argv)
    rows = []
    for seed in range(args.draws or 1):
        one = case(np.random.default_rng(seed))
        found, walks = figures(one, runs=20 if args.draws else 200)
        rows.append({"seed": seed, **found})
        if not args.draws:
            draw(one, found, walks, PICTURE)
    print(json.dumps(rows) if args.json else "\n".join(map(str, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
