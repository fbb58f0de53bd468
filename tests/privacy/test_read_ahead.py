"""Processes that read ahead: the same rows in the same order, and nothing that a record does reaches another one."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

import halfsilver as hs
from halfsilver._core import forks
from halfsilver._core.tensors import batch_leaves, flatten, trainable
from halfsilver.errors import ConfigError
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.read_ahead import ReadAhead
from halfsilver.privacy.schema import Schema

EXAMPLE = {
    "x": torch.zeros(3),
    "half": torch.zeros(2, dtype=torch.bfloat16),
    "y": torch.tensor(True),
    "none": torch.zeros(0),
}


class Rows(Dataset[Any]):
    """Fifty records; what `odd` does with some of them comes first."""

    def __init__(self, odd: Callable[[int], None] = lambda i: None) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> Any:
        self.odd(i)
        x = torch.full((3,), float(i))
        return {"x": x, "half": x[:2].bfloat16(), "y": i % 2 == 0, "none": x[:0]}


def opened(data: Any, workers: int = 2) -> ReadAhead:
    records, _ = PrivateData(data, example=EXAMPLE, workers=workers)._open()
    assert isinstance(records, ReadAhead)
    return records


def read(records: Any, batches: list[Any], schema: Schema, rows: int = 50) -> list[list[Tensor]]:
    return [batch_leaves(batch) for batch in records.fetch_all(batches, schema, rows)]


def numbers(found: list[list[Tensor]]) -> list[list[float]]:
    """Which rows they are; leaves are in the order of their names: half, none, x, y."""
    return [columns[2][:, 0].tolist() for columns in found]


def raises(i: int) -> None:
    warnings.warn(f"row {i}", stacklevel=1)
    if i % 7 == 3:
        raise OSError(f"file {i}")
    if i % 7 == 5:
        raise SystemExit(i)


def kills(i: int) -> None:
    if i in (4, 5, 30):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def both() -> Iterator[Any]:
    schema, data = Schema.of_record(EXAMPLE), Rows(raises)
    here, _ = PrivateData(data, example=EXAMPLE)._open()
    ahead = {workers: opened(data, workers) for workers in (1, 2, 3)}
    yield here, ahead, schema
    for records in ahead.values():
        records.close()


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 49), max_size=20), max_size=6),
    workers=st.sampled_from([1, 2, 3]),
)
def test_the_rows_are_those_that_are_read_here(both: Any, batches: list[list[int]], workers: int) -> None:
    here, ahead, schema = both
    wanted = [torch.tensor(rows, dtype=torch.int64) for rows in batches]
    found = read(ahead[workers], wanted, schema, rows=20)
    assert len(found) == len(wanted)
    for rows, columns in zip(wanted, found, strict=True):
        for own, theirs in zip(batch_leaves(here.fetch(rows, schema)), columns, strict=True):
            assert own.dtype == theirs.dtype
            assert torch.equal(own, theirs)


def test_slices_and_larger_batches_than_before(both: Any) -> None:
    here, ahead, schema = both
    for rows in (slice(3, 9), slice(0, 50)):
        for own, theirs in zip(
            batch_leaves(here.fetch(rows, schema)), batch_leaves(ahead[2].fetch(rows, schema)), strict=True
        ):
            assert torch.equal(own, theirs)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_a_record_that_kills_its_reader_takes_no_other_along(workers: int) -> None:
    """With 7 workers, some have nothing to read when one dies."""
    records, schema = opened(Rows(kills), workers), Schema.of_record(EXAMPLE)
    for size in (10, 3):
        batches = [torch.arange(start, min(start + size, 50)) for start in range(0, 50, size)]
        found = numbers(read(records, batches, schema))
        assert [row for batch in found for row in batch] == [i for i in range(50) if i not in (4, 5, 30)]


def test_a_record_that_kills_its_reader_later_takes_no_other_along() -> None:
    """Row 3 is read in good order, and ends the process while another row is read."""

    def later(i: int) -> None:
        if i == 3:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        time.sleep(0.01)

    records, schema = opened(Rows(later), 1), Schema.of_record(EXAMPLE)
    batches = [torch.arange(start, start + 5) for start in range(0, 20, 5)]
    found = numbers(read(records, batches, schema))
    assert [row for batch in found for row in batch] == list(range(20))


def test_a_record_that_forks_is_one_record() -> None:
    def forks_and_raises(i: int) -> None:
        """The second process would answer late, in the place of another piece, and without row 4."""
        time.sleep(0.005)
        if i == 4 and not os.fork():
            time.sleep(0.05)
            raise OSError

    records, schema = opened(Rows(forks_and_raises)), Schema.of_record(EXAMPLE)
    found = numbers(read(records, [torch.arange(k, k + 10) for k in range(0, 50, 10)], schema))
    assert [row for batch in found for row in batch] == list(range(50))


def test_what_a_record_leaves_running_holds_nobody_up() -> None:
    """A process that holds the reader's end of the pipe open, when the reader is dead."""

    def leaves_one(i: int) -> None:
        if i == 4:
            if not os.fork():
                time.sleep(30)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    records, schema = opened(Rows(leaves_one)), Schema.of_record(EXAMPLE)
    started = time.monotonic()
    assert numbers(read(records, [torch.arange(10)], schema)) == [[i for i in range(10) if i != 4]]
    assert time.monotonic() - started < 25


def test_a_reader_killed_between_reads_is_replaced() -> None:
    records, schema = opened(Rows()), Schema.of_record(EXAMPLE)
    read(records, [torch.arange(4)], schema)
    for process in readers_of(records):
        os.kill(process, signal.SIGKILL)
    assert numbers(read(records, [torch.arange(4), torch.arange(6)], schema)) == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]


def workers_of(records: ReadAhead) -> list[int]:
    return [worker._fork._process.pid or 0 for worker in records._workers]


def readers_of(records: ReadAhead) -> set[int]:
    return {int(pid) for p in workers_of(records) for pid in Path(f"/proc/{p}/task/{p}/children").read_text().split()}


def test_a_worker_killed_from_outside_is_an_error_and_the_next_read_has_new_ones() -> None:
    records, schema = opened(Rows()), Schema.of_record(EXAMPLE)
    read(records, [torch.arange(4)], schema)
    os.kill(workers_of(records)[0], signal.SIGKILL)
    with pytest.raises(ConfigError, match="ended from outside"):
        read(records, [torch.arange(4), torch.arange(6)], schema)
    assert numbers(read(records, [torch.arange(3)], schema)) == [[0, 1, 2]]


def test_a_read_that_is_not_taken_to_its_end_leaves_no_answer_behind() -> None:
    records, schema = opened(Rows()), Schema.of_record(EXAMPLE)
    begun = records.fetch_all([torch.arange(k, k + 5) for k in range(5)], schema, 5)
    next(begun)
    assert numbers(read(records, [torch.arange(40, 45)], schema, rows=5)) == [[40, 41, 42, 43, 44]]
    begun.close()  # the readers are another's by now
    assert numbers(read(records, [torch.arange(30, 35)], schema, rows=5)) == [[30, 31, 32, 33, 34]]


def test_a_fork_of_this_process_has_readers_of_its_own() -> None:
    records, schema = opened(Rows(lambda i: time.sleep(0.001))), Schema.of_record(EXAMPLE)
    wanted = [[float(k), float(k + 1)] for k in range(40)]
    read(records, [torch.arange(2)], schema)

    def check(pipe: Any) -> None:
        pipe.send(numbers(read(records, [torch.arange(k, k + 2) for k in range(40)], schema)) == wanted)

    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork").Process(target=check, args=(theirs,))
    fork.start()
    for _ in range(5):
        assert numbers(read(records, [torch.arange(k, k + 2) for k in range(40)], schema)) == wanted
    assert ours.recv()
    fork.join()
    assert numbers(read(records, [torch.arange(2)], schema)) == wanted[:1]


class InOneFile(Rows):
    """Rows of a file that was opened before, read by moving to their place."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_bytes(b"".join(i.to_bytes(2, "little") for i in range(50)))
        self.file = path.open("rb", buffering=0)

    def __getitem__(self, i: int) -> Any:
        self.file.seek(2 * i)
        time.sleep(0.0005)
        return {**super().__getitem__(i), "x": torch.full((3,), float(int.from_bytes(self.file.read(2), "little")))}


@pytest.mark.skipif(sys.platform != "linux", reason="forks share their place in a file elsewhere")
def test_readers_do_not_move_one_anothers_place_in_a_file(tmp_path: Path) -> None:
    data = InOneFile(tmp_path / "rows")
    records, schema = opened(data), Schema.of_record(EXAMPLE)
    for _ in range(10):
        assert numbers(read(records, [torch.arange(50)], schema)) == [list(range(50))]
    assert data.file.tell() == 0
    data.file.close()


def test_nothing_is_said_of_what_a_record_does(capfd: pytest.CaptureFixture[str]) -> None:
    records = opened(Rows(lambda i: raises(i)))
    read(records, [torch.arange(50)], Schema.of_record(EXAMPLE))
    assert capfd.readouterr() == ("", "")


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_readers_end_with_the_handle() -> None:
    records = opened(Rows())
    read(records, [torch.arange(4)], Schema.of_record(EXAMPLE))
    started = [*workers_of(records), *readers_of(records)]
    assert len(started) == 4
    del records
    gc.collect()
    until = time.monotonic() + 20
    while any(running(process) for process in started):
        assert time.monotonic() < until, "a reader outlived the handle"
        time.sleep(0.05)


def test_rows_are_read_while_the_model_computes(tmp_path: Path) -> None:
    """While the first piece is used, the second is read, and the third is not."""
    records = opened(Rows(lambda i: (tmp_path / str(i)).touch()), 2)
    pieces = records.fetch_all([torch.arange(k, k + 10) for k in range(0, 50, 10)], Schema.of_record(EXAMPLE), 10)
    next(pieces)
    until = time.monotonic() + 20
    while (found := len(list(tmp_path.iterdir()))) < 20:
        assert time.monotonic() < until, f"{found} rows are read"
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(list(tmp_path.iterdir())) == 20
    pieces.close()


class Drawing(Rows):
    """Records that a data set changes at random, as augmentations do."""

    def __getitem__(self, i: int) -> Any:
        return {**super().__getitem__(i), "x": torch.randn(3)}


def test_every_read_draws_anew_from_the_seed_of_the_step() -> None:
    records, schema = opened(Drawing()), Schema.of_record(EXAMPLE)
    batches = [torch.arange(10), torch.arange(10)]
    torch.manual_seed(1)
    first = read(records, batches, schema)
    drawn = torch.cat([columns[2] for columns in first])
    assert len({tuple(row) for row in drawn.tolist()}) == 20
    torch.manual_seed(1)
    assert all(torch.equal(a[2], b[2]) for a, b in zip(first, read(records, batches, schema), strict=True))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"] / 50), batch["y"].long(), reduction="none")


def trained(data: Any, folder: Path, unit: Any = "example", rows: int = 7, steps: int = 4) -> tuple[Tensor, Tensor]:
    """The parameters after a run from one seed, and a number that is drawn after it."""
    plan = hs.PrivacyPlan(steps=steps, sampling_rate=0.5, expected_batch_size=10.0, noise_multiplier=0.5, unit=unit)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    sgd, performance = torch.optim.SGD(model.parameters(), lr=0.5), hs.Performance(micro_batch_size=rows)
    trainer = hs.Trainer(model, loss_fn, optimizer=sgd, plan=plan, performance=performance, unsafe_seed=3)
    torch.manual_seed(5)
    trainer.fit(data, run_dir=folder)
    return flatten(trainable(model)).detach().clone(), torch.rand(1)


def private(odd: Callable[[int], None], unit: str, workers: int) -> PrivateData:
    keys = [i // 7 for i in range(50)] if unit == "user" else None
    return PrivateData(Rows(odd), example=EXAMPLE, users=keys, workers=workers)


def leaves_out(i: int) -> None:
    if i in (4, 5, 30):
        raise OSError


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("unit", ["example", "user"])
@pytest.mark.parametrize(("odd", "here"), [(raises, raises), (kills, leaves_out)])
def test_a_run_is_that_of_one_process(odd: Any, here: Any, unit: Any, rows: int, tmp_path: Path) -> None:
    """Also with rows that end their reader, with users in several pieces; and global generators are left alone."""
    ends = [
        trained(private(which, unit, workers), tmp_path / str(workers), unit, rows)
        for which, workers in ((here, 0), (odd, 2))
    ]
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])


@pytest.mark.parametrize("unit", ["example", "user"])
def test_readers_stay_from_step_to_step(unit: Any, tmp_path: Path) -> None:
    seen: list[set[int]] = []
    model, data = nn.Linear(3, 2), private(lambda i: None, unit, 2)
    records: Any = data._open()[0]
    trainer = hs.Trainer(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        plan=hs.PrivacyPlan(steps=4, sampling_rate=1, expected_batch_size=8, noise_multiplier=1, unit=unit),
        callbacks=[lambda report: seen.append(readers_of(records))],
    )
    trainer.fit(data, run_dir=tmp_path / "run")
    assert workers_of(records) == []  # they end with training
    assert len(seen[0]) == 2
    assert seen == [seen[0]] * 4


@pytest.mark.parametrize("unit", ["example", "user"])
def test_workers_that_do_not_start_are_an_error_before_any_row_is_read(
    unit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = private(lambda i: (tmp_path / str(i)).touch(), unit, 2)
    with monkeypatch.context() as patched:
        patched.setattr(forks.Fork, "is_ready", lambda fork: False)
        with pytest.raises(ConfigError, match="could not be started"):
            trained(data, tmp_path / "run", unit)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    trained(data, tmp_path / "again", unit)  # nothing is left of the failed start


def test_workers_that_are_gone_are_an_error_for_users_too(tmp_path: Path) -> None:
    """Users' rows are read where errors are swallowed, because a record can raise any."""

    model, data = nn.Linear(3, 2), private(lambda i: None, "user", 2)
    records: Any = data._open()[0]

    def gone(report: Any) -> None:
        os.kill(workers_of(records)[1], signal.SIGKILL)

    trainer = hs.Trainer(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        plan=hs.PrivacyPlan(steps=4, sampling_rate=1, expected_batch_size=8, noise_multiplier=1, unit="user"),
        callbacks=[gone],
    )
    with pytest.raises(ConfigError, match="ended from outside"):
        trainer.fit(data, run_dir=tmp_path / "run")


def test_features_are_those_of_one_process() -> None:
    found = []
    for workers in (0, 2):
        records, _ = (
            private(kills if workers else leaves_out, "example", workers)
            .mapped(lambda x: 2 * x, column="x", rows=8)
            ._open()
        )
        found.append(batch_leaves(records.fetch(slice(0, 50), Schema.of_record(EXAMPLE))))
    for here, ahead in zip(*found, strict=True):
        assert torch.equal(here, ahead)


def test_what_it_cannot_do_it_says() -> None:
    for wrong in (-1, 1.5, True):
        with pytest.raises(ConfigError, match=f"workers={wrong} to be a whole number"):
            PrivateData(Rows(), example=EXAMPLE, workers=wrong)  # type: ignore[arg-type]
    elsewhere = Schema((torch.zeros(3, device="meta"),), Schema.of_record(torch.zeros(3)).structure)
    with pytest.raises(ConfigError, match=r"example on=\['meta'\] to be on the CPU"):
        opened(Rows()).start(elsewhere, 2)
    records, _ = PrivateData(torch.zeros(5, 2), workers=2)._open()
    assert not isinstance(records, ReadAhead)  # tensors are in memory
