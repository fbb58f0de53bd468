"""Stores of private users: who is enrolled, whose rows are read, and that bad rows say nothing about themselves."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.federated.stackoverflow_file import INDEXES, example, write
from halfsilver.errors import PrivateDataError
from halfsilver.federated import InProcess, LocalTraining, Round
from halfsilver.privacy.users.stores.base import PrivateUsers, TensorUsers, UserStore
from halfsilver.privacy.users.stores.jsonl import JsonlUsers
from halfsilver.privacy.users.stores.sqlite import SqliteUsers, Tables, tff_users
from halfsilver.privacy.users.stores.tf_example import Example, MalformedExample, parse_example

# ---- the handle, and users in memory


def tensor_users() -> TensorUsers:
    return TensorUsers((torch.arange(6), torch.arange(6) * 10), users=["b", "a", "b", "c", "b", "a"])


@pytest.mark.parametrize("do", [len, iter, lambda h: h[0], pickle.dumps, copy.copy, copy.deepcopy, vars])
def test_the_handle_is_opaque(do: Callable[[Any], Any]) -> None:
    handle = PrivateUsers(tensor_users())
    with pytest.raises((TypeError, AttributeError, PrivateDataError)):
        do(handle)
    assert repr(handle) == str(handle) == "PrivateUsers(<opaque>)"
    assert repr(handle._open()) == "TensorUsers(<opaque>)"


@pytest.mark.parametrize("wrong", [PrivateUsers(tensor_users()), [1, 2], torch.zeros(3)])
def test_what_is_not_a_store_is_refused(wrong: Any) -> None:
    with pytest.raises(PrivateDataError, match="PrivateUsers"):
        PrivateUsers(wrong)


def test_rows_of_users_in_memory_keep_their_order() -> None:
    store = tensor_users()
    assert store.size() == 3
    assert [store.rows(user, 9)[1].tolist() for user in range(3)] == [[0, 20, 40], [10, 50], [30]]
    assert store.rows(0, 2)[0].tolist() == [0, 2]
    with pytest.raises(PrivateDataError, match="one user key"):
        TensorUsers(torch.zeros(3), users=[1, 2])


# ---- JSON lines


def numbers(records: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([record["n"] for record in records])


def lines(path: Path, *found: Any) -> Path:
    made = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in found]
    path.write_bytes(b"\n".join(made))
    return path


def contents(store: UserStore) -> list[list[int]]:
    return [store.rows(user, 99).tolist() for user in range(store.size())]


def test_users_of_a_file_are_read_when_drawn(tmp_path: Path) -> None:
    found = [{"user": user, "n": n} for n, user in enumerate(["b", "é", "b", "c", "é", "b"])]
    path = lines(tmp_path / "users.jsonl", *found)
    store = JsonlUsers(path, encode=numbers)
    assert contents(store) == [[0, 2, 5], [1, 4], [3]]
    assert store.rows(0, 2).tolist() == [0, 2]
    assert contents(JsonlUsers(path, encode=numbers, chosen={"é", "c", "nobody"}.__contains__)) == [[1, 4], [3]]
    assert JsonlUsers(path, encode=numbers, user="n").size() == 0  # a name is a string
    assert repr(store) == "JsonlUsers(<opaque>)"


@pytest.mark.parametrize(
    "bad",
    [
        *(b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b'["user"]', b"{}", b"\0"),
        *(b'{"user": null}', b'{"user": ["a"]}', b'{"user": NaN}', b'{"user": ""}'),
    ],
)
def test_a_broken_line_is_nobodys(bad: bytes, tmp_path: Path) -> None:
    path = lines(tmp_path / "users.jsonl", {"user": "a", "n": 1}, bad, {"user": "b", "n": 2}, {"user": "a", "n": 3})
    assert contents(JsonlUsers(path, encode=numbers)) == [[1, 3], [2]]


def test_a_user_whose_records_are_no_rows_is_enrolled_and_told_only_when_read(tmp_path: Path) -> None:
    store = JsonlUsers(lines(tmp_path / "users.jsonl", {"user": "a"}, {"user": "b", "n": 2}), encode=numbers)
    assert store.size() == 2
    with pytest.raises(KeyError):
        store.rows(0, 9)
    assert store.rows(1, 9).tolist() == [2]


def test_a_file_that_has_changed_is_not_read_on(tmp_path: Path) -> None:
    path = lines(tmp_path / "users.jsonl", {"user": "a", "n": 1}, {"user": "b", "n": 2})
    store = JsonlUsers(path, encode=numbers)
    lines(path, {"user": "b", "n": 2}, {"user": "a", "n": 1})
    os.utime(path, ns=(1, 1))
    with pytest.raises(PrivateDataError, match="has changed"):
        store.rows(0, 9)
    with pytest.raises(PrivateDataError, match="no file"):
        JsonlUsers(tmp_path / "other.jsonl", encode=numbers)


def test_the_index_is_16_bytes_a_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "users.jsonl", *({"user": f"u{i // 3}", "n": i, "text": "x" * 500} for i in range(300)))
    store = JsonlUsers(path, encode=numbers)
    index = store._JsonlUsers__index  # type: ignore[attr-defined]
    arrays = [getattr(index, name) for name in type(index).__slots__]
    assert all(isinstance(array, np.ndarray) and array.base is None for array in arrays)
    assert sum(array.nbytes for array in arrays) == 300 * 16 + 101 * 8


# ---- SQLite in TFF's format

# By protobuf itself, from the message definitions of tf.Example: {"none": no bytes, "score": [-2, 300],
# "tokens": ["how do i sort a list"], "w": floats [0.5, -1.25]}.
BY_PROTOBUF = bytes.fromhex(
    "0a5e0a0a0a046e6f6e6512020a000a190a0573636f726512101a0e0a0cfeffffffffffffffff01ac020a220a06746f6b656e7312180a160a"
    "14686f7720646f206920736f72742061206c6973740a110a0177120c120a0a080000003f0000a0bf"
)


def tokens(examples: list[Example]) -> Tensor:
    return torch.tensor([int(e["tokens"][0]) for e in examples], dtype=torch.int64)


def database(path: Path, people: list[tuple[str, str]], found: list[tuple[str, str, Any]]) -> Path:
    """Lines (client, split) of client_metadata and (split, client, value) of examples."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
    connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
    connection.executemany("INSERT INTO client_metadata VALUES (?, ?, 1)", people)
    connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", found)
    connection.executescript(INDEXES)
    connection.close()
    return path


def said(n: int) -> bytes:
    return example({"tokens": str(n).encode(), "score": -n, "type": b"answer"})


FOUND = [(split, who, said(n)) for n, (split, who) in enumerate([("train", "a"), ("train", "b"), ("test", "a")] * 3)]


def test_users_of_a_split(tmp_path: Path) -> None:
    people = [("a", "train"), ("b", "train"), ("a", "test"), ("empty", "train")]  # numbers with a gap
    path = database(tmp_path / "users.sqlite", people, FOUND)
    assert contents(tff_users(path, encode=tokens)) == [[0, 3, 6], [1, 4, 7], []]
    assert contents(tff_users(path, encode=tokens, split="test")) == [[2, 5, 8]]
    assert tff_users(path, encode=tokens, split="none").size() == 0
    assert tff_users(path, encode=tokens).rows(1, 2).tolist() == [1, 4]


def test_a_person_who_is_listed_twice_counts_once(tmp_path: Path) -> None:
    people = [("b", "train"), ("a", "train"), ("b", "train")]
    assert contents(tff_users(database(tmp_path / "u.sqlite", people, FOUND), encode=tokens)) == [
        [1, 4, 7],
        [0, 3, 6],
        [],
    ]


@pytest.mark.parametrize("bad", [b"\x0a\xff", None, 10**12, "text", 0.5, b"\x0b\x0c", BY_PROTOBUF])
def test_a_bad_example_is_told_by_its_own_user_only(bad: Any, tmp_path: Path) -> None:
    """The last one is a good tf.Example whose tokens are not what the task expects."""
    people = [("a", "train"), ("b", "train")]
    path = database(tmp_path / "users.sqlite", people, [*FOUND, ("train", "a", bad)])
    store = tff_users(path, encode=tokens)
    with pytest.raises(ValueError, match=r"tf\.Example|invalid literal"):
        store.rows(0, 99)
    assert store.rows(1, 99).tolist() == [1, 4, 7]


def test_the_file_cannot_be_written_and_each_process_has_its_connection(tmp_path: Path) -> None:
    path = database(tmp_path / "users & 100%?.sqlite", [("a", "train"), ("b", "train")], FOUND)
    store = tff_users(path, encode=tokens)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        store._database().execute("DELETE FROM examples")
    assert store._database() is store._database()
    with warnings.catch_warnings():  # newer versions of Python warn of forks where there are threads, as torch has
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:  # exit status: whether the child opened its own connection and read the same
        fresh = len(store._SqliteUsers__connections) == 1  # type: ignore[attr-defined]
        same = store.rows(0, 99).tolist() == [0, 3, 6]
        own = len(store._SqliteUsers__connections) == 2  # type: ignore[attr-defined]
        os._exit(0 if fresh and same and own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert contents(store) == [[0, 3, 6], [1, 4, 7]]


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    text = tmp_path / "text.sqlite"
    text.write_text("not a database, but long enough to be looked at" * 40, encoding="utf-8")
    path = database(tmp_path / "users.sqlite", [("a", "train")], FOUND)
    with pytest.raises(PrivateDataError, match="cannot be read: file is not a database"):
        tff_users(text, encode=tokens)
    with pytest.raises(PrivateDataError, match="no such column"):
        SqliteUsers(path, encode=tokens, tables=Tables(value="text"))
    connection = sqlite3.connect(path)
    connection.execute("DROP INDEX idx_examples_client_id")
    assert tff_users(path, encode=tokens).size() == 1  # the index by split and user is enough
    connection.execute("DROP INDEX idx_examples_client_id_split")
    connection.execute("CREATE INDEX useless ON examples (split_name)")
    connection.close()
    with pytest.raises(PrivateDataError, match=r"CREATE INDEX \w+ ON examples \(client_id COLLATE BINARY\);"):
        tff_users(path, encode=tokens)


@pytest.mark.parametrize("index", [b"INDEX", b"INDXX"])
def test_names_in_the_file_that_are_not_text(index: bytes, tmp_path: Path) -> None:
    """In the second case SQLite's own message quotes the name, and Python cannot read the message."""
    path = database(tmp_path / "users.sqlite", [("a", "train")], FOUND)
    path.write_bytes(path.read_bytes().replace(b"idx_", b"\xffdx_").replace(b"CREATE INDEX", b"CREATE " + index))
    with pytest.raises(PrivateDataError, match=r"cannot be read: (Could not decode to UTF-8|'utf-8' codec)"):
        tff_users(path, encode=tokens)


def test_keys_of_two_types_are_refused(tmp_path: Path) -> None:
    """As numbers '1' and '01' are one: two people of the one table would read the same rows of the other."""
    path = tmp_path / "mixed.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER);"
        "CREATE TABLE examples (split_name TEXT, client_id INTEGER, serialized_example_proto BLOB);"
        "INSERT INTO client_metadata VALUES ('1', 'train', 1), ('01', 'train', 1);" + INDEXES
    )
    connection.close()
    with pytest.raises(PrivateDataError, match="one type"):
        SqliteUsers(path, encode=lambda values: torch.zeros(len(values)))


COLLATED = """
CREATE TABLE client_metadata (client_id TEXT {0}, split_name TEXT, num_examples INTEGER);
CREATE TABLE examples (client_id TEXT {1}, split_name TEXT, serialized_example_proto BLOB);
CREATE INDEX by_user ON client_metadata (client_id); CREATE INDEX examples_by_user ON examples (client_id);
INSERT INTO client_metadata VALUES ('Bob', 'train', 1), ('bob', 'train', 1), ('bob ', 'train', 1), ('ann', 'train', 1);
INSERT INTO examples VALUES ('bob', 'train', 1), ('bob', 'train', 2), ('Bob', 'train', 3), ('ann', 'train', 9);
"""


@pytest.mark.parametrize("collation", ["NOCASE", "RTRIM"])
@pytest.mark.parametrize("where", ["users", "examples", "both"])
def test_names_are_compared_byte_by_byte(tmp_path: Path, collation: str, where: str) -> None:
    """Where the column takes 'Bob' for 'bob', two numbers would read the same rows: two contributions of one person."""
    path = tmp_path / "users.sqlite"
    said = [f"COLLATE {collation}" if where in (table, "both") else "" for table in ("users", "examples")]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(COLLATED.format(*said))
        encode: Callable[[list[Any]], Tensor] = torch.tensor
        with pytest.raises(PrivateDataError, match="byte by byte") as caught:
            SqliteUsers(path, encode=encode)
        for table in ("client_metadata", "examples") if where == "both" else (table_in(str(caught.value)),):
            connection.execute(f"CREATE INDEX binary_{table} ON {table} (client_id COLLATE BINARY)")
    assert contents(SqliteUsers(path, encode=encode)) == [[3], [1, 2], [], [9]]


def table_in(message: str) -> str:
    return next(table for table in ("client_metadata", "examples") if f"Table {table} " in message)


def test_rows_without_a_user_are_nobodys(tmp_path: Path) -> None:
    nobody = [(None, "train"), ("", "train"), ("a", "train")]
    found = [*FOUND, ("train", None, said(70)), ("train", "", said(71))]
    assert contents(tff_users(database(tmp_path / "u.sqlite", nobody, found), encode=tokens)) == [[], [], [0, 3, 6]]  # type: ignore[arg-type]


def test_a_file_with_a_write_ahead_log_is_refused(tmp_path: Path) -> None:
    """Others could add people in the second file, and the first one would look unchanged."""
    path = database(tmp_path / "users.sqlite", [("a", "train")], FOUND)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("INSERT INTO client_metadata VALUES ('b', 'train', 1)")
        connection.commit()
        with pytest.raises(PrivateDataError, match="PRAGMA journal_mode=DELETE"):
            tff_users(path, encode=tokens)
        connection.execute("PRAGMA journal_mode=DELETE")
    store = tff_users(path, encode=tokens)
    assert store.size() == 2
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        with pytest.raises(PrivateDataError, match="has changed"):
            store.rows(0, 9)


def test_a_file_that_changes_ends_the_run(tmp_path: Path) -> None:
    path = lines(tmp_path / "users.jsonl", {"user": "a", "n": 1}, {"user": "b", "n": 2})
    engine = InProcess(PrivateUsers(JsonlUsers(path, encode=numbers)), LocalTraining(lr=1.0))
    asked = Round(step=0, model=torch.nn.Linear(1, 1), loss_fn=lambda m, b: b.float(), users=torch.arange(2),
                  max_grad_norm=1.0, seed=0)  # fmt: skip
    list(engine.contributions(asked))
    lines(path, {"user": "b", "n": 1}, {"user": "a", "n": 2}, {"user": "c", "n": 3})
    with pytest.raises(PrivateDataError, match="changed"):
        list(engine.contributions(asked))


def test_tables_of_other_names(tmp_path: Path) -> None:
    path = tmp_path / "users.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE person (name TEXT, part TEXT); CREATE TABLE post (name TEXT, part TEXT, `the text` TEXT);"
        "CREATE INDEX a ON person (name); CREATE INDEX b ON post (name);"
        "INSERT INTO person VALUES ('ann', 'train'); INSERT INTO post VALUES ('ann', 'train', 'four');"
    )
    connection.close()
    tables = Tables(users="person", examples="post", key="name", split="part", value="the text")
    store = SqliteUsers(path, encode=lambda texts: torch.tensor([len(t) for t in texts]), tables=tables)
    assert contents(store) == [[4]]


def test_a_generated_file(tmp_path: Path) -> None:
    path = tmp_path / "stackoverflow.sqlite"
    write(path, 300)
    seen: list[Example] = []

    def encode(examples: list[Example]) -> Tensor:
        seen.extend(examples)
        return torch.zeros(len(examples))

    store = tff_users(path, encode=encode)
    rows = [len(store.rows(user, 99)) for user in range(store.size())]
    assert (store.size(), tff_users(path, encode=encode, split="heldout").size()) == (300, 3)
    assert min(rows) >= 1
    assert sum(rows) == len(seen) > 600
    assert {tuple(sorted(e)) for e in seen} == {("creation_date", "score", "tags", "title", "tokens", "type")}
    with pytest.raises(SystemExit, match="already"):
        write(path, 300)


def test_what_a_read_does_is_independent_of_the_population(tmp_path: Path) -> None:
    """By SQLite's own count of virtual-machine steps, which no busy machine can disturb."""
    steps = []
    for users in (100, 10_000):
        write(path := tmp_path / f"{users}.sqlite", users)
        store = tff_users(path, encode=lambda found: torch.zeros(len(found)))
        ticks: list[None] = []
        store._database().set_progress_handler(lambda ticks=ticks: ticks.append(None), 1)  # type: ignore[misc]
        store.rows(users // 2, 1)
        steps.append(len(ticks))
    assert 0 < steps[1] <= 1.2 * steps[0]


# ---- tf.Example


def test_an_example_that_protobuf_wrote() -> None:
    found = {"none": [], "score": [-2, 300], "tokens": [b"how do i sort a list"], "w": [0.5, -1.25]}
    assert parse_example(BY_PROTOBUF) == found
    assert parse_example(b"") == {}


def test_lists_that_are_not_packed() -> None:
    """Old writers give each number its own field: {"s": [1, 2]}, {"f": [0.5, 0.5]}."""
    integers = bytes.fromhex("0a0d0a0b0a01731206" + "1a0408010802")
    floats = bytes.fromhex("0a130a110a0166120c" + "120a" + "0d0000003f" * 2)
    assert parse_example(integers) == {"s": [1, 2]}
    assert parse_example(floats) == {"f": [0.5, 0.5]}


@given(features=st.dictionaries(st.text("aé\u2603", max_size=4), st.binary() | st.integers(-(2**63), 2**63 - 1)))
def test_what_is_written_is_read(features: dict[str, bytes | int]) -> None:
    assert parse_example(example(features)) == {name: [value] for name, value in features.items()}


def typed(data: bytes) -> Example | None:
    """None where the error is the one that is allowed; any other fails the test."""
    try:
        return parse_example(data)
    except MalformedExample:
        return None


@given(data=st.binary(max_size=60))
def test_random_bytes_raise_nothing_untyped(data: bytes) -> None:
    typed(data)


@given(at=st.integers(0, len(BY_PROTOBUF) - 1), byte=st.integers(0, 255), cut=st.integers(1, len(BY_PROTOBUF) - 1))
def test_damaged_examples_raise_nothing_untyped(at: int, byte: int, cut: int) -> None:
    damaged = bytes([*BY_PROTOBUF[:at], byte, *BY_PROTOBUF[at + 1 :]])
    typed(damaged)
    typed(damaged[:cut])
    assert typed(BY_PROTOBUF[:cut]) is None  # its outermost length is then too long


def test_the_error_does_not_quote_the_bytes() -> None:
    with pytest.raises(MalformedExample, match=r"^These bytes are not a tf\.Example\.$"):
        parse_example(b"\x0a\x50secret")
