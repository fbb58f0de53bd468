"""A ledger that is not the one a checkpoint knew is refused, whatever was done to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfsilver.errors import LedgerCorrupt
from halfsilver.privacy.ledger import Budget, Head, Ledger
from halfsilver.privacy.ledger.records import GENESIS, canonical, decode, digest, encode
from halfsilver.privacy.plan import PrivacyPlan

PLAN = PrivacyPlan(steps=50, sampling_rate=1.0, expected_batch_size=10, noise_multiplier=30.0, max_grad_norm=0.5)


def build(path: Path, *, compacted: bool) -> Head:
    """A ledger with a finished and an unfinished run; its head, as a checkpoint would keep it."""
    ledger = Ledger.open(path, budget=Budget(epsilon=9.0, delta=1e-5))
    for run_id in ("done", "open"):
        ledger.register_run(run_id, PLAN, block_max=5)
        for count in (5, 1, 3, 2, 4):
            grant = ledger.intend(run_id, count)
        if run_id == "done":
            ledger.finish(run_id, 12)
    if compacted:
        assert ledger.compact()
    path.with_name(f"{path.name}.head").unlink()  # it would see most of this before the checkpoint's head does
    return Head(grant.seq, grant.head)


def refused(path: Path, head: Head, changed: bytes) -> bool:
    path.write_bytes(changed)
    try:
        Ledger.open(path, create=False).verify_head(*head)
    except LedgerCorrupt as error:
        return "Restore the newest copy" in str(error)
    return False


def rechained(lines: list[bytes], change: Callable[[dict[str, Any]], None], index: int) -> bytes:
    """Change one record and mend every hash after it, as a careful forger would."""
    records = [dict(decode(line)) for line in lines]
    change(records[index])
    prev = GENESIS
    for record in records:
        record["prev"] = prev
        record["hash"] = digest(record)
        prev = record["finish"]["hash"] if record["type"] == "summary" else record["hash"]
    return b"".join(canonical(record) + b"\n" for record in records)


def older(rng: random.Random, good: bytes, other: bytes) -> bytes:
    lines = good.splitlines(keepends=True)
    return b"".join(lines[: rng.randrange(len(lines))])


def shortened(rng: random.Random, good: bytes, other: bytes) -> bytes:
    return good[: rng.randrange(len(good))]


def bit_flipped(rng: random.Random, good: bytes, other: bytes) -> bytes:
    position = rng.randrange(len(good))
    return good[:position] + bytes([good[position] ^ 1 << rng.randrange(8)]) + good[position + 1 :]


def last_newline_flipped(rng: random.Random, good: bytes, other: bytes) -> bytes:
    return good[:-1] + bytes([good[-1] ^ 1 << rng.randrange(8)])


def respaced(rng: random.Random, good: bytes, other: bytes) -> bytes:
    """The same JSON in other bytes."""
    position = rng.choice([i for i, byte in enumerate(good) if byte in b",:{}"])
    return good[: position + 1] + rng.choice([b" ", b"\t", b"\r"]) + good[position + 1 :]


def line_lost_or_doubled(rng: random.Random, good: bytes, other: bytes) -> bytes:
    lines = good.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    lines[index : index + 1] = [lines[index]] * rng.choice([0, 2])
    return b"".join(lines)


def miscounted(rng: random.Random, good: bytes, other: bytes) -> bytes:
    lines = good.splitlines(keepends=True)
    intents = [i for i, line in enumerate(lines) if b'"type":"intent"' in line and b'"count":1,' not in line]
    count = rng.choice([-3, 0, 1, 10**9, 1.5, True, None, "2"])
    return rechained(lines, lambda record: record.update(count=count), rng.choice(intents))


def foreign(rng: random.Random, good: bytes, other: bytes) -> bytes:
    return other


CORRUPTIONS = (
    *(
        older,
        shortened,
        bit_flipped,
        last_newline_flipped,
        respaced,
        line_lost_or_doubled,
        miscounted,
        foreign,
    ),
)


@pytest.mark.parametrize("compacted", [False, True])
def test_500_corruptions_500_refusals(tmp_path: Path, compacted: bool) -> None:
    path, elsewhere = tmp_path / "ledger", tmp_path / "other"
    head = build(path, compacted=compacted)
    build(elsewhere, compacted=compacted)
    good, other = path.read_bytes(), elsewhere.read_bytes()
    assert not refused(path, head, good)
    assert not refused(path, head, rechained(good.splitlines(keepends=True), lambda record: None, 0))
    rng = random.Random(7)
    for trial in range(250):
        corrupt = CORRUPTIONS[trial % len(CORRUPTIONS)]
        assert refused(path, head, corrupt(rng, good, other)), (corrupt.__name__, trial)


def test_every_bit_of_the_last_two_records_matters(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    head = build(path, compacted=False)
    good = path.read_bytes()
    tail = sum(map(len, good.splitlines(keepends=True)[-2:]))
    for position in range(len(good) - tail, len(good), 3):
        changed = bytearray(good)
        changed[position] ^= 1 << (position % 8)
        assert refused(path, head, bytes(changed)), position


def summary_with(path: Path, **changes: object) -> bytes:
    header, summary, *rest = path.read_bytes().splitlines(keepends=True)
    record = decode(summary)
    record["runs"][0].update(changes)
    return b"".join([header, encode(record, seq=record["seq"], prev=record["prev"]), *rest])


@pytest.mark.parametrize("spent", [0, 14, 16, -15, 51, 15.0, None])
def test_a_summary_cannot_be_rewritten_with_another_count(tmp_path: Path, spent: object) -> None:
    path = tmp_path / "ledger"
    head = build(path, compacted=True)
    assert not refused(path, head, summary_with(path, spent=15))
    assert refused(path, head, summary_with(path, spent=spent))


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a record whose chain is right, whatever it says."""
    last = decode(path.read_bytes().splitlines(keepends=True)[-1])
    with open(path, "ab") as handle:
        handle.write(encode(record, seq=last["seq"] + 1, prev=last["hash"]))


STEPS = {
    "type": "intent",
    "run_id": "open",
    "plan_hash": PLAN.fingerprint(),
    "noise_multiplier": 30.0,
    "sampling_rate": 1.0,
    "sampler": "full",
    "count": 1,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": -1}, "impossible count=-1"),
        ({"count": 0}, "impossible count=0"),
        ({"count": 6}, "at most 5 is possible"),
        ({"noise_multiplier": 300.0}, "not those of the plan"),
        ({"noise_multiplier": 30}, "impossible noise_multiplier=30"),
        ({"sampling_rate": 0.5}, "not those of the plan"),
        ({"sampler": "poisson"}, "not those of the plan"),
        ({"plan_hash": "0" * 64}, "not those of the plan"),
        ({"run_id": "unknown"}, "not registered or has finished"),
        ({"run_id": "done"}, "not registered or has finished"),
        ({"type": "release"}, "unknown type 'release'"),
        ({"type": ["intent"]}, "unknown type"),
        ({"type": "finish"}, "has the fields"),
        ({"extra": 1}, "has the fields"),
        ({"schema_version": 2}, "has the fields"),
        ({"schema_version": 3}, "of a later halfsilver"),
        ({"type": "approval"}, "of a later halfsilver"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused_with_its_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "ledger"
    build(path, compacted=False)
    append(path, STEPS)
    assert Ledger.open(path).runs["open"].spent == 16
    append(path, {**STEPS, **change})
    with pytest.raises(LedgerCorrupt, match=message) as caught:
        Ledger.open(path)
    assert "line 16 " in str(caught.value)


def test_a_finish_record_must_state_the_totals(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    build(path, compacted=False)
    append(path, {"type": "finish", "run_id": "open", "updates": 1, "totals": [[30.0, 1.0, 29]]})
    with pytest.raises(LedgerCorrupt, match="states other totals"):
        Ledger.open(path)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"null\n",
        b"[]\n",
        b"NaN\n",
        b'{"a":1,"a":1}\n',
        b'{"count":1e999}\n',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b"9" * 5000 + b"\n",
        b"\0" * 300 + b"\n",
    ],
)
def test_a_complete_line_that_is_no_record_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "ledger"
    build(path, compacted=False)
    with open(path, "ab") as handle:
        handle.write(line)
    with pytest.raises(LedgerCorrupt, match="line 15 is not"):
        Ledger.open(path)


def test_nan_and_repeated_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    build(path, compacted=False)
    good = path.read_bytes()
    for old, new in ((b'"count":5,', b'"count":NaN,'), (b'"count":5,', b'"count":5,"count":5,')):
        path.write_bytes(good.replace(old, new))
        with pytest.raises(LedgerCorrupt, match="line 3 is not"):
            Ledger.open(path)


def test_an_unknown_schema_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    build(path, compacted=False)
    header = decode(path.read_bytes().splitlines(keepends=True)[0])
    path.write_bytes(encode({**header, "schema_version": 3, "new_field": 0}, seq=0, prev=GENESIS))
    with pytest.raises(
        LedgerCorrupt, match="schema_version=3 of a later halfsilver; this one reads versions 1 to 2"
    ) as caught:
        Ledger.open(path)
    assert "Restore" not in str(caught.value)  # nothing is wrong with the file


@pytest.mark.parametrize("content", [b"", b'{"adj'])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ledger").write_bytes(content)
    with pytest.raises(LedgerCorrupt, match="no complete header"):
        Ledger.open(tmp_path / "ledger")
