"""Makes an SQLite file with the tables, indexes and tf.Example keys of TFF's StackOverflow, and made-up text.

    python -m benchmarks.federated.stackoverflow_file OUT --users 342477

The real file has 342,477 users in the split "train" with about 400 sentences each. Here they have few, so that the
file is made in under a minute: what a lookup costs depends on the number of users, and on the sentences that are read.
The three indexes are those that readers of TFF's file document; a read uses the one by split and user, and the
one by user of `client_metadata`.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

TRAIN_USERS = 342_477
EXAMPLES = 3  # of a user, on average
_POOL = 2_000  # different examples; users share them, which saves most of the time
_TABLES = """
CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
"""
INDEXES = """
CREATE INDEX idx_examples_client_id ON examples (client_id);
CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);
CREATE INDEX idx_metadata_client_id ON client_metadata (client_id);
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--users", type=int, default=TRAIN_USERS)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    write(asked.out, asked.users, asked.seed)
    print(f"{asked.out}: {asked.users:,} users, {asked.out.stat().st_size / 1e6:.0f} MB")


def write(path: Path, users: int, seed: int = 0) -> None:
    """A file with `users` users in the split "train" and a hundredth of them, other people, in "heldout"."""
    if path.exists():
        raise SystemExit(f"There is a file {path} already; remove it or give another name.")
    draw = random.Random(seed)
    pool = [example(_sentence(draw)) for _ in range(_POOL)]
    counts = [1 + min(int(draw.expovariate(1 / (EXAMPLES - 1))), 50) for _ in range(users)]
    counts += [1] * max(1, users // 100)
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + _TABLES)
        database.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", _people(counts, users))
        lines = ((s, c, draw.choice(pool)) for c, s, n in _people(counts, users) for _ in range(n))
        database.executemany("INSERT INTO examples VALUES (?, ?, ?)", lines)
        database.executescript(INDEXES)


def _people(counts: list[int], train: int) -> Iterator[tuple[str, str, int]]:
    return ((f"{i:08d}", "train" if i < train else "heldout", n) for i, n in enumerate(counts))


def _sentence(draw: random.Random) -> dict[str, bytes | int]:
    """The six features of one sentence; words by Zipf's law, so that frequent ones are frequent here too."""
    words = " ".join(f"w{int(draw.paretovariate(1.0)) % 10_000}" for _ in range(draw.randint(4, 30)))
    return {
        "creation_date": b"2012-%02d-%02d 12:00:00.0 UTC" % (draw.randint(1, 12), draw.randint(1, 28)),
        "score": draw.randint(-3, 40),
        "tags": b"python|sql|list",
        "title": b"a made up title of a question",
        "tokens": words.encode(),
        "type": draw.choice([b"question", b"answer"]),
    }


def example(features: Mapping[str, bytes | int]) -> bytes:
    """A serialized tf.Example with one value a feature."""
    entries = (_field(1, name.encode()) + _field(2, _feature(value)) for name, value in features.items())
    return _field(1, b"".join(_field(1, entry) for entry in entries))


def _feature(value: bytes | int) -> bytes:
    if isinstance(value, bytes):
        return _field(1, _field(1, value))
    return _field(3, _field(1, _varint(value)))  # packed


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    value, out = value & (1 << 64) - 1, bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


if __name__ == "__main__":
    main()
