"""Why a mirror helps or not: what clipping does to the gradients of a study's models, and where the public one points.

    python -m benchmarks.studies.gradients STUDY [--rows 1000] [--out FILE]

Test rows stand in for private ones, so no private row is read. For the start and the finished runs of warm and pda:

- `row norm`, `clipped`: the median norm of a row's gradient, and the share of rows above the study's clip norm;
- `bent by clipping`: how far the mean of the clipped gradients lies from their mean, as a share of its length;
- `test norm`, `public norm`, `cosine`: the mean gradients on test rows and on public rows, and the angle between them;
- `worth`: what a step along the public gradient takes off the test loss, where one along the test gradient takes off 1.

A mirror step gives the private gradient the weight `alpha` and the public one `1 - alpha`: apart from the noise, it
gets ahead of the private gradient alone where `worth` is above 1, or where clipping has bent that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.studies.overfit import each_model, options, tell
from halfsilver._core.tensors import eval_mode, trainable
from halfsilver.runs.folder import read_json
from halfsilver.study.problem import Problem


def row_gradients(problem: Problem, model: nn.Module, rows: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """One flat gradient for each row, without dropout, one backward pass each: slow, and nothing to get wrong."""
    with eval_mode(model):
        for row in zip(*(torch.split(column, 1) for column in rows), strict=True):
            gradients = torch.autograd.grad(problem.loss_fn(model, row).sum(), trainable(model))
            yield torch.cat([g.flatten() for g in gradients]).double()


def figures(problem: Problem, model: nn.Module, clip_norm: float, rows: int) -> dict[str, float]:
    size = sum(p.numel() for p in trainable(model))
    test, cut, public = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    norms: list[float] = []  # as numbers: a small tensor kept for each row sits in the large holes that rows leave
    for g in row_gradients(problem, model, _first(problem.test, rows)):
        norms.append(float(g.norm()))
        test += g
        cut += g * min(1.0, clip_norm / max(norms[-1], 1e-30))
    for number, g in enumerate(row_gradients(problem, model, _first(problem.public, rows))):
        public += (g - public) / (number + 1)
    test, cut = test / len(norms), cut / len(norms)
    of_rows = torch.tensor(norms)
    return {
        "row norm": float(of_rows.median()),
        "clipped": float((of_rows > clip_norm).double().mean()),
        "bent by clipping": float((cut - test).norm() / test.norm()),
        "test norm": float(test.norm()),
        "public norm": float(public.norm()),
        "cosine": float(torch.dot(test, public) / test.norm() / public.norm()),
        "worth": float(torch.dot(test, public) / torch.dot(test, test)),
    }


def _first(rows: Any, n: int) -> tuple[Tensor, ...]:
    return tuple(column[:n] for column in rows)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=1000, help="the first so many test rows, and public rows")
    args = parser.parse_args()
    asked = {"clip_norm": read_json(args.study / "study.json")["plan"]["max_grad_norm"], "rows": args.rows}
    result = each_model(args.study, args.data, partial(figures, **asked))
    tell("Gradients", {**asked, **result}, args)


if __name__ == "__main__":
    main()
