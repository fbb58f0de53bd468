"""The audit has teeth: bugs put into the library from outside set off its alarms, and only they do."""

from __future__ import annotations

import pytest

from benchmarks.robustness.mutants.attempt import Job, Outcome, attempt
from benchmarks.robustness.mutants.catalogue import MUTANTS, Mutant
from benchmarks.robustness.mutants.change import Change, in_force
from benchmarks.robustness.mutants.table import missed, row_of, shown
from halfsilver.auditing.instruments import Finding
from halfsilver.privacy import noise

QUICK = ("clip x 2", "rate x 1.5", "ledger off by one")  # one for A and C, one for B, one for the reconciliation
ALARM = Finding(instrument="A", test="epsilon", kind="bound", value=9.0, limit=1.0, alarm=True)


def outcome(calls: int = 1, error: str = "", findings: tuple[Finding, ...] = (ALARM,)) -> Outcome:
    setting = MUTANTS["clip x 2"].setting
    return Outcome(job=Job(setting=setting, mutant="clip x 2"), findings=findings, calls={"f": calls}, error=error)


def assert_killed(name: str) -> None:
    row = row_of(name, [attempt(Job(setting=MUTANTS[name].setting, mutant=name))])
    assert row["errors"] == []
    assert row["killed"] == 1, row
    assert missed(row) == [], row


@pytest.mark.nightly
@pytest.mark.parametrize("name", QUICK)
def test_mutants_are_killed_by_the_instruments_that_should(name: str) -> None:
    assert_killed(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in QUICK])
def test_all_other_mutants_are_killed_by_the_instruments_that_should(name: str) -> None:
    assert_killed(name)


@pytest.mark.nightly
def test_the_same_run_without_the_bug_is_silent() -> None:
    """With a probability of at least 1 - 1e-6, the level of all tests on one run."""
    clean = attempt(Job(setting=MUTANTS["clip x 2"].setting))
    assert (clean.alarms, clean.error) == ([], "")
    assert clean.findings


def test_a_change_ends_with_its_block_and_counts_its_calls() -> None:
    real = noise.noise_scale
    with in_force([Change(noise, "noise_scale", lambda real, *args: 2 * real(*args))]) as calls:
        assert noise.noise_scale(1.0, 3.0) == 2 * real(1.0, 3.0)
        assert calls() == {"privacy.noise.noise_scale": 1}
    assert noise.noise_scale is real


def test_neither_an_error_nor_a_bug_that_never_ran_counts_as_a_kill() -> None:
    row = row_of("clip x 2", [outcome(), outcome(calls=0), outcome(error="ValueError: no"), outcome(findings=())])
    assert (row["runs"], row["killed"], row["errors"]) == (4, 1, ["ValueError: no"])
    assert row["least_calls"] == {"f": 0}
    assert missed(row) == ["A", "C"]
    result = {"killed": 0, "total": 1, "false_alarms": 0, "clean_runs": 0, "errors": 1, "seconds": 1}
    assert "ValueError: no" in shown({**result, "table": [row], "clean": []})


def test_an_error_of_the_changed_code_is_reported_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("in the patch")

    small = MUTANTS["ledger off by one"].setting
    monkeypatch.setitem(MUTANTS, "broken", Mutant(lambda: [Change(noise, "noise_scale", broken)], small, by=("A",)))
    found = attempt(Job(setting=small, mutant="broken"))
    assert found.error == "ZeroDivisionError: in the patch"
    assert row_of("broken", [found])["killed"] == 0
