"""The picture and the listing of the architecture page say what the source says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.markdown import ROOT
from tools.architecture import BOXES, PACKAGE, PICTURE, draw, imports_of_boxes, modules

MIRROR, PRIVACY = "halfsilver.mirror.base", "halfsilver.privacy.plan"


def test_the_picture_shows_the_imports_of_today() -> None:
    drawn = draw(imports_of_boxes(modules()))
    assert PICTURE.read_text(encoding="utf-8") == drawn, "make it again: python -m tools.architecture"


def test_each_import_is_a_dot_and_each_box_that_is_imported_has_an_arrow() -> None:
    graph = imports_of_boxes(modules())
    drawn = draw(graph)
    pairs = {(a, b) for a, others in graph.items() for b in others}
    assert set(re.findall(r"<circle [^>]*><title>(.+) imports (.+)</title>", drawn)) == pairs
    assert drawn.count('l9 -5.5v11z"') == len({b for _, b in pairs})
    assert {("trainer.py", "privacy/"), ("trainer.py", "mirror/")} <= pairs
    for a, b in pairs:  # one import fewer is another picture
        assert draw({**graph, a: graph[a] - {b}}) != drawn


@pytest.mark.parametrize(
    ("module", "line", "message"),
    [
        (MIRROR, "from halfsilver.trainer import Trainer", "stands above mirror/"),
        (PRIVACY, "def f():\n    from ..mirror import base", "stands above privacy/"),
        (MIRROR, "import halfsilver", "halfsilver is in no box"),
        (MIRROR, "from halfsilver import Trainer", "halfsilver.Trainer is in no box"),
        ("halfsilver.new", "", "halfsilver.new is in no box"),
    ],
)
def test_what_has_no_place_in_the_picture(module: str, line: str, message: str) -> None:
    with pytest.raises(LookupError, match=message):
        imports_of_boxes([(module, ast.parse(line))])


def test_the_first_part_of_a_name_decides_on_the_box() -> None:
    graph = imports_of_boxes([("halfsilver.tasks.named", ast.parse("from halfsilver.study import run\nimport torch"))])
    assert {name: others for name, others in graph.items() if others} == {"tasks/": {"study/"}}
    assert [box.name for box in BOXES] == list(graph)


# ---- the listing


def listed() -> dict[Path, set[str]]:
    """Files and folders by the folder under which the page lists them; a line has one, or several with commas."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Layout")[2]
    lines = re.findall(r"^((?:  )+)((?:[\w/.]+, )*[\w/.]+)(?:\s|$)", page, re.MULTILINE)
    found: dict[Path, set[str]] = {}
    above = [PACKAGE]
    for indent, names in lines:
        above = above[: len(indent) // 2]
        entries = [name.rstrip("/") for name in names.split(", ") if name.endswith(("/", ".py"))]
        if entries:
            found.setdefault(above[-1], set()).update(entries)
            above.append(above[-1] / entries[-1])
    return found


def test_the_listing_has_every_file_of_each_folder_that_it_opens() -> None:
    found = listed()
    assert {PACKAGE, PACKAGE / "privacy", PACKAGE / "mirror", PACKAGE / "study"} <= set(found)
    for folder, names in found.items():
        there = {p.name for p in folder.iterdir() if p.suffix == ".py" or (p.is_dir() and p.name != "__pycache__")}
        assert names == there - {"__init__.py"} | (names & {"__init__.py"}), folder
