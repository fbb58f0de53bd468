"""What several views of a record cost in a private step.

    python -m benchmarks.speed.views --views 1,2,4 --reps 7 --json --out FILE

The network of CIFAR-10 on 64 records, one thread. A view mirrors an image at random. Steps with different numbers of
views take turns, and ratios are taken within a repetition, of processor time. `per view` is the ratio to a step with
one view, divided by the number of views. `peak MB` is the memory of two steps above that of the idle process, each in a
fresh process, with 32 records at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

import halfsilver as hs
from benchmarks.show import show
from benchmarks.speed.__main__ import circumstances
from benchmarks.speed.contenders import Options
from benchmarks.speed.contenders.ours import Ours
from benchmarks.speed.memory import peak_above_idle
from benchmarks.speed.models import Workload, workload
from benchmarks.speed.race import build
from halfsilver._core.tensors import LossFn
from halfsilver.privacy.gradients import Performance

ROWS, PIECE = 64, 32


def mirrored(batch: Any) -> Any:
    images, labels = batch
    flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flipped, images.flip(-1), images), labels


@dataclass(frozen=True)
class Viewed(Workload):
    """A workload whose loss is the mean over so many views."""

    views: int = 1

    @property
    def loss_fn(self) -> LossFn:
        return hs.views(super().loss_fn, mirrored, self.views)


class InPieces(Ours):
    """With so many records at once, whatever is fastest, because memory goes with their number."""

    def _speed(self, options: Options) -> Performance:
        return Performance(micro_batch_size=PIECE)


def stepper(views: int, kind: type[Ours] = Ours) -> Ours:
    plain = workload("cifar")
    parts = {field.name: getattr(plain, field.name) for field in fields(plain)}
    inputs, labels = plain.batch
    task = Viewed(**{**parts, "batch": (inputs[:ROWS], labels[:ROWS])}, views=views)
    return kind(task, task.model(), Options())


def peak(views: int) -> float:
    """Of this process, which must not have trained the network before."""

    def steps() -> None:
        ours = stepper(views, InPieces)
        ours.step()
        ours.step()

    build("halfsilver", workload("tiny"), Options()).step()  # libraries load parts of themselves at their first use
    return peak_above_idle(steps)


def in_fresh_process(views: int) -> float:
    command = [sys.executable, "-m", "benchmarks.speed.views", "--peak-of", str(views)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def cost(numbers: Sequence[int], reps: int) -> list[dict[str, Any]]:
    """Medians over `reps` rounds, in which each number of views has one step."""
    steppers = {views: stepper(views) for views in numbers}
    for ours in steppers.values():
        ours.step()
    ratios: dict[int, list[float]] = {views: [] for views in numbers}
    for rep in range(reps):
        seconds = {}
        for views in sorted(steppers, reverse=bool(rep % 2)):
            started = time.process_time()
            steppers[views].step()
            seconds[views] = time.process_time() - started
        for views in numbers:
            ratios[views].append(seconds[views] / seconds[numbers[0]])
    return [
        {
            "views": views,
            "ratio": statistics.median(found),
            "per view": statistics.median(found) / views,
            "least": min(found),
            "most": max(found),
            "reps": reps,
        }
        for views, found in ratios.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--views", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak-of", type=int, help="print the peak memory with so many views, and nothing else")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.peak_of:
        print(peak(args.peak_of))
        return
    rows = [row | {"peak MB": round(in_fresh_process(row["views"]))} for row in cost(args.views, args.reps)]
    result = {"rows": rows, **circumstances(threads=1, reps=args.reps)}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result)) if args.json else show("Views of a record", rows, list(rows[0]))


if __name__ == "__main__":
    main()
