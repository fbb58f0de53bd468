"""Does the rehearsal turn down a geometry of wrong public rows? EMNIST, with four sources of public rows.

    python -m benchmarks.studies.guard --out DIR [--json]

    right     EMNIST's own public rows
    few       20 of them
    cifar     CIFAR-10 images in grey, cut to 28 x 28 pixels
    noise     pictures of uniform noise

The start is trained on one part of EMNIST's public rows. The others are held out: half of them stand in for private
rows, half are scored. For each source, `choose_geometry` rehearses the first 40 steps of the plan with the geometry of
that source and without one. No private row and no test row is read.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.show import show
from halfsilver import Trainer, Whitened
from halfsilver._core.tensors import trainable
from halfsilver.mirror.rows import PublicRows
from halfsilver.runs.folder import versions, write_json
from halfsilver.study import choose_geometry
from halfsilver.study.arena import SEARCH, make_plan, search_arena
from halfsilver.study.start import load_start, make_start, new_model, precision
from halfsilver.tasks import files
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

EPSILON, SEED, STEPS, LR, DAMPING = 0.48, 100, 40, 0.025, 1.0
GREY = torch.tensor([0.299, 0.587, 0.114])


def sources(data: Path, right: tuple[Tensor, Tensor]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Public rows by name. The labels of pictures of something else are not used: `Whitened` draws them."""
    labels = right[1]
    yield "right", right
    yield "few", (right[0][:20], labels[:20])
    images = files.cifar10(data, "train")[0][: len(labels), :, 2:30, 2:30].float() / 255
    yield "cifar", ((images * GREY[:, None, None]).sum(1, keepdim=True), labels[: len(images)])
    noise = torch.rand(right[0].shape, generator=torch.Generator().manual_seed(0))
    yield "noise", (noise, labels)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if args.data is None:
        parser.error("give --data, or set HALFSILVER_DATA")
    data = Path(args.data)
    recipe, more = load("emnist", "short")
    problem = TaskSource.of("emnist", data, {"validation": 0})()
    plan = make_plan(recipe, problem.population, EPSILON, more["delta"])
    part = search_arena(problem, recipe, plan, SEARCH["public"]).problem
    start = args.out / "start" / f"search-{SEED}.safetensors"
    make_start(part, recipe, SEED, start)
    right: Any = PublicRows(part.public).batch(slice(None), torch.device("cpu"))
    # Neither stand-in rows nor scored ones have been seen by the start. Stand-in rows may be repeated.
    stand_in, scored = part.private, part.test
    once = min(len(stand_in[1]), round(0.4 * len(PublicRows(problem.public))))
    held_out = tuple(torch.cat([a[:once], b]) for a, b in zip(stand_in, scored, strict=True))
    rows: list[dict[str, Any]] = []
    for name, public in sources(data, right):
        model = new_model(problem, SEED)
        load_start(model, start)
        trainer = Trainer(
            model,
            problem.loss_fn,
            optimizer=torch.optim.SGD(trainable(model), lr=LR),
            plan=plan,
            average=recipe.average,
            performance=precision(recipe),
        )
        candidates = [Whitened(damping=DAMPING)]
        choice = choose_geometry(trainer, public, held_out, candidates=candidates, lr_factors=(0.5, 1.0), steps=STEPS)
        tried = [{"geometry": repr(t.geometry), "lr_factor": t.lr_factor, "loss": t.loss} for t in choice.tried]
        rows.append(
            {
                "public rows": name,
                "chosen": repr(choice.geometry),
                "ahead": choice.ahead,
                "standard error": choice.standard_error,
                "scored": choice.rows,
                "tried": tried,
            }
        )
        print(f"{name}: {choice}", flush=True)
    config = {"epsilon": EPSILON, "steps": STEPS, "lr": LR, "damping": DAMPING, "seed": SEED, "plan": plan.to_dict()}
    result = {"config": config, "versions": versions(), "rows": rows}
    write_json(args.out / "guard.json", result)
    if args.json:
        print(json.dumps(result))
    else:
        show("Geometry of four sources", rows, ["public rows", "chosen", "ahead", "standard error", "scored"])


if __name__ == "__main__":
    main()
