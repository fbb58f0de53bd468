r"""Private training on one file per record, read by 0, 1 or 2 processes, against a plain loop on the same files.

    python -m benchmarks.speed.files --data DIR --folder DIR --out FILE

The pictures are 2,560 of CIFAR-10, enlarged to 256 x 256 and stored as JPEG, so that opening one costs what it costs
for photographs. Each is read back as 64 x 64 numbers. Plain PyTorch reads by a `DataLoader` with as many workers.
Contenders take turns. In each turn, 20 steps of (expected) 256 pictures are timed, after a first one that starts the
readers. Both train in one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import halfsilver as hs
from halfsilver.runs.folder import versions, write_json
from halfsilver.tasks import files

PICTURES, BATCH, STEPS, SIDE, STORED = 2560, 256, 20, 64, 256
WORKERS = (0, 1, 2)


class Pictures(Dataset[Any]):
    """JPEG files of a folder, with the label in the name."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(self.paths[i]) as picture:
            pixels = np.asarray(picture.resize((SIDE, SIDE)), dtype=np.float32)
        return torch.from_numpy(pixels / 255).permute(2, 0, 1), int(self.paths[i].stem.rpartition("-")[2])


def stored(data: Path, folder: Path) -> Pictures:
    """The files, unless they are there."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    if len(Pictures(folder)) != PICTURES:
        images, labels = files.cifar10(data, "train")
        for i in range(PICTURES):
            small = Image.fromarray(images[i].permute(1, 2, 0).numpy())
            small.resize((STORED, STORED)).save(folder / f"{i:05}-{int(labels[i])}.jpg", quality=90)
    return Pictures(folder)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5408, 10),
    )


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plain(pictures: Pictures, workers: int, folder: Path) -> float:
    """Seconds per step of a usual loop."""
    model, times = network(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(pictures, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    while len(times) <= STEPS:
        for batch in loader:
            loss_fn(model, batch).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
    return (times[STEPS] - times[0]) / STEPS


def private(pictures: Pictures, workers: int, folder: Path) -> float:
    """Seconds per step of a private run, ledger and noise included."""
    model, times = network(), list[float]()
    plan = hs.PrivacyPlan(
        steps=STEPS + 1, sampling_rate=BATCH / PICTURES, expected_batch_size=BATCH, noise_multiplier=1.0
    )
    trainer = hs.Trainer(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        plan=plan,
        callbacks=[lambda report: times.append(time.perf_counter())],
        checkpoint_seconds=1e9,
        progress=False,
        performance=hs.Performance(micro_batch_size=64),
    )
    example = (torch.zeros(3, SIDE, SIDE), torch.tensor(0))
    trainer.fit(hs.PrivateData(pictures, example=example, workers=workers), run_dir=folder / f"run-{time.time_ns()}")
    return (times[STEPS] - times[0]) / STEPS


CONTENDERS: dict[str, Callable[[Pictures, int, Path], float]] = {"plain": plain, "private": private}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar-10-batches-bin")
    parser.add_argument("--folder", type=Path, required=True, help="for pictures and runs")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pictures = stored(args.data, args.folder / "pictures")
    keys = [(name, workers) for workers in WORKERS for name in CONTENDERS]
    times: dict[tuple[str, int], list[float]] = {key: [] for key in keys}
    for _ in range(args.reps):
        for name, workers in keys:
            times[name, workers].append(CONTENDERS[name](pictures, workers, args.folder))
    found = [
        {"workers": w, "contender": name, "seconds": statistics.median(t), "min": min(t), "max": max(t)}
        for (name, w), t in times.items()
    ]
    result = {"pictures": PICTURES, "batch": BATCH, "steps": STEPS, "reps": args.reps, "rows": found}
    if args.out:
        write_json(args.out, {**result, "versions": versions()})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
