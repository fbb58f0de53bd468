"""Users in a file of JSON lines, which is indexed once. Rows are read when their user is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np

from halfsilver._core.tensors import Batch, take_rows
from halfsilver.privacy.users.stores.base import UsersFile

Record = dict[str, Any]
Encode = Callable[[list[Record]], Batch]
Chosen = Callable[[str], bool]


@final
class JsonlUsers:
    """Users of a JSON-lines file with one record per line, each of which names its user.

    Opening reads the file once and keeps the byte offsets of each user's lines: 16 bytes per line, no text and no name.

    A line that is not a JSON object, or whose user is not a non-empty string, belongs to nobody. Neither such a line
    nor a user whose records `encode` cannot take raises anything, because an error would reveal that it exists.

    Args:
        path: The file, in UTF-8.
        encode: A function from the list of one user's records (dicts, in the order of the file) to a batch of rows. It
            is called whenever the user is drawn.
        user: The field that names the user. Default "user".
        chosen: A function from a user's name to whether that user belongs to this population. Default None, which takes
            everybody. Use it to split users into populations by name.

    Raises:
        PrivateDataError: If there is no such file, or when it changes after it was opened.

    Example:
        >>> import pathlib, tempfile
        >>> import torch
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "users.jsonl"
        >>> size = file.write_text('{"user": "ann", "x": 1.0}' + chr(10) + '{"user": "bob", "x": 2.0}')
        >>> store = JsonlUsers(file, encode=lambda records: torch.tensor([[r["x"]] for r in records]))
        >>> store.size(), store.rows(1, 10)
        (2, tensor([[2.]]))
    """

    __slots__ = ("__encode", "__index", "__user", "file")

    def __init__(self, path: Path | str, *, encode: Encode, user: str = "user", chosen: Chosen | None = None) -> None:
        self.file, self.__encode, self.__user = UsersFile(path), encode, user
        self.__index = _Index.of(self.file.path, user, chosen)

    def __repr__(self) -> str:
        return "JsonlUsers(<opaque>)"

    def size(self) -> int:
        """The number of users.

        Returns:
            The number of distinct names that were chosen.
        """
        return self.__index.users

    def rows(self, user: int, limit: int) -> Batch:
        """Read and encode the records of one user.

        Args:
            user: The user's number, from 0 to `size` - 1, in the order in which names first occur.
            limit: The most rows to return, at least 1.

        Returns:
            At most `limit` rows of what `encode` returned.

        Raises:
            PrivateDataError: If the file has changed since it was opened.
        """
        self.file.require_unchanged()
        with self.file.path.open("rb") as stream:
            lines = [_line(stream, start, size) for start, size in self.__index.lines(user)]
        records = [record for line in lines if (record := _record(line, self.__user)) is not None]
        return take_rows(self.__encode(records), slice(limit))


class _Index:
    """Start and length of each user's lines, as one array with offsets."""

    __slots__ = ("_offsets", "_spans")

    def __init__(self, spans: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> None:
        self._spans = spans[np.argsort(numbers, kind="stable")]
        self._offsets = np.concatenate([[0], np.cumsum(np.bincount(numbers))])

    @classmethod
    def of(cls, path: Path, user: str, chosen: Chosen | None) -> _Index:
        seen: dict[str, int] = {}
        found = np.fromiter(_entries(path, user, chosen, seen), dtype=np.dtype((np.int64, 3)))
        return cls(found[:, :2].copy(), found[:, 2])

    @property
    def users(self) -> int:
        return len(self._offsets) - 1

    def lines(self, user: int) -> Iterator[tuple[int, int]]:
        span = self._spans[self._offsets[user] : self._offsets[user + 1]]
        return ((int(start), int(size)) for start, size in span)


def records(path: Path, user: str = "user") -> Iterator[tuple[int, int, Record]]:
    """Start, length and content of each line that belongs to somebody."""
    start = 0
    with path.open("rb") as stream:
        for line in stream:
            record = _record(line, user)
            if record is not None:
                yield start, len(line), record
            start += len(line)


def _entries(path: Path, user: str, chosen: Chosen | None, seen: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    """Start, length and user number of each line of a chosen user."""
    for start, size, record in records(path, user):
        name = record[user]
        if name in seen or chosen is None or chosen(name):
            yield start, size, seen.setdefault(name, len(seen))


def _record(line: bytes, user: str) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end: nobody's line
        return None
    named = isinstance(record, dict) and isinstance(record.get(user), str) and record[user]
    return record if named else None


def _line(stream: Any, start: int, size: int) -> bytes:
    stream.seek(start)
    line: bytes = stream.read(size)
    return line
