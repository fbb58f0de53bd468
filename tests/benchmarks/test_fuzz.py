"""Every reader, given damaged files, returns data or raises a typed error.

The long form is ``python -m benchmarks.robustness.fuzz --seconds 120 --json``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.robustness.fuzz.__main__ import TARGETS
from benchmarks.robustness.fuzz.damage import damaged
from benchmarks.robustness.fuzz.run import Tally, Target, fuzz
from halfsilver.errors import DataMissing

CASES = 40


@pytest.mark.parametrize("name", TARGETS)
def test_readers(name: str, tmp_path: Path) -> None:
    tally = fuzz(TARGETS[name](), tmp_path, lambda t: t.cases >= CASES)
    assert dict(tally.errors) == {}
    assert tally.refused or name == "jsonl"  # in which a broken line is nobody's
    assert tally.cases == CASES


def raises(error: BaseException) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        if (folder / "file").read_bytes() != b"whole":
            raise error

    return read


@pytest.mark.parametrize(
    ("error", "untyped"), [(ValueError("x"), 1), (BaseException("panic"), 1), (UserWarning("x"), 1), (DataMissing(), 0)]
)
def test_what_is_not_typed_is_counted(error: BaseException, untyped: int, tmp_path: Path) -> None:
    target = Target(good={"file": b"whole"}, damage={"file": damaged}, read=raises(error))
    tally = fuzz(target, tmp_path, lambda t: t.cases >= 20)
    assert tally.errors.total() == untyped * (20 - tally.accepted)
    assert tally.accepted < 10


def test_a_reader_that_refuses_the_whole_file_is_no_target(tmp_path: Path) -> None:
    target = Target(good={"file": b"broken"}, damage={"file": damaged}, read=raises(DataMissing()))
    with pytest.raises(DataMissing):
        fuzz(target, tmp_path, lambda t: True)


def test_warnings_are_errors() -> None:
    tally = Tally()

    def read() -> None:
        import warnings

        warnings.warn("odd", RuntimeWarning, stacklevel=1)

    tally.add(read)
    assert tally.row()["untyped"] == 1
