"""A full or failing disk at every write, a process that dies anywhere, eight that want one folder, clocks that lie.

`benchmarks.robustness.disk` keeps what was fsynced, so each release can be held against the records that were durable
then.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import halfsilver as hs
from benchmarks.robustness.crash import steps_in
from benchmarks.robustness.disk import Disk, Watch, same_place
from halfsilver._core import system
from halfsilver.errors import BudgetExceeded, CheckpointCorrupt, ConfigError, LedgerCorrupt, StorageError
from halfsilver.privacy.ledger import records as ledger_records
from halfsilver.privacy.releases import Releases
from halfsilver.runs import folder as runs
from halfsilver.runs.verify import verify

PLAN = hs.PrivacyPlan(steps=4, spare_steps=8, sampling_rate=1.0, expected_batch_size=30, noise_multiplier=30.0)
ROWS = torch.linspace(-1, 1, 120).reshape(30, 4)


def trainer(plan: hs.PrivacyPlan = PLAN, **options: Any) -> hs.Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return hs.Trainer(
        model,
        lambda m, b: m(b).square().squeeze(1),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        plan=plan,
        performance=hs.Performance(backend="vmap", micro_batch_size=30),
        checkpoint_seconds=-1.0,
        **options,
    )


@pytest.fixture(autouse=True)
def one_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "place_of", same_place)


@pytest.fixture(autouse=True, scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first run imports parts of torch, which may make folders of their own: not the calls to count."""
    trainer().fit(ROWS, run_dir=tmp_path_factory.mktemp("first"), delta=1e-5)


class Crash(BaseException):
    """The process is gone, and what it wrote is still in the machine's memory."""


class Fragile(io.FileIO):
    """A file whose writes can fail, half done."""

    call: Callable[[str], None]

    def write(self, data: Any, /) -> int:
        try:
            self.call("write")
        except BaseException:
            super().write(bytes(data)[: len(bytes(data)) // 2])
            raise
        return super().write(data) or 0


class Calls:
    """Every call that changes the disk, by number; the one numbered `fatal` raises what `fail` makes of its name."""

    def __init__(self, fatal: int = -1, fail: Callable[[str], BaseException] = Crash) -> None:
        self.made: list[str] = []
        self._fatal, self._fail = fatal, fail

    def __call__(self, name: str) -> None:
        self.made.append(name)
        if len(self.made) - 1 == self._fatal:
            raise self._fail(name)

    @contextmanager
    def installed(self, disk: Disk) -> Iterator[None]:
        """Stand between `halfsilver` and the system's calls; what is synced goes to `disk`."""
        watch, real_write = Watch(disk.apply), os.write

        def opened(path: Path, mode: str, **options: Any) -> Any:
            if "x" not in mode and "a" not in mode:
                return builtins.open(path, mode, **options)
            file = Fragile(path, mode.replace("b", ""))
            file.call = self
            raw = io.BufferedWriter(file)
            return raw if "b" in mode else io.TextIOWrapper(raw, **options)

        def write(fd: int, data: Any) -> int:
            try:
                self("append")
            except BaseException:
                real_write(fd, bytes(data)[: len(bytes(data)) // 2])
                raise
            return real_write(fd, data)

        def before(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **options: Any) -> Any:
                self(name)
                return call(*args, **options)

            return called

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(system, "open", opened, raising=False)
            patch.setattr(runs, "open", opened, raising=False)
            patch.setattr(os, "write", write)
            patch.setattr(os, "fsync", before("fsync", watch.fsync))
            for name in ("replace", "mkdir", "unlink"):
                patch.setattr(os, name, before(name, getattr(os, name)))
            yield
        watch.close()


@contextmanager
def releases_on(disk: Disk, ledger: tuple[str, ...]) -> Iterator[Counter[str]]:
    """Counts releases, and those for which the durable ledger held no step."""
    seen, real = Counter[str](), Releases.noisy

    def noisy(self: Releases, *args: Any) -> Any:
        seen["released"] += 1
        seen["uncovered"] += steps_in(disk.read(*ledger)) < seen["released"]
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Releases, "noisy", noisy)
        yield seen


def full_or_broken(name: str) -> OSError:
    code = errno.ENOSPC if name in ("append", "write", "mkdir") else errno.EIO
    return OSError(code, os.strerror(code))


def faults(folder: Path, fail: Callable[[str], BaseException]) -> Iterator[tuple[Disk, Calls]]:
    """A fresh disk for each call that a run makes, and the calls of which that one fails."""
    for fatal in itertools.count():
        root = folder / str(fatal)
        root.mkdir(parents=True)
        disk, calls = Disk(root), Calls(fatal, fail)
        yield disk, calls
        disk.close()
        if len(calls.made) <= fatal:
            return


@pytest.mark.nightly
def test_a_full_or_failing_disk_releases_nothing_and_the_run_goes_on_later(tmp_path: Path) -> None:
    """A fault at each of more than 50 calls: every error typed, 0 releases without a durable record, all resumed."""
    failed = Counter[str]()
    for fault, (disk, calls) in enumerate(faults(tmp_path / "disks", full_or_broken)):
        with releases_on(disk, ("a", "run", "ledger.jsonl")) as seen:
            with calls.installed(disk), suppress(StorageError):
                trainer().fit(ROWS, run_dir=disk.root / "a" / "run", delta=1e-5)
                assert len(calls.made) <= fault, "a fault went unheard"
            assert not seen["uncovered"]
            failed.update(calls.made[fault : fault + 1])
            left = disk.cut(tmp_path / str(fault)).root if fault % 2 else disk.root  # with a power cut, and without
            trainer().fit(ROWS, run_dir=left / "a" / "run", delta=1e-5)
            counted = steps_in((left / "a" / "run" / "ledger.jsonl").read_bytes())
        assert seen["released"] <= counted <= seen["released"] + 1
        assert verify(left / "a" / "run")["finished"]
    assert sum(failed.values()) >= 50
    assert set(failed) == {"append", "write", "fsync", "replace", "mkdir", "unlink"}


@pytest.mark.nightly
def test_a_death_anywhere_leaves_nothing_half_synced_for_the_next_process(tmp_path: Path) -> None:
    """Dying is not a power cut: the next process finds names that nobody synced, and must not rely on them."""
    plan = replace(PLAN, steps=2)
    for disk, calls in faults(tmp_path, Crash):
        path = disk.root / "a" / "run"
        with releases_on(disk, ("a", "run", "ledger.jsonl")) as seen:
            with calls.installed(disk), suppress(Crash):
                trainer(plan).fit(ROWS, run_dir=path, delta=1e-5)
            with Calls().installed(disk):
                trainer(plan).fit(ROWS, run_dir=path, delta=1e-5)
        assert seen["released"] >= 2
        assert not seen["uncovered"], calls.made


def test_a_repair_that_died_halfway_cannot_lose_the_steps_of_others(tmp_path: Path) -> None:
    """Another process mends a torn record and dies before its rename is durable; this one goes on appending."""
    plan = replace(PLAN, steps=90)
    for disk, calls in faults(tmp_path, Crash):
        path = disk.root / "ledger"
        with Calls().installed(disk):
            mine = hs.Ledger.open(path)
            mine.register_run("mine", plan)
            mine.intend("mine")
            with open(path, "ab") as file:
                file.write(b'{"count":1,')  # by a process that was killed
        with calls.installed(disk), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "unlink", lambda *args, **options: None)  # the dead tidy nothing up
            with suppress(Crash):
                hs.Ledger.open(path).intend("mine")
        with Calls().installed(disk):
            mine.intend("mine")
        assert steps_in(disk.read("ledger")) == steps_in(path.read_bytes()), calls.made


RACE = """
import os, sys
from tests.test_faults import *
from halfsilver.errors import RunFolderBusy
folder, racers = Path(sys.argv[1]), 8
torch.set_num_threads(1)
(ready, go), (told, done) = os.pipe(), os.pipe()
def wait(report):
    os.write(done, b"w")  # the winner holds the folder until it is told that all have tried
    os.read(ready, 1)
for _ in range(racers):
    if os.fork() == 0:
        try:
            trainer(replace(PLAN, steps=1), callbacks=[wait]).fit(ROWS, run_dir=folder / "run", delta=1e-5)
        except RunFolderBusy:
            os.write(done, b"b")
        except BaseException:
            os.write(done, b"?")
        os._exit(0)
answers = b"".join(os.read(told, 1) for _ in range(racers))
os.write(go, b"x" * racers)
for _ in range(racers):
    os.wait()
print(json.dumps({"winners": answers.count(b"w"), "busy": answers.count(b"b")}))
"""


@pytest.mark.nightly
def test_eight_processes_race_for_a_folder_and_one_wins(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"winners": 1, "busy": 7}
    assert verify(tmp_path / "run")["finished"]
    assert len(hs.Ledger.open(tmp_path / "run" / "ledger.jsonl", create=False).runs) == 1


def test_holes_in_the_log_do_not_stop_a_run(tmp_path: Path) -> None:
    """Nobody syncs the log: after a power cut, sectors in the middle of it may be zeros."""
    result = trainer().fit(ROWS, run_dir=tmp_path, delta=1e-5)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    holes = [lines[0], b"\0" * 40 + lines[1][40:], b"{}\n", b"[1]\n", b"\xff\n", b"[" * 9999 + b"\n", lines[3], b'{"st']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(holes))
    again = trainer().fit(ROWS, run_dir=tmp_path, delta=1e-5)
    assert [record["step"] for record in again.history] == [1, 4]
    assert [record["step"] for record in result.history] == [1, 2, 3, 4]


def test_clocks_that_go_backwards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()

    class Backwards(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Backwards:
            return cls(2000, 1, 1, tzinfo=UTC) - timedelta(days=next(ticks))

    monkeypatch.setattr(ledger_records, "datetime", Backwards)
    monkeypatch.setattr(time, "monotonic", lambda: -3600.0 * next(ticks))
    result = trainer().fit(ROWS, run_dir=tmp_path, delta=1e-5)
    assert (result.updates, result.stopped) == (4, "finished")
    assert verify(tmp_path)["ok"]
    assert "1999-12" in (tmp_path / "ledger.jsonl").read_text()


def test_a_budget_used_up_in_mid_run_stops_it_before_the_data(tmp_path: Path) -> None:
    """By another run, which takes 9 of the 12 steps that there are."""

    def other(report: hs.trainer.StepReport) -> None:
        if report.step == 1:
            also = hs.Ledger.open(tmp_path / "ledger")
            also.register_run("other", PLAN, block_max=9)
            assert also.intend("other", 9).count == 9

    budget = hs.Budget(epsilon=PLAN.epsilon(5e-6), delta=1e-5)
    ledger = hs.Ledger.open(tmp_path / "ledger", budget=budget)
    result = trainer(callbacks=[other]).fit(ROWS, run_dir=tmp_path / "run", ledger=ledger, delta=1e-5)
    assert (result.updates, result.stopped) == (3, "budget")
    assert verify(tmp_path / "run")["step"] == 3
    assert trainer().fit(ROWS, run_dir=tmp_path / "run", ledger=ledger, delta=1e-5).updates == 3
    with pytest.raises(BudgetExceeded, match="Nothing was spent"):
        trainer().fit(ROWS, run_dir=tmp_path / "next", ledger=ledger, delta=1e-5)
    assert sum(c.count for c in ledger.counts()) == 12


@pytest.mark.parametrize("name", ["config.json", "ledger.jsonl", "checkpoint.safetensors"])
def test_files_of_another_plans_run_are_refused(tmp_path: Path, name: str) -> None:
    """Whatever part of the folder comes from the other run, training does not go on."""
    other = replace(PLAN, noise_multiplier=40.0)
    for plan, folder in ((PLAN, "mine"), (other, "other")):
        trainer(plan).fit(ROWS, run_dir=tmp_path / folder, delta=1e-5)
    with pytest.raises(ConfigError, match="Use another run_dir"):
        trainer().fit(ROWS, run_dir=tmp_path / "other", delta=1e-5)
    (tmp_path / "other" / name).replace(tmp_path / "mine" / name)
    with pytest.raises((ConfigError, LedgerCorrupt, CheckpointCorrupt)):
        trainer().fit(ROWS, run_dir=tmp_path / "mine", delta=1e-5)
