"""What the models of a Stack Exchange study guess: how often an unknown word, how often they are right, and the loss.

    python -m benchmarks.studies.guesses STUDY [--also RUN ...] [--out FILE]

On the test rows of the curves, for the first seed and for the runs in the folders RUN. The accuracy of a study counts
words of the vocabulary alone, so a model that has learnt how often people write other words loses there what it gains
over all targets. The loss is shown as a sum: what the words of the vocabulary, and what the unknown ones add to it.
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
from torch.nn import functional

from benchmarks.show import show
from halfsilver._core.tensors import eval_mode, trainable
from halfsilver.runs.folder import read_json, versions, write_json
from halfsilver.study.method import METHODS, PUBLIC
from halfsilver.study.start import load_start
from halfsilver.tasks import stackexchange
from halfsilver.tasks.sentences import PAD, SPECIAL, UNKNOWN


@torch.no_grad()
def guesses(model: nn.Module, words: Tensor, targets: Tensor) -> dict[str, float]:
    made, losses = [], []
    with eval_mode(model):
        for piece, wanted in zip(torch.split(words, 200), torch.split(targets, 200), strict=True):
            logits = model(piece)
            made.append(logits.argmax(2))
            losses.append(functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none"))
    guessed, loss = torch.cat(made), torch.cat(losses).double()
    real, known, unknown = targets != PAD, targets >= len(SPECIAL), targets == UNKNOWN

    def share(what: Tensor, among: Tensor) -> float:
        return float(what[among].double().mean())

    return {
        "unknown guessed": share(guessed == UNKNOWN, real),
        "unknown written": share(unknown, real),
        "right, vocabulary": share(guessed == targets, known),
        "right, all": share(guessed == targets, real),
        "loss, vocabulary": share(loss * known, real),
        "loss, unknown": share(loss * unknown, real),
        "loss, all": share(loss, real),
    }


def load(model: nn.Module, run: Path) -> None:
    """The weights of a run as they were tested: the averaged ones."""
    found = load_file(run / "checkpoint.safetensors")
    with torch.no_grad():
        for i, p in enumerate(trainable(model)):
            p.copy_(found[f"average.{i}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="folders of further runs")
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    about = read_json(args.study / "study.json")
    problem = stackexchange.problem(args.data, **about["options"])
    words, targets, _ = problem.curve
    shown = problem.public[1]
    unknown = float((shown[shown != PAD] == UNKNOWN).double().mean())
    model = problem.make_model()
    load_start(model, args.study / "start" / "seed-0.safetensors")
    rows = [{"method": PUBLIC.name, **guesses(model, words, targets)}]
    for folder in [*(args.study / "runs" / f"{method.name}-seed-0" for method in METHODS if method.trains), *args.also]:
        load(model, folder)
        rows.append({"method": folder.name.removesuffix("-seed-0"), **guesses(model, words, targets)})
    result: dict[str, Any] = {"task": about["task"], "epsilon": about["epsilon"], "unknown in public text": unknown,
                              "rows": rows, "versions": versions()}  # fmt: skip
    if args.out is not None:
        write_json(args.out, result)
    print(json.dumps(result)) if args.json else show("Guesses", rows, list(rows[0]))


if __name__ == "__main__":
    main()
