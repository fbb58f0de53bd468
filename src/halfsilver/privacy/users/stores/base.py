"""Private users: where their rows are read, and the opaque handle that carries them outside this folder."""

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
    """The interface to the rows of private users. Write your own to read another format.

    Users are numbered from 0, and no person may have two numbers. A second number would be a second contribution, which
    the noise does not hide.

    Example:
        >>> import torch
        >>> class Even:
        ...     def size(self):
        ...         return 10
        ...
        ...     def rows(self, user, limit):
        ...         return torch.full((5, 1), 2.0 * user)[:limit]
        >>> PrivateUsers(Even())
        PrivateUsers(<opaque>)
    """

    def size(self) -> int:
        """The number of enrolled users.

        Returns:
            A count, at least 0.
        """

    def rows(self, user: int, limit: int) -> Batch:
        """Read the rows of one user now. A user whose rows raise an error contributes zero.

        Args:
            user: The user's number, from 0 to `size` - 1.
            limit: The most rows to return, at least 1.

        Returns:
            At most `limit` rows, as a batch with one example per entry of dimension 0. It may be empty.
        """


@final
class PrivateUsers:
    """An opaque handle on private users, which you give to an engine.

    It has no length, no index and no iterator, and its repr shows nothing. What a store holds or raises depends on
    private rows, so only `halfsilver.privacy` opens the handle.

    Args:
        store: Where the rows are: `TensorUsers`, `JsonlUsers`, `SqliteUsers`, or any object with the methods of
            `UserStore`.

    Raises:
        PrivateDataError: If `store` lacks ``size`` or ``rows``.

    Example:
        >>> import torch
        >>> PrivateUsers(TensorUsers(torch.randn(4, 3), users=["ann", "ann", "bob", "eve"]))
        PrivateUsers(<opaque>)
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
        """Tell whether a data set that should be public holds rows of these users.

        The check compares memory addresses. It finds views and slices of the same storage, and no copies. It applies to
        users in memory; users in files share no memory with anything.

        Args:
            data: The data set in question.

        Returns:
            True if both share at least one row in memory.
        """
        found: bool = getattr(self.__store, "shares_rows_with", lambda data: False)(data)
        return found

    def _open(self) -> UserStore:
        return self.__store


@final
class TensorUsers:
    """Users in memory: columns with one row per example, and the key of the person behind each row.

    The rows of a user keep their order. Users without a row do not exist here.

    Args:
        columns: A tensor, or a tuple or dict of tensors, with one example per entry of dimension 0.
        users: One key per row, as a sequence, a NumPy array or a tensor of one dimension. Keys are compared by value,
            so two spellings of one name count as two people.

    Raises:
        PrivateDataError: If the number of keys differs from the number of rows, or if a key is missing.

    Example:
        >>> import torch
        >>> TensorUsers(torch.randn(4, 3), users=["ann", "ann", "bob", "eve"]).size()
        3
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
        """The number of users.

        Returns:
            The number of distinct keys.
        """
        return self.__users.size()

    def shares_rows_with(self, data: Any) -> bool:
        """Tell whether a data set that should be public holds rows of these users; see `PrivateUsers.shares_rows_with`.

        Args:
            data: The data set in question.

        Returns:
            True if both share at least one row in memory.
        """
        return shares_rows(self.__columns, data)

    def rows(self, user: int, limit: int) -> Batch:
        """The first rows of one user.

        Args:
            user: The user's number, from 0 to `size` - 1, in the order in which keys first occur or, for arrays, sort.
            limit: The most rows to return, at least 1.

        Returns:
            At most `limit` rows.
        """
        return take_rows(self.__columns, next(self.__users.rows(user, limit)))


def require_unchanged(store: UserStore) -> None:
    """Raise if the file of a store has changed. Engines call this once per round, before any user is read.

    An error about a user would reveal something about that user. An error about the file as a whole may be raised. A
    store that reads a file has its `UsersFile` as ``file``.
    """
    file = getattr(store, "file", None)
    if isinstance(file, UsersFile):
        file.require_unchanged()


@final
class UsersFile:
    """A file whose users were numbered when it was opened.

    Once it has changed, a number may belong to another person, or one person may have two. So nothing more is read from
    it.
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
