"""The benchmark measures what it says: its JSON, its check of clipped sums, its order of turns, its memory."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.speed import __main__ as speed
from benchmarks.speed import memory, oracle, race, timing
from benchmarks.speed.contenders import BASE, CONTENDERS, Contender, Entry, Named, Options
from benchmarks.speed.models import WORKLOADS, Workload, workload
from benchmarks.speed.networks import LanguageModel, LoopLSTM, copy_parameters

COLUMNS = {"model", "contender", "ratio", "min", "max", "reps"}
QUICK = ["--models", "tiny", "--reps", "2", "--quick"]


class Recorder:
    """Does nothing but write down its name."""

    def __init__(self, name: str, calls: list[str], found: Callable[[], Named | None] = lambda: None) -> None:
        self._name, self._calls, self._found, self.detail = name, calls, found, ""

    def step(self) -> None:
        self._calls.append(self._name)

    def clipped_sum(self) -> Named | None:
        return self._found()


def with_entry(monkeypatch: pytest.MonkeyPatch, name: str, found: Callable[[], Named | None]) -> None:
    def build(task: Workload, model: torch.nn.Module, options: Options) -> Contender:
        return Recorder(name, [], found)

    monkeypatch.setitem(CONTENDERS, name, Entry(build=build))


@pytest.mark.nightly
def test_json_has_a_row_for_each_contender(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    status = speed.main([*QUICK, "--contenders", "halfsilver,halfsilver_pda,vmap", "--json", "--out", str(out)])
    result = json.loads(capsys.readouterr().out)
    assert status == 0
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert {"machine", "versions", "date", "threads"} <= result.keys()
    assert {(r["model"], r["contender"]) for r in result["rows"]} == {
        ("tiny", BASE), ("tiny", "halfsilver"), ("tiny", "vmap"), ("tiny+pda", "halfsilver"),
    }  # fmt: skip
    for row in result["rows"]:
        assert row.keys() >= COLUMNS
        assert row["min"] <= row["ratio"] <= row["max"]
        assert row["reps"] == 2


@pytest.mark.nightly
def test_table_names_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("opacus")
    assert speed.main([*QUICK, "--pda"]) == 0
    printed = capsys.readouterr().out
    assert "tiny+pda" in printed
    assert "opacus_best" in printed


def test_fewer_repetitions_must_be_asked_for() -> None:
    with pytest.raises(SystemExit):
        speed.main(["--models", "tiny", "--reps", "3"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit):
        speed.main(["--models", "tiny,nothing"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "distort",
    [
        lambda total: {name: 1.01 * t for name, t in total.items()},
        lambda total: {name: torch.full_like(t, torch.nan) for name, t in total.items()},
        lambda total: dict(list(total.items())[1:]),
    ],
    ids=["scaled", "nan", "missing"],
)
def test_a_wrong_clipped_sum_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], distort: Callable[[Named], Named]
) -> None:
    right = oracle.expected(workload("tiny")).total
    with_entry(monkeypatch, "liar", lambda: distort(right))
    assert speed.main([*QUICK, "--contenders", "liar", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [r["contender"] for r in result["wrong"]] == ["liar"]
    assert all(r["contender"] != "liar" for r in result["rows"])


@pytest.mark.nightly
def test_the_right_clipped_sum_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_entry(monkeypatch, "honest", lambda: oracle.expected(workload("tiny")).total)
    assert speed.main([*QUICK, "--contenders", "honest", "--json"]) == 0


def test_a_sum_without_clipping_is_wrong() -> None:
    task = workload("tiny")
    unclipped = oracle.expected(replace(task, clip=1e9))
    assert unclipped.clipped == 0
    assert oracle.relative_error(unclipped.total, oracle.expected(task).total) > oracle.TOLERANCE


def test_a_workload_that_clips_nobody_is_refused() -> None:
    with pytest.raises(AssertionError, match="are clipped"):
        race.race(replace(workload("tiny"), clip=1e9), [], 1, Options(), lambda text: None)


def test_a_contender_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Named:
        raise NotImplementedError("no such layer")

    with_entry(monkeypatch, "broken", fail)
    assert speed.main([*QUICK, "--contenders", "broken", "--json"]) == 0
    skipped = json.loads(capsys.readouterr().out)["skipped"]
    assert [(r["contender"], r["reason"]) for r in skipped] == [("broken", "NotImplementedError: no such layer")]


def test_ours_must_not_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed.main([*QUICK, "--contenders", "halfsilver", "--backend", "nothing", "--json"]) == 1


def test_contenders_take_turns_and_the_base_has_two() -> None:
    calls: list[str] = []
    names = [BASE, "a", "b"]
    take = {name: partial(timing.sample, Recorder(name, calls)) for name in names}
    samples = timing.measure(take, dict.fromkeys(names, 1.0), 3, exactly=True)
    assert {name: len(own) for name, own in samples.items()} == dict.fromkeys(names, 3)
    rounds = [calls[i : i + 4] for i in range(0, len(calls), 4)]
    assert [sorted(r) for r in rounds] == [["a", "b", BASE, BASE]] * 3
    assert {tuple(name for name in r if name != BASE) for r in rounds} == {("a", "b"), ("b", "a")}


def test_short_steps_are_sampled_several_at_a_time() -> None:
    calls: list[str] = []
    timing.measure({BASE: partial(timing.sample, Recorder(BASE, calls))}, {BASE: 0.1}, 1, exactly=True)
    assert len(calls) == 2 * 3


def test_ratios_are_taken_within_a_repetition() -> None:
    base = [timing.Sample(1.0, 1.0), timing.Sample(10.0, 10.0), timing.Sample(2.0, 2.0)]
    own = [timing.Sample(2.0, 1.0), timing.Sample(20.0, 10.0), timing.Sample(5.0, 2.0)]
    ratio = timing.ratios({BASE: base, "own": own})["own"]
    assert (ratio.median, ratio.least, ratio.most, ratio.cpu) == (2.0, 2.0, 2.5, 1.0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")
def test_memory_finds_a_peak_that_is_gone_afterwards() -> None:
    def touch() -> None:
        with mmap.mmap(-1, 64 * 2**20) as block:  # from the system, where malloc may have as much lying about
            for page in range(0, len(block), mmap.PAGESIZE):
                block[page] = 1

    assert 60 < memory.peak_above_idle(touch) < 80
    assert memory.peak_above_idle(lambda: None) < 10


def test_the_written_out_lstm_is_nn_lstm() -> None:
    tokens = torch.arange(24).reshape(4, 6) % 7
    fused, loop = (LanguageModel(7, 5, 8, 2, kind) for kind in (torch.nn.LSTM, LoopLSTM))
    copy_parameters(fused, loop)
    assert torch.allclose(fused(tokens), loop(tokens), atol=1e-6)


def test_the_workloads_have_the_stated_sizes() -> None:
    shapes = {"cifar": (500, 3, 32, 32), "emnist": (500, 1, 28, 28), "wikitext": (250, 35)}
    shapes |= {"stackoverflow": (16, 20), "gpt": (32, 128)}
    assert {name: tuple(workload(name).batch[0].shape) for name in shapes} == shapes
    assert set(WORKLOADS) == {*shapes, "linreg", "cifar_cl", "emnist_cl"}
    smaller = workload("emnist@8")
    assert (smaller.name, smaller.rows, workload("stackoverflow@32").rows) == ("emnist@8", 8, 32)
