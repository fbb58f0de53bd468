"""What the models of a Stack Exchange study guess: how often an unknown word, and how often they are right.

    python -m benchmarks.guesses STUDY [--out FILE]

On the test rows of the curves, for the first seed. The accuracy of a study counts words of the vocabulary alone, so a
model that has learnt how often people write other words loses there what it gains over all targets.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.show import show
from halfsilver._tensors import eval_mode, trainable
from halfsilver.runs import read_json, versions, write_json
from halfsilver.study.problem import METHODS
from halfsilver.study.start import load_start
from halfsilver.tasks import stackexchange
from halfsilver.tasks.sentences import PAD, SPECIAL, UNKNOWN


@torch.no_grad()
def guesses(model: nn.Module, words: Tensor, targets: Tensor) -> dict[str, float]:
    with eval_mode(model):
        made = torch.cat([model(piece).argmax(2) for piece in torch.split(words, 200)])
    real, known = targets != PAD, targets >= len(SPECIAL)

    def share(what: Tensor, among: Tensor) -> float:
        return float(what[among].double().mean())

    return {
        "unknown guessed": share(made == UNKNOWN, real),
        "unknown written": share(targets == UNKNOWN, real),
        "right, vocabulary": share(made == targets, known),
        "right, all": share(made == targets, real),
    }


def load(model: nn.Module, study: Path, method: str) -> None:
    """The first seed's weights, as they were tested: the averaged ones."""
    if method == "public":
        load_start(model, study / "start" / "seed-0.safetensors")
        return
    found = load_file(study / "runs" / f"{method}-seed-0" / "checkpoint.safetensors")
    with torch.no_grad():
        for i, p in enumerate(trainable(model)):
            p.copy_(found[f"average.{i}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    about = read_json(args.study / "study.json")
    problem = stackexchange.problem(args.data, **about["options"])
    words, targets, _ = problem.curve
    model, rows = problem.make_model(), []
    for method in METHODS:
        load(model, args.study, method)
        rows.append({"method": method, **guesses(model, words, targets)})
    result: dict[str, Any] = {"task": about["task"], "epsilon": about["epsilon"], "rows": rows, "versions": versions()}
    if args.out is not None:
        write_json(args.out, result)
    print(json.dumps(result)) if args.json else show("Guesses", rows, list(rows[0]))


if __name__ == "__main__":
    main()
