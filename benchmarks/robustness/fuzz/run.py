"""Feeds damaged files to a reader and counts what comes out."""

from __future__ import annotations

import itertools
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from halfsilver.errors import HalfsilverError

_BATCH = 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """The valid files of a reader, how to damage some of them, and the reader, which gets the folder."""

    good: Mapping[str, bytes]
    damage: Mapping[str, Callable[[bytes], st.SearchStrategy[bytes]]]
    read: Callable[[Path], object]

    def cases(self) -> st.SearchStrategy[tuple[str, bytes]]:
        """Names of files and what they hold instead."""
        return st.one_of([st.tuples(st.just(name), how(self.good[name])) for name, how in self.damage.items()])

    def write(self, folder: Path, changed: Mapping[str, bytes]) -> None:
        for name, content in {**self.good, **changed}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


@dataclass
class Tally:
    """Cases that were read as data, refused by a typed error, or ended in anything else, by kind and place."""

    accepted: int = 0
    refused: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0  # seconds

    @property
    def cases(self) -> int:
        return self.accepted + self.refused + self.errors.total()

    def add(self, read: Callable[[], object]) -> None:
        started = time.perf_counter()
        try:
            with warnings.catch_warnings(action="error"):
                read()
            self.accepted += 1
        except HalfsilverError:
            self.refused += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.errors[_place(error)] += 1
        self.slowest = max(self.slowest, time.perf_counter() - started)

    def row(self) -> dict[str, Any]:
        counts = {"cases": self.cases, "accepted": self.accepted, "refused": self.refused}
        return {**counts, "untyped": self.errors.total(), "slowest_ms": round(1e3 * self.slowest, 1)}


def fuzz(target: Target, folder: Path, enough: Callable[[Tally], bool], seed: int = 0) -> Tally:
    """Damaged files until `enough`; the undamaged ones are read first, and an error there is raised."""
    tally = Tally()
    target.write(folder, {})
    target.read(folder)

    @settings(
        max_examples=_BATCH,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=target.cases())
    def batch(case: tuple[str, bytes]) -> None:
        if not enough(tally):
            target.write(folder, dict([case]))
            tally.add(lambda: target.read(folder))

    for number in itertools.takewhile(lambda _: not enough(tally), itertools.count(seed)):
        hypothesis.seed(number)(batch)()
    return tally


def _place(error: BaseException) -> str:
    """Kind of the error, the last line of halfsilver that it went through, and its message without the numbers."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "halfsilver" in Path(f.filename).parts]
    at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "the reader's caller"
    return f"{type(error).__name__} at {at}: {re.sub(r'(0x)?[0-9a-f]*[0-9][0-9a-f]*', '#', str(error))[:80]}"
