"""What a stop costs, and whether what is left behind is true.

    python -m benchmarks.robustness.stops --kills 200 --json
    python -m benchmarks.robustness.stops --kills 0 --planted 10 --honest 100 --json

With `--kills`, a run of 80 steps trains in a forked process, which is killed (SIGKILL) at a time drawn uniformly from
the time that a whole run takes. The next process resumes, and may be killed as well. It counts

    lost           steps that the ledger counts and the checkpoint lacks, for each kill: median, worst, and all of them
    over           kills that cost more steps than lie between two checkpoints by the number that the run computed
    under          releases that the ledger does not count
    noise_reused   blocks of noise that were drawn before
    unreadable     kills after which the run could not go on; `errors` says why

and, in one run that is not killed, `checkpoint_share`, the share of its time that checkpoints take. `TMPDIR` chooses
the disk: how often a checkpoint may be written depends on how long that takes.

With `--planted` and `--honest`, faults are planted so many times in a process, and looked for in as many runs without:

    statement      a stop by Ctrl-C, SIGTERM or an exception does not update the statement; `verify` must say so
    score          a score that raises can be tried again with another one; one payment must have one answer
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

import halfsilver as hs
from benchmarks.robustness.crash import _witness, steps_in
from benchmarks.robustness.select_kills import _put
from halfsilver import selection
from halfsilver._core import checkpoint
from halfsilver.errors import SelectionFailed
from halfsilver.runs.session import Session
from halfsilver.runs.verify import verify
from halfsilver.selection import Selection

DELTA = 1e-5
PLAN = hs.PrivacyPlan(steps=80, spare_steps=100_000, sampling_rate=0.2, expected_batch_size=300, noise_multiplier=20.0)


# ---- the process that is killed


def train(run_dir: Path, plan: hs.PrivacyPlan, **options: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(1500, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 10))
    hs.Trainer(
        model,
        lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        plan=plan,
        performance=hs.Performance(backend="vmap", micro_batch_size=64),
        progress=False,
        **options,
    ).fit((x, x[:, :10].argmax(1)), run_dir=run_dir, delta=DELTA)


def _watch(report: Callable[[Any], None]) -> None:
    """Report noise, the steps between checkpoints, and how long each of these takes to write."""
    _witness(report)
    between, write = hs.Trainer._steps_between, hs.Trainer._checkpoint

    def told(trainer: hs.Trainer, *args: Any) -> float:
        steps = between(trainer, *args)
        report(("cadence", steps))
        return steps

    def timed(trainer: hs.Trainer, *args: Any, **options: Any) -> float:
        started = time.monotonic()
        steps = write(trainer, *args, **options)
        report(("written", time.monotonic() - started))
        return steps

    _put(hs.Trainer, _steps_between=told, _checkpoint=timed)


def _live(run_dir: Path, pipe: Connection, plan: hs.PrivacyPlan) -> None:
    logging.disable(logging.CRITICAL)
    _watch(pipe.send)
    try:
        train(run_dir, plan)
        pipe.send(("end",))
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


# ---- the one that kills and counts


@dataclass
class Kills:
    """One run after the other, each killed at a random time, and again when it is resumed."""

    folder: Path
    plan: hs.PrivacyPlan
    lost: list[int] = field(default_factory=list)
    cadence: list[float] = field(default_factory=list)
    over: int = 0
    under: int = 0
    noise_reused: int = 0
    unreadable: int = 0
    releases: int = 0
    finished: int = 0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._noise, self._number = set[str](), 0
        self._written: list[float] = []
        self._new_run()

    def _new_run(self) -> None:
        self._number += 1
        self._released = 0

    @property
    def _path(self) -> Path:
        return self.folder / str(self._number)

    def whole_run(self) -> tuple[float, float]:
        """Seconds that one takes, and the share of checkpoints in it."""
        started = time.monotonic()
        self._life(float("inf"))
        seconds = time.monotonic() - started
        return seconds, sum(self._written) / seconds

    def kill_once(self, seconds: float, chance: random.Random) -> None:
        while True:
            before = self._state()
            if self._life(chance.uniform(0, seconds)):
                break
        after = self._state()
        if before is None or after is None:
            return
        lost = (after[0] - before[0]) - (after[1] - before[1])
        self.lost.append(lost)
        self.over += lost > max(self._every, 1)
        self.under += after[0] < self._released

    def _state(self) -> tuple[int, int] | None:
        """Steps that the ledger counts, and those of the checkpoint."""
        ledger, saved = self._path / "ledger.jsonl", self._path / "checkpoint.safetensors"
        try:
            counted = steps_in(ledger.read_bytes()) if ledger.exists() else 0
            return counted, checkpoint.read(saved)[1]["step"] if saved.exists() else 0
        except hs.HalfsilverError as error:
            self._failed(str(error))
            return None

    def _life(self, seconds: float) -> bool:
        """Whether it ended by a kill."""
        self._every = 1.0
        ours, theirs = Pipe(duplex=False)
        deadline = time.monotonic() + seconds
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _live(self._path, theirs, self.plan)
            finally:
                os._exit(0)
        theirs.close()
        self._follow(ours, deadline)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._follow(ours, float("inf"))  # what it still said
        ours.close()
        return os.waitpid(pid, 0)[1] == signal.SIGKILL

    def _follow(self, pipe: Connection, deadline: float) -> None:
        """Take in reports until the process falls silent or the time has come."""
        with suppress(EOFError, OSError):
            while (left := deadline - time.monotonic()) > 0:
                if pipe.poll(min(left, 1.0)):
                    self._take(pipe.recv())

    def _take(self, event: Sequence[Any]) -> None:
        match event:
            case ("release", blocks, *_):
                self._released, self.releases = self._released + 1, self.releases + 1
                self.noise_reused += len(self._noise.intersection(blocks))
                self._noise.update(blocks)
            case ("cadence", steps):
                self._every = max(self._every, steps)
                self.cadence.append(steps)
            case ("written", seconds):
                self._written.append(seconds)
            case ("end",):
                self.finished += verify(self._path)["ok"]
                self._new_run()
            case ("error", what):
                self._failed(what)

    def _failed(self, why: str) -> None:
        self.unreadable += 1
        self.errors.append(why)
        self._new_run()


def kills(count: int, *, seed: int = 0, plan: hs.PrivacyPlan = PLAN) -> dict[str, Any]:
    """Kill so often, and count."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "first", replace(plan, steps=2))  # imports and the accountant's answers are inherited
        tally, chance = Kills(Path(folder), plan), random.Random(seed)
        seconds, share = tally.whole_run()
        for _ in range(count):
            tally.kill_once(seconds, chance)
    names = ("over", "under", "noise_reused", "unreadable", "releases", "finished", "errors")
    return {
        "kills": count,
        "steps": plan.steps,
        "lost_median": median(tally.lost),
        "lost_worst": max(tally.lost),
        "lost": sorted(tally.lost),
        "cadence_median": median(tally.cadence),
        "cadence_worst": max(tally.cadence),
        "seconds_of_a_run": round(seconds, 2),
        "checkpoint_share": round(share, 4),
        **{name: getattr(tally, name) for name in names},
        "ok": not (tally.over or tally.under or tally.noise_reused or tally.unreadable),
    }


# ---- planted faults


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Take a guard away: one of `FAULTS`."""
    stated, run = Session.stated, selection._Run.__call__

    def heard(one: Any, index: int, draw: selection.Draw) -> Any:
        """What the sealed folder keeps of an error is raised."""
        one.seal.error.unlink(missing_ok=True)
        found = run(one, index, draw)
        if one.seal.error.exists():
            raise ValueError(one.seal.error.read_text())
        return found

    try:
        if name == "statement":
            _put(Session, stated=lambda session: nullcontext())
        else:
            _put(selection._Run, __call__=heard)
        yield
    finally:
        _put(Session, stated=stated)
        _put(selection._Run, __call__=run)


def _stop(kind: int) -> None:
    if kind == 2:
        raise ValueError("a callback")
    os.kill(os.getpid(), (signal.SIGINT, signal.SIGTERM)[kind])


def statement_lags(folder: Path, chance: random.Random) -> bool:
    """Whether `verify` says that a stopped run left a statement that is older than its ledger."""
    plan = replace(PLAN, expected_batch_size=20, sampling_rate=0.005)
    kind, at = chance.randrange(3), chance.randint(1, 10)
    with suppress(KeyboardInterrupt, SystemExit, ValueError):
        train(folder, plan, callbacks=[lambda report: _stop(kind) if report.step == at else None])
    return not verify(folder)["ok"]


def score_is_retried(folder: Path, chance: random.Random) -> bool:
    """Whether one payment has several answers: calls whose score raises, each with another one."""
    plan = Selection(each=replace(PLAN, steps=2, expected_batch_size=20, sampling_rate=0.005, delta=DELTA), trials=2)
    x = torch.randn(200, 4)

    def build(lr: float) -> hs.Trainer:
        model = torch.nn.Linear(4, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        return hs.Trainer(model, lambda m, b: m(b[0]).square().squeeze(1), optimizer=sgd, plan=plan.each)

    def score_above(threshold: float) -> Callable[[torch.nn.Module], float]:
        def score(model: torch.nn.Module) -> float:
            if in_a_run() and float(next(model.parameters())[0, 0]) > threshold:
                raise ValueError("Input contains NaN")
            return 0.0

        return score

    answers = 0
    for t in (-9.0, -8.0, -7.0):  # an attack begins where all runs are above
        answers += 1
        with suppress(SelectionFailed):
            hs.select([0.1], build, score_above(t + chance.random()), (x,), plan=plan, run_dir=folder)
            break
    return answers > sum(count.count for count in hs.Ledger.open(folder / "ledger.jsonl").counts())


def in_a_run() -> bool:
    """Whether a selection has been paid for: the checks before that do not see what a score does later."""
    return any(frame.f_code.co_name == "_continue" for frame, _ in traceback.walk_stack(None))


FAULTS: dict[str, Callable[[Path, random.Random], bool]] = {"statement": statement_lags, "score": score_is_retried}


def find(name: str, times: int, honest: int, *, seed: int = 0) -> dict[str, int]:
    """How often a planted fault is found, and how often one is found where none is."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    chance, look = random.Random(seed), FAULTS[name]
    usual = {number: signal.signal(number, how) for number, how in _USUAL.items()}
    try:
        with tempfile.TemporaryDirectory() as folder:
            with planted(name):
                found = sum(look(Path(folder) / f"planted-{i}", chance) for i in range(times))
            alarms = sum(look(Path(folder) / f"honest-{i}", chance) for i in range(honest))
    finally:
        logging.disable(logging.NOTSET)
        for number, before in usual.items():
            signal.signal(number, before)
    return {"planted": times, "found": found, "honest": honest, "false_alarms": alarms}


# A process that is started in the background may ignore Ctrl-C.
_USUAL: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--planted", type=int, default=0, metavar="TIMES")
    parser.add_argument("--honest", type=int, default=0, metavar="RUNS")
    parser.add_argument("--seed", type=int, default=0, help="of the times of kills")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    started = time.monotonic()
    out: dict[str, Any] = kills(args.kills, seed=args.seed) if args.kills else {"ok": True}
    if args.planted or args.honest:
        out["faults"] = {name: find(name, args.planted, args.honest, seed=args.seed) for name in FAULTS}
        out["ok"] &= all(f["found"] == args.planted and not f["false_alarms"] for f in out["faults"].values())
    out |= {
        "seconds": round(time.monotonic() - started, 1),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("halfsilver", "torch")},
    }
    print(json.dumps(out) if args.json else "\n".join(f"{name:18} {value}" for name, value in out.items()))
    return 0 if out["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
