"""The ledger's records on disk: one canonical JSON line each, chained by SHA-256.

This file knows what a record looks like on its own; `history` knows whether it fits those before it.

Version 2 (halfsilver 0.2.1) added the record "schema" and the field `owner`. A file of version 1 keeps its header, and
the first record appended to it is "schema", which older versions refuse. A digest of the weights has its place among
the `files` of a finish. `RESERVED` names types for later versions. A reader that does not know one refuses the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

SCHEMA_VERSION = 2
RESERVED = ("budget", "request", "approval", "reservation", "return")
ADJACENCY = "add-remove-one"
GENESIS = "0" * 64  # what the first record names as its predecessor

Record = dict[str, Any]


class FromLaterVersion(ValueError):
    """A whole record that this version cannot read."""


class Head(NamedTuple):
    """A place in a ledger: the number of a record, and its hash, which fixes all records before it."""

    seq: int
    hash: str


def canonical(value: object) -> bytes:
    """The one byte string that stands for a JSON value; NaN and infinity have none.

    >>> canonical({"b": 1.0, "a": None})
    b'{"a":null,"b":1.0}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def digest(record: Mapping[str, Any]) -> str:
    """SHA-256 over all fields but the hash itself."""
    return hashlib.sha256(canonical({k: v for k, v in record.items() if k != "hash"})).hexdigest()


def encode(fields: Mapping[str, Any], *, seq: int, prev: str) -> bytes:
    """The line of a new record. Its time only informs: nothing depends on a clock.

    It is a date and no more, since how long a step took may tell of a record that was slow to read.
    """
    record = {**fields, "seq": seq, "prev": prev, "time": datetime.now(UTC).date().isoformat()}
    return line_of({**record, "hash": digest(record)})


def line_of(record: Record) -> bytes:
    return canonical(record) + b"\n"


def decode(line: bytes) -> Record:
    """The record in a complete line; `ValueError` says what is wrong with it.

    Only the canonical bytes are accepted, so a changed space or a repeated key is refused like other damage.
    """
    try:
        value: object = json.loads(line)
        is_canonical = canonical(value) + b"\n" == line
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not a JSON record ({error})") from error
    if not isinstance(value, dict) or not is_canonical:
        raise ValueError("is not in the canonical form that a ledger writes")
    record: Record = value
    if record.get("hash") != digest(record):
        raise ValueError("does not match its own hash")
    _check_type(record)
    check_fields(record, (*_COMMON, *_FIELDS[record["type"]], *_OPTIONAL.get(record["type"], set()) & set(record)))
    return record


def check_fields(record: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuse (by `ValueError`) anything but exactly these fields, each with a possible value."""
    if set(record) != set(names):
        raise ValueError(f"has the fields {sorted(record)} where {sorted(names)} are expected")
    for name in names:
        if not _POSSIBLE[name](record[name]):
            raise ValueError(f"has an impossible {name}={record[name]!r}")


def _check_type(record: Record) -> None:
    kind, version = record.get("type"), record.get("schema_version", SCHEMA_VERSION)
    if kind in RESERVED or (type(version) is int and version > SCHEMA_VERSION):
        what = f"has type={kind!r}, schema_version={version!r} of a later halfsilver; this one reads versions 1 to"
        raise FromLaterVersion(f"{what} {SCHEMA_VERSION}. Use the version that wrote the ledger.")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"has the unknown type {kind!r}; expected one of {sorted(_FIELDS)}")
    if type(version) is not int or version < 1:
        raise ValueError(f"has the impossible schema_version={version!r}")


_COMMON = ("type", "seq", "prev", "hash", "time")
_STEPS = ("run_id", "plan_hash", "noise_multiplier", "sampling_rate", "sampler", "count")
_FIELDS: dict[str, tuple[str, ...]] = {
    "header": ("schema_version", "ledger_id", "adjacency", "unit", "budget"),
    "schema": ("schema_version",),
    "run": ("run_id", "plan", "plan_hash", "block_max"),
    "intent": _STEPS,
    "torn": _STEPS,
    "finish": ("run_id", "updates", "totals"),
    "external": ("why", "event", "count"),
    "summary": ("finish", "runs"),
}
# Only where there is something to say, so that versions before can read all other ledgers.
_OPTIONAL: dict[str, set[str]] = {"summary": {"external"}, "finish": {"files"}, "run": {"owner"}, "intent": {"owner"}}


def is_whole(value: object, least: int = 0) -> bool:
    return type(value) is int and value >= least


def is_positive(value: object) -> bool:
    return type(value) is float and math.isfinite(value) and value > 0


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_budget(value: object) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and set(value) == {"epsilon", "delta"}
        and all(is_positive(v) for v in value.values())
        and value["delta"] < 1
    )


def is_head(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and is_whole(value[0]) and _is_hash(value[1])


def _is_event(value: object) -> bool:
    """What was spent elsewhere: a Gaussian mechanism, on a sample or on all, or an (epsilon, delta)."""
    if not isinstance(value, dict) or not all(type(v) is float and math.isfinite(v) for v in value.values()):
        return False
    if set(value) == {"noise_multiplier", "sampling_rate"}:
        return bool(value["noise_multiplier"] > 0 and 0 < value["sampling_rate"] <= 1)
    return set(value) == {"epsilon", "delta"} and bool(value["epsilon"] >= 0 and 0 <= value["delta"] < 1)


def _are_files(value: object) -> bool:
    """Digests of files by name."""
    return isinstance(value, dict) and all(_is_text(name) and _is_hash(digest) for name, digest in value.items())


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


_POSSIBLE: dict[str, Callable[[Any], bool]] = {
    "type": _is_text,
    "seq": is_whole,
    "prev": _is_hash,
    "hash": _is_hash,
    "time": _is_text,
    "schema_version": is_whole,
    "ledger_id": _is_text,
    "adjacency": lambda value: value == ADJACENCY,
    "unit": lambda value: value in ("example", "user"),
    "budget": _is_budget,
    "run_id": _is_text,
    "owner": _is_text,
    "plan": lambda value: isinstance(value, dict),
    "plan_hash": _is_hash,
    "block_max": lambda value: is_whole(value, 1),
    "noise_multiplier": is_positive,
    "sampling_rate": lambda value: is_positive(value) and value <= 1,
    "sampler": lambda value: value in ("poisson", "full", "separated"),
    "count": lambda value: is_whole(value, 1),
    "updates": is_whole,
    "totals": lambda value: isinstance(value, list),
    "files": _are_files,
    "finish": lambda value: isinstance(value, dict),
    "runs": lambda value: isinstance(value, list) and all(isinstance(run, dict) for run in value),
    "why": _is_text,
    "event": _is_event,
    "external": lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
    # of what was spent elsewhere, inside a summary
    "head": is_head,
    "prior": lambda value: type(value) is bool,
    # of a run inside a summary
    "spent": is_whole,
    "last": lambda value: value is None or is_head(value),
    "closed": is_head,
}
