"""Lock file, metadata and pages agree with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import halfsilver as hs
from tests.markdown import ROOT

LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINS = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", LOCK, re.MULTILINE))


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def _requirements() -> list[Requirement]:
    project = _project()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


@pytest.mark.parametrize("requirement", _requirements(), ids=lambda r: r.name)
def test_lock_satisfies_every_requirement_but_torch(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    if name == "torch":
        assert name not in PINS  # its builds differ from machine to machine; installed first
    else:
        assert PINS[name] in requirement.specifier


def test_every_pin_has_hashes() -> None:
    entries = re.split(r"^(?=[a-z0-9])", LOCK, flags=re.MULTILINE)[1:]
    assert len(entries) == len(PINS) > 50
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_lock_names_no_host_or_folder() -> None:
    assert re.findall(r"https?:|file:|--(?:extra-)?index|--find-links|--trusted|\S*/\S*", LOCK) == []


def test_citation_and_changes_name_the_same_release() -> None:
    cited = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    version = _project()["version"]
    (day,) = re.findall(rf"^version: {re.escape(version)}\ndate-released: (\S+)$", cited, re.MULTILINE)
    assert f"## {version} - {day}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_earlier_path_of_the_audit_warns_and_works() -> None:
    from halfsilver import auditing

    with pytest.warns(DeprecationWarning, match=r"halfsilver\.auditing\.AuditReport"):
        from halfsilver.audit import AuditReport
    assert AuditReport is auditing.AuditReport
    assert callable(hs.audit)
    with pytest.raises(ImportError):
        from halfsilver.audit import nothing  # noqa: F401
