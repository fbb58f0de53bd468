"""Sampled batches with independent noise, and batches in turn with correlated noise: which model is better?

    python -m benchmarks.studies.turns_trained --out benchmarks/results/turns-trained.json

A linear classifier of EMNIST's 47 classes over the pixels of 60,000 images, from zero, with 100 batches in a pass and 4
passes. Both arms have the same epsilon, clip norm, average and grid of learning rates. The best rate of an arm is that
with the highest mean accuracy on 5,000 set-aside rows, which its epsilon does not pay for. The figures are of the test
rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import halfsilver as hs
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.strategies import INDEPENDENT, Noise
from halfsilver.runs.folder import versions, write_json
from halfsilver.tasks import files

ARMS: dict[str, Noise] = {"sampled": INDEPENDENT, "correlated": hs.Correlated()}
EPSILONS, RATES, SEEDS = (0.5, 2.0, 8.0), (2.0, 4.0, 8.0, 16.0, 32.0), 3
BATCHES, PASSES, ROWS, SET_ASIDE, DELTA = 100, 4, 60_000, 5_000, 1e-6

Rows = tuple[Tensor, Tensor]


def losses(model: Any, batch: Rows) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def accuracy(model: nn.Module, rows: Rows) -> float:
    with torch.no_grad():
        return float((model(rows[0]).argmax(1) == rows[1]).double().mean())


def flat(rows: Rows) -> Rows:
    return rows[0].flatten(1).float().div(255), rows[1].long()


def train(plan: PrivacyPlan, rows: Rows, rate: float, held: Rows, test: Rows) -> tuple[float, float]:
    """Accuracy on set-aside and on test rows."""
    model = nn.Linear(784, 47)
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = hs.Trainer(model, losses, optimizer=optimizer, plan=plan, average=0.95, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer.fit(rows, run_dir=folder)
    return accuracy(model, held), accuracy(model, test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("HALFSILVER_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.process_time()
    images, labels = flat(files.emnist(args.data, "train"))
    test, rows = flat(files.emnist(args.data, "test")), []
    for epsilon in EPSILONS:
        for arm, noise in ARMS.items():
            plan = PrivacyPlan.calibrate(
                epsilon=epsilon, delta=DELTA, population=ROWS, batch_size=ROWS // BATCHES, epochs=PASSES, noise=noise
            )
            found: dict[float, list[tuple[float, float]]] = {rate: [] for rate in RATES}
            for seed in range(SEEDS):
                order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
                mine, held = order[:ROWS], order[ROWS : ROWS + SET_ASIDE]
                for rate in RATES:
                    parts = [(images[i], labels[i]) for i in (mine, held)]
                    found[rate].append(train(plan, parts[0], rate, parts[1], test))
            best = max(RATES, key=lambda rate: statistics.mean(f[0] for f in found[rate]))
            rows.append(
                {
                    "epsilon": epsilon,
                    "arm": arm,
                    "learning_rate": best,
                    "accuracy": [f[1] for f in found[best]],
                    "noise_multiplier": plan.noise_multiplier,
                    "all": {str(rate): [f[0] for f in values] for rate, values in found.items()},
                }
            )
            print(epsilon, arm, best, [round(f[1], 4) for f in found[best]], flush=True)
    setting = {"batches": BATCHES, "passes": PASSES, "records": ROWS, "delta": DELTA, "seeds": SEEDS}
    seconds = round(time.process_time() - started)
    write_json(args.out, {**setting, "rows": rows, "processor_seconds": seconds, "versions": versions()})


if __name__ == "__main__":
    main()
