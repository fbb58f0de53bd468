r"""Private training on a table that is larger than what is kept in memory, against a plain loop on the same file.

    python -m benchmarks.speed.large --rows 1000000 10000000 --folder DIR --out FILE

The table is an Arrow file of `datasets`, read by memory map: 16 features and a label per row. Both loops take the same
steps on batches of (expected) 10,000 rows. The plain one draws row numbers without noise and clipping. Steps take turns
in one process, in one thread; ratios are medians over steps. Memory is that of the process without file pages, which
the system takes back when it needs them (RssAnon), at its largest after a step, less what it was before the first.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import halfsilver as hs
from halfsilver.runs.folder import versions, write_json

FEATURES, CLASSES, BATCH, STEPS, CHUNK = 16, 4, 10_000, 20, 500_000


def made(rows: int, folder: Path) -> Path:
    """The table, unless it is there: points around one centre per class."""
    import pyarrow as pa

    path = folder / f"rows-{rows}.arrow"
    if path.exists():
        return path
    schema = pa.schema([("x", pa.list_(pa.float32(), FEATURES)), ("y", pa.int64())])
    centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    part = path.with_suffix(".part")
    with pa.OSFile(str(part), "wb") as file, pa.ipc.new_stream(file, schema) as out:
        for start in range(0, rows, CHUNK):
            rng, size = np.random.default_rng(start + 1), min(CHUNK, rows - start)
            y = rng.integers(CLASSES, size=size)
            x = (centres[y] + rng.normal(size=(size, FEATURES))).astype(np.float32)
            columns = [pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), FEATURES), pa.array(y)]
            out.write_batch(pa.record_batch(columns, schema=schema))
    part.rename(path)
    return path


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))


def anonymous() -> float:
    """Memory of this process that is not a file, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def plain_steps(table: Any) -> Iterator[None]:
    """A usual loop: rows by number, the mean loss, a step."""
    model, rng = network(), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = table.with_format("torch")
    while True:
        loss_fn(model, rows[np.sort(rng.choice(len(table), BATCH, replace=False))]).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield


def measured(rows: int, folder: Path) -> dict[str, Any]:
    import datasets

    table = datasets.Dataset.from_file(str(made(rows, folder)))
    plain, times, peak = plain_steps(table), dict[str, list[float]](private=[], plain=[]), 0.0
    next(plain)
    before = anonymous()
    model = network()
    plan = hs.PrivacyPlan.calibrate(epsilon=1, delta=1e-9, population=rows, batch_size=BATCH, steps=STEPS)
    last = time.perf_counter()

    def turn(report: Any) -> None:
        nonlocal last, peak
        times["private"].append(time.perf_counter() - last)
        peak = max(peak, anonymous())
        start = time.perf_counter()
        next(plain)
        last = time.perf_counter()
        times["plain"].append(last - start)

    example = {"x": torch.zeros(FEATURES), "y": torch.tensor(0)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = hs.Trainer(
        model, loss_fn, optimizer=optimizer, plan=plan, callbacks=[turn], checkpoint_seconds=1e9, progress=False
    )
    result = trainer.fit(hs.PrivateData(table, example=example), run_dir=folder / f"run-{rows}-{time.time_ns()}")
    test = table.with_format("torch")[:1000]
    found = {name: statistics.median(values[2:]) for name, values in times.items()}
    return {
        "rows": rows,
        "file_mb": made(rows, folder).stat().st_size / 2**20,
        "rows_per_second": {name: BATCH / seconds for name, seconds in found.items()},
        "ratio": found["private"] / found["plain"],
        "more_memory_mb": peak - before,
        "peak_with_file_pages_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loss": float(loss_fn(model, test).mean().detach()),
        "epsilon": result.epsilon(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    found = {
        "batch": BATCH,
        "steps": STEPS,
        "versions": versions(),
        "tables": [measured(n, args.folder) for n in args.rows],
    }
    if args.out:
        write_json(args.out, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
