"""How much less noise does a geometry need, layer by layer? From the public rows of a task, before any private step.

    python -m benchmarks.studies.spectra --out DIR [--tasks emnist,cifar10,...] [--dampings 1,0.1] [--json]

A factor M with M^T M = P^-1 makes the moment P of a side round. Noise before a mirror with the same quadratic costs
tr(P) tr(P^-1), noise in its coordinates d^2. `inputs` and `outputs` are the roots of the ratio,
sqrt(tr(P) tr(P^-1)) / d, and `both` is their product: the factor by which the geometry lowers the noise at the same
progress, if moments of public rows are those of the loss. 1 means that there is nothing to gain. Damping bounds it:
with damping t no side can gain more than sqrt((1 + t) / t).

The start is that of the recipe, trained on public rows; DIR keeps it. No private row and no test row is read.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.show import show
from halfsilver import Whitened
from halfsilver.mirror.geometry import Factor, ShapedEmbedding, ShapedRecurrent
from halfsilver.runs.folder import versions, write_json
from halfsilver.study.start import load_start, make_start, new_model
from halfsilver.tasks.recipes import load
from halfsilver.tasks.source import TaskSource

RECIPES = {"emnist": "short", "cifar10": "fifth", "wikitext2": "fifth", "stackexchange": "fifth"}
SEED = 0


def gain(factor: Factor, size: int) -> float:
    """|M| |M^-1| / d in the Frobenius norm."""
    one = torch.eye(size, dtype=torch.float64)
    return float(factor.mul(one).norm() * factor.solve(one).norm()) / size


def gain_of_scales(scales: Tensor) -> float:
    """The same for a diagonal."""
    scales = scales.double().flatten()
    return float(scales.norm() * (1 / scales).norm()) / len(scales)


def sizes(layer: Any) -> tuple[int, int]:
    """Numbers on the input and on the output side of a shaped layer; for embeddings, tokens and width."""
    original = layer.original
    if isinstance(layer, ShapedRecurrent):
        return original.input_size, 1
    if isinstance(layer, ShapedEmbedding):
        return original.num_embeddings, original.embedding_dim
    inputs = len(layer.before.matrix) or len(layer.before.scale)
    return inputs, len(layer.after.matrix) or len(layer.after.scale)


def rows_of(task: str, data: Path, out: Path, damping: float) -> list[dict[str, Any]]:
    """One row for each layer that is whitened."""
    recipe, more = load(task, RECIPES[task])
    set_aside = {} if recipe.local else {"validation": 0}  # users are set aside by a hash of their names
    problem = TaskSource.of(task, data, {**set_aside, **more.get("task", {})})()
    path = out / "start" / f"{task}-{SEED}.safetensors"
    if not path.exists():
        make_start(problem, recipe, SEED, path)
    model = new_model(problem, SEED)
    load_start(model, path)
    names = {id(module): name for name, module in model.named_modules()}
    rows = []
    for _, _, layer in Whitened(damping=damping).shape(model, problem.loss_fn, problem.public).layers:
        own: Any = layer
        inputs, outputs = sizes(own)
        before = gain_of_scales(own.tokens) if isinstance(own, ShapedEmbedding) else gain(own.before, inputs)
        after = 1.0 if isinstance(own, ShapedRecurrent) else gain(own.after, outputs)
        kind = type(own.original).__name__
        rows.append(
            {
                "task": task,
                "damping": damping,
                "layer": f"{names[id(own.original)]} ({kind})",
                "parameters": sum(p.numel() for p in own.own().values()),
                "size": f"{inputs} x {outputs}",
                "inputs": before,
                "outputs": after,
                "both": before * after,
            }
        )
    whole = sum(row["parameters"] for row in rows)
    mean = math.exp(math.fsum(row["parameters"] / whole * math.log(row["both"]) for row in rows))
    all_layers = {"layer": "all, weighted by parameters", "parameters": whole, "both": mean}
    return [*rows, {"task": task, "damping": damping, **all_layers}]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(RECIPES))
    parser.add_argument("--dampings", type=lambda text: [float(t) for t in text.split(",")], default=[1.0, 0.1])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    if args.data is None:
        parser.error("give --data, or set HALFSILVER_DATA")
    torch.set_num_threads(1)
    rows = [r for task in args.tasks for t in args.dampings for r in rows_of(task, Path(args.data), args.out, t)]
    result = {"seed": SEED, "versions": versions(), "rows": rows}
    write_json(args.out / "spectra.json", result)
    if args.json:
        print(json.dumps(result))
    else:
        show("Noise that a geometry saves", rows, ["task", "damping", "layer", "size", "inputs", "outputs", "both"])


if __name__ == "__main__":
    main()
