"""Hypothesis strategies that start from something valid and damage it: bytes, JSON values, chained records."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from halfsilver.privacy.ledger.records import GENESIS, canonical, digest

Bytes = st.SearchStrategy[bytes]

_LENGTHS = (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
# What json.dumps cannot write: nesting without end, and a number with more digits than Python converts.
_UNWRITABLE = {'"@deep@"': "[" * 50_000 + "]" * 50_000, '"@long@"': "9" * 5_000}
_EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**31, 2**63, 10**400, -(10**400)),
    *(-0.0, 5e-324, 1e-30, 1e308, math.nan, math.inf, -math.inf),
    *("", "0", "nan", "\x00", "\ud800", "a" * 5_000, "@deep@", "@long@", [], {}, [[]], [None], {"": {}}),
)
_VALUES = st.sampled_from(_EXTREMES) | st.integers() | st.floats() | st.text(max_size=6)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with one to four edits: bits, bytes, lengths, pieces lost, doubled, moved or put in; or other bytes."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=200))
    for _ in range(draw(st.integers(1, 4))):
        near_the_front = draw(st.booleans())  # where headers are
        at = draw(st.integers(0, min(len(content), 64) if near_the_front else len(content)))
        size = draw(st.integers(1, 64))
        content = content[:at] + draw(_instead_of(content[at : at + size])) + content[at + size :]
        content = content[: draw(st.integers(0, len(content)))] if draw(st.integers(0, 9)) == 0 else content
    return content


def _instead_of(piece: bytes) -> Bytes:
    flipped = st.integers(0, max(8 * len(piece) - 1, 0)).map(lambda bit: _flip(piece, bit))
    lengths = st.builds(
        lambda value, width, order: (value % 256**width).to_bytes(width, order) + piece[width:],
        st.sampled_from(_LENGTHS),
        st.sampled_from((1, 2, 4, 8)),
        st.sampled_from(("big", "little")),
    )
    return st.one_of(flipped, flipped, lengths, st.binary(max_size=64), st.sampled_from((b"", piece * 2, piece[::-1])))


def _flip(piece: bytes, bit: int) -> bytes:
    return bytes(byte ^ (1 << bit % 8 if i == bit // 8 else 0) for i, byte in enumerate(piece))


@st.composite
def twisted(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one to three places in it lost, doubled or of another kind; `as_json` writes it."""
    root = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 3))):
        box, key = draw(st.sampled_from(list(_places(root)) or [(root, 0)]))
        change = draw(st.sampled_from(("replace", "replace", "drop", "double")))
        if change == "replace" or box is root:
            box[key] = copy.deepcopy(draw(_VALUES))
        elif change == "drop":
            del box[key]
        else:
            box[key if isinstance(box, list) else f"{key} "] = [box[key], copy.deepcopy(box[key])]
    return root[0]


def _places(box: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(box) if isinstance(box, dict) else range(len(box)):
        yield box, key
        if isinstance(box[key], dict | list):
            yield from _places(box[key])


def as_json(value: Any) -> bytes:
    text = json.dumps(value)
    for mark, instead in _UNWRITABLE.items():
        text = text.replace(mark, instead)
    return text.encode()


def json_file(content: bytes) -> Bytes:
    """One JSON value, damaged as such or as bytes."""
    return twisted(json.loads(content)).map(as_json) | damaged(content)


def json_lines(content: bytes) -> Bytes:
    """A JSON value a line: one of them damaged as such, or the file as bytes."""
    lines = content.splitlines(keepends=True)
    return st.integers(0, len(lines) - 1).flatmap(lambda at: _with_line(lines, at)) | damaged(content)


def _with_line(lines: Sequence[bytes], at: int) -> Bytes:
    return twisted(json.loads(lines[at])).map(lambda v: b"".join([*lines[:at], as_json(v) + b"\n", *lines[at + 1 :]]))


@st.composite
def forged(draw: st.DrawFn, content: bytes) -> bytes:
    """A ledger with a changed record and all hashes made right again, so that the change itself has to be refused."""
    records = [json.loads(line) for line in content.splitlines()]
    at = draw(st.integers(0, len(records) - 1))
    records[at] = draw(twisted(records[at]))
    try:
        return b"".join(_chained(records))
    except (ValueError, TypeError, KeyError, AttributeError):  # the change has no canonical form, or is no record
        assume(False)
        raise


def _chained(records: Sequence[Any]) -> Iterator[bytes]:
    prev = GENESIS
    for record in records:
        if "prev" in record:
            record["prev"] = prev
        record["hash"] = digest(record)
        prev = record["finish"]["hash"] if record["type"] == "summary" else record["hash"]
        yield canonical(record) + b"\n"


def inside(unpack: Callable[[bytes], bytes], pack: Callable[[bytes], bytes], content: bytes) -> Bytes:
    """Damage under the packing, which stays whole, or on it."""
    return damaged(unpack(content)).map(pack) | damaged(content)
