"""The list of nodes that count. It defines who the users are, whoever is online."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from halfsilver.errors import ConfigError, require


@dataclass(frozen=True, kw_only=True)
class Member:
    """One enrolled node: its key's fingerprint, and how many users it serves.

    Args:
        name: A name for people to read, unique within the enrolment.
        fingerprint: The `fingerprint` of the node's public key, 64 lower-case hexadecimal digits, unique as well.
        users: How many users the node serves, at least 1. Default 1.
        revoked: Whether the node is neither asked nor heard any more. Default False. A revoked node keeps the numbers
            of its users, so that nobody else's numbers change. Revoke a node instead of deleting it.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> Member(name="hospital", fingerprint="0" * 64, users=120).users
        120
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
    """All enrolled nodes, in a fixed order. Users are numbered through them.

    The population is every enrolled user, present or not, because a user who is away must look like one who was not
    drawn.

    Args:
        members: The nodes. Append new ones at the end, so that the numbers of users stay.

    Raises:
        ConfigError: If there are no members, or if two have the same name or fingerprint.

    Example:
        >>> nodes = Enrolment((Member(name="a", fingerprint="0" * 64, users=2), Member(name="b", fingerprint="1" * 64)))
        >>> nodes.population
        3
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
        """Read an enrolment from a JSON file.

        The file is ``{"members": [{"name": ..., "fingerprint": ..., "users": 1, "revoked": false}, ...]}``.

        Args:
            path: The file.

        Returns:
            The enrolment.

        Raises:
            ConfigError: If the file cannot be read or a member is not valid.
        """
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
        """Write the enrolment to a JSON file that `load` reads.

        Args:
            path: The file, which is replaced if it exists.
        """
        rows: list[Mapping[str, Any]] = [vars(m) for m in self.members]
        Path(path).write_text(json.dumps({"members": rows}, indent=1) + "\n", encoding="utf-8")

    @property
    def population(self) -> int:
        """The number of enrolled users over all members, revoked ones included."""
        return sum(m.users for m in self.members)

    def users_of(self, fingerprints: Collection[str]) -> list[int]:
        """The users that some nodes serve.

        Args:
            fingerprints: Those of the nodes.

        Returns:
            User numbers in rising order.
        """
        starts = accumulate((m.users for m in self.members), initial=0)
        return [
            user
            for member, start in zip(self.members, starts, strict=False)
            if member.fingerprint in fingerprints
            for user in range(start, start + member.users)
        ]

    def by_member(self, users: Iterable[int]) -> dict[Member, list[int]]:
        """Group users by the node that serves them.

        Args:
            users: User numbers from 0 to `population` - 1.

        Returns:
            Per member, the numbers of its own users, which count from 0 within the node.

        Example:
            >>> a, b = (Member(name=name, fingerprint=digit * 64, users=2) for name, digit in (("a", "0"), ("b", "1")))
            >>> {member.name: users for member, users in Enrolment((a, b)).by_member([1, 2, 3]).items()}
            {'a': [1], 'b': [0, 1]}
        """
        ends = list(accumulate(m.users for m in self.members))
        found: dict[Member, list[int]] = {}
        for user in users:
            at = bisect_right(ends, user)
            member = self.members[at]
            found.setdefault(member, []).append(user - ends[at] + member.users)
        return found
