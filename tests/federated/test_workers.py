"""Worker processes: the sum of one process, whoever dies, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core import forks
from halfsilver._core.tensors import Batch, flatten, norm, trainable
from halfsilver.errors import ConfigError
from halfsilver.federated import Engine, InProcess, LocalTraining, PrivateUsers, Round
from halfsilver.privacy.users import Fold, workers
from halfsilver.privacy.users.workers import Workers
from tests.federated.helpers import LOCAL, linear, loss_fn, plan, users

CLIP = 0.05
HERE = os.getpid()
PROC = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


class Uneven:
    """30 users with 1 to 30 rows. Those in `deadly` kill the process that reads them, those in `broken` raise."""

    def __init__(self, deadly: frozenset[int] = frozenset(), broken: frozenset[int] = frozenset()) -> None:
        self._deadly, self._broken = deadly, broken

    def size(self) -> int:
        return 30

    def rows(self, user: int, limit: int) -> Batch:
        if user in self._deadly and os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        if user in self._broken:
            raise ValueError(f"the rows of user {user}")
        x = torch.randn(min(user + 1, limit), 6, generator=torch.Generator().manual_seed(user))
        return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def network() -> nn.Module:
    """With dropout, which takes randomness of the user's own, and a batch norm, whose buffers each user moves."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16, momentum=0.5), nn.Dropout(0.3), nn.Linear(16, 3))


def asked(model: nn.Module, drawn: list[int], **changes: Any) -> Round:
    values: dict[str, Any] = {"step": 0, "loss_fn": loss_fn, "max_grad_norm": CLIP, "seed": 7}
    return Round(model=model, users=torch.tensor(drawn, dtype=torch.int64), **(values | changes))


def total(engine: Engine, round: Round) -> Tensor:
    """The sum without noise, as the source of releases takes it."""
    fold = Fold(trainable(round.model), round.max_grad_norm, users=len(round.users))
    for contribution in engine.contributions(round):
        fold.add(contribution)
    return flatten(fold.total.tensors)


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


@pytest.fixture
def engine() -> Iterator[Workers]:
    with Workers(PrivateUsers(Uneven()), LOCAL) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_sum_is_that_of_one_process(processes: int) -> None:
    model, rounds = network(), [[*range(30)], [3], [0, 5, 29], [*range(1, 30, 2)]]
    here = InProcess(PrivateUsers(Uneven()), LOCAL)
    with Workers(PrivateUsers(Uneven()), LOCAL, processes) as spread:
        assert spread.population == here.population == 30
        for step, drawn in enumerate(rounds):
            round = asked(model, drawn, step=step, seed=step)
            assert error(total(spread, round), total(here, round)) < 1e-12
            with torch.no_grad():  # the server's step, buffers included: workers must get the new values
                for t in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
                    t.mul_(0.9).add_(0.01)


def test_users_differ_in_dropout_and_rounds_too(engine: Workers) -> None:
    """A wrong seed would show, so the equality above says something."""
    model = network()
    first, other = (total(engine, asked(model, [4, 9], seed=seed)) for seed in (1, 2))
    assert error(other, first) > 1e-3


def test_each_worker_is_one_contribution(engine: Workers) -> None:
    found = list(engine.contributions(asked(network(), [*range(30)])))
    assert 1 <= len(found) <= 2
    assert sum(c.users for c in found) == 30
    for c in found:
        assert all(t.dtype == torch.float64 for t in c.tensors)
        assert 0 < norm(c.tensors) <= c.users * CLIP


def test_an_empty_cohort_starts_nothing(engine: Workers) -> None:
    assert list(engine.contributions(asked(network(), []))) == []
    assert multiprocessing.active_children() == []


@pytest.mark.nightly
@pytest.mark.parametrize("deadly", [{0}, {29}, {7, 8, 9}, set(range(30))])
def test_who_kills_a_worker_takes_nobody_along(deadly: set[int]) -> None:
    """One user must not be able to remove others from the sum: that would be more than one clip norm."""
    model, everybody = network(), [*range(30)]
    right = total(InProcess(PrivateUsers(Uneven()), LOCAL), asked(model, [u for u in everybody if u not in deadly]))
    with Workers(PrivateUsers(Uneven(deadly=frozenset(deadly))), LOCAL) as spread:
        for _ in range(2):
            found = total(spread, asked(model, everybody))
            assert float((found - right).norm()) < 1e-12 * max(1.0, float(right.norm()))
        assert len(multiprocessing.active_children()) == 2


def test_a_worker_killed_between_rounds_is_replaced(engine: Workers) -> None:
    model, everybody = network(), [*range(30)]
    right = total(engine, asked(model, everybody))
    victim = multiprocessing.active_children()[0]
    victim.kill()
    victim.join()
    assert error(total(engine, asked(model, everybody)), right) < 1e-12
    assert len(multiprocessing.active_children()) == 2


def test_a_user_whose_rows_raise_is_passed_over(capfd: pytest.CaptureFixture[str]) -> None:
    model, broken = network(), {0, 13, 29}
    right = total(InProcess(PrivateUsers(Uneven()), LOCAL), asked(model, [u for u in range(30) if u not in broken]))
    with Workers(PrivateUsers(Uneven(broken=frozenset(broken))), LOCAL) as spread:
        assert error(total(spread, asked(model, [*range(30)])), right) < 1e-12
    assert capfd.readouterr() == ("", "")  # nor is a word said about it


def test_another_model_loss_or_mode_is_another_crew(engine: Workers) -> None:
    here = InProcess(PrivateUsers(Uneven()), LOCAL)
    first, second = network(), network()
    for round in (
        asked(first, [2, 3]),
        asked(second, [2, 3]),
        asked(second.eval(), [2, 3]),
        asked(second, [2, 3], max_grad_norm=2 * CLIP),
        asked(second, [2, 3], loss_fn=lambda model, batch: 2 * loss_fn(model, batch)),
    ):
        assert error(total(engine, round), total(here, round)) < 1e-12


def test_workers_start_anew_after_close(engine: Workers) -> None:
    round = asked(network(), [1, 2, 3])
    before = total(engine, round)
    engine.close()
    engine.close()
    assert multiprocessing.active_children() == []
    assert error(total(engine, round), before) < 1e-12


def test_workers_end_with_their_object() -> None:
    engine = Workers(PrivateUsers(Uneven()), LOCAL)
    total(engine, asked(network(), [1, 2, 3]))
    assert len(multiprocessing.active_children()) == 2
    del engine
    gc.collect()
    assert multiprocessing.active_children() == []


def test_a_fork_beside_torchs_threads_trains() -> None:
    """A parallel region in a fork waits forever for threads that were not copied."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        (torch.ones(600, 600) @ torch.ones(600, 600, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
        big = nn.Sequential(nn.Linear(6, 1200), nn.ReLU(), nn.Linear(1200, 3))
        with Workers(users(4, 600), LocalTraining(lr=0.1, batch_size=600, max_examples=600)) as spread:
            assert total(spread, asked(big, [0, 1, 2, 3])).isfinite().all()
    finally:
        torch.set_num_threads(threads)


def test_a_fork_that_cannot_train_is_an_error_before_any_row_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck() -> None:
        time.sleep(60)

    monkeypatch.setattr(workers, "_train_on_made_up_numbers", stuck)
    monkeypatch.setattr(forks, "START_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="cannot train"):
        total(Workers(PrivateUsers(Uneven()), LOCAL), asked(network(), [1]))


def test_what_it_cannot_do_it_says() -> None:
    with pytest.raises(ConfigError, match="processes=0 at least 1"):
        Workers(users(), LOCAL, 0)
    with Workers(users(), LOCAL) as spread, pytest.raises(ConfigError, match=r"model on=\['meta'\] to be on the CPU"):
        total(spread, asked(nn.Linear(6, 3, device="meta"), [1]))


@PROC
def test_nothing_grows_over_50_rounds() -> None:
    """Memory of parent and workers, in MB, and open files; every fifth round a worker dies."""
    model, held = network(), []
    with Workers(PrivateUsers(Uneven(deadly=frozenset({5}))), LOCAL) as spread:
        for step in range(60):
            total(spread, asked(model, [5, 6, 7] if step % 5 == 0 else [6, 7, 20], seed=step))
            if step in (9, 59):
                theirs = [_resident(p.pid) for p in multiprocessing.active_children()]
                held.append((_resident(os.getpid()), max(theirs), len(os.listdir("/proc/self/fd"))))
    (parent, worker, files), (parent_then, worker_then, files_then) = held
    assert files_then <= files
    assert parent_then - parent < 4
    assert worker_then - worker < 8


def _resident(pid: int | None) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.nightly
@PROC
def test_workers_end_when_their_parent_is_killed() -> None:
    script = (
        "import os, signal, multiprocessing as m, torch, tests.federated.test_workers as t\n"
        "e = t.Workers(t.PrivateUsers(t.Uneven()), t.LOCAL); t.total(e, t.asked(t.network(), [1, 2, 3]))\n"
        "print(*(p.pid for p in m.active_children()), flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(p) for p in done.stdout.split()]
    assert len(pids) == 2
    until = time.monotonic() + 20
    while any(_running(p) for p in pids):
        assert time.monotonic() < until, "a worker outlived its parent"
        time.sleep(0.05)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_over_workers_is_that_of_one_process_and_is_resumed(tmp_path: Path) -> None:
    """From one seed, so that draws and noise agree; a second `fit` finds the finished run."""
    ends = []
    for name in ("here", "spread"):
        model, private = linear(), users(20)
        trainer = hs.Trainer(
            model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), plan=plan(), unsafe_seed=3
        )
        with Workers(private, LOCAL) as spread:
            engine: Engine = InProcess(private, LOCAL) if name == "here" else spread
            trainer.fit(engine, run_dir=tmp_path / name)
            first = flatten(trainable(model)).detach().clone()
            trainer.fit(engine, run_dir=tmp_path / name)
        assert torch.equal(flatten(trainable(model)), first)
        ends.append(first)
    assert error(ends[1], ends[0]) < 1e-6
