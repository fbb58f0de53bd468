"""Readers of data: the published files of the benchmarks, and where private users lie."""

from __future__ import annotations

import gzip
import json
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from benchmarks.federated import stackoverflow_file
from benchmarks.robustness.fuzz.damage import Bytes, damaged, inside, json_lines
from benchmarks.robustness.fuzz.run import Target
from halfsilver._core.tensors import Batch
from halfsilver.privacy.users.stores.base import UserStore
from halfsilver.privacy.users.stores.jsonl import JsonlUsers
from halfsilver.privacy.users.stores.sqlite import tff_users
from halfsilver.privacy.users.stores.tf_example import parse_example
from halfsilver.tasks import files, wikitext2
from halfsilver.tasks.stackexchange import data as stackexchange_data

_ROWS = 4  # of each image file
_USERS = 8
_WORDS = [f"word{i}" for i in range(20)]
_NUMBERS = np.random.default_rng(0)


def cifar10() -> Target:
    name, records = "test_batch.bin", _NUMBERS.integers(0, 10, (_ROWS, 3073), dtype=np.uint8)
    read = lambda folder: files.cifar10_images(folder / name)  # noqa: E731 (one line is enough)
    return Target(good={name: records.tobytes()}, damage={name: damaged}, read=read)


def emnist() -> Target:
    good = {}
    for kind, shape in (("images-idx3", (_ROWS, 28, 28)), ("labels-idx1", (_ROWS,))):
        header = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
        rows = _NUMBERS.integers(0, 47, shape, dtype=np.uint8)
        good[f"EMNIST/raw/emnist-bymerge-test-{kind}-ubyte.gz"] = gzip.compress(header + rows.tobytes())
    return Target(good=good, damage=dict.fromkeys(good, _packed), read=lambda folder: files.emnist(folder, "test"))


def _packed(content: bytes) -> Bytes:
    return inside(gzip.decompress, lambda data: gzip.compress(data, 1), content)


def wikitext() -> Target:
    lines = "\n".join(" ".join(_WORDS[i % 7 :] + _WORDS + _WORDS) for i in range(40)).encode()
    good = {f"wikitext-2/wiki.{part}.tokens": lines for part in ("train", "test")}
    read = lambda folder: wikitext2.problem(folder, public=20, validation=2)  # noqa: E731 (one line is enough)
    return Target(good=good, damage=dict.fromkeys(good, damaged), read=read)


def stackexchange() -> Target:
    text = " ".join(_WORDS).encode()
    good = {stackexchange_data.FILE: _posts(), "brown/brown.tokens": text, "wikipedia-extra/wiki.tokens": text}
    options = stackexchange_data.Options(words=10, public_users=1, public_sentences=1, max_sentences=4)

    def read(folder: Path) -> object:
        return _rows(stackexchange_data.parts(folder, options).private._open())

    damage = {name: json_lines if name.endswith("jsonl") else damaged for name in good}
    return Target(good=good, damage=damage, read=read)


def jsonl() -> Target:
    def read(folder: Path) -> object:
        return _rows(JsonlUsers(folder / "users.jsonl", encode=_lengths))

    return Target(good={"users.jsonl": _posts()}, damage={"users.jsonl": json_lines}, read=read)


def sqlite() -> Target:
    def read(folder: Path) -> object:
        return _rows(tff_users(folder / "users.sqlite", encode=_lengths))

    return Target(good={"users.sqlite": _database()}, damage={"users.sqlite": _database_damage}, read=read)


def tf_example() -> Target:
    features: Mapping[str, bytes | int] = {"tokens": b"how do i sort", "score": -3, "": b"", "type": b"answer"}

    def read(folder: Path) -> object:
        return parse_example((folder / "example").read_bytes())

    return Target(good={"example": stackoverflow_file.example(features)}, damage={"example": damaged}, read=read)


def _posts() -> bytes:
    posts = ({"user": f"u{i % _USERS}", "time": i, "text": " ".join(_WORDS[i % 5 :]) + ". Yes."} for i in range(24))
    return b"".join(json.dumps(post).encode() + b"\n" for post in posts)


def _lengths(records: list[Any]) -> Batch:
    return torch.tensor([len(record) for record in records])


def _rows(store: UserStore) -> list[Batch]:
    return [store.rows(user, 3) for user in range(min(store.size(), _USERS))]


def _database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        stackoverflow_file.write(Path(folder) / "users", _USERS)
        return (Path(folder) / "users").read_bytes()


_CHANGES = (
    "UPDATE client_metadata SET client_id = ? WHERE rowid = 1",
    "UPDATE client_metadata SET split_name = ? WHERE rowid = 1",
    "UPDATE client_metadata SET rowid = ? WHERE rowid = 1",
    "UPDATE examples SET client_id = ? WHERE rowid = 1",
    "UPDATE examples SET split_name = ? WHERE rowid = 1",
    "UPDATE examples SET rowid = ? WHERE rowid = 1",
    "UPDATE examples SET serialized_example_proto = ? WHERE rowid = 1",
)


def _database_damage(content: bytes) -> Bytes:
    """Bytes of the file changed, or in a whole file a value, a name or a table."""
    anything = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.binary(max_size=9) | st.text(max_size=9)
    made = st.tuples(st.sampled_from(_CHANGES), anything).map(lambda case: _after(content, *case))
    return made | st.sampled_from(list(_other_schemas(content))) | damaged(content)


def _after(content: bytes, change: str, *values: object) -> bytes:
    with closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(content)
        try:
            database.execute(change, values)
            database.commit()
        except (sqlite3.Error, UnicodeEncodeError):  # a value that the table itself refuses
            return content
        return database.serialize()


def _other_schemas(content: bytes) -> Iterator[bytes]:
    for change in (
        "DELETE FROM client_metadata",
        "DELETE FROM examples",
        "DROP TABLE examples",
        "ALTER TABLE examples RENAME TO other",
        "ALTER TABLE client_metadata RENAME COLUMN client_id TO other",
        "ALTER TABLE examples RENAME COLUMN serialized_example_proto TO other",
    ):
        yield _after(content, change)
