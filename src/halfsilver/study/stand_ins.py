"""Public records that stand in for private ones in rehearsals: examples, or users who train themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import Dataset

from halfsilver._core.local_training import LocalTraining
from halfsilver._core.tensors import Batch
from halfsilver.mirror.rows import PublicRows
from halfsilver.mirror.users import pooled
from halfsilver.privacy.users import InProcess
from halfsilver.study.arena import private_users, rows_at


class StandIns(Protocol):
    """Public records, of which some can be taken."""

    def __len__(self) -> int:
        """The number of records."""
        ...

    def at(self, index: Tensor) -> StandIns:
        """The records with these numbers, in this order; a number may come more than once."""
        ...

    @property
    def rows(self) -> Any:
        """All rows of all records."""
        ...

    @property
    def private(self) -> Any:
        """The records as `Trainer.fit` takes private ones."""
        ...


class _Apart(Dataset[Any]):
    """Rows of a data set under another identity: those that stand in for private ones may be the public ones."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


@dataclass(frozen=True)
class Examples:
    """Each row is a record."""

    rows: Any

    def __len__(self) -> int:
        return len(PublicRows(self.rows))

    def at(self, index: Tensor) -> Examples:
        return Examples(rows_at(self.rows, index))

    @property
    def private(self) -> Any:
        return _Apart(self.rows) if isinstance(self.rows, Dataset) else self.rows


@dataclass(frozen=True)
class Users:
    """Each user is a record, and trains on its own rows."""

    users: Sequence[Batch]
    local: LocalTraining

    def __len__(self) -> int:
        return len(self.users)

    def at(self, index: Tensor) -> Users:
        return Users([self.users[i] for i in index.tolist()], self.local)

    @cached_property
    def rows(self) -> Any:
        return pooled(self.users)

    @property
    def private(self) -> InProcess:
        return InProcess(private_users(self.users), self.local)
