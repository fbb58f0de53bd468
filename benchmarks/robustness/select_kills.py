"""Kills of a selection at every point: is K ever drawn twice, is anything uncounted, does what remains tell K?

    python -m benchmarks.robustness.select_kills --kills 200 --json

Runs `hs.select` in a forked process that kills itself (SIGKILL) before its n-th event: a sync, rename, deletion, new
folder, draw or release. First n goes through all events of a selection of two runs, then selections with K as drawn are
killed at random, again and again until they finish. After every second kill, whatever was not fsynced is lost as well.
The next process resumes. The process that watches counts

    under          draws and releases without a durable record of the whole selection, or of their own run in the seal
    second_draws   draws of K beyond one per record, and selections that went on with another K than was drawn
    changed_runs   runs whose weights were others when they were read again
    wrong_winner   selections that did not publish the best of all K runs
    leftovers      finished selections of which files remain that others do not have
    unreadable     kills after which the selection neither resumed nor was refused as lost; `errors` says why
    lost           selections that were paid for and refused, with no K on disk: each is paid for again. Allowed, if
                   nothing was released: `lost_after_release` counts the others

`forms` compares all that remains of a selection with K = 1 and one with K = 7. `--without ...` breaks the process from
outside, and each must fail; `--mutants 40` tries them all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import halfsilver as hs
from benchmarks.robustness.crash import steps_in
from benchmarks.robustness.disk import Disk, Event, Watch, same_place
from halfsilver import selection
from halfsilver._core import system
from halfsilver._core.tensors import Tensors
from halfsilver.errors import SelectionLost
from halfsilver.privacy import releases
from halfsilver.privacy.entropy import Entropy, OsEntropy
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.runs.verify import verify
from halfsilver.selection import Selection

PLAN = Selection(
    each=hs.PrivacyPlan(
        steps=2, spare_steps=10_000, sampling_rate=1.0, expected_batch_size=200, noise_multiplier=100.0, delta=1e-5
    ),
    trials=3,
)
SETTINGS = (0.1, 0.3, 1.0)
_ROWS = torch.randn(280, 8, generator=torch.Generator().manual_seed(0))
_LABELS = _ROWS[:, :3].argmax(1)


# ---- the process that is killed


def run(run_dir: Path, *, pay_again: bool = False) -> selection.Selected[float]:
    """A selection among three learning rates of a small network."""

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def build(lr: float) -> hs.Trainer:
        model = torch.nn.Linear(8, 3)
        return hs.Trainer(
            model,
            loss_fn,
            optimizer=torch.optim.SGD(model.parameters(), lr=lr),
            plan=PLAN.each,
            performance=hs.Performance(backend="vmap", micro_batch_size=200),
            checkpoint_seconds=0.0,
        )

    def score(model: Any) -> float:
        """Always two digits, so that files have one size whatever the score is."""
        return 10 + int((model(_ROWS[200:]).argmax(1) == _LABELS[200:]).sum())

    private = (_ROWS[:200], _LABELS[:200])
    return hs.select(SETTINGS, build, score, private, plan=PLAN, run_dir=run_dir, pay_again=pay_again)


class _Process:
    """Reports what the process under test does, and kills it before event number `last`."""

    def __init__(self, report: Callable[[Event], None], last: int | None, attic: Path) -> None:
        self._report, self._last, self._count, self._attic, self._index = report, last, 0, attic, -1

    def event(self) -> None:
        self._count += 1
        if self._count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def install(self, forced: int | None) -> None:
        watch, system.place_of = Watch(self._report), same_place
        own: dict[str, Callable[..., Any]] = {"fsync": watch.fsync, "rmdir": self._put_away}
        for name in ("fsync", "replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, self._before(own.get(name) or getattr(os, name)))
        draw, noisy, read = Selection.draw, releases.Releases.noisy, selection._Seal.read
        train = selection._Run.__call__

        def drawn(plan: Selection, entropy: Entropy) -> int:
            self.event()
            k = draw(plan, entropy) if forced is None else forced
            self._report(("draw", k))
            return k

        def told(source: releases.Releases, total: ClippedSum) -> Tensors:
            self.event()
            released = noisy(source, total)
            self._report(("release", self._index))
            return released

        def found(seal: selection._Seal) -> list[selection.Draw] | None:
            draws = read(seal)
            self._report(("read", None if draws is None else len(draws)))
            return draws

        def trained(one: Any, index: int, what: selection.Draw) -> Any:
            self._index = index
            weights, score, failed = train(one, index, what)
            text = b"".join(t.numpy().tobytes() for t in weights.values())
            self._report(("scored", index, hashlib.sha256(text).hexdigest(), score))
            return weights, score, failed

        _put(Selection, draw=drawn)
        _put(releases.Releases, noisy=told)
        _put(selection._Seal, read=found)
        _put(selection._Run, __call__=trained)

    def _put_away(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Keep the folder elsewhere: a new one would get its number, and with it what `Disk` knows of the old one."""
        os.rename(path, self._attic / secrets.token_hex(8), src_dir_fd=dir_fd)

    def _before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.event()
            return real(*args, **options)

        return counted


def _put(owner: type, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(owner, name, method)


def _draw_again() -> None:
    """Have a selection that was paid for draw once more when it is resumed."""
    paid = selection._is_paid

    def never(session: Any) -> bool:
        if paid(session):
            session.ledger.intend = lambda run_id, **options: None
        return False

    selection._is_paid = never


def _pay_late() -> None:
    """Have K drawn before the record is written."""
    draws = selection._draws

    def late(session: Any, seal: Any, plan: Selection, settings: int, probe: str) -> Any:
        if not selection._is_paid(session):
            plan.draw(OsEntropy())
        return draws(session, seal, plan, settings, probe)

    selection._draws = late


def _forget_runs() -> None:
    """Have a killed run begin again."""
    train = selection._Run.__call__

    def fresh(one: Any, index: int, what: selection.Draw) -> Any:
        shutil.rmtree(one.seal.run(index), ignore_errors=True)
        return train(one, index, what)

    _put(selection._Run, __call__=fresh)


def _keep_seal() -> None:
    """Have the sealed folder stay."""
    _put(selection._Seal, destroy=lambda seal: None, make=lambda seal: seal.path.mkdir(exist_ok=True))


MUTANTS: dict[str, Callable[[], None]] = {
    "one-draw": _draw_again,
    "order": _pay_late,
    "resume": _forget_runs,
    "deletion": _keep_seal,
}


def _live(run_dir: Path, pipe: Connection, last: int | None, forced: int | None, without: str | None) -> None:
    if without:
        MUTANTS[without]()
    _Process(pipe.send, last, run_dir.parents[2] / "attic").install(forced)
    try:
        try:
            best = run(run_dir)
        except SelectionLost:
            pipe.send(("lost",))
            best = run(run_dir, pay_again=True)
        pipe.send(("end", best.score))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


# ---- the one that watches


def records(ledger: bytes, kind: str) -> int:
    """How many whole lines of a ledger are of that kind; read here without halfsilver's own reader."""
    return sum(json.loads(line)["type"] == kind for line in ledger.split(b"\n")[:-1])


@dataclass
class Tally:
    kills: int = 0
    under: int = 0
    second_draws: int = 0
    changed_runs: int = 0
    wrong_winner: int = 0
    leftovers: int = 0
    unreadable: int = 0
    lost: int = 0
    lost_after_release: int = 0
    power_cuts: int = 0
    selections: int = 0
    draws: int = 0
    releases: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        wrong = (self.under, self.second_draws, self.changed_runs, self.wrong_winner, self.leftovers, self.unreadable)
        return not any(wrong) and not self.lost_after_release


class Harness:
    """One selection after the other, each killed once or more, on one disk."""

    def __init__(self, folder: Path, seed: int, without: str | None) -> None:
        self.tally, self._chance, self._folder, self._without = Tally(), random.Random(seed), folder, without
        (folder / "attic").mkdir()
        (folder / "disk-0").mkdir()
        self._disk, self._names = Disk(folder / "disk-0"), map(str, range(10**9))
        self._new()

    def _new(self) -> None:
        self._name, self._draws, self._intents = next(self._names), 0, 0
        self._forget()

    def _forget(self) -> None:
        """Begin to watch a selection that is newly paid for."""
        self._k, self._released = 0, Counter[int]()
        self._scores: dict[int, tuple[str, float]] = {}

    @property
    def _path(self) -> Path:
        return self._disk.root / "runs" / self._name

    def sweep(self, points: Iterable[int]) -> bool:
        """Kill a new selection of two runs before each of these events in turn. Whether one came after all of them."""
        for last in points:
            self._new()
            if not self._life(last, forced=2):
                return True
            self._cut()
            while self._life(None, forced=2):
                pass
        return False

    def at_random(self) -> None:
        """Kill the present selection once, wherever it is; a finished one is followed by another."""
        while not self._life(self._chance.randint(1, 120), forced=None):
            pass
        self._cut()

    def _life(self, last: int | None, forced: int | None) -> bool:
        """Whether it ended by a kill."""
        ours, theirs = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _live(self._path, theirs, last, forced, self._without)
            finally:
                os._exit(0)
        theirs.close()
        with suppress(EOFError, OSError):
            while True:
                self._take(ours.recv())
        ours.close()
        killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
        self.tally.kills += killed
        return killed

    def _cut(self) -> None:
        """Lose what was not synced, after every second kill; after the others only the process is gone."""
        root = self._folder / f"disk-{self.tally.kills}"
        if self.tally.kills % 2:
            self.tally.power_cuts += 1
            self._disk = self._disk.cut(root, self._chance if self._chance.random() < 0.5 else None)
        else:
            self._disk.close()
            self._disk = Disk(self._disk.root)
        ledger = self._path / "ledger.jsonl"
        if ledger.exists():
            try:
                counted = sum(c.count for c in hs.Ledger.open(ledger, create=False).counts())
            except hs.HalfsilverError as error:
                self._failed(str(error))
                return
            self.tally.under += counted < self._draws

    def _durable(self, kind: str) -> int:
        return records(self._disk.read("runs", self._name, "ledger.jsonl"), kind)

    def _take(self, event: Event) -> None:
        tally = self.tally
        match event:
            case ("draw", k):
                tally.draws, self._draws = tally.draws + 1, self._draws + 1
                paid = self._durable("intent")
                tally.under += paid == 0
                tally.second_draws += self._draws > max(paid, 1)
                self._forget()
                self._k = k
            case ("read", k) if k is not None:
                tally.second_draws += k != self._k
            case ("release", index):
                tally.releases += 1
                self._released[index] += 1
                own = self._disk.read("runs", self._name, "sealed", f"run-{index}", "ledger.jsonl")
                counted = self._durable("intent") >= max(1, self._draws) and steps_in(own) >= self._released[index]
                tally.under += not counted
            case ("scored", index, digest, score):
                tally.changed_runs += self._scores.setdefault(index, (digest, score))[0] != digest
            case ("lost",):
                tally.lost += 1
                tally.lost_after_release += self._released.total() > 0
            case ("end", score):
                best = max((s for _, s in self._scores.values()), default=None)
                tally.wrong_winner += len(self._scores) != self._k or score != best
                self._finished()
            case ("error", what):
                self._failed(what)
            case ("file" | "folder", *_):
                self._disk.apply(event)

    def _finished(self) -> None:
        try:
            verify(self._path)
        except hs.HalfsilverError as error:
            self._failed(f"verify: {error}")
            return
        there = {p.relative_to(self._path).as_posix() for p in self._path.rglob("*") if not p.name.endswith(".tmp")}
        self.tally.leftovers += there != _FILES
        self.tally.selections += 1
        self._new()

    def _failed(self, why: str) -> None:
        self.tally.unreadable += 1
        self.tally.errors.append(why)
        self._new()


_FILES = {
    ".lock",
    "checkpoint.safetensors",
    "config.json",
    "ledger.jsonl",
    "ledger.jsonl.head",
    "ledger.jsonl.lock",
    "metrics.jsonl",
    "place.json",
    "statement.json",
}


# ---- what remains, for two values of K


def remains(folder: Path, k: int) -> dict[str, Any]:
    """All that is left of a selection with this K: names, sizes, modes, ledger records, values but for random ones."""
    with _forced(k):
        run(folder)
    files = sorted(folder.rglob("*"))
    times = [file.stat().st_mtime for file in files]
    with safe_open(folder / "checkpoint.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["halfsilver"])
        tensors = {name: list(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return {
        "files": [[str(file.relative_to(folder)), file.stat().st_size, oct(file.stat().st_mode)] for file in files],
        "links": folder.stat().st_nlink,
        "ledger": [_masked(line) for line in (folder / "ledger.jsonl").read_text().splitlines()],
        "config": _masked((folder / "config.json").read_text()),
        "statement": _masked((folder / "statement.json").read_text()),
        "metrics": [sorted(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()],
        "checkpoint": [sorted(about), tensors],
        "written_within_a_second": max(times) - min(times) < 1,
        "generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }


@contextmanager
def _forced(k: int) -> Iterator[None]:
    """K is this, whatever would be drawn."""
    draw = Selection.draw
    _put(Selection, draw=lambda plan, entropy: k)
    try:
        yield
    finally:
        _put(Selection, draw=draw)


def _masked(text: str) -> str:
    """With every hash and random name blanked; their lengths stay."""
    return re.sub(r"[0-9a-f]{16,}", lambda match: "x" * len(match[0]), text)


def forms(folder: Path) -> dict[str, Any]:
    """Whether what remains is the same for K = 1 and K = 7, part by part."""
    one, seven = (remains(folder / f"k{k}", k) for k in (1, 7))
    return {**{name: one[name] == seven[name] for name in one}, "files_and_sizes": one["files"]}


def kill(kills: int, points: Iterable[int] = (), *, seed: int = 0, without: str | None = None) -> tuple[Tally, bool]:
    """Kill selections so often: first one at each of `points`, then at random. Whether `points` had all events."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        with _forced(1):
            run(Path(folder) / "first")  # imports and the accountant's answers are inherited
        harness = Harness(Path(folder), seed, without)
        swept = harness.sweep(points)
        harness._new()
        while harness.tally.kills < kills:
            harness.at_random()
        return harness.tally, swept


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of what survives")
    parser.add_argument("--without", choices=sorted(MUTANTS), help="what to take away from the process")
    parser.add_argument("--mutants", type=int, default=0, metavar="KILLS", help="then also break it in each way")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    started = time.monotonic()
    points = range(1, args.kills * 85 // 100 + 1)
    tally, swept = kill(args.kills, points, seed=args.seed, without=args.without)
    with tempfile.TemporaryDirectory() as folder:
        same = forms(Path(folder))
    mutants = {name: kill(args.mutants, without=name)[0] for name in MUTANTS if args.mutants}
    alike = all(value for name, value in same.items() if name != "files_and_sizes")
    out = {
        **asdict(tally),
        "every_event_of_two_runs": swept,
        "without": args.without,
        "seconds": round(time.monotonic() - started, 1),
        "forms": same,
        "mutants": {name: {**asdict(t), "ok": t.ok} for name, t in mutants.items()},
        "ok": tally.ok and alike,
    }
    print(json.dumps(out) if args.json else "\n".join(f"{name:24} {value}" for name, value in out.items()))
    return 0 if out["ok"] and not any(t.ok for t in mutants.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
