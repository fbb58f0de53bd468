"""Private rows that are given for public ones are recognised by the memory that they share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import halfsilver as hs
from halfsilver.errors import ConfigError
from halfsilver.federated import InProcess, LocalTraining, PrivateUsers, TensorUsers
from halfsilver.mirror import PublicLoss
from halfsilver.privacy.collated import Collated
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.recognise import shares_rows

X, Y = torch.randn(40, 3), torch.randint(0, 2, (40,))
POSITIONS = torch.arange(8).expand(40, 8)
ROWS = [(x, y) for x, y in zip(X, Y, strict=True)]


class Own(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return X[i], Y[i]


OWN, TENSORS, TENSORS_B = Own(), TensorDataset(X, Y), TensorDataset(X[9:], Y[9:])
MANY = [(torch.zeros(1), i) for i in range(3000)]
WIDE = TensorDataset(torch.zeros(6000, 2), torch.zeros(6000))

SAME: dict[str, tuple[Any, Any]] = {
    "the same tensor": (X, X),
    "a new tuple": ((X, Y), (X, Y)),
    "the features alone": ((X, Y), X),
    "a dict": ((X, Y), {"x": X, "label": Y}),
    "a part": ((X, Y), (X[5:9], Y[5:9])),
    "every other row": (X, X[::2]),
    "a transposed view": (X, X.T),
    "a NumPy view": (X, X.numpy()),
    "a data set of the tensors": ((X, Y), TENSORS),
    "a loader": ((X, Y), DataLoader(TENSORS)),
    "a subset of a data set": (OWN, Subset(OWN, [1, 2])),
    "overlapping subsets": (Subset(OWN, [1, 2]), Subset(Subset(OWN, [0, 2, 4]), [1])),
    "a subset of a data set of tensors": (TENSORS, Subset(TENSORS, [3])),
    "data sets in a row": (OWN, ConcatDataset([TensorDataset(torch.zeros(2, 3)), OWN])),
    "a list": (ROWS, ROWS[3:5]),
    "a subset of tensors": ((X, Y), Subset(TENSORS, [3, 4, 9])),
    "subsets of two data sets of the same tensors": (Subset(TensorDataset(X, Y), [3]), Subset(TENSORS, [2, 3])),
    "rows that are counted from the end": (Subset(OWN, [39]), Subset(OWN, [-1])),
    "rows of tensors that are counted from the end": ((X[39:], Y[39:]), Subset(TENSORS, [-1])),
    "long lists": (MANY, MANY[2900:]),
    "scattered subsets": (Subset(WIDE, range(0, 6000, 2)), Subset(TensorDataset(*WIDE.tensors), range(5001, 6000, 3))),
    "a scattered subset and the tensors": (Subset(WIDE, range(0, 6000, 2)), WIDE.tensors[0][5990:]),
    "a list of row views": (X, list(X)),
    "lists of row views": (list(X[:9]), list(X[8:])),
    "many data sets": (ConcatDataset([TensorDataset(x[None]) for x in X] * 9), ConcatDataset([TENSORS] * 40)),
}
OTHER: dict[str, tuple[Any, Any]] = {
    "a copy, which nobody can see": (X, X.clone()),
    "two halves": ((X[:20], Y[:20]), (X[20:], Y[20:])),
    "rows in turn": (X[::2], X[1::2]),
    "the same labels": ((X[:20], Y[:20]), (torch.zeros(20, 3), Y[:20])),
    "subsets without a common row": (Subset(OWN, [1, 2]), Subset(OWN, [0, 3])),
    "two lists": (ROWS[:3], ROWS[3:]),
    "two long lists": (MANY[:1500], MANY[1500:]),
    "scattered subsets": (Subset(WIDE, range(0, 6000, 2)), Subset(TensorDataset(*WIDE.tensors), range(1, 6000, 2))),
    "a scattered subset and other rows": (Subset(WIDE, range(0, 6000, 2)), (X, Y)),
    "a scattered subset and the rows between": (Subset(WIDE, range(0, 6000, 2)), WIDE.tensors[0][1::2]),
    "two lists of row views": (list(X[:9]), list(X[9:])),
    "many data sets": (ConcatDataset([TensorDataset(x[None]) for x in X[:9]] * 40), ConcatDataset([TENSORS_B] * 40)),
    "parts of tensors without a common row": ((X[:5], Y[:5]), Subset(TENSORS, [7, 9])),
    "a wide constant": ((X[:9], POSITIONS[:9]), (X[9:], POSITIONS[9:])),
    "two data sets": (Own(), Own()),
    "nothing": (X, None),
    "no rows": (X[:0], X),
    "empty tuples": ((), ()),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_rows_under_another_name(name: str) -> None:
    a, b = SAME[name]
    assert shares_rows(a, b)
    assert shares_rows(b, a)


@pytest.mark.parametrize("name", OTHER)
def test_other_rows(name: str) -> None:
    a, b = OTHER[name]
    assert not shares_rows(a, b)
    assert not shares_rows(b, a)


def test_frames_and_tables() -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pandas.DataFrame(np.random.default_rng(0).normal(size=(10, 3)), columns=list("abc"))
    assert shares_rows(frame, frame.iloc[2:4])
    assert not shares_rows(frame.iloc[:5], frame.iloc[5:])
    table = datasets.Dataset.from_dict({"a": list(range(10))})
    assert shares_rows(table, table.select([1, 5]))
    assert shares_rows(table.select([1, 5]), table.select([5, 6]))
    assert not shares_rows(table.select([1, 5]), table.select([2, 6]))
    assert not shares_rows(table.select(range(5)), table.select(range(5, 10)))
    assert shares_rows(table.select(range(5)), table.select(range(4, 10)))


def test_tables_with_other_columns() -> None:
    """Without a column, in another order, and with a column of nulls, which have no place in memory."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"id": list(range(10)), "text": list("abcdefghij"), "none": [None] * 10})
    other = datasets.Dataset.from_dict({"id": list(range(10)), "text": list("abcdefghij"), "none": [None] * 10})
    for changed in (
        table.remove_columns("id"),
        table.remove_columns(["id", "none"]),
        table.select_columns(["text", "id"]),
    ):
        assert shares_rows(changed, table)
        assert shares_rows(changed.select([3, 5]), table.select([5]))
        assert not shares_rows(changed.select([3, 5]), table.select([4]))
        assert not shares_rows(changed, other)


def test_no_value_is_read() -> None:
    """Tensors on another device have addresses too, and a meta tensor has none."""
    assert not shares_rows(X.to("meta"), X)
    assert not shares_rows(X.to_sparse(), X)


# ---- where it is asked


def losses(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trainer(**options: Any) -> hs.Trainer:
    model = nn.Linear(3, 2)
    plan = hs.PrivacyPlan(steps=2, sampling_rate=0.5, expected_batch_size=20, noise_multiplier=2.0)
    return hs.Trainer(model, losses, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, **options)


def test_test_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="test="):
        trainer().fit((X, Y), run_dir=tmp_path / "a", test=(X, Y))
    stamped = trainer(metrics_not_private=True).fit((X, Y), run_dir=tmp_path / "b", test=(X, Y))
    assert stamped.statement["not_private_because"]
    trainer().fit((X[:20], Y[:20]), run_dir=tmp_path / "c", test=(X[20:], Y[20:]))


def test_public_rows(tmp_path: Path) -> None:
    for i, public in enumerate([(X, Y), TensorDataset(X[:5], Y[:5]), PrivateData((X, Y))]):
        with pytest.raises(ConfigError, match="public="):
            trainer(mirror=hs.FirstOrder(0.5)).fit((X, Y), public, run_dir=tmp_path / str(i))
    made = trainer(mirror=hs.FirstOrder(0.5))
    with pytest.raises(ConfigError, match="public="):
        made.fit((X, Y), PublicLoss(made.model, losses, (X, Y)), run_dir=tmp_path / "loss")


def test_rows_that_were_trained_on_before(tmp_path: Path) -> None:
    made = trainer()
    made.pretrain((X, Y), epochs=1)
    with pytest.raises(ConfigError, match="rows of pretrain"):
        made.fit((X, Y), run_dir=tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_evaluation_before_and_after(tmp_path: Path) -> None:
    made = trainer()
    made.fit((X, Y), run_dir=tmp_path / "a")
    for data in ((X, Y), PrivateData((X, Y))):
        with pytest.raises(ConfigError, match=r"evaluate|not private"):
            made.evaluate(data)
    with pytest.raises(ConfigError, match="pretrain"):
        made.pretrain((X, Y), epochs=1)
    made.evaluate((X.clone(), Y))
    before = trainer()
    before.evaluate((X, Y))
    with pytest.raises(ConfigError, match="rows of evaluate"):
        before.fit((X, Y), run_dir=tmp_path / "b")


def test_metrics_that_are_allowed_too_late_for_the_statement(tmp_path: Path) -> None:
    made = trainer()
    made.fit((X, Y), run_dir=tmp_path)
    made.metrics_not_private = True
    for data in ((X, Y), PrivateData((X, Y))):
        with pytest.raises(ConfigError, match=r"evaluate|not private"):
            made.evaluate(data)


def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    made = trainer(mirror=hs.FirstOrder(0.5))
    with pytest.raises(ConfigError, match="public="):
        made.fit((X, Y), (X, Y), run_dir=tmp_path)
    made.fit((X, Y), (X.clone(), Y), run_dir=tmp_path)


def test_users_who_train_themselves(tmp_path: Path) -> None:
    users = PrivateUsers(TensorUsers((X, Y), users=list(range(40))))
    plan = hs.PrivacyPlan(steps=1, sampling_rate=0.5, expected_batch_size=20, noise_multiplier=2.0, unit="user")
    made = trainer(mirror=hs.FirstOrder(0.5))
    made.plan = plan
    with pytest.raises(ConfigError, match="public="):
        made.fit(InProcess(users, LocalTraining(lr=0.1)), (X, Y), run_dir=tmp_path)


def test_a_model_that_holds_private_rows(tmp_path: Path) -> None:
    made = trainer()
    made.model.register_buffer("bank", X[:3])
    with pytest.raises(ConfigError, match="part of the model"):
        made.fit((X, Y), run_dir=tmp_path)


def test_studies(tmp_path: Path) -> None:
    halves: Any = {"private": (X[:20], Y[:20]), "public": (X[20:], Y[20:]), "test": (X[20:], Y[20:])}
    about: Any = {"epsilon": 1.0, "delta": 1e-5, "population": 20, "batch_size": 5, "epochs": 1.0, "out": tmp_path}
    for name in ("public", "test"):
        with pytest.raises(ConfigError, match=name):
            hs.compare(lambda: nn.Linear(3, 2), losses, **{**halves, name: (X[:5], Y[:5])}, **about)


def test_estimators() -> None:
    from halfsilver.linear_model import MirrorLinearRegression

    x, y = X.double().numpy(), Y.double().numpy()
    model = MirrorLinearRegression(n_private=30)
    with pytest.raises(ConfigError, match="X_public"):
        model.fit(x, y, X_public=x[:10], y_public=y[:10].copy())
    with pytest.raises(ConfigError, match="y_public"):
        model.fit(x[10:], y[10:], X_public=x[:10], y_public=y[10:20])


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    picks=st.tuples(*[st.one_of(st.none(), st.lists(st.integers(0, 23), max_size=8)) for _ in range(2)]),
)
def test_rows_of_tables_meet_where_sets_of_their_numbers_do(
    sizes: list[int], picks: tuple[list[int] | None, list[int] | None]
) -> None:
    """Oracle: sets of row numbers of one table in several chunks, from which two selections are taken."""
    datasets = pytest.importorskip("datasets")
    chunks = [datasets.Dataset.from_dict({"a": list(range(size))}) for size in sizes]
    table, rows = datasets.concatenate_datasets(chunks), sum(sizes)
    chosen = [None if pick is None else [i % rows for i in pick] for pick in picks]
    parts = [table.select(range(rows)) if pick is None else table.select(pick) for pick in chosen]
    mine, theirs = (set(range(rows)) if pick is None else set(pick) for pick in chosen)
    assert shares_rows(*parts) == bool(mine & theirs)


def test_rows_behind_a_collator_are_recognised() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"a": list(range(10))})
    mine, theirs = (Collated(table.select(rows), lambda rows: {}) for rows in (range(5), range(4, 9)))
    assert shares_rows(mine, theirs)
    assert shares_rows(mine, table)
    assert not shares_rows(mine, Collated(table.select(range(5, 10)), lambda rows: {}))


def test_a_large_table_is_recognised_without_reading_its_rows() -> None:
    """Ten million rows: by runs of rows, in far less time and memory than one entry for each would take."""
    datasets, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    table = datasets.Dataset(pa.table({"a": np.arange(10_000_000)}))
    started = time.monotonic()
    assert shares_rows(table, table.select(range(5_000_000, 5_000_010)))
    assert not shares_rows(table.select(range(5_000_000)), table.select(range(5_000_000, 10_000_000)))
    assert time.monotonic() - started < 5


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped where")
class TestFiles:
    """One file that is opened twice: the same rows at other addresses."""

    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        for name in ("one", "other"):
            np.save(tmp_path / f"{name}.npy", np.arange(600.0).reshape(200, 3))
        torch.save(torch.arange(6000.0).reshape(2000, 3), tmp_path / "t.pt")
        return tmp_path

    def test_arrays(self, files: Path) -> None:
        def opened(name: str = "one", mode: Any = "r") -> Any:
            return np.load(files / f"{name}.npy", mmap_mode=mode)

        first = opened()
        assert shares_rows(first, opened())
        assert shares_rows(first, opened()[50:60])
        assert shares_rows(np.asarray(first)[50:60], opened("one", "c")[59:])
        assert shares_rows(torch.from_numpy(opened("one", "r+")), first[7:8])
        assert shares_rows([first[3]], opened())
        assert shares_rows((np.zeros((200, 2)), first), opened()[::-1][:1])
        assert not shares_rows(first[:50], opened()[50:])
        assert not shares_rows(first[::2], opened()[1::2])
        assert not shares_rows(first, opened("other"))
        assert not shares_rows(first, np.array(opened()))

    def test_tensors(self, files: Path) -> None:
        first, second = (torch.load(files / "t.pt", mmap=True, weights_only=True) for _ in range(2))
        assert first.data_ptr() != second.data_ptr()
        assert shares_rows(first, second[100:])
        assert not shares_rows(first[:100], second[100:])

    def test_tables(self, files: Path) -> None:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"x": [[i, i] for i in range(100)]}).save_to_disk(str(files / "table"))
        first, second = (datasets.load_from_disk(str(files / "table")) for _ in range(2))
        assert shares_rows(first, second)
        assert shares_rows(first.select(range(10)), second.select(range(9, 20)))
        assert not shares_rows(first.select(range(10)), second.select(range(10, 20)))
