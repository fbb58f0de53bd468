"""How long a private step takes, and what memory it needs, against the number of private records.

    python -m benchmarks.speed.population --records 100000000

A transformer takes 32 sequences (expected) of so many in a step, as in `benchmarks.speed.scale`. All sequences share
one place in memory, so that the set itself takes none. Plain PyTorch draws 32 by number. Both take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.memory import peak_above_idle
from benchmarks.speed.models import workload
from halfsilver import PrivacyPlan
from halfsilver._core.tensors import map_batch, trainable
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient

MODEL, BATCH = "gpt/128x32x64", 32


def measured(records: int, reps: int) -> dict[str, Any]:
    """Medians of seconds per step, and the peak of both in MB."""
    task = workload(MODEL)
    model, stored = task.model(), map_batch(lambda t: t[:1].expand(records, *t.shape[1:]), task.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    times: dict[str, list[float]] = {"plain": [], "halfsilver": []}

    def plain() -> None:
        drawn = torch.randint(records, (BATCH,))
        task.loss_fn(model, map_batch(lambda t: t[drawn], stored)).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            plan = PrivacyPlan(
                steps=10_000, sampling_rate=BATCH / records, expected_batch_size=BATCH, noise_multiplier=1.0
            )
            ledger = Ledger.open(Path(folder) / "ledger.jsonl")
            source = PrivateGradient(model, task.loss_fn, PrivateData(stored), plan, ledger=ledger, run_id="population")

            def private() -> None:
                for p, g in zip(trainable(model), source.release(), strict=True):
                    p.grad = g
                optimizer.step()
                optimizer.zero_grad()

            steps: dict[str, Callable[[], None]] = {"plain": plain, "halfsilver": private}
            for _ in range(reps + 1):
                for name, step in steps.items():
                    started = time.perf_counter()
                    step()
                    times[name].append(time.perf_counter() - started)

    plain()  # libraries load parts of themselves when they are first used
    peak = peak_above_idle(run)
    found = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    return {"records": records, "reps": reps, "seconds": found, "peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--reps", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measured(args.records, args.reps)))


if __name__ == "__main__":
    main()
