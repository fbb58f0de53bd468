"""Reads one serialized tf.Example: the few parts of the protobuf wire format that it is made of.

An Example is a map from names to lists of byte strings, floats or integers. Whatever cannot be read as one raises
`MalformedExample`, and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from halfsilver.errors import HalfsilverError

Values = list[bytes] | list[float] | list[int]
Example = dict[str, Values]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}


class MalformedExample(HalfsilverError, ValueError):
    """These bytes are not a tf.Example. The message says nothing of them, since they are private."""

    def __init__(self) -> None:
        super().__init__("These bytes are not a tf.Example.")


def parse_example(data: object) -> Example:
    """The features by name. As in protobuf, the last value counts if a name occurs twice."""
    if not isinstance(data, bytes):  # a column of SQLite may hold anything
        raise MalformedExample
    found: Example = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            name, value = b"", b""
            for number, wire, part in _fields(entry):
                name = part if (number, wire) == (1, _BYTES) else name
                value = value + part if (number, wire) == (2, _BYTES) else value
            found[_text(name)] = _feature(value)
    return found


def _feature(data: bytes) -> Values:
    """One of the three kinds of list; where there are several, the last kind counts."""
    fields = [(number, value) for number, wire, value in _fields(data) if number in _KINDS and wire == _BYTES]
    if not fields:
        return []
    kind = fields[-1][0]
    return _KINDS[kind](b"".join(value for number, value in fields if number == kind))


def _strings(data: bytes) -> list[bytes]:
    return list(_messages(data, 1))


def _floats(data: bytes) -> list[float]:
    """Packed or one by one: in both cases four bytes each, little end first."""
    packed = b"".join(v for number, wire, v in _fields(data) if number == 1 and wire in (_BYTES, _FIXED32))
    if len(packed) % 4:
        raise MalformedExample
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


def _integers(data: bytes) -> list[int]:
    found: list[int] = []
    for number, wire, value in _fields(data):
        at = 0
        while number == 1 and wire in (_BYTES, _VARINT) and at < len(value):
            whole, at = _varint(value, at)
            found.append(whole - (1 << 64) if whole >> 63 else whole)
    return found


_KINDS: dict[int, Callable[[bytes], Values]] = {1: _strings, 2: _floats, 3: _integers}


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """The byte strings under one field number; in another form the field is not what it should be."""
    for number, wire, value in _fields(data):
        if number == wanted:
            if wire != _BYTES:
                raise MalformedExample
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, wire type and bytes of each field, in order; an integer as the bytes that encode it."""
    end, size = 0, len(data)
    while end < size:
        key, start = _varint(data, end)
        number, wire = key >> 3, key & 7
        if wire == _BYTES:
            length, start = _varint(data, start)
            end = start + length
        elif wire == _VARINT:
            _, end = _varint(data, start)
        else:
            end = start + _FIXED.get(wire, size)  # groups were given up long ago: beyond the end
        if not number or end > size:
            raise MalformedExample
        yield number, wire, data[start:end]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer of at most 64 bits in groups of seven, and where it ends."""
    if at < len(data) and data[at] < 128:  # nearly all of them
        return data[at], at + 1
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value & (1 << 64) - 1, at + shift + 1
    raise MalformedExample


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MalformedExample from None
