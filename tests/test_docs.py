"""The site: built without a warning, with every public name in it, and a picture that shows what its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import halfsilver as hs
from tests.markdown import ROOT
from tools import geometry, idea

ENTRY = re.compile(r"^\.\. auto\w+:: halfsilver\.(\w+)$", re.MULTILINE)


def test_the_reference_has_every_public_name_once() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(ENTRY.findall(page)) == sorted(hs.__all__)


def test_the_package_has_the_names_that_it_lists_and_no_others() -> None:
    """About 25 of them: what is less common is imported from where it lives."""
    names = {name for name in dir(hs) if name[0] != "_" and not isinstance(getattr(hs, name), ModuleType)}
    assert sorted(names) == sorted(hs.__all__)
    assert 18 <= len(hs.__all__) <= 32


@pytest.mark.parametrize("name", sorted(hs._MOVED))
def test_earlier_names_work_and_warn(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"halfsilver.{name} is halfsilver.{hs._MOVED[name]} now"):
        value = getattr(hs, name)
    module, _, attribute = f"halfsilver.{hs._MOVED[name]}".rpartition(".")
    assert value is getattr(import_module(module), attribute)


def test_other_entries_are_where_the_stability_page_says() -> None:
    page, promised = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("api", "stability"))
    entries = re.findall(r"^\.\. auto\w+:: (halfsilver\.[\w.]+)\.(\w+)$", page, re.MULTILINE)
    assert len(entries) > 20
    for module, name in entries:
        found = import_module(module)
        assert name in getattr(found, "__all__", vars(found)), f"{module}.{name}"
        assert f"`{module}`" in promised


@pytest.mark.docs
def test_sphinx_finds_nothing_to_warn_about(tmp_path: Path) -> None:
    """Among other things: each page is in the contents, each link and anchor leads somewhere, docstrings are sound."""
    pytest.importorskip("furo", reason="needs the extra docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'class="sig-name' in (tmp_path / "api.html").read_text(encoding="utf-8")


def test_the_picture_of_the_idea() -> None:
    """The matrix shrinks the steep direction and keeps the other; from the same start, the mirror ends lower."""
    case = idea.case(np.random.default_rng(0))
    values = np.linalg.eigvalsh(case.mirror)
    assert values[1] == pytest.approx(1)
    assert values[0] < 0.1
    without, through = (
        idea.excess(idea.paths(case, mirror, lr, runs=20, seed=1)[-1]).mean()
        for mirror, lr in ((np.eye(2), 0.8), (case.mirror, 1.6))  # the rates that the script finds best
    )
    assert through < without < idea.excess(case.start)


def test_the_picture_of_the_geometry() -> None:
    """Gradients keep their median norm, the public loss is round, and runs end lower than with the mirror."""
    own = idea.case(np.random.default_rng(0))
    root = geometry.root_of(own)
    assert root @ root.T / own.mirror == pytest.approx(float((root @ root.T)[0, 0] / own.mirror[0, 0]))
    found, _ = geometry.figures(own)
    assert found["whitened"]["excess"] < found["pda"]["excess"] < found["start"]
