"""The list of nodes that count: it says who the users are, whoever is online."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from halfsilver.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node, known by the fingerprint of its key, and how many users it serves.

    A `revoked` one keeps the numbers of its users, so that nobody else's change, but is neither asked nor heard.
    """

    name: str
    fingerprint: str
    users: int = 1
    revoked: bool = False

    def __post_init__(self) -> None:
        good = re.fullmatch("[0-9a-f]{64}", self.fingerprint) is not None
        require(good, f"fingerprint of {self.name!r}", self.fingerprint, "to be 64 hexadecimal digits, lower case")
        require(type(self.users) is int and self.users >= 1, f"users of {self.name!r}", self.users, "at least 1")
        require(type(self.revoked) is bool, f"revoked of {self.name!r}", self.revoked, "to be true or false")


@dataclass(frozen=True)
class Enrolment:
    """All members, in an order that stays: users are numbered through them.

    The population is every enrolled user, present or not, since a user who is away must look like one who was not
    drawn.
    """

    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        require(len(self.members) > 0, "number of members", 0, "at least 1")
        for field in ("name", "fingerprint"):
            values = [getattr(m, field) for m in self.members]
            twice = sorted({v for v in values if values.count(v) > 1}) if len(set(values)) < len(values) else []
            require(not twice, f"{field} of a member", twice[:1], "to occur once")

    @classmethod
    def load(cls, path: str | Path) -> Enrolment:
        """From a JSON file: ``{"members": [{"name": ..., "fingerprint": ..., "users": 1, "revoked": false}, ...]}``."""
        try:
            rows = json.loads(Path(path).read_bytes())["members"]
            return cls(tuple(Member(**row) for row in rows))
        except ConfigError:
            raise
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"Expected {Path(path).name} to list members, each with name and fingerprint, perhaps users and "
                f"revoked; got {type(error).__name__}: {error}."
            ) from error

    def save(self, path: str | Path) -> None:
        rows: list[Mapping[str, Any]] = [vars(m) for m in self.members]
        Path(path).write_text(json.dumps({"members": rows}, indent=1) + "\n", encoding="utf-8")

    @property
    def population(self) -> int:
        return sum(m.users for m in self.members)

    def by_member(self, users: Iterable[int]) -> dict[Member, list[int]]:
        """Which of its own users, numbered from 0, each member has among `users`."""
        ends = list(accumulate(m.users for m in self.members))
        found: dict[Member, list[int]] = {}
        for user in users:
            at = bisect_right(ends, user)
            member = self.members[at]
            found.setdefault(member, []).append(user - ends[at] + member.users)
        return found
