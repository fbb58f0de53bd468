"""Tests in the tier `core` are short, by the committed measurement, and never by the clock of the run that asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.durations import FILE, ROOT, measured, updated

LIMIT = 3.0
SHARED = ("tests/device/",)  # one process compiles the device and runs all flows, for the first test that asks

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b.TestC" name="test_d[1-x]" file="tests/a/test_b.py" time="1.26"/>
<testcase classname="tests.a.test_b" name="test_e" file="tests/a/test_b.py" time="0.01"/>
<testcase classname="tests.a.test_b" name="test_g" file="tests/a/test_b.py" time="0.31"/>
</testsuite></testsuites>"""


def test_no_test_of_the_core_tier_takes_longer_than_three_seconds(request: pytest.FixtureRequest) -> None:
    durations = json.loads(FILE.read_text(encoding="utf-8"))
    core = {item.nodeid for item in request.session.items if item.get_closest_marker("core")}
    slow = {test: s for test, s in durations.items() if s > LIMIT and test in core}
    assert {test: s for test, s in slow.items() if not test.startswith(SHARED)} == {}


def test_what_was_measured_exists() -> None:
    """A file or test that was renamed would escape the limit."""
    for test in json.loads(FILE.read_text(encoding="utf-8")):
        file, _, name = test.partition("[")[0].partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert file.startswith("src/") or f"def {name.rpartition('::')[2]}(" in text, test


def test_a_report_replaces_what_was_known_of_its_tests(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert measured(report) == {
        "tests/a/test_b.py::TestC::test_d[1-x]": 1.26,
        "tests/a/test_b.py::test_e": 0.01,
        "tests/a/test_b.py::test_g": 0.31,
    }
    known = {"tests/a/test_b.py::test_e": 5.0, "tests/z.py::test_f": 2.0}
    assert updated(known, [report]) == {
        "tests/a/test_b.py::TestC::test_d[1-x]": 1.3,
        "tests/a/test_b.py::test_g": 0.3,
        "tests/z.py::test_f": 2.0,
    }
