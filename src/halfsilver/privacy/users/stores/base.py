"""Private users: where their rows are read, and the opaque handle under which they travel outside this folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn, Protocol, final

from halfsilver._core.tensors import Batch, batch_rows, take_rows
from halfsilver.errors import PrivateDataError
from halfsilver.privacy.data import Keys, _Users
from halfsilver.privacy.recognise import shares_rows
from halfsilver.privacy.schema import require_plain


class UserStore(Protocol):
    """The rows of each private user, inside the boundary.

    Users are numbered from 0 and no person has two numbers: a second number would be a second contribution, which the
    noise does not hide.
    """

    def size(self) -> int:
        """Number of enrolled users."""

    def rows(self, user: int, limit: int) -> Batch:
        """At most `limit` rows of that user, read now; may be empty; a user whose rows raise contributes nothing."""


@final
class PrivateUsers:
    """An opaque handle on private users: no length, no index, no iteration, and it prints nothing.

    What a store holds or raises depends on private rows, so only `halfsilver.privacy` opens the handle.
    """

    __slots__ = ("__store",)

    def __init__(self, store: UserStore) -> None:
        if isinstance(store, PrivateUsers):
            raise PrivateDataError("This is a PrivateUsers handle already; pass it on as it is.")
        if not (hasattr(store, "size") and hasattr(store, "rows")):
            raise PrivateDataError(
                f"Expected a store of users with size() and rows(user, limit), got {type(store).__name__}. "
                "For tensors: PrivateUsers(TensorUsers(columns, users=keys))."
            )
        self.__store = store

    def __repr__(self) -> str:
        return "PrivateUsers(<opaque>)"

    def __reduce__(self) -> NoReturn:
        raise PrivateDataError("Private users cannot be pickled; open them where they lie.")

    def shares_rows_with(self, data: Any) -> bool:
        """Whether `data`, which somebody calls public, holds rows of these users, as far as addresses show it."""
        found: bool = getattr(self.__store, "shares_rows_with", lambda data: False)(data)
        return found

    def _open(self) -> UserStore:
        return self.__store


@final
class TensorUsers:
    """Users in memory: columns with one row an example, and the key of the person behind each row.

    A user's rows keep their order. Users without a row do not exist here.
    """

    __slots__ = ("__columns", "__users")

    def __init__(self, columns: Batch, *, users: Keys) -> None:
        require_plain(columns)
        if len(users) != batch_rows(columns):
            raise PrivateDataError("Expected one user key for each private row.")
        self.__columns = columns
        self.__users = _Users.from_keys(users)

    def __repr__(self) -> str:
        return "TensorUsers(<opaque>)"

    def size(self) -> int:
        return self.__users.size()

    def shares_rows_with(self, data: Any) -> bool:
        return shares_rows(self.__columns, data)

    def rows(self, user: int, limit: int) -> Batch:
        return take_rows(self.__columns, next(self.__users.rows(user, limit)))


def require_unchanged(store: UserStore) -> None:
    """Once a round, before any user is read: of a user an error would tell, of a file as a whole it may.

    A store that lies in a file has its `UsersFile` as ``file``.
    """
    file = getattr(store, "file", None)
    if isinstance(file, UsersFile):
        file.require_unchanged()


@final
class UsersFile:
    """A file whose users were numbered when it was opened.

    Once it has changed, a number may be another person's, or one person may have two, so nothing more is read from it.
    """

    __slots__ = ("_seen", "path")

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise PrivateDataError(f"There is no file {self.path} with private users.")
        self._seen = self._now()

    def require_unchanged(self) -> None:
        if self._now() != self._seen:
            raise PrivateDataError(f"The file {self.path} has changed since its users were counted. Open it again.")

    def _now(self) -> tuple[int, int, int]:
        found = os.stat(self.path)
        return found.st_ino, found.st_size, found.st_mtime_ns
