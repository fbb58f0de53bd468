"""Users in an SQLite file, each read by an indexed lookup when drawn; among them TFF's StackOverflow file.

Opening makes one pass over the table of users inside SQLite. It keeps two numbers or, where users of several splits are
mixed, eight bytes per user. The cost of a read does not depend on the number of users.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from halfsilver._core.tensors import Batch, take_rows
from halfsilver.errors import PrivateDataError
from halfsilver.privacy.users.stores.base import UsersFile
from halfsilver.privacy.users.stores.tf_example import Example, parse_example

Encode = Callable[[list[Any]], Batch]


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The layout of an SQLite file: a table with one row per user, one with one row per example, and a split of both.

    Both tables need an index by `key`, alone or with `split`. The defaults are those of TensorFlow Federated.

    Args:
        users: The table of users. Default "client_metadata".
        examples: The table of examples. Default "examples".
        key: The column, in both tables, that names the user. Default "client_id".
        split: The column, in both tables, that names the split. Default "split_name".
        value: The column of `examples` that `encode` gets. Default "serialized_example_proto".

    Example:
        >>> Tables(key="name").sql("SELECT {key} FROM {users}")
        'SELECT `name` FROM `client_metadata`'
    """

    users: str = "client_metadata"
    examples: str = "examples"
    key: str = "client_id"
    split: str = "split_name"
    value: str = "serialized_example_proto"

    def sql(self, text: str) -> str:
        """`text` with the names filled in, quoted so that SQLite never reads one as a string.

        Args:
            text: A statement with names such as ``{users}`` in braces.

        Returns:
            The statement.
        """
        names = {name: "`" + str(value).replace("`", "``") + "`" for name, value in vars(self).items()}
        return text.format(**names)


_UNREADABLE = (sqlite3.Error, UnicodeDecodeError)  # the latter from names of tables or indices that are not text
_NAMED = "SELECT {key} FROM {users} WHERE rowid = ? AND {split} = ?"
# Byte by byte, whatever collation a column declares: else "Bob" and "bob" could read the same rows under two numbers.
_FIRST = "SELECT min(rowid) FROM {users} WHERE {key} = ? COLLATE BINARY AND {split} = ?"
_VALUES = "SELECT {value} FROM {examples} WHERE {key} = ? COLLATE BINARY AND {split} = ? ORDER BY rowid LIMIT ?"
_NOBODY = (None, "", b"")


@final
class SqliteUsers:
    """Users of one split of an SQLite file, which is opened read-only.

    A user that is listed twice is read under the first number only, so that a person counts once. Names are compared
    byte by byte. Rows without a name (NULL or empty) belong to nobody. Each process has a connection of its own, so the
    store may be used after a fork.

    Args:
        path: The SQLite file, without a write-ahead log.
        encode: A function from the list of one user's values, in the order in which they were stored, to a batch of
            rows.
        split: Which split to read. Default "train".
        tables: Names of tables and columns. Default None, which uses those of TensorFlow Federated.

    Raises:
        PrivateDataError: If there is no such file, if it cannot be read, if it has a write-ahead log, if an index by
            user is missing, or when it changes after it was opened.

    Example:
        >>> import sqlite3, tempfile
        >>> import torch
        >>> path = tempfile.mkdtemp() + "/users.sqlite"
        >>> db = sqlite3.connect(path)
        >>> db = db.executescript('''
        ...     CREATE TABLE people (name TEXT PRIMARY KEY, part TEXT);
        ...     CREATE TABLE rows (name TEXT, part TEXT, x REAL);
        ...     CREATE INDEX rows_by_name ON rows (name);
        ...     INSERT INTO people VALUES ('ann', 'train');
        ...     INSERT INTO rows VALUES ('ann', 'train', 1.5), ('ann', 'train', 2.5);
        ... ''').connection.close()
        >>> tables = Tables(users="people", examples="rows", key="name", split="part", value="x")
        >>> store = SqliteUsers(path, encode=lambda values: torch.tensor(values), tables=tables)
        >>> store.size(), store.rows(0, 10)
        (1, tensor([1.5000, 2.5000]))
    """

    __slots__ = ("__connections", "__encode", "__rowids", "__split", "__tables", "file")

    def __init__(self, path: Path | str, *, encode: Encode, split: str = "train", tables: Tables | None = None) -> None:
        self.__connections: dict[int, sqlite3.Connection] = {}  # by process
        self.file, self.__encode, self.__split = UsersFile(path), encode, split
        self.__tables = tables or Tables()
        _require_one_file(self.file.path)
        try:
            _require_indexed(self._database(), self.__tables)
            _require_text(self._database(), self.__tables)
            self.__rowids = _rowids(self._database(), self.__tables, split)
        except _UNREADABLE as error:
            raise PrivateDataError(f"The file {self.file.path} cannot be read: {error}. {self.__tables}") from error

    def __repr__(self) -> str:
        return "SqliteUsers(<opaque>)"

    def __del__(self) -> None:
        for process, connection in self.__connections.items():
            if process == os.getpid():  # one that came over a fork is not ours to close
                connection.close()

    def size(self) -> int:
        """The number of users.

        Returns:
            The number of rows of the table of users in this split.
        """
        return len(self.__rowids)

    def rows(self, user: int, limit: int) -> Batch:
        """Read and encode the values of one user.

        Args:
            user: The user's number, from 0 to `size` - 1, in the order of the table.
            limit: The most rows to return, at least 1.

        Returns:
            At most `limit` rows of what `encode` returned. For a second entry of the same person, `encode` gets an
            empty list.

        Raises:
            PrivateDataError: If the file has changed since it was opened, or cannot be read.
        """
        self.file.require_unchanged()
        try:
            values = self._values(int(self.__rowids[user]), limit)
        except _UNREADABLE:  # not shown: it may quote what is stored
            raise PrivateDataError(f"The rows of a user cannot be read from {self.file.path}.") from None
        return take_rows(self.__encode(values), slice(limit))

    def _values(self, rowid: int, limit: int) -> list[Any]:
        ask, sql, split = self._database().execute, self.__tables.sql, self.__split
        found = ask(sql(_NAMED), (rowid, split)).fetchone()
        if found is None or found[0] in _NOBODY or ask(sql(_FIRST), (found[0], split)).fetchone() != (rowid,):
            return []
        return [value for (value,) in ask(sql(_VALUES), (found[0], split, limit))]

    def _database(self) -> sqlite3.Connection:
        process = os.getpid()
        if process not in self.__connections:
            source = f"{self.file.path.resolve().as_uri()}?mode=ro"
            self.__connections[process] = sqlite3.connect(source, uri=True, check_same_thread=False)
        return self.__connections[process]


def tff_users(path: Path | str, *, encode: Callable[[list[Example]], Batch], split: str = "train") -> SqliteUsers:
    """Users of a file in the SQLite format of TensorFlow Federated (TFF), such as its StackOverflow data set.

    An example of StackOverflow has the keys creation_date, score, tags, title, tokens and type, and its tokens are one
    sentence. A user with an example that is not a tf.Example contributes zero.

    Args:
        path: The SQLite file.
        encode: A function from the list of one user's examples to a batch of rows. An example is a dict from names to
            lists of bytes, floats or integers.
        split: Which split to read. Default "train". In StackOverflow, "test" has in part the same people as "train" at
            a later time, so do not take both for different users.

    Returns:
        The store, to be wrapped by `PrivateUsers`.

    Raises:
        PrivateDataError: As for `SqliteUsers`.

    Example:
        >>> import sqlite3, tempfile
        >>> import torch
        >>> path = tempfile.mkdtemp() + "/tff.sqlite"
        >>> sqlite3.connect(path).executescript('''
        ...     CREATE TABLE client_metadata (client_id TEXT, split_name TEXT);
        ...     CREATE TABLE examples (client_id TEXT, split_name TEXT, serialized_example_proto BLOB);
        ...     CREATE INDEX metadata_by_user ON client_metadata (client_id);
        ...     CREATE INDEX examples_by_user ON examples (client_id);
        ...     INSERT INTO client_metadata VALUES ('ann', 'train');
        ...     INSERT INTO examples VALUES ('ann', 'train', x'');
        ... ''').connection.close()
        >>> store = tff_users(path, encode=lambda examples: torch.ones(len(examples), 1))
        >>> store.size(), store.rows(0, 10)
        (1, tensor([[1.]]))
    """

    def parsed(values: list[Any]) -> Batch:
        return encode([parse_example(value) for value in values])

    return SqliteUsers(path, encode=parsed, split=split)


def _require_one_file(path: Path) -> None:
    """With a write-ahead log, changes lie in a second file for a while, and `UsersFile` sees one.

    The mode is in the header. Later it cannot be switched on unseen: that changes the file.
    """
    with path.open("rb") as file:
        if b"\2" in file.read(20)[18:]:
            raise PrivateDataError(
                f"The file {path} has a write-ahead log, so it cannot be told whether others change it while it is "
                'read. Switch the log off: sqlite3 FILE "PRAGMA journal_mode=DELETE".'
            )


def _require_indexed(database: sqlite3.Connection, tables: Tables) -> None:
    """Without an index every read would go through the whole table."""
    for query, table, values in ((_FIRST, tables.users, ("", "")), (_VALUES, tables.examples, ("", "", 1))):
        plan = database.execute("EXPLAIN QUERY PLAN " + tables.sql(query), values).fetchall()
        if not any(f"{tables.key}=?" in str(line[-1]) for line in plan):
            raise PrivateDataError(
                f"Table {table} has no index by user that compares names byte by byte, so each read would go through "
                "all of it. See that each person has one spelling, and make one: "
                f"CREATE INDEX {table}_by_exact_user ON {table} ({tables.key} COLLATE BINARY);"
            )


def _require_text(database: sqlite3.Connection, tables: Tables) -> None:
    """In a column of numbers '1' and '01' would find the same rows, and one person would have two numbers."""
    types = {}
    for table in (tables.users, tables.examples):
        columns = database.execute("SELECT name, upper(type) FROM pragma_table_info(?)", (table,)).fetchall()
        types[table] = dict(columns).get(tables.key)
    if len(set(types.values())) != 1:
        raise PrivateDataError(f"Expected column {tables.key} to be of one type in both tables, got {types}.")


def _rowids(database: sqlite3.Connection, tables: Tables, split: str) -> range | np.ndarray[Any, Any]:
    """Line number of each user: a range where the lines follow each other, else an array."""
    limits = "SELECT count(*), min(rowid), max(rowid) FROM {users} WHERE {split} = ?"
    count, first, last = database.execute(tables.sql(limits), (split,)).fetchone()
    if not count:
        return range(0)
    if last - first + 1 == count:
        return range(first, last + 1)
    lines = database.execute(tables.sql("SELECT rowid FROM {users} WHERE {split} = ? ORDER BY rowid"), (split,))
    return np.fromiter((rowid for (rowid,) in lines), dtype=np.int64, count=count)
