"""Error of released prefix sums with correlated noise, beside the same strategies of JAX Privacy.

    pip install jax-privacy
    python -m benchmarks.studies.correlated --out FILE

Root mean squared error at a noise multiplier of 1, for several numbers of rounds and separations: independent noise,
banded strategies with as many bands as the separation, and BLT with at most four buffers. Both optimise the mean
squared error. Each strategy, ours and theirs, is scored by one function, which is neither: dense matrices in numpy. A
command that was stopped goes on with the settings that FILE lacks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.show import show
from halfsilver.privacy.correlated import banded, buffered
from halfsilver.privacy.strategies import Participation
from halfsilver.runs.folder import read_json, versions, write_json

BUFFERS = 4
SETTINGS = [(500, 50), (500, 100), (500, 500), (2000, 50), (2000, 100), (2000, 500)]


def score(column: np.ndarray[Any, Any], separation: int) -> float:
    """Sensitivity times the root of the mean squared row of A C^-1, from whole matrices."""
    n = len(column)
    rows, cols = np.indices((n, n))
    c = np.where(rows >= cols, column[np.maximum(rows - cols, 0)], 0.0)
    together = c[:, ::separation].sum(1)
    b = np.cumsum(np.linalg.inv(c), axis=0)
    return float(np.linalg.norm(together) * np.sqrt((b**2).sum() / n))


def of_jax(rounds: int, separation: int, times: int) -> dict[str, Callable[[], Any]]:
    """Their banded and their buffered strategy, as first columns."""
    package = "jax_privacy.matrix_factorization"
    toeplitz, blt = import_module(f"{package}.toeplitz"), import_module(f"{package}.buffered_toeplitz")

    def bands() -> Any:
        return toeplitz.pad_coefs_to_n(toeplitz.optimize_banded_toeplitz(n=rounds, bands=separation), rounds)

    def buffers() -> Any:
        asked = {"n": rounds, "min_sep": separation, "max_participations": times, "error": "mean"}
        return blt.optimize(**asked, min_buffers=1, max_buffers=BUFFERS, rtol=1.001).toeplitz_coefs(rounds)

    return {"banded": bands, "BLT": buffers}


def row(rounds: int, separation: int) -> dict[str, Any]:
    participation = Participation(rounds=rounds, separation=separation)
    ours: dict[str, Callable[[], Any]] = {
        "banded": lambda: banded(participation, bands=separation).column(rounds),
        "BLT": lambda: buffered(participation, buffers=BUFFERS).column(rounds),
    }
    found: dict[str, Any] = {"rounds": rounds, "separation": separation}
    found["independent"] = score(np.eye(rounds)[0], separation)
    for name, make in ours.items():
        started = time.perf_counter()
        found[name] = score(make().numpy(), separation)
        found[f"{name}, seconds"] = time.perf_counter() - started
    for name, make in of_jax(rounds, separation, participation.times).items():
        started = time.perf_counter()
        theirs = score(np.asarray(make(), dtype=np.float64), separation)
        found[f"{name}, theirs"], found[f"{name}, their seconds"] = theirs, time.perf_counter() - started
        found[f"{name}, ratio"] = found[name] / theirs
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    peers = {name: import_module("importlib.metadata").version(name) for name in ("jax", "jax-privacy")}
    rows: list[dict[str, Any]] = []
    record = {"rows": rows, "buffers": BUFFERS, "versions": {**versions(), **peers}}
    if args.out and args.out.exists():
        rows += read_json(args.out)["rows"]
    for setting in SETTINGS[len(rows) :]:
        rows.append(row(*setting))
        if args.out:
            write_json(args.out, record)
    shown = ["rounds", "separation", "independent", "banded", "banded, ratio", "BLT", "BLT, ratio", "BLT, seconds"]
    print(json.dumps(record)) if args.json else show("Error of prefix sums", rows, shown)


if __name__ == "__main__":
    main()
