"""How long each test takes, from the reports of pytest: python -m tools.durations REPORT.xml...

A report is made by ``pytest -o junit_family=xunit1 --junitxml=REPORT.xml``. `tests/durations.json` then has the seconds
of every test of these reports that takes at least a tenth of a second. Tests that are in no report keep theirs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "durations.json"
LEAST = 0.1


def measured(report: Path) -> dict[str, float]:
    """Seconds of each test of a report, by its node ID."""
    # The report is written by pytest on this machine.
    cases = ElementTree.parse(report).getroot().iter("testcase")  # nosec B314
    return {node_id(case): float(case.get("time", 0)) for case in cases}


def node_id(case: ElementTree.Element) -> str:
    """The ID that pytest prints: file, class if any, and name."""
    file, name = case.get("file", ""), case.get("name", "")
    module = file.removesuffix(".py").replace("/", ".")
    inside = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join(part for part in (file, inside, name) if part)


def updated(known: dict[str, float], reports: Iterable[Path]) -> dict[str, float]:
    """What is known, with the tests of the reports in place of what was known of them."""
    found: dict[str, float] = {}
    for report in reports:
        found |= measured(report)
    kept = {test: seconds for test, seconds in known.items() if test not in found}
    return dict(sorted({**kept, **{t: round(s, 1) for t, s in found.items() if s >= LEAST}}.items()))


if __name__ == "__main__":
    before = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    after = updated(before, map(Path, sys.argv[1:]))
    FILE.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
    print(f"{len(after)} tests of {LEAST} s or more, {sum(after.values()) / 60:.1f} minutes in all")
