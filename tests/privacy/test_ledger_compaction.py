"""A ledger that is compacted, or exchanged, while other objects have it open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from halfsilver.errors import BudgetExceeded, LedgerCorrupt
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.privacy.ledger.records import decode, encode
from halfsilver.privacy.plan import PrivacyPlan


def full_batch(sigma: float = 20.0) -> PrivacyPlan:
    """A plan whose accounting takes milliseconds."""
    return PrivacyPlan(steps=8, sampling_rate=1.0, expected_batch_size=100, noise_multiplier=sigma)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def steps_of(ledger: Ledger) -> int:
    return sum(c.count for c in ledger.counts())


class TestCompaction:
    def test_keeps_the_total_and_the_heads_that_checkpoints_hold(self, path: Path) -> None:
        ledger = Ledger.open(path, budget=Budget(epsilon=1.0, delta=1e-5))
        heads = {}
        for run_id, sigma in (("a", 40.0), ("b", 40.0), ("c", 30.0)):
            ledger.register_run(run_id, full_batch(sigma), block_max=2)
            ledger.intend(run_id)
            grant = ledger.intend(run_id, 2)
            heads[run_id] = (grant.seq, grant.head)
            if run_id != "c":
                ledger.finish(run_id, 2)
        counts, spent, runs, size = ledger.counts(), ledger.spent(), dict(ledger.runs), path.stat().st_size
        assert ledger.compact()
        assert not ledger.compact()
        for opened in (ledger, Ledger.open(path)):
            assert (opened.counts(), opened.spent(), dict(opened.runs)) == (counts, spent, runs)
            for head in heads.values():
                opened.verify_head(*head)
        assert path.stat().st_size < size
        assert [decode(line)["type"] for line in path.read_bytes().splitlines(keepends=True)] == [
            *("header", "summary", "run", "intent", "intent")
        ]
        with pytest.raises(LedgerCorrupt, match="compacted it away"):
            ledger.verify_head(2, heads["a"][1])

    def test_goes_on_and_repeats(self, path: Path) -> None:
        ledger = Ledger.open(path)
        for index in range(4):
            ledger.register_run(str(index), full_batch())
            ledger.intend(str(index))
            ledger.finish(str(index), 1)
            assert ledger.compact()
        assert steps_of(Ledger.open(path)) == 4
        assert path.read_bytes().count(b"\n") == 2
        with pytest.raises(BudgetExceeded, match="has finished"):
            ledger.intend("0")

    def test_is_noticed_by_other_objects(self, path: Path) -> None:
        one = Ledger.open(path)
        one.register_run("a", full_batch())
        idle = Ledger.open(path)
        one.intend("a")
        one.finish("a", 1)
        one.register_run("b", full_batch())
        two = Ledger.open(path)
        assert one.compact()
        grant = two.intend("b")
        one.verify_head(grant.seq, grant.head)
        assert steps_of(one) == steps_of(two) == steps_of(idle) == 2

    def test_with_nothing_finished_does_nothing(self, path: Path) -> None:
        ledger = Ledger.open(path)
        ledger.register_run("a", full_batch())
        before = path.read_bytes()
        assert not ledger.compact()
        assert path.read_bytes() == before

    def test_agrees_with_the_head_file(self, path: Path) -> None:
        head_file = path.parent / "elsewhere"
        ledger = Ledger.open(path, head_file=head_file)
        ledger.register_run("a", full_batch())
        other = Ledger.open(path)
        other.intend("a")
        other.finish("a", 1)
        assert ledger.compact()
        assert steps_of(Ledger.open(path, head_file=head_file)) == 1


class TestUnderALiveWriter:
    @pytest.fixture
    def ledger(self, path: Path) -> Ledger:
        ledger = Ledger.open(path)
        ledger.register_run("a", full_batch())
        ledger.intend("a")
        return ledger

    def test_an_older_copy_is_refused(self, path: Path, ledger: Ledger) -> None:
        older = path.read_bytes()
        ledger.intend("a")
        path.write_bytes(older)
        with pytest.raises(LedgerCorrupt, match="replaced or shortened"):
            ledger.intend("a")

    def test_a_foreign_ledger_is_refused(self, path: Path, ledger: Ledger) -> None:
        other = Ledger.open(path.with_name("other"))
        other.register_run("a", full_batch())
        for _ in range(3):
            other.intend("a")
        os.replace(other.path, path)
        with pytest.raises(LedgerCorrupt, match="replaced or shortened"):
            ledger.intend("a")

    def test_a_missing_file_is_refused(self, path: Path, ledger: Ledger) -> None:
        path.unlink()
        with pytest.raises(LedgerCorrupt, match="any more"):
            ledger.intend("a")

    def test_a_compaction_that_drops_steps_is_refused(self, path: Path, ledger: Ledger) -> None:
        ledger.intend("a")
        ledger.finish("a", 2)
        with_two = Ledger.open(path)
        assert ledger.compact()
        header, summary = path.read_bytes().splitlines(keepends=True)
        record = decode(summary)
        record["runs"][0]["spent"] = 1
        path.write_bytes(header + encode(record, seq=record["seq"], prev=record["prev"]))
        with pytest.raises(LedgerCorrupt, match="does not add up"):
            with_two.counts()

    def test_a_compaction_that_moves_steps_between_runs_is_refused(self, path: Path, ledger: Ledger) -> None:
        ledger.finish("a", 1)
        ledger.register_run("b", full_batch())
        ledger.intend("b")
        ledger.finish("b", 1)
        witness = Ledger.open(path)
        assert ledger.compact()
        header, summary = path.read_bytes().splitlines(keepends=True)
        record = decode(summary)
        record["runs"][0]["spent"], record["runs"][1]["spent"] = 0, 2
        path.write_bytes(header + encode(record, seq=record["seq"], prev=record["prev"]))
        with pytest.raises(LedgerCorrupt, match="replaced or shortened"):
            witness.counts()
