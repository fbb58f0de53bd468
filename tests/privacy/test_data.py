from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from halfsilver.errors import PrivateDataError
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.schema import Schema
from halfsilver.privacy.users.stores.base import TensorUsers


class Broken(Dataset[Any]):
    """Ten records of which five cannot be used, each for another reason."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        if i == 1:
            raise OSError("file 1 is damaged")
        if i == 3:
            return torch.zeros(5), 1
        if i == 5:
            return torch.zeros(4)
        if i == 7:
            return None, 1
        if i == 9:
            raise KeyError("row 9")
        return torch.full((4,), float(i), dtype=torch.float64), i


EXAMPLE = (torch.zeros(4), 0)


def test_the_handle_is_opaque() -> None:
    handle = PrivateData((torch.randn(7, 3), torch.arange(7)))
    for name in ("__len__", "__getitem__", "__iter__", "__dict__"):
        assert not hasattr(handle, name)
    assert "7" not in repr(handle)
    assert repr(handle) == str(handle) == "PrivateData(<opaque>)"
    with pytest.raises(PrivateDataError, match="pickled"):
        pickle.dumps(handle)
    with pytest.raises(PrivateDataError, match="already"):
        PrivateData(handle)


def test_unusable_records_are_left_out_without_a_word() -> None:
    records, _ = PrivateData(Broken())._open()
    x, y = records.fetch(slice(0, 10), Schema.of_record(EXAMPLE))
    assert y.tolist() == [0, 2, 4, 6, 8]
    assert x.dtype == torch.float32  # the example's dtype, not the record's
    x, y = records.fetch(torch.tensor([1, 3, 5]), Schema.of_record(EXAMPLE))
    assert x.shape == (0, 4)
    assert y.shape == (0,)


def test_the_custodian_can_see_why() -> None:
    report = PrivateData(Broken()).inspect_not_private(EXAMPLE)
    assert report["not_private"] is True
    assert report["looked_at"] == 10
    assert sum(report["unusable"].values()) == 5
    assert "OSError: file 1 is damaged" in report["unusable"]


@pytest.mark.parametrize(
    "records",
    [
        (torch.arange(6.0).reshape(6, 1), torch.arange(6)),
        {"x": torch.arange(6.0).reshape(6, 1), "y": torch.arange(6)},
        torch.arange(6),
        TensorDataset(torch.arange(6.0).reshape(6, 1), torch.arange(6)),
    ],
)
def test_tensors_in_any_nesting(records: Any) -> None:
    handle = PrivateData(records)
    opened, _ = handle._open()
    batch = opened.fetch(torch.tensor([1, 4]), handle._schema())
    last = torch.utils._pytree.tree_leaves(batch)[-1]
    assert last.tolist() == [1, 4]
    view = torch.utils._pytree.tree_leaves(opened.fetch(slice(0, 3), handle._schema()))[-1]
    assert view.tolist() == [0, 1, 2]


def test_the_schema_never_comes_from_a_private_record() -> None:
    with pytest.raises(PrivateDataError, match="example="):
        PrivateData(Broken())._schema()
    expected = Schema.of_record(EXAMPLE).shapes
    assert PrivateData(Broken(), example=EXAMPLE)._schema().shapes == expected
    assert PrivateData(Broken())._schema(EXAMPLE).shapes == expected


def test_synthetic_batches_have_the_schema() -> None:
    schema = Schema.of_record({"ids": torch.zeros(3, dtype=torch.long), "x": torch.zeros(2), "label": 1})
    batch = schema.synthetic(5)
    assert Schema.of_columns(batch).shapes == schema.shapes
    assert set(batch["ids"].flatten().tolist()) <= {0, 1}
    assert set(batch["label"].tolist()) == {0, 1}
    assert batch["x"].std() > 0.1
    probability = Schema.of_record(torch.tensor([0.0, 1.0, 0.3])).synthetic(50)
    assert 0 <= float(probability.min()) <= float(probability.max()) <= 1


def columns_alike(schema: Schema, rows: int = 80) -> int:
    """In how many columns some made-up rows are the same."""
    return sum(len(torch.unique(t.reshape(rows, -1), dim=0)) < rows for t in schema.synthetic(rows))


def random_example(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Tokens, bytes, marks at padding, bits and numbers; or zeros of the same kinds."""
    width = int(torch.randint(24, 60, (), generator=g))
    tokens = torch.randint(1, int(torch.randint(2, 5000, (), generator=g)) + 1, (width,), generator=g)
    marked = torch.where(torch.rand(width, generator=g) < 0.3, -100, tokens)
    pixels = torch.randint(1, 256, (3, 4, 5), generator=g).to(torch.uint8)
    bits, numbers = torch.ones(width, dtype=torch.bool), torch.randn(width, generator=g)
    example = (tokens, marked, pixels, bits, numbers)
    return tuple(map(torch.zeros_like, example)) if torch.rand((), generator=g) < 0.2 else example


def test_made_up_rows_all_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 examples without a false alarm; rows that are all alike are found in 10 of 10."""
    g = torch.Generator().manual_seed(0)
    schemas = [Schema.of_record(random_example(g)) for _ in range(100)]
    assert sum(columns_alike(schema) > 0 for schema in schemas) == 0

    def alike(leaf: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
        return leaf.expand(rows, *leaf.shape).clone()

    monkeypatch.setattr("halfsilver.privacy.schema._vary", alike)
    assert all(columns_alike(schema) > 0 for schema in schemas[:10])


def test_made_up_whole_numbers_are_as_valid_as_the_example() -> None:
    """No number is larger than in the example, lengths stay above 0, marks and both ends stay, zeros stay zeros."""
    example = (torch.tensor([101, 7, 0, 5000, 3, -100, 102]), torch.tensor(9), torch.tensor([[1, 1, 1, 0, 0]] * 2))
    tokens, length, mask = Schema.of_record(example).synthetic(300)
    for made, given in zip((tokens, length, mask), example, strict=True):
        assert bool((made <= given).all())
        assert bool((made >= given.where(given < 0, given // 2)).all())
    assert bool((tokens[:, [0, 2, 5, 6]] == example[0][[0, 2, 5, 6]]).all())
    assert len(torch.unique(tokens, dim=0)) == 300
    assert len(torch.unique(mask, dim=0)) == 16, "as many as there are: each half can be hidden, but for the ends"
    assert sorted(set(Schema.of_record(torch.tensor(1)).synthetic(9).tolist())) == [0, 1]
    large = Schema.of_record(torch.tensor([2**62, 2**62])).synthetic(64)
    assert bool((large <= 2**62).all() & (large >= 2**61).all())


def test_the_first_made_up_rows_are_the_same_however_many_are_made() -> None:
    g = torch.Generator().manual_seed(1)
    for _ in range(5):
        schema = Schema.of_record(random_example(g))
        many = schema.synthetic(100)
        for rows in (1, 7, 16, 64, 99):
            assert all(torch.equal(a, b[:rows]) for a, b in zip(schema.synthetic(rows), many, strict=True))


def test_lists_and_mappings_are_read_as_tuples_and_dicts() -> None:
    schema = Schema.of_record([torch.zeros(2), 1])
    assert len(schema.conform((torch.ones(2), 0))) == 2
    records, _ = PrivateData([(torch.full((2,), float(i)), i) for i in range(9)])._open()
    assert records.size() == 9  # a list is a data set, not columns
    assert records.fetch(slice(0, 9), schema)[1].tolist() == list(range(9))


def test_streams_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("private rows were read")

    with pytest.raises(PrivateDataError, match="map-style"):
        PrivateData(Stream())
    with pytest.raises(PrivateDataError, match="map-style"):
        PrivateData(DataLoader(Stream()))
    with pytest.raises(PrivateDataError, match="same number of rows"):
        PrivateData((torch.zeros(3), torch.zeros(4)))
    with pytest.raises(PrivateDataError, match="__getitem__"):
        PrivateData(3)


def test_the_order_of_keys_does_not_matter() -> None:
    """Columns of a padded batch meet by name, also where example, tensors and records spell them in other orders."""
    tensors = {"y": torch.arange(4), "x": torch.ones(4, 2)}
    handle = PrivateData(tensors, example={"x": torch.zeros(2), "y": 0})
    records, _ = handle._open()
    batch = records.fetch(slice(0, 2), handle._schema())
    shapes = [t.shape[1:] for t in torch.utils._pytree.tree_leaves(batch)]
    assert shapes == [leaf.shape for leaf in handle._schema().leaves]
    assert len(handle._schema().conform({"y": 1, "x": torch.ones(2)})) == 2
    with pytest.raises(PrivateDataError, match="to have the shapes"):
        PrivateData(tensors, example={"x": torch.zeros(3), "y": 0})._schema()


def test_user_keys_are_compared_as_they_are() -> None:
    for keys in ([1, "1", "x"], [2**53, 2**53 + 1, 0.5], torch.tensor([3, 1, 2])):
        _, users = PrivateData(torch.arange(3), users=keys)._open()
        assert users is not None
        assert users.size() == 3
    with pytest.raises(PrivateDataError, match="one user key"):
        PrivateData(torch.arange(3), users=[1, 2])


def test_users_are_grouped() -> None:
    _, users = PrivateData(torch.arange(6), users=["b", "a", "b", "c", "b", "a"])._open()
    assert users is not None
    assert users.size() == 3
    assert [torch.cat(list(users.rows(u, 2))).tolist() for u in range(3)] == [[0, 2, 4], [1, 5], [3]]


class NoEquality:
    """As pandas.NA: equal to nothing, and the answer is neither yes nor no."""

    def __eq__(self, other: object) -> Any:
        return self

    def __hash__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        raise TypeError("neither")


MISSING: dict[str, Any] = {
    "NaN in a list": ["a", float("nan"), "b"],
    "NaN in an array": np.array([1.0, np.nan, 2.0]),
    "NaN in a tensor": torch.tensor([1.0, torch.nan, 2.0]),
    "NaN among objects": np.array(["secret", np.nan, 2], dtype=object),
    "NaN in a pair": [("secret", 1), ("b", float("nan")), ("c", 2)],
    "NaN as a decimal": [Decimal(1), Decimal("NaN"), Decimal(2)],
    "None in a list": ["a", None, "b"],
    "None in an array": np.array(["secret", None, "b"], dtype=object),
    "no time": np.array(["2026-01-01", "NaT", "2026-01-02"], dtype="datetime64[D]"),
    "neither equal nor unequal": ["a", NoEquality(), "b"],
    "masked": np.ma.MaskedArray([1, 2, 3], mask=[False, True, False]),
    "empty text": ["a", "", "b"],
    "empty text in an array": np.array(["a", "", "b"]),
    "empty bytes": [b"a", b"", b"b"],
    "empty bytes in an array": np.array([b"a", b"", b"b"]),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_row_without_a_user_key_is_refused_and_not_quoted(what: str) -> None:
    """As lists, each NaN was a user of its own; as arrays, all of them were one user. Neither is known to be true."""
    for make in (PrivateData, TensorUsers):
        with pytest.raises(PrivateDataError, match="lack the key of their user") as caught:
            make(torch.arange(3), users=MISSING[what])
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None


@pytest.mark.parametrize("keys", [list(torch.tensor([7, 7, 7])), [object(), object(), object()], [[1], [1], [2]]])
def test_keys_that_do_not_compare_by_value_are_refused(keys: list[Any]) -> None:
    """A list of tensors would make each row a user of its own."""
    with pytest.raises(PrivateDataError, match="compare by value"):
        PrivateData(torch.arange(3), users=keys)


def test_keys_in_several_columns_are_refused() -> None:
    with pytest.raises(PrivateDataError, match="one column"):
        PrivateData(torch.arange(3), users=np.ones((3, 2)))


@pytest.mark.parametrize("keys", [[3, 1, 3, 2], ["c", "a", "c", "b"], [0.5, -1.0, 0.5, 2.0], [b"c", b"a", b"c", b"b"]])
def test_arrays_lists_and_objects_name_the_same_users(keys: list[Any]) -> None:
    for form in (keys, np.array(keys), np.array(keys, dtype=object), tuple(keys)):
        _, users = PrivateData(torch.arange(4), users=form)._open()
        assert users is not None
        rows = [torch.cat(list(users.rows(u, 9))).tolist() for u in range(users.size())]
        assert sorted(rows) == [[0, 2], [1], [3]]


def test_columns_of_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    _, users = PrivateData(torch.arange(4), users=pandas.Series(["c", "a", "c", "b"]))._open()
    assert users is not None
    assert users.size() == 3
    for column in ([1, pandas.NA, 2], pandas.Series(["a", None, "b"]), pandas.Series([1, None, 2], dtype="Int64")):
        with pytest.raises(PrivateDataError, match="lack the key"):
            PrivateData(torch.arange(3), users=column)
