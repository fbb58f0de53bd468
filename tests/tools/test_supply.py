"""The SBOM names all that is installed for halfsilver, and the page of licences is that of the lock file."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from typing import Any

import pytest

from tests.markdown import ROOT
from tools import supply

LOCKED = re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_sbom_is_whole() -> None:
    """Nothing pinned is left out, every reference leads somewhere, and all of it hangs on halfsilver."""
    bom = supply.sbom()
    found = {part["name"]: part for part in bom["components"]}
    assert {*LOCKED, "torch"} <= set(found)
    assert all(part["version"] == version(name) for name, part in found.items())
    assert all(part["licenses"] for part in found.values())
    edges = {entry["ref"]: entry["dependsOn"] for entry in bom["dependencies"]}
    assert set(edges) == {"halfsilver", *(part["bom-ref"] for part in found.values())}
    reached, rest = set(), ["halfsilver"]
    while rest:
        ref = rest.pop()
        rest += [] if ref in reached else edges[ref]
        reached.add(ref)
    assert reached == set(edges)


def test_the_core_is_told_from_the_extras() -> None:
    scopes = {part["name"]: part["scope"] for part in supply.sbom()["components"]}
    assert scopes["torch"] == scopes["dp-accounting"] == "required"
    assert scopes["scipy"] == "required"  # dp-accounting needs it
    assert scopes["pytest"] == scopes["flwr"] == "optional"


def test_the_same_environment_gives_the_same_bytes() -> None:
    assert json.dumps(supply.sbom()) == json.dumps(supply.sbom())


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock file is for CPython 3.11")
def test_the_page_of_licences_is_up_to_date() -> None:
    """If not: python -m tools.supply --write."""
    text = supply.PAGE.read_text(encoding="utf-8")
    assert text == supply.page(text)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and line.count(" | ") == 3][1:]
    assert [row[0].removeprefix("| ") for row in rows] == sorted([*LOCKED, "torch"])
    assert not [row for row in rows if row[3] == " |" or "not stated" in row[2]]
    core = [row[2] for row in rows if row[3].startswith("core")]
    assert len(core) > 10
    assert not [text for text in core if re.search("GPL|General Public|Mozilla|MPL", text)]


OSI = "License :: OSI Approved :: MIT License"


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({"license_expression": "MIT OR Apache-2.0", "license": "x"}, "MIT OR Apache-2.0"),
        ({"license": "BSD", "classifier": [OSI]}, "BSD"),
        ({"license": "Copyright\nall of it", "classifier": [OSI, "Topic :: Security"]}, "MIT License"),
        ({"license": "UNKNOWN"}, "not stated"),
        ({}, "not stated"),
    ],
)
def test_where_a_licence_is_stated(about: dict[str, Any], expected: str) -> None:
    assert supply.licence(about) == expected
