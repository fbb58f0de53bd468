"""The ledger's own rules, one process at a time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from halfsilver._core import system
from halfsilver.errors import BudgetExceeded, ConfigError, LedgerCorrupt
from halfsilver.privacy import accounting
from halfsilver.privacy.accounting import MechanismCount, epsilon_of
from halfsilver.privacy.ledger import Budget, Ledger
from halfsilver.privacy.ledger.records import decode
from halfsilver.privacy.plan import PrivacyPlan

BUDGET = Budget(epsilon=1.0, delta=1e-5)


def full_batch(sigma: float = 20.0, steps: int = 8, spare_steps: int = 0) -> PrivacyPlan:
    """A plan whose accounting takes milliseconds."""
    return PrivacyPlan(
        steps=steps,
        sampling_rate=1.0,
        expected_batch_size=100,
        noise_multiplier=sigma,
        spare_steps=spare_steps,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def steps_of(ledger: Ledger) -> int:
    return sum(c.count for c in ledger.counts())


def test_a_step_is_in_the_file_before_intend_returns(path: Path) -> None:
    ledger = Ledger.open(path, budget=BUDGET)
    ledger.register_run("a", full_batch(), block_max=4)
    grant = ledger.intend("a", 3)
    record = decode(path.read_bytes().splitlines(keepends=True)[-1])
    assert (record["type"], record["count"], record["sampler"]) == ("intent", 3, "full")
    assert (grant.count, grant.seq, grant.head) == (3, record["seq"], record["hash"])
    assert Ledger.open(path).spent() == epsilon_of([full_batch().count(3)], 1e-5, "pld")


def test_each_append_is_synced_and_so_is_the_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger.open(path).register_run("a", full_batch())
    ledger, calls = Ledger.open(path), list[str]()
    monkeypatch.setattr(system, "fsync_file", lambda fd: calls.append("file"))
    monkeypatch.setattr(system, "fsync_folder", lambda folder: calls.append("folder"))
    ledger.intend("a")
    ledger.intend("a")
    # Whoever put the ledger there may not have come to sync the folder. The last is the head beside it, which may lag.
    assert calls == ["file", "folder", "file"] * 2


def test_the_plan_is_the_limit_and_repeated_steps_use_it_up(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.register_run("a", full_batch(steps=3, spare_steps=2), block_max=4)
    assert [ledger.intend("a", 9).count, ledger.intend("a", 9).count] == [4, 1]
    with pytest.raises(BudgetExceeded, match="all 5 steps of its plan"):
        ledger.intend("a")


def test_two_runs_share_one_budget_and_the_exceeding_step_is_not_written(path: Path) -> None:
    one, two = Ledger.open(path, budget=BUDGET), Ledger.open(path)
    one.register_run("a", full_batch(steps=60), block_max=7)
    two.register_run("b", full_batch(steps=60), block_max=7)
    with contextlib.suppress(BudgetExceeded):
        while True:
            one.intend("a", 2)
            two.intend("b", 7)
    before, total = path.read_bytes(), steps_of(one)
    for ledger, run_id in ((one, "a"), (two, "b")):
        with pytest.raises(BudgetExceeded, match="not touched"):
            ledger.intend(run_id)
    assert path.read_bytes() == before
    assert one.spent() == two.spent() <= 1.0 < full_batch(steps=total + 1).epsilon(5e-6)


def test_several_mechanisms_are_spent_by_rdp(path: Path) -> None:
    ledger = Ledger.open(path, budget=Budget(epsilon=3.0, delta=1e-5))
    ledger.register_run("a", full_batch(20.0))
    ledger.intend("a")
    assert ledger.spent() == epsilon_of([full_batch(20.0).count(1)], 1e-5, "pld")
    ledger.register_run("b", full_batch(30.0))
    ledger.intend("b")
    both = [full_batch(20.0).count(1), full_batch(30.0).count(1)]
    assert ledger.spent() == epsilon_of(both, 1e-5, "rdp")
    assert ledger.spent(accountant="pld") == epsilon_of(both, 1e-5, "pld")
    assert ledger.spent(delta=1e-6) == epsilon_of(both, 1e-6, "rdp")


def test_an_unused_second_plan_does_not_change_the_accountant(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.register_run("a", full_batch(20.0))
    ledger.register_run("b", full_batch(30.0))
    ledger.intend("a")
    assert ledger.counts() == (MechanismCount(noise_multiplier=20.0, sampling_rate=1.0, count=1),)


@pytest.mark.parametrize("epsilon", [0.6, 5.0])
def test_the_accountant_is_not_asked_at_every_step(path: Path, epsilon: float) -> None:
    ledger = Ledger.open(path, budget=Budget(epsilon=epsilon, delta=1e-5))
    ledger.register_run("a", full_batch(steps=100))
    ledger.intend("a")
    asked = accounting._epsilon.cache_info().misses
    for _ in range(3):
        ledger.intend("a")
    assert accounting._epsilon.cache_info().misses == asked


def test_resuming_registers_nothing_new_and_a_changed_plan_is_refused(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.register_run("a", full_batch())
    ledger.intend("a")
    before = path.read_bytes()
    assert Ledger.open(path).register_run("a", full_batch()).spent == 1
    with pytest.raises(ConfigError, match="another plan"):
        ledger.register_run("a", full_batch(sigma=40.0))
    assert path.read_bytes() == before


def test_a_finished_run_takes_no_more_steps(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.register_run("a", full_batch())
    ledger.intend("a")
    with pytest.raises(ConfigError, match=r"updates=2 in \[0, 1\]"):
        ledger.finish("a", 2)
    head = ledger.finish("a", 1)
    assert ledger.finish("a", 1) == head == ledger.head
    assert ledger.runs["a"].updates == 1
    with pytest.raises(BudgetExceeded, match="has finished"):
        ledger.intend("a")


def test_terms_are_fixed_at_creation(path: Path) -> None:
    Ledger.open(path, budget=BUDGET)
    assert Ledger.open(path).budget == BUDGET
    with pytest.raises(ConfigError, match="fixed when"):
        Ledger.open(path, budget=Budget(epsilon=2.0, delta=1e-5))
    with pytest.raises(ConfigError, match="fixed when"):
        Ledger.open(path, unit="user")
    plan = PrivacyPlan(steps=1, sampling_rate=1.0, expected_batch_size=1, noise_multiplier=1.0, unit="user")
    with pytest.raises(ConfigError, match="that of the ledger, 'example'"):
        Ledger.open(path).register_run("a", plan)


def test_bad_arguments_are_refused(path: Path) -> None:
    ledger = Ledger.open(path)
    with pytest.raises(ConfigError, match="Call register_run first"):
        ledger.intend("a")
    for wanted in (0, -1, True, 1.0):
        with pytest.raises(ConfigError, match="whole number"):
            ledger.intend("a", wanted)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="delta is needed"):
        ledger.spent()
    for epsilon in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="epsilon"):
            Budget(epsilon=epsilon, delta=1e-5)


def test_a_missing_ledger_is_created_only_on_demand(path: Path) -> None:
    with pytest.raises(LedgerCorrupt, match="does not exist"):
        Ledger.open(path, create=False)
    deep = path.parent / "new" / "folder" / "ledger.jsonl"
    assert Ledger.open(deep).spent(delta=1e-5) == 0.0
    assert Ledger.open(deep).adjacency == "add-remove-one"


def test_reading_needs_no_permission_to_write(path: Path) -> None:
    Ledger.open(path, budget=BUDGET).register_run("a", full_batch())
    os.unlink(f"{path}.lock")
    before = sorted(os.listdir(path.parent))
    reader = Ledger.open(path, create=False)
    reader.verify_head(*reader.head)
    assert reader.spent() == 0.0
    assert sorted(os.listdir(path.parent)) == before == [path.name, f"{path.name}.head"]


class TestHeadFile:
    def test_follows_each_append(self, path: Path) -> None:
        head_file = path.parent / "elsewhere"
        ledger = Ledger.open(path, head_file=head_file)
        ledger.register_run("a", full_batch())
        grant = ledger.intend("a")
        assert head_file.read_text() == f'{{"hash":"{grant.head}","seq":{grant.seq}}}\n'
        Ledger.open(path, head_file=head_file)

    def test_refuses_a_ledger_that_is_behind_it_or_gone(self, path: Path) -> None:
        head_file = path.parent / "elsewhere"
        ledger = Ledger.open(path, head_file=head_file)
        ledger.register_run("a", full_batch())
        older = path.read_bytes()
        ledger.intend("a")
        path.write_bytes(older)
        path.with_name("ledger.jsonl.head").unlink()
        with pytest.raises(LedgerCorrupt, match="does not hold it"):
            Ledger.open(path, head_file=head_file)
        path.unlink()
        with pytest.raises(LedgerCorrupt, match="shows that it existed"):
            Ledger.open(path, head_file=head_file)

    def test_may_be_behind_the_ledger(self, path: Path) -> None:
        head_file = path.parent / "elsewhere"
        ledger = Ledger.open(path, head_file=head_file)
        ledger.register_run("a", full_batch())
        Ledger.open(path).intend("a")
        assert steps_of(Ledger.open(path, head_file=head_file)) == 1

    def test_must_be_readable(self, path: Path) -> None:
        Ledger.open(path)
        for text in ("", "[]", "{}", '{"seq":"x","hash":""}'):
            (path.parent / "elsewhere").write_text(text)
            with pytest.raises(LedgerCorrupt, match="cannot be read"):
                Ledger.open(path, head_file=path.parent / "elsewhere")


class TestHeadBesideTheLedger:
    """`<ledger>.head`, which nobody asked for, shows that the ledger alone was cut back. Its chain cannot show that."""

    @pytest.fixture
    def ledger(self, path: Path) -> Ledger:
        ledger = Ledger.open(path, budget=BUDGET)
        ledger.register_run("a", full_batch(), block_max=2)
        ledger.intend("a", 2)
        ledger.intend("a", 1)
        return ledger

    def test_a_ledger_cut_back_anywhere_is_refused_to_everybody(self, path: Path, ledger: Ledger) -> None:
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        for kept in range(1, len(lines)):
            path.write_bytes(b"".join(lines[:kept]))
            with pytest.raises(LedgerCorrupt, match=r"ledger\.jsonl\.head shows .* Restore the newest copy"):
                Ledger.open(path)
        path.unlink()
        with pytest.raises(LedgerCorrupt, match="shows that it existed"):
            Ledger.open(path)
        path.write_bytes(whole)
        assert steps_of(Ledger.open(path)) == 3

    def test_another_ledger_in_its_place_is_refused(self, path: Path, ledger: Ledger) -> None:
        other = Ledger.open(path.with_name("other"))
        other.register_run("a", full_batch(), block_max=2)
        for _ in range(4):
            other.intend("a")
        os.replace(other.path, path)
        with pytest.raises(LedgerCorrupt, match=r"\.head shows"):
            Ledger.open(path)

    def test_the_ledger_may_be_ahead_of_it(self, path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        """As after a death between the two writes, or after steps that an earlier version took; compacted or not."""
        with monkeypatch.context() as patch:
            patch.setattr(system, "write_atomically", lambda *args, **kwargs: None)
            ledger.intend("a", 2)
        assert steps_of(Ledger.open(path)) == 5
        behind = path.with_name("ledger.jsonl.head").read_bytes()
        ledger.finish("a", 5)
        assert ledger.compact()
        path.with_name("ledger.jsonl.head").write_bytes(behind)
        assert steps_of(Ledger.open(path)) == 5

    def test_a_ledger_without_one_gets_it_with_the_next_record(self, path: Path, ledger: Ledger) -> None:
        head = path.with_name("ledger.jsonl.head")
        head.unlink()
        Ledger.open(path).intend("a")
        assert head.read_text() == f'{{"hash":"{Ledger.open(path).head.hash}","seq":4}}\n'

    def test_one_that_cannot_be_read_is_refused_with_a_way_out(self, path: Path, ledger: Ledger) -> None:
        path.with_name("ledger.jsonl.head").write_text("{}")
        with pytest.raises(LedgerCorrupt, match="cannot be read"):
            Ledger.open(path)

    def test_putting_back_both_is_not_seen(self, path: Path, ledger: Ledger) -> None:
        """The limit that the threat model names: for that, a `head_file` has to lie elsewhere."""
        head = path.with_name("ledger.jsonl.head")
        before = path.read_bytes(), head.read_bytes()
        ledger.intend("a")
        path.write_bytes(before[0])
        head.write_bytes(before[1])
        assert steps_of(Ledger.open(path)) == 3
