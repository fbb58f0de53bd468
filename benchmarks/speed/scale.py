"""How a private step grows: time and memory against parameters, batch, sequence length, records and processes.

    python -m benchmarks.speed.scale                       measures, and writes the picture and the figures
    python -m benchmarks.speed.scale --plot                draws the picture again from the figures

A transformer of four layers, in the middle 128 wide, 32 sequences of 64 tokens, 2,000 words; one quantity at a time is
made larger and smaller. Plain PyTorch, halfsilver and Opacus's hooks take turns; memory is that of a fresh process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.__main__ import circumstances, say
from benchmarks.speed.contenders import Options
from benchmarks.speed.memory import in_fresh_process
from benchmarks.speed.models import workload
from benchmarks.speed.race import race

Row = dict[str, Any]

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "benchmarks" / "results" / "scale.json"
PICTURE = ROOT / "docs" / "pictures" / "scale.svg"

WIDTH, ROWS, TOKENS = 128, 32, 64
SWEEPS: dict[str, list[tuple[int, int, int]]] = {
    "parameters": [(width, ROWS, TOKENS) for width in (64, 128, 256, 512)],
    "batch": [(WIDTH, rows, TOKENS) for rows in (8, 32, 128, 512)],
    "sequence length": [(WIDTH, ROWS, tokens) for tokens in (16, 64, 256, 512)],
}
RECORDS = (10_000, 1_000_000, 100_000_000)
CONTENDERS = ("plain", "halfsilver", "opacus_hooks")
COLOURS = {"plain": "#888888", "halfsilver": "#0b6e99", "opacus_hooks": "#c8553d", "ddp": "#0b6e99", "fsdp": "#6a9f58"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--plot", action="store_true", help="draw only")
    parser.add_argument("--again", help="measure one workload again, e.g. gpt/512x32x64")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.again:
        found = json.loads(FIGURES.read_text(encoding="utf-8"))
        new = [row for name in SWEEPS for row in _sweep(name, args.reps, args.again)]
        found["rows"] = [row for row in found["rows"] if row["model"] != args.again] + new
        FIGURES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    elif not args.plot:
        rows = [row for name in SWEEPS for row in _sweep(name, args.reps)] + _records(args.reps)
        found = {"rows": rows, "processes": _processes(args.reps), **circumstances(threads=1, reps=args.reps)}
        FIGURES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(json.loads(FIGURES.read_text(encoding="utf-8")), PICTURE)
    return 0


def _sweep(name: str, reps: int, only: str | None = None) -> list[Row]:
    rows: list[Row] = []
    for size in SWEEPS[name]:
        task = workload("gpt/{}x{}x{}".format(*size))
        if only not in (None, task.name):
            continue
        x = (
            sum(p.numel() for p in task.model().parameters())
            if name == "parameters"
            else size[1 if name == "batch" else 2]
        )
        for row in race(task, CONTENDERS, reps, Options(), say, exactly=True).rows:
            peak = in_fresh_process(task.name, row["contender"], Options(), threads=1)
            rows.append({"sweep": name, "x": x, **row, **peak})
    return rows


def _records(reps: int) -> list[Row]:
    """Each number in a process of its own, because of its memory."""
    rows: list[Row] = []
    for records in RECORDS:
        command = [sys.executable, "-m", "benchmarks.speed.population", "--records", str(records)]
        done = subprocess.run([*command, "--reps", str(2 * reps)], check=True, cwd=ROOT, stdout=subprocess.PIPE)
        found = json.loads(done.stdout)
        for contender, seconds in found["seconds"].items():
            ratio = seconds / found["seconds"]["plain"]
            peak = {} if contender == "plain" else {"peak_mb": found["peak_mb"]}
            row = {"sweep": "records", "x": records, "contender": contender, "ratio": ratio, "seconds": seconds}
            rows.append({**row, "model": f"records-{records}", "reps": found["reps"], **peak})
    return rows


def _processes(reps: int) -> list[Row]:
    """On this machine's cores, the same batch spread over more processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        model = f"gpt/{WIDTH}x{ROWS}x{TOKENS}"
        command = [sys.executable, "-m", "benchmarks.speed.distributed", "--model", model, "--reps", str(reps)]
        subprocess.run([*command, "--out", str(out)], check=True, cwd=ROOT, stdout=sys.stderr)
        rows: list[Row] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    return rows


def draw(found: Row, path: Path) -> None:
    """Seconds a step above, memory below, and the cost of several processes at the right."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "halfsilver"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 5, figsize=(15.5, 5.6), layout="constrained")
    for column, name in enumerate((*SWEEPS, "records")):
        rows = [row for row in found["rows"] if row["sweep"] == name]
        for i, (field, label) in enumerate((("seconds", "seconds a step"), ("peak_mb", "memory above idle, MB"))):
            _lines(axes[i, column], rows, field)
            axes[i, column].set(xlabel=name, ylabel=label if column == 0 else "")
    for row in axes:
        row[3].set_ylim(row[0].get_ylim())  # nothing grows with the records, and noise should look like noise
    axes[0, 0].legend(frameon=False)
    _bars(axes[0, 4], found["processes"], "ratio", "private over plain, same processes")
    _bars(axes[1, 4], found["processes"], "seconds", "seconds a step, whole batch")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _lines(axis: Any, rows: list[Row], field: str) -> None:
    for contender in CONTENDERS:
        points = sorted((row["x"], row[field]) for row in rows if row["contender"] == contender and field in row)
        if points:
            axis.loglog(*zip(*points, strict=True), marker="o", ms=4, color=COLOURS[contender], label=contender)
    ticks = sorted({row["x"] for row in rows})
    axis.set_xticks(ticks, [_short(x) for x in ticks])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _short(x: int) -> str:
    return str(x) if x <= 10_000 else f"{x / 1e6:.2g}M" if x < 1e7 else f"{x / 1e6:.0f}M"


def _bars(axis: Any, rows: list[Row], field: str, label: str) -> None:
    sizes = sorted({row["processes"] for row in rows})
    for shift, kind in ((-0.2, "ddp"), (0.2, "fsdp")):
        heights = [next(r[field] for r in rows if (r["processes"], r["kind"]) == (size, kind)) for size in sizes]
        axis.bar([i + shift for i in range(len(sizes))], heights, 0.38, color=COLOURS[kind], label=kind)
    axis.set(xticks=range(len(sizes)), xticklabels=sizes, xlabel="processes", title=label)
    axis.title.set_fontsize(9)
    axis.legend(frameon=False)


if __name__ == "__main__":
    sys.exit(main())
