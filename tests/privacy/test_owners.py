"""One run has one owner: copies, forks and restored images of a process take no step that another one counts."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfsilver as hs
from halfsilver._core import system
from halfsilver._core.distributed import World
from halfsilver._core.forks import BESIDE_THREADS
from halfsilver._core.warning_filters import warning_filters
from halfsilver.errors import LedgerCorrupt, RunFolderBusy
from halfsilver.privacy.entropy import OsEntropy
from halfsilver.privacy.gradients import ClippedSum
from halfsilver.privacy.ledger.records import decode, encode
from halfsilver.privacy.releases import Releases
from halfsilver.privacy.strategies import Buffered
from halfsilver.runs.folder import RunFolder

PLAN = hs.PrivacyPlan(steps=60, sampling_rate=0.1, expected_batch_size=10, noise_multiplier=1.0)
CORRELATED = hs.PrivacyPlan(
    steps=60,
    sampling_rate=1 / 6,
    expected_batch_size=10,
    noise_multiplier=2.0,
    noise=hs.Correlated(separation=6, strategy=Buffered((0.9, 0.3), (0.4, 0.2)), order_kept=False),
)


def releases(path: Path, plan: hs.PrivacyPlan = PLAN, block: int = 10) -> Releases:
    ledger = hs.Ledger.open(path)
    out = Releases([torch.zeros(3)], plan, ledger=ledger, run_id="run", entropy=OsEntropy(), world=World())
    out.register(block)
    return out


def release(out: Releases) -> Tensor:
    out.intend()
    (noisy,) = out.noisy(ClippedSum([torch.zeros(3, dtype=torch.float64)], out.plan.max_grad_norm))
    return noisy


def counted(path: Path) -> int:
    return hs.Ledger.open(path).runs["run"].spent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


class TestInTheLedger:
    def test_another_owner_takes_the_run_over_for_good(self, path: Path) -> None:
        ledger = hs.Ledger.open(path)
        ledger.register_run("run", PLAN, block_max=5)
        for owner in ("a", "a", "b", "c", "c"):
            ledger.intend("run", owner=owner)
        for replaced in ("a", "b"):
            with pytest.raises(RunFolderBusy, match="has taken it over"):
                ledger.intend("run", owner=replaced)
            with pytest.raises(RunFolderBusy):
                hs.Ledger.open(path).intend("run", owner=replaced)
        assert counted(path) == 5
        ledger.register_run("other", PLAN)
        assert ledger.intend("other", owner="a").count == 1, "owners are of a run"

    def test_a_file_in_which_an_owner_comes_back_is_refused(self, path: Path) -> None:
        ledger = hs.Ledger.open(path)
        ledger.register_run("run", PLAN)
        for owner in ("a", "b"):
            ledger.intend("run", owner=owner)
        fields = {"type": "intent", **ledger.runs["run"].steps(1), "owner": "a"}
        with open(path, "ab") as file:
            file.write(encode(fields, seq=ledger.head.seq + 1, prev=ledger.head.hash))
        with pytest.raises(LedgerCorrupt, match="whom owner='b' has replaced"):
            hs.Ledger.open(path)

    def test_a_torn_record_changes_no_owner(self, path: Path) -> None:
        ledger = hs.Ledger.open(path)
        ledger.register_run("run", PLAN, block_max=5)
        ledger.intend("run", owner="a")
        with open(path, "ab") as file:
            file.write(b'{"count":1,')
        assert ledger.intend("run", owner="a").count == 1
        assert counted(path) == 1 + 5 + 1


class TestLinks:
    def test_a_ledger_with_two_names_takes_no_record(self, path: Path) -> None:
        """Neither a step nor a compaction, which would make two files of it; reading is possible."""
        ledger, other = hs.Ledger.open(path), path.with_name("other.jsonl")
        ledger.register_run("run", PLAN)
        ledger.intend("run")
        os.link(path, other)
        before = path.read_bytes()
        for name in (path, other):
            opened = hs.Ledger.open(name)
            for act in (lambda: opened.intend("run"), opened.compact, lambda: opened.external((1.0, 0.0), "why")):  # noqa: B023
                with pytest.raises(LedgerCorrupt, match="2 hard links"):
                    act()
            assert opened.spent(1e-5) == ledger.spent(1e-5)
        assert path.read_bytes() == before
        other.unlink()
        assert ledger.intend("run").count == 1

    def test_writers_by_another_path_are_excluded_too(self, path: Path) -> None:
        """As where one file is bound into two containers: each path then has a lock file of its own."""
        ledger = hs.Ledger.open(path)
        ledger.register_run("run", PLAN)
        done = threading.Event()

        def step() -> None:
            hs.Ledger.open(path).intend("run")
            done.set()

        thread = threading.Thread(target=step)
        with system.lock_file(path, blocking=True):
            thread.start()
            assert not done.wait(0.3)
            assert counted(path) == 0
        thread.join()
        assert counted(path) == 1


class TestForks:
    def test_a_fork_has_no_granted_step_and_takes_none(self, path: Path) -> None:
        """Wherever the process is forked: between two steps of a block, or within one."""
        for plan, within in ((PLAN, False), (PLAN, True), (CORRELATED, True)):
            path.unlink(missing_ok=True)
            path.with_name("ledger.jsonl.head").unlink(missing_ok=True)
            out = releases(path, plan)
            release(out)
            if within:
                out.intend()
            there = in_a_fork(lambda out=out: attempts(out, 20))  # type: ignore[misc]
            assert there == ["RunFolderBusy"] * 20
            here = [release(out) for _ in range(8)]
            assert counted(path) == 10
            assert len({tuple(t.tolist()) for t in here}) == 8

    def test_a_fork_does_not_keep_the_noise_that_is_remembered(self, path: Path) -> None:
        out = releases(path, CORRELATED)
        release(out)
        assert out._chain is not None
        assert in_a_fork(lambda: [str(out._chain), str(out.round - out._end)]) == ["None", "0"]

    def test_a_fork_may_begin_a_run_of_its_own(self, path: Path, tmp_path: Path) -> None:
        release(releases(path))
        assert in_a_fork(lambda: attempts(releases(tmp_path / "other.jsonl"), 2)) == ["released"] * 2

    def test_a_fork_that_fails_leaves_the_lock_of_its_parent_alone(self, tmp_path: Path) -> None:
        def child() -> list[str]:
            held.__exit__(None, None, None)
            return []

        held = system.lock_file(tmp_path / "lock", blocking=False)
        with held:
            in_a_fork(child)
            with pytest.raises(RunFolderBusy), system.lock_file(tmp_path / "lock", blocking=False):
                pass


def in_a_fork(job: Callable[[], list[str]]) -> list[str]:
    """What a job returns in a forked copy of this process."""
    reader, writer = os.pipe()
    with warning_filters(BESIDE_THREADS):
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(job()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        found: list[str] = json.loads(file.read())
    os.waitpid(child, 0)
    return found


def attempts(out: Releases, steps: int) -> list[str]:
    found = []
    for _ in range(steps):
        try:
            release(out)
        except RunFolderBusy as error:
            found.append(type(error).__name__)
        else:
            found.append("released")
    return found


class TestRestoredImages:
    """A second image of a process, without a fork: a machine that was restored from a snapshot of its memory."""

    @pytest.mark.parametrize("plan", [PLAN, CORRELATED], ids=["independent", "correlated"])
    def test_all_images_together_release_no_more_than_is_counted(self, path: Path, plan: hs.PrivacyPlan) -> None:
        """20 schedules of three images that are made at random moments, also within a step."""
        for seed in range(20):
            chance, here = random.Random(seed), path.with_name(f"{seed}.jsonl")
            images, released, refused = [releases(here, plan, block=chance.choice([1, 4, 10]))], 0, 0
            for _ in range(30):
                if len(images) < 3 and chance.random() < 0.2:
                    images.append(copy.copy(chance.choice(images)))
                out = chance.choice(images)
                try:
                    if chance.random() < 0.3:
                        out.intend()
                        if len(images) < 3:
                            images.append(copy.copy(out))
                        out.noisy(ClippedSum([torch.zeros(3, dtype=torch.float64)], out.plan.max_grad_norm))
                    else:
                        release(out)
                    released += 1
                except RunFolderBusy:
                    refused += 1
            assert released <= counted(here)
            assert released > 0
            assert refused > 0

    def test_it_says_what_to_do(self, path: Path) -> None:
        out = releases(path)
        release(out)
        image = copy.copy(out)
        release(out)
        with pytest.raises(RunFolderBusy, match=r"call fit again"):
            release(image)

    def test_a_new_process_goes_on(self, path: Path) -> None:
        """Whatever the file says that tells of the last use, or if it is gone or was lost in a power cut."""
        for damage in (lambda file: None, Path.unlink, lambda file: file.write_bytes(b"")):
            out = releases(path)
            release(out)
            release(out)
            (use,) = path.parent.glob("*.used")
            damage(use)
        assert counted(path) == 30
        assert out._ledger is not None
        out._ledger.finish("run", 6)
        assert not list(path.parent.glob("*.used"))


class TestFolders:
    ROWS = torch.ones(100, 4)

    def fit(self, folder: Path, stop: int | None = None, **options: Any) -> hs.trainer.RunResult | None:
        model = torch.nn.Linear(4, 1)

        class Stop(Exception):
            pass

        def callback(report: hs.trainer.StepReport) -> None:
            if report.step == stop:
                raise Stop

        trainer = hs.Trainer(
            model,
            lambda m, b: m(b).square().squeeze(1),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            plan=hs.PrivacyPlan(
                steps=6, sampling_rate=0.1, expected_batch_size=10, noise_multiplier=1.0, spare_steps=9
            ),
            performance=hs.Performance(backend="vmap"),
            callbacks=[callback],
            checkpoint_seconds=0.0,
        )
        try:
            return trainer.fit(self.ROWS, run_dir=folder, delta=1e-4, **options)
        except Stop:
            return None

    @pytest.fixture(params=["own ledger", "shared ledger"])
    def run(self, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
        options = {} if request.param == "own ledger" else {"ledger": tmp_path / "ledger.jsonl"}
        self.fit(tmp_path / "run", stop=2, **options)
        return tmp_path / "run", options

    @pytest.mark.nightly
    def test_a_copy_goes_on_only_if_it_is_said_to_take_over(self, run: tuple[Path, dict[str, Any]]) -> None:
        folder, options = run
        copied = Path(shutil.copytree(folder, folder.with_name("copy")))
        with pytest.raises(RunFolderBusy, match=rf"delete {copied}/place.json and call fit again"):
            self.fit(copied, **options)
        assert self.fit(folder, stop=3, **options) is None, "the original goes on without a word"
        (copied / "place.json").unlink()
        if options:
            result = self.fit(copied, stop=4, **options)
            with pytest.raises(RunFolderBusy, match=r"gone on elsewhere"):
                self.fit(folder, **options)
        result = self.fit(copied, **options)
        assert result is not None
        assert result.stopped == "finished"

    def test_a_ledger_that_was_opened_before_the_takeover_hides_nothing(self, tmp_path: Path) -> None:
        folder, path = tmp_path / "run", tmp_path / "ledger.jsonl"
        opened = hs.Ledger.open(path)
        self.fit(folder, stop=2, ledger=opened)
        copied = Path(shutil.copytree(folder, tmp_path / "copy"))
        (copied / "place.json").unlink()
        self.fit(copied, stop=3, ledger=path)
        with pytest.raises(RunFolderBusy, match="gone on elsewhere"):
            self.fit(folder, ledger=opened)

    def test_that_a_run_was_taken_over_is_known_at_each_later_start(self, tmp_path: Path) -> None:
        """It may be killed before it has waited for those who took part elsewhere."""
        folder = RunFolder(tmp_path)
        assert [folder.take("a", ""), folder.take("b", "a")] == [False, False]
        folder.place.unlink()
        assert [folder.take("c", "b"), folder.take("d", "c"), folder.take("e", "d")] == [True, True, True]

    def test_a_copy_of_a_finished_run_is_loaded(self, run: tuple[Path, dict[str, Any]]) -> None:
        folder, options = run
        assert self.fit(folder, **options)
        copied = Path(shutil.copytree(folder, folder.with_name("copy")))
        result = self.fit(copied, **options)
        assert result is not None
        assert result.updates == 6

    def test_a_folder_that_is_renamed_or_met_after_a_reboot_goes_on(
        self, run: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A device may have another number after a reboot, but not before one."""
        folder, options = run
        moved = folder.rename(folder.with_name("moved"))
        assert self.fit(moved, stop=3, **options) is None
        here = system.place_of(moved)
        monkeypatch.setattr(system, "place_of", lambda folder: {**here, "device": 7})
        with pytest.raises(RunFolderBusy):
            self.fit(moved, **options)
        monkeypatch.setattr(system, "place_of", lambda folder: {**here, "device": 7, "boot": "another"})
        assert self.fit(moved, **options) is not None

    def test_a_kill_before_the_first_step_of_a_process_needs_no_word(self, run: tuple[Path, dict[str, Any]]) -> None:
        """The folder then names an owner of whom the ledger has not heard."""
        folder, options = run
        place = json.loads((folder / "place.json").read_text())
        (folder / "place.json").write_text(json.dumps({**place, "owners": [*place["owners"], "killed"]}))
        assert self.fit(folder, **options) is not None

    def test_two_processes_with_one_ledger_do_not_both_go_on(self, tmp_path: Path) -> None:
        """The one that was there stops at its next step, also within a block, and the ledger counts what both took."""
        path = tmp_path / "ledger.jsonl"
        first = releases(path)
        taken = [release(first) for _ in range(3)]
        second = releases(path)
        taken.append(release(second))
        for _ in range(3):
            with pytest.raises(RunFolderBusy):
                release(first)
        taken += [release(second) for _ in range(9)]
        assert counted(path) == 20
        kinds = [decode(line)["type"] for line in path.read_bytes().splitlines(keepends=True)]
        assert kinds == ["header", "run", "intent", "intent"]
