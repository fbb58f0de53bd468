"""Time and memory of a round against the number of enrolled users, each size in a fresh process.

Users lie in an SQLite file of TFF's format and are read when drawn; about 100 are drawn in each round, and each makes
one pass over its few sentences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.federated import stackoverflow_file
from benchmarks.federated.rounds import Row, Spent, middle, timed, timed_rounds
from benchmarks.speed.memory import peak_above_idle
from halfsilver.federated import InProcess, LocalTraining, PrivateUsers
from halfsilver.privacy.users.stores.sqlite import SqliteUsers, tff_users
from halfsilver.privacy.users.stores.tf_example import Example
from halfsilver.tasks.networks import LanguageModel
from halfsilver.tasks.sentences import SPECIAL, Rows, encode
from halfsilver.tasks.stackexchange import loss_fn

SIZES = (1_000, 10_000, 100_000, stackoverflow_file.TRAIN_USERS)
WORDS = 1_000
_IDS = {f"w{i}": len(SPECIAL) + i for i in range(WORDS)}
_SECONDS = 900


def measure(sizes: tuple[int, ...], folder: Path, *, rounds: int, cohort: int = 100) -> list[Row]:
    """A row for each size; the files stay in `folder`, and one that is there already is used."""
    rows = []
    for size in sizes:
        path = folder / f"stackoverflow-{size}.sqlite"
        if not path.exists():
            stackoverflow_file.write(path, size)
        rows.append(_in_fresh_process(path, rounds, cohort))
    return rows


def _in_fresh_process(path: Path, rounds: int, cohort: int) -> Row:
    command = [sys.executable, "-m", "benchmarks.federated.population", str(path)]
    command += ["--rounds", str(rounds), "--cohort", str(cohort)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment, timeout=_SECONDS, check=True
    )
    row: Row = json.loads(done.stdout)
    return row


def of_file(path: Path, rounds: int, cohort: int) -> Row:
    """Of this process, which must not have trained before."""
    opened: list[SqliteUsers] = []
    opening = timed(lambda: opened.append(tff_users(path, encode=_rows)))
    store, spent = opened[0], list[Spent]()
    warm_up = store.rows(0, 1)  # libraries load parts of themselves when they are first used
    model = LanguageModel(WORDS + len(SPECIAL), 32, 32, 1)
    torch.autograd.backward(loss_fn(model, warm_up).sum())
    engine = InProcess(PrivateUsers(store), LocalTraining(lr=0.1))
    peak = peak_above_idle(
        lambda: spent.extend(timed_rounds(model, loss_fn, engine, rounds=rounds, cohort=min(cohort, store.size())))
    )
    return {
        "users": store.size(),
        "file_mb": round(path.stat().st_size / 1e6, 1),
        "round_seconds": middle([s.wall for s in spent]),
        "round_cpu_seconds": middle([s.cpu for s in spent]),
        "peak_above_idle_mb": round(peak, 1),
        "peak_mb": round(_peak_mb(), 1),
        "open_seconds": round(opening.wall, 4),
    }


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _rows(examples: list[Example]) -> Rows:
    texts = (b"".join(v for v in e["tokens"] if isinstance(v, bytes)).decode().split() for e in examples)
    return encode(texts, _IDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cohort", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(of_file(args.file, args.rounds, args.cohort)))


if __name__ == "__main__":
    main()
