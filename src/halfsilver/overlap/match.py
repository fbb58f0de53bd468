"""Records of two sets paired by content: equal, or similar by the measure of their kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from halfsilver.errors import ConfigError

NOTE = (
    "Read from private data in the clear: outside the privacy guarantee. Keep it with the private data, and do not "
    "choose public data by it unless that choice may be known."
)
Content = TypeVar("Content", str, bytes)
Near = Callable[[list[Content], list[Content]], Iterable[tuple[int, int, float]]]


class Match(NamedTuple):
    """The closest record of the other set.

    Args:
        exact: Whether both records are equal.
        similarity: From 0 to 1, by the measure of the kind of record; 1 for equal ones.
        record: The number of the other record in its set, from 0.
    """

    exact: bool
    similarity: float
    record: int


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two sets, as compared with the other.

    Args:
        compared: How many records were compared.
        left_aside: How many could not be compared.
        matches: The closest copy per record that has one, by the record's number.
    """

    compared: int
    left_aside: int
    matches: dict[int, Match]

    def figures(self) -> dict[str, Any]:
        """Counts of exact and near copies.

        Returns:
            A dict with compared, left_aside, exact, near, and the share of records with a copy.
        """
        exact = sum(match.exact for match in self.matches.values())
        return {
            "compared": self.compared,
            "left_aside": self.left_aside,
            "exact": exact,
            "near": len(self.matches) - exact,
            "share": len(self.matches) / max(1, self.compared),
        }


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What two sets have in common, from the view of each. It is not private.

    Args:
        kind: "text", "tables" or "images".
        private: The private set.
        public: The public set.
        columns: The columns that were compared, for tables. Default ().
    """

    kind: str
    private: Side
    public: Side
    columns: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        """Counts and shares of both sets, with a note that they are not private.

        Returns:
            A dict that JSON can hold.
        """
        sides = {"private": self.private.figures(), "public": self.public.figures()}
        by = {"columns": list(self.columns)} if self.columns else {}
        return {"not_private": True, "note": NOTE, "kind": self.kind, **by, **sides}

    def report(self) -> dict[str, Any]:
        """The figures, and each private record that has a copy.

        Returns:
            As `figures`, with one entry per match: both numbers, whether they are equal, and how similar.
        """
        fields = ("private", "public", "exact", "similarity")
        rows = ((i, m.record, m.exact, m.similarity) for i, m in sorted(self.private.matches.items()))
        return {**self.figures(), "matches": [dict(zip(fields, row, strict=True)) for row in rows]}


def overlap(
    kind: str, private: Sequence[Content | None], public: Sequence[Content | None], near: Near[Content], expected: str
) -> Overlap:
    """Pair the records of two sets, given by their contents. None is a record that is left aside.

    Args:
        kind: The kind of record, for the report.
        private: The contents of the private records.
        public: The contents of the public records.
        near: A function from the distinct contents of both sets to pairs of their numbers with a similarity.
        expected: What a record should be like, for the error message.

    Returns:
        The overlap.

    Raises:
        ConfigError: If nothing of a set can be compared, because 0 of 0 records is not "no overlap".
    """
    ours, theirs = _places(private), _places(public)
    for side, given, found in (("private", private, ours), ("public", public, theirs)):
        if not found:
            raise ConfigError(
                f"Expected the {side} set to hold {expected}; of its {len(given):,} records none could be compared."
            )
    keys, other_keys = list(ours), list(theirs)
    pairs = [(key, key, True, 1.0) for key in keys if key in theirs]
    alike = near(keys, other_keys)
    pairs += [(keys[i], other_keys[j], False, similarity) for i, j, similarity in alike if keys[i] != other_keys[j]]
    turned = [(b, a, exact, similarity) for a, b, exact, similarity in pairs]
    return Overlap(kind=kind, private=_side(private, ours, theirs, pairs), public=_side(public, theirs, ours, turned))


def _places(records: Sequence[Content | None]) -> dict[Content, list[int]]:
    found: dict[Content, list[int]] = {}
    for i, content in enumerate(records):
        if content is not None:
            found.setdefault(content, []).append(i)
    return found


def _side(
    records: Sequence[Content | None],
    own: dict[Content, list[int]],
    other: dict[Content, list[int]],
    pairs: Iterable[tuple[Content, Content, bool, float]],
) -> Side:
    best: dict[Content, Match] = {}
    for key, copy, exact, similarity in pairs:
        best[key] = max(best.get(key, Match(False, -1.0, 0)), Match(exact, similarity, other[copy][0]))
    compared = sum(map(len, own.values()))
    matches = {place: match for key, match in best.items() for place in own[key]}
    return Side(compared=compared, left_aside=len(records) - compared, matches=matches)
