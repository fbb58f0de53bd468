"""Users who come when they can, with correlated noise: nobody takes part twice within the separation."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs
from halfsilver.errors import ConfigError, LedgerCorrupt, RunFolderBusy
from halfsilver.federated import Contribution, Round
from halfsilver.privacy.entropy import OsEntropy
from halfsilver.privacy.strategies import Buffered, Correlated
from halfsilver.privacy.users.attendance import Attendance
from tests.federated.helpers import plan, source

APART = 5
NOISE = Correlated(separation=APART, strategy=Buffered((0.9,), (0.3,)))


class Devices:
    """An engine of devices of which some are here. Whoever is asked answers; it notes who was asked."""

    population = 40

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.asked: list[list[int]] = []
        self.here: Tensor | None = None

    def present(self) -> Tensor:
        if self.here is not None:
            return self.here
        count = self._chance.randint(0, self.population)
        return torch.tensor(self._chance.sample(range(self.population), count), dtype=torch.int64)

    def contributions(self, round: Round) -> Iterator[Contribution]:
        self.asked.append(round.users.tolist())
        for _ in round.users.tolist():
            yield Contribution([torch.ones_like(p) for p in round.model.parameters()])


def devices_plan(steps: int = 200) -> hs.PrivacyPlan:
    return plan(steps=steps, sampling_rate=0.2, expected_batch_size=8.0, noise=NOISE)


def test_nobody_comes_too_early_whatever_is_lost(tmp_path: Path) -> None:
    """150 rounds in processes that end at random, some of them between the record and the request."""
    chance, when = random.Random(1), dict[int, list[int]]()
    rounds, p = 0, devices_plan()
    while rounds < 150:
        engine = Devices(seed=rounds)
        updates = source(tmp_path, engine, p, nn.Linear(2, 1))
        for _ in range(chance.randint(1, 12)):
            if chance.random() < 0.2:
                updates.out.intend()  # the process ends before anybody is asked, or goes on with the next round
                if chance.random() < 0.5:
                    updates._drawn()  # or before anybody has answered
                continue
            updates.release()
            rounds = updates.out._end
            for user in engine.asked[-1]:
                when.setdefault(user, []).append(rounds - 1)
    assert all(len(asked) <= 8 for asked in engine.asked)
    apart = [later - earlier for seen in when.values() for earlier, later in pairwise(seen)]
    assert min(apart) >= APART
    assert len(apart) > 100


@pytest.mark.parametrize("said", [True, False])
def test_a_run_that_is_taken_over_waits_for_those_who_came_elsewhere(tmp_path: Path, said: bool) -> None:
    """The folder is a copy, and does not know the last rounds of the original. The session knows that it is one."""
    first = Devices(seed=0)
    original = source(tmp_path, first, devices_plan(), nn.Linear(2, 1))
    for _ in range(4):
        original.release()
    old = shutil.copytree(tmp_path / "attendance", tmp_path / "kept")
    for _ in range(6):
        original.release()
    shutil.rmtree(tmp_path / "attendance")
    old.rename(tmp_path / "attendance")
    second = Devices(seed=1)
    copied = source(tmp_path, second, devices_plan(), nn.Linear(2, 1), taken_over=said)
    copied.release()
    with pytest.raises(RunFolderBusy):
        original.release()
    now, last = copied.out.round - 1, {user: at for at, asked in enumerate(first.asked) for user in asked}
    assert now == 10 + (APART - 1 if said else 0)
    assert (min(now - last[user] for user in second.asked[0] if user in last) >= APART) is said


def test_only_the_last_rounds_are_kept(tmp_path: Path) -> None:
    engine = Devices(seed=0)
    updates = source(tmp_path, engine, devices_plan(), nn.Linear(2, 1))
    for _ in range(12):
        updates.release()
    kept = {int(path.stem) for path in (tmp_path / "attendance").iterdir()}
    assert kept == {8, 9, 10, 11}


def test_whoever_is_present_and_free_is_asked(tmp_path: Path) -> None:
    engine = Devices(seed=0)
    engine.here = torch.tensor([3, 1, 2])
    updates = source(tmp_path, engine, devices_plan(), nn.Linear(2, 1))
    for _ in range(6):
        updates.release()
    assert engine.asked == [[1, 2, 3], [], [], [], [], [1, 2, 3]]


def test_who_is_asked_of_many_is_a_matter_of_chance(tmp_path: Path) -> None:
    """1,000 rounds of 10 of 20 users, each independent: a user is asked 500 times on average, with a standard deviation
    of 16; 100 off is 6 of them, with a chance below 1e-7 for all users.
    """
    attendance, counts = Attendance(tmp_path, 1, next_round=0), torch.zeros(20, dtype=torch.int64)
    for number in range(1000):
        counts[attendance.admit(torch.arange(20), number, 10, OsEntropy())] += 1
    assert int(counts.sum()) == 10_000
    assert int((counts - 500).abs().max()) < 100


def test_a_lost_or_damaged_record_is_refused(tmp_path: Path) -> None:
    engine, folder = Devices(seed=0), tmp_path / "attendance"
    updates = source(tmp_path, engine, devices_plan(), nn.Linear(2, 1))
    updates.release()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-8] + bytes(8), b""):
        path.write_bytes(damaged)
        with pytest.raises(LedgerCorrupt, match="damaged"):
            source(tmp_path, engine, devices_plan(), nn.Linear(2, 1))
    path.unlink()
    folder.rmdir()
    with pytest.raises(LedgerCorrupt, match=r"gone.*last 4 rounds"):
        source(tmp_path, engine, devices_plan(), nn.Linear(2, 1))


def test_a_lost_file_between_others_is_refused(tmp_path: Path) -> None:
    """Only round 3 matters after round 5, if users come four rounds apart; round 4 was never begun."""
    attendance = Attendance(tmp_path, 4, next_round=0)
    for number in (0, 1, 2, 3, 5):
        attendance.admit(torch.arange(number, number + 1), number, 10, OsEntropy())
    assert {path.stem for path in tmp_path.iterdir()} == {"3", "5"}
    Attendance(tmp_path, 4, next_round=6)
    (tmp_path / "3.users").unlink()
    with pytest.raises(LedgerCorrupt, match=r"3\.users is gone"):
        Attendance(tmp_path, 4, next_round=6)
    Attendance(tmp_path, 3, next_round=6)  # nobody of round 3 would have to wait


def test_a_record_that_is_ahead_of_the_ledger_is_refused(tmp_path: Path) -> None:
    attendance = Attendance(tmp_path, 3, next_round=0)
    attendance.admit(torch.arange(4), 7, 10, OsEntropy())
    with pytest.raises(LedgerCorrupt, match="round 7"):
        attendance.admit(torch.arange(4), 7, 10, OsEntropy())
    with pytest.raises(LedgerCorrupt, match="round 7"):
        Attendance(tmp_path, 3, next_round=7)
    Attendance(tmp_path, 3, next_round=8)


class InTurn:
    """The same devices, of which nobody knows who is here."""

    population = Devices.population

    def __init__(self, devices: Devices) -> None:
        self.contributions = devices.contributions


def test_an_engine_that_does_not_know_who_is_present_cannot_take_over(tmp_path: Path) -> None:
    devices = Devices(seed=0)
    source(tmp_path, devices, devices_plan(), nn.Linear(2, 1)).release()
    with pytest.raises(ConfigError, match="method present"):
        source(tmp_path, InTurn(devices), devices_plan(), nn.Linear(2, 1))


@pytest.mark.parametrize("kept", [False, True])
def test_users_in_turn_wait_for_a_pass_after_a_restart_unless_they_keep_their_numbers(
    tmp_path: Path, kept: bool
) -> None:
    p, devices = replace(devices_plan(), noise=replace(NOISE, order_kept=kept)), Devices(seed=0)
    for _ in range(2):
        updates = source(tmp_path, InTurn(devices), p, nn.Linear(2, 1))
        updates.release()
    assert updates.out._end == (2 if kept else 2 + APART - 1)


@pytest.mark.parametrize("here", [torch.tensor([40]), torch.tensor([-1]), torch.tensor([1, 1]), torch.tensor([0.5])])
def test_an_engine_that_names_nobody_real_is_refused(tmp_path: Path, here: Tensor) -> None:
    engine = Devices(seed=0)
    engine.here = here
    with pytest.raises(ConfigError, match="present"):
        source(tmp_path, engine, devices_plan(), nn.Linear(2, 1)).release()


def test_independent_noise_draws_by_coins_whoever_is_present(tmp_path: Path) -> None:
    engine = Devices(seed=0)
    engine.here = torch.tensor([3])
    updates = source(tmp_path, engine, plan(steps=30, sampling_rate=0.5), nn.Linear(2, 1))
    for _ in range(5):
        updates.release()
    assert len({user for asked in engine.asked for user in asked}) > 10
    assert not (tmp_path / "attendance").exists()
