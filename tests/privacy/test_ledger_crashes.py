"""A crash never under-counts: kills at random moments, torn records, and a failure at every system call.

Run as a script, this file is the harness: a process without threads, which may fork the workers.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halfsilver.errors import BudgetExceeded, LedgerCorrupt
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.privacy.ledger.records import decode
from halfsilver.privacy.plan import PrivacyPlan

BLOCK = 4
KILLS = 24
WORKERS = 8


def plan_of(steps: int, sigma: float = 50.0) -> PrivacyPlan:
    return PrivacyPlan(steps=steps, sampling_rate=1.0, expected_batch_size=10, noise_multiplier=sigma)


def total(ledger: Ledger) -> int:
    return sum(c.count for c in ledger.counts())


def work(ledger: Ledger, run_id: str, touched: Path) -> None:
    """Take steps until none is granted, leaving a byte for each one that touches the data."""
    fd = os.open(touched, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        while True:
            for _ in range(ledger.intend(run_id, BLOCK).count):
                os.write(fd, b".")
    except BudgetExceeded:
        pass


def fork(job: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            job()
            status = 0
        finally:
            os._exit(status)
    return pid


def kill_harness(folder: Path) -> None:
    """Kill a worker at 24 random moments; between two lives the ledger must open and cover every step."""
    path, touched, rng = folder / "ledger", folder / "touched", random.Random(3)

    def live(life: int) -> None:
        ledger = Ledger.open(path)
        for run_id, run in ledger.runs.items():
            if not run.closed:
                ledger.finish(run_id, 0)
        ledger.compact()
        ledger.register_run(f"life {life}", plan_of(10**6), block_max=BLOCK)
        work(ledger, f"life {life}", touched)

    touched.write_bytes(b"")
    for life in range(1, KILLS + 1):
        pid = fork(lambda life=life: live(life))  # type: ignore[misc]
        if life % 4:  # by progress, not by the clock, so that a slow machine sees as many steps
            wait_for_size(touched, touched.stat().st_size + rng.randint(1, 60))
        time.sleep(rng.uniform(0.0, 0.004))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the worker ended by itself"
        if path.exists():
            surplus = total(Ledger.open(path)) - touched.stat().st_size
            assert 0 <= surplus <= BLOCK * life, surplus
    assert b'"type":"summary"' in path.read_bytes(), "no compaction was under way"


def wait_for_size(path: Path, size: int) -> None:
    deadline = time.monotonic() + 30
    while path.stat().st_size < size and time.monotonic() < deadline:
        time.sleep(0.0005)


def race_harness(folder: Path) -> None:
    """Eight processes spend one budget at once, with two mechanisms; one of them also compacts."""
    path = folder / "ledger"
    ledger = Ledger.open(path, budget=Budget(epsilon=1.0, delta=1e-5))

    def live(worker: int) -> None:
        mine, run_id = Ledger.open(path), f"run {worker}"
        mine.register_run(run_id, plan_of(60, sigma=50.0 + worker % 2), block_max=BLOCK)
        work(mine, run_id, folder / f"touched {worker}")
        mine.finish(run_id, 0)
        mine.compact()

    pids = [fork(lambda worker=worker: live(worker)) for worker in range(WORKERS)]  # type: ignore[misc]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * WORKERS
    steps = {f"run {w}": (folder / f"touched {w}").stat().st_size for w in range(WORKERS)}
    assert {run_id: run.spent for run_id, run in Ledger.open(path).runs.items()} == steps
    assert 0.9 < ledger.spent() <= 1.0


@pytest.mark.nightly
@pytest.mark.parametrize("harness", ["kill_harness", "race_harness"])
def test_harness(tmp_path: Path, harness: str) -> None:
    command = [sys.executable, __file__, harness, str(tmp_path)]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    if harness == "kill_harness":
        assert (tmp_path / "touched").stat().st_size > 10 * KILLS, "too few steps to show anything"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def test_a_record_torn_anywhere_counts_as_one_block(path: Path) -> None:
    """Torn while it was written: its head comes after that."""
    ledger, beside = Ledger.open(path), path.with_name("ledger.head")
    ledger.register_run("a", plan_of(100), block_max=BLOCK)
    ledger.intend("a", 2)
    before, head = path.read_bytes(), beside.read_bytes()
    ledger.intend("a", 3)
    whole = path.read_bytes()
    for size in [*range(len(before) + 1, len(whole) - 1, 11), len(whole) - 1]:
        path.write_bytes(whole[:size])
        beside.write_bytes(head)
        assert total(Ledger.open(path, create=False)) == 2 + BLOCK
        assert path.read_bytes() == whole[:size], "reading must not repair"
        grant = Ledger.open(path).intend("a")
        types = [decode(line)["type"] for line in path.read_bytes().splitlines(keepends=True)]
        assert types == ["header", "run", "intent", "torn", "intent"]
        assert total(Ledger.open(path)) == 2 + BLOCK + 1
        Ledger.open(path).verify_head(grant.seq, grant.head)


def test_a_record_that_was_whole_once_cannot_be_torn(path: Path) -> None:
    """It may be of a run with less noise than the one that a torn record is charged to."""
    ledger = Ledger.open(path)
    ledger.register_run("a", plan_of(100), block_max=BLOCK)
    ledger.intend("a", 3)
    whole = path.read_bytes()
    for cut in (1, 5, 100):
        path.write_bytes(whole[:-cut])
        with pytest.raises(LedgerCorrupt, match="cut back"):
            Ledger.open(path, create=False)


def test_a_torn_record_is_charged_to_a_run_that_can_go_on(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.register_run("first", plan_of(100), block_max=BLOCK)
    ledger.register_run("used up", plan_of(2), block_max=2)
    ledger.intend("used up", 2)
    ledger.register_run("finished", plan_of(2), block_max=2)
    ledger.finish("finished", 0)
    tear(path)
    ledger.intend("first")
    assert {run_id: run.spent for run_id, run in ledger.runs.items()} == {
        "first": BLOCK + 1,
        "used up": 2,
        "finished": 0,
    }


def test_a_torn_record_before_any_run_is_dropped(path: Path) -> None:
    Ledger.open(path)
    before = path.read_bytes()
    tear(path)
    assert total(Ledger.open(path)) == 0
    Ledger.open(path).register_run("a", plan_of(2))
    assert path.read_bytes().startswith(before + b'{"block_max"')


def test_a_charge_for_a_torn_record_stays_within_plan_and_budget(path: Path) -> None:
    ledger = Ledger.open(path, budget=Budget(epsilon=plan_of(5).epsilon(5e-6), delta=1e-5))
    ledger.register_run("a", plan_of(50), block_max=BLOCK)
    ledger.intend("a", BLOCK)
    tear(path)
    assert total(Ledger.open(path)) == 5
    with pytest.raises(BudgetExceeded):
        ledger.intend("a")
    assert ledger.runs["a"].spent == 5


def tear(path: Path) -> None:
    with open(path, "ab") as handle:
        handle.write(b'{"count":1,"ha')


class Crash(BaseException):
    pass


def crash_points(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Path]:
    """For each n, a fresh folder in which the n-th system call that changes a file fails, half done."""
    real = {name: getattr(os, name) for name in ("write", "fsync", "replace")}
    for fatal in range(1000):
        calls = iter(range(10**9))

        def fragile(name: str, *args: object, fatal: int = fatal, calls: Iterator[int] = calls) -> object:
            if next(calls) != fatal:
                return real[name](*args)
            if name == "write":
                fd, data = args
                real["write"](fd, bytes(data)[: len(bytes(data)) // 2])  # type: ignore[call-overload]
            raise Crash

        for name in real:
            monkeypatch.setattr(os, name, lambda *args, name=name: fragile(name, *args))
        yield folder / str(fatal)
        monkeypatch.undo()
        if next(calls) <= fatal:
            return


@pytest.mark.nightly
def test_a_crash_at_any_system_call_neither_loses_a_step_nor_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = 0
    for folder in crash_points(monkeypatch, tmp_path):
        touched = 0
        try:
            for count in life(folder):
                touched += count
        except Crash:
            crashes += 1
        monkeypatch.undo()
        ledger = Ledger.open(folder / "ledger", head_file=folder / "head")
        assert 0 <= total(ledger) - touched <= BLOCK
        ledger.register_run("next", plan_of(20))
        grant = ledger.intend("next")
        Ledger.open(ledger.path, head_file=folder / "head").verify_head(grant.seq, grant.head)
    assert crashes > 30


def life(folder: Path) -> Iterator[int]:
    """All that writes to a ledger, in turn; yields the steps that touch the data."""
    ledger = Ledger.open(folder / "ledger", head_file=folder / "head")
    ledger.register_run("a", plan_of(20), block_max=BLOCK)
    yield ledger.intend("a", 3).count
    yield ledger.intend("a", 1).count
    ledger.register_run("b", plan_of(20), block_max=BLOCK)
    yield ledger.intend("b", 2).count
    ledger.finish("a", 4)
    ledger.finish("b", 2)
    ledger.compact()
    ledger.register_run("c", plan_of(20), block_max=BLOCK)
    yield ledger.intend("c", 4).count


if __name__ == "__main__":
    {"kill_harness": kill_harness, "race_harness": race_harness}[sys.argv[1]](Path(sys.argv[2]))
