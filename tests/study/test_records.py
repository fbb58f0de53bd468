"""Files of studies from before: they open as typed records, are written as they were, and make a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.studies import carry
from halfsilver.report import write_report
from halfsilver.runs.folder import json_text, read_json
from halfsilver.study.records import Choice, Result, StudyRecord, Summary
from halfsilver.study.summary import summary_of
from tests.markdown import ROOT

COMMITTED = sorted((ROOT / "benchmarks" / "results" / "studies").glob("*.json"))


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_a_committed_summary_is_written_as_it_was(file: Path) -> None:
    assert json_text(Summary.from_json(read_json(file)).to_json()) == file.read_bytes()


@pytest.mark.parametrize("file", COMMITTED[:1], ids=lambda file: file.stem)
def test_a_restored_study_has_the_same_summary_and_a_report(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before = read_json(file)
    carry.restore(file, tmp_path / "study")
    for path, kind in (("runs/*/result.json", Result), ("search/*/choice.json", Choice), ("study.json", StudyRecord)):
        files = sorted((tmp_path / "study").glob(path))
        assert files
        for one in files:
            assert json_text(kind.from_json(read_json(one)).to_json()) == one.read_bytes()
    carry.keep(tmp_path / "study", tmp_path / "again.json")
    again = read_json(tmp_path / "again.json")
    assert {name: again[name] for name in before if name != "ledger"} == {
        name: value for name, value in before.items() if name != "ledger"
    }, "the verdict and its words are those of before"
    page = write_report(tmp_path / "study").read_text(encoding="utf-8")
    assert summary_of(tmp_path / "study").verdict.headline.split(";")[0] in page.replace("&nbsp;", " ")
    assert "DP-SGD from random weights" in page


def test_what_other_versions_wrote_is_kept() -> None:
    assert Result.from_json({"method": "warm", "later": 1}).to_json()["later"] == 1
    record = {"runs": [], "later": {"x": 1}, "choices": {"warm": {"setting": {"lr": 1.0}, "later": 2}}}
    again = Summary.from_json(record).to_json()
    assert again["later"] == {"x": 1}
    assert again["choices"]["warm"]["later"] == 2
    assert "runner_up" not in again["choices"]["warm"]
