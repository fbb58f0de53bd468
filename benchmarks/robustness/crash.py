"""Kills of a training run on a disk that forgets: is a release ever without its record, is noise ever used twice?

    python -m benchmarks.robustness.crash --kills 200 --json [--noise correlated]

Trains with `Trainer.fit` in a process of its own, kills it (SIGKILL) at random moments, throws away what was not
fsynced, and lets the next process go on with what is left. It counts

    under          releases that no durable record of the ledger covered when they happened, or that none covers later
    over           records of the ledger that kills left unused; `over_worst` is the most that one kill did (allowed: 1)
    noise_reused   blocks of noise that were drawn before
    steps_reused   releases whose number, by which records take turns, does not follow that of the release before
    state_reused   processes whose correlated noise does not begin anew
    unreadable     kills after which the run could not go on; `errors` says why

`--without-fsync` and `--without ...` break the process from outside, and each must fail; `--mutants 6` tries them all.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

import halfsilver as hs
from benchmarks.robustness.disk import Disk, Event, Watch, same_place
from halfsilver import trainer
from halfsilver._core import system
from halfsilver._core.tensors import Tensors
from halfsilver.privacy import entropy, noise, releases
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.strategies import Buffered
from halfsilver.runs.verify import verify

DELTA = 1e-5
PLAN = hs.PrivacyPlan(steps=400, spare_steps=100_000, sampling_rate=0.05, expected_batch_size=20, noise_multiplier=20.0)
# All spare steps count for correlated noise, so there are fewer, and a run may end before its schedule does.
_BUFFERS = Buffered((0.98, 0.8, 0.3), (0.1, 0.1, 0.2))
CORRELATED = replace(PLAN, spare_steps=400, noise=hs.Correlated(separation=20, strategy=_BUFFERS, order_kept=True))
PLANS = {"independent": PLAN, "correlated": CORRELATED}
_MOST_LIVES = 100  # without a kill in between
_EVENTS = 100  # a life is at most about this long: some eight blocks with their checkpoints


# ---- the process that is killed


def train(run_dir: Path, plan: hs.PrivacyPlan) -> None:
    """A small network with all that a checkpoint can hold: momentum, an average, a mirror's state."""
    torch.manual_seed(0)
    x = torch.randn(500, 8)
    rows = (x, x[:, :3].argmax(1))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    hs.Trainer(
        model,
        lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        plan=plan,
        mirror=hs.FirstOrder(0.5),
        average=0.9,
        performance=hs.Performance(backend="vmap", micro_batch_size=32),
        checkpoint_seconds=0.0,
        progress=False,
    ).fit((rows[0][100:], rows[1][100:]), (rows[0][:100], rows[1][:100]), run_dir=run_dir, delta=DELTA)


def _witness(report: Callable[[Event], None]) -> None:
    """Report the noise of every release before anybody can see the release."""
    drawn: list[str] = []
    blocks, noisy = entropy.normal_blocks, releases.Releases.noisy

    def noted(source: entropy.Entropy, n: int, scale: float, size: int) -> Iterator[tuple[int, Tensor]]:
        for start, block in blocks(source, n, scale, size):
            drawn.append(hashlib.sha256(block.numpy().tobytes()).hexdigest())
            yield start, block

    def told(self: releases.Releases, total: ClippedSum) -> Tensors:
        number, new = self.round, self._chain is None or self._chain._step == 0
        released = noisy(self, total)
        report(("release", drawn.copy(), number, new))
        drawn.clear()
        return released

    noise.normal_blocks = noted  # type: ignore[assignment, attr-defined]
    releases.Releases.noisy = told  # type: ignore[method-assign]


def _spend_late() -> None:
    """Have the record written after the data were touched."""
    intend, noisy = releases.Releases.intend, releases.Releases.noisy

    def first(self: releases.Releases) -> None:
        self._intended = True

    def then(self: releases.Releases, total: ClippedSum) -> Tensors:
        released = noisy(self, total)
        self._granted += 1
        intend(self)
        self._intended, self._granted = False, self._granted - 1
        return released

    releases.Releases.intend, releases.Releases.noisy = first, then  # type: ignore[method-assign]


def _number_anew() -> None:
    """Have every process number its steps from 0."""
    releases.Releases.round = property(lambda self: self.count)  # type: ignore[method-assign, assignment]


MUTANTS: dict[str, Callable[[], None]] = {
    "fsync": lambda: setattr(os, "fsync", lambda fd: None),
    "file-fsync": lambda: setattr(system, "fsync_file", lambda fd: None),
    "folder-fsync": lambda: setattr(system, "fsync_folder", lambda path: None),
    "entropy": lambda: setattr(trainer, "OsEntropy", lambda: entropy.UnsafeSeed(1)),
    "order": _spend_late,
    "number": _number_anew,
}


def _live(run_dir: Path, pipe: Connection, without: str | None, plan: hs.PrivacyPlan) -> None:
    os.fsync = Watch(pipe.send).fsync  # type: ignore[assignment]
    system.place_of = same_place
    _witness(pipe.send)
    if without:
        MUTANTS[without]()
    try:
        train(run_dir, plan)
        pipe.send(("end",))
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def start(run_dir: Path, without: str | None, plan: hs.PrivacyPlan) -> tuple[int, Connection]:
    """Fork, so that no life begins by importing torch."""
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _live(run_dir, theirs, without, plan)
        finally:
            os._exit(0)
    theirs.close()
    return pid, ours


# ---- the one that kills and counts


@functools.cache
def _steps(line: bytes) -> int:
    record = json.loads(line)
    return int(record["count"]) if record["type"] in ("intent", "torn") else 0


def steps_in(ledger: bytes) -> int:
    """Steps that the whole lines of a ledger stand for; read here without halfsilver's own reader."""
    return sum(map(_steps, ledger.split(b"\n")[:-1]))


@dataclass
class Tally:
    kills: int = 0
    under: int = 0
    over: int = 0
    noise_reused: int = 0
    steps_reused: int = 0
    state_reused: int = 0
    unreadable: int = 0
    over_worst: int = 0
    releases: int = 0
    runs_finished: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        reused = self.noise_reused + self.steps_reused + self.state_reused
        return not (self.under or reused or self.unreadable) and self.over_worst <= 1


class Harness:
    """Lives and deaths of one run after the other, on one disk."""

    def __init__(self, folder: Path, seed: int, without: str | None, plan: hs.PrivacyPlan) -> None:
        self.tally, self._chance, self._folder = Tally(), random.Random(seed), folder
        self._without, self._plan, self._first = without, plan, True
        (folder / "0").mkdir()  # the disk before the first kill
        self._disk, self._noise = Disk(folder / "0"), set[str]()
        self._names = map(str, range(10**9))
        self._new_run()

    def _new_run(self) -> None:
        self._run, self._released, self._surplus, self._number = next(self._names), 0, 0, -1

    @property
    def _path(self) -> Path:
        return self._disk.root / "runs" / self._run

    def kill_once(self) -> None:
        """Let runs go on until one has been killed."""
        for _ in range(_MOST_LIVES):
            if self._life():
                break
        else:
            raise RuntimeError(f"No run lived long enough to be killed: {self.tally.errors[-1:]}")
        self.tally.kills += 1
        root = self._folder / str(self.tally.kills)
        self._disk = self._disk.cut(root, self._chance if self._chance.random() < 0.5 else None)
        self._inspect()

    def _life(self) -> bool:
        """Whether it ended by a kill."""
        self._first = True
        pid, pipe = start(self._path, self._without, self._plan)
        most = self._chance.randint(1, _EVENTS)
        events = self._follow(pipe, most)
        if events == most:
            time.sleep(self._chance.expovariate(1000))
            os.kill(pid, signal.SIGKILL)
            self._follow(pipe)  # what it still said
        pipe.close()
        return os.waitpid(pid, 0)[1] == signal.SIGKILL

    def _follow(self, pipe: Connection, most: float = math.inf) -> int:
        """Take in reports until the process falls silent or `most` have come; one cut short by the kill is none."""
        count = 0
        with suppress(EOFError, OSError):
            while count < most:
                self._take(pipe.recv())
                count += 1
        return count

    def _take(self, event: Event) -> None:
        match event:
            case ("release", blocks, number, new):
                self._released += 1
                self.tally.steps_reused += number <= self._number
                self.tally.state_reused += self._first and not new
                self._number, self._first = number, False
                self.tally.releases += 1
                self.tally.noise_reused += len(self._noise.intersection(blocks))
                self._noise.update(blocks)
                self.tally.under += steps_in(self._disk.read("runs", self._run, "ledger.jsonl")) < self._released
            case ("end",):
                verify(self._path)
                self.tally.runs_finished += 1
                self._new_run()
            case ("error", what):
                self._lost(what)
            case _:
                self._disk.apply(event)

    def _lost(self, why: str) -> None:
        self.tally.unreadable += 1
        self.tally.errors.append(why)
        self._new_run()

    def _inspect(self) -> None:
        """Hold what survived against what was released."""
        ledger = self._path / "ledger.jsonl"
        try:
            found = hs.Ledger.open(ledger, create=False) if ledger.exists() else None
            runs = [*found.runs.values()] if found else []
            counted = sum(run.spent for run in runs) + ((found and found._torn_steps()) or (None, 0))[1]
        except hs.HalfsilverError as error:
            self._lost(f"{type(error).__name__}: {error}")
            return
        surplus = counted - self._released
        if surplus < 0:
            self.tally.under += 1
            self._new_run()
            return
        unused = math.ceil(max(0, surplus - self._surplus) / runs[0].block_max) if runs else 0
        self.tally.over, self.tally.over_worst = self.tally.over + unused, max(self.tally.over_worst, unused)
        self._surplus = surplus


def crash(kills: int, *, seed: int = 0, without: str | None = None, plan: hs.PrivacyPlan = PLAN) -> Tally:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "first", replace(plan, steps=2))  # imports and the accountant's answers are inherited
        harness = Harness(Path(folder), seed, without, plan)
        for _ in range(kills):
            harness.kill_once()
        return harness.tally


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of what survives")
    parser.add_argument("--without", choices=sorted(MUTANTS), help="what to take away from the process")
    parser.add_argument("--without-fsync", dest="without", action="store_const", const="fsync")
    parser.add_argument("--mutants", type=int, default=0, metavar="KILLS", help="then also break it in each way")
    parser.add_argument("--noise", choices=sorted(PLANS), default="independent")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    started = time.monotonic()
    plan = PLANS[args.noise]
    tally = crash(args.kills, seed=args.seed, without=args.without, plan=plan)
    mutants = {name: crash(args.mutants, seed=args.seed, without=name, plan=plan) for name in MUTANTS if args.mutants}
    out = {
        **asdict(tally),
        "noise": args.noise,
        "without": args.without,
        "seconds": round(time.monotonic() - started, 1),
        "ok": tally.ok,
    }
    out |= {"mutants": {name: {**asdict(t), "ok": t.ok} for name, t in mutants.items()}}
    print(json.dumps(out) if args.json else "\n".join(f"{name:14} {value}" for name, value in out.items()))
    return 0 if tally.ok and not any(t.ok for t in mutants.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
