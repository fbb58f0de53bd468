"""The wheel, in an environment of its own, does what the README says."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.markdown import ROOT, blocks


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed, with nothing of this checkout on its path."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, so that one is known to be complete as well."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; only dependencies are borrowed, since torch alone takes minutes."""
    home = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", home, cwd=home)
    interpreter = home / "bin" / "python"
    site = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip()
    run(interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    borrowed = dict.fromkeys(p for p in sys.path if p.endswith(("site-packages", "dist-packages")))
    (Path(site) / "borrowed.pth").write_text("\n".join([*borrowed, sysconfig.get_path("purelib")]) + "\n")
    return interpreter


@pytest.mark.docs
def test_import_comes_from_the_wheel(python: Path, tmp_path: Path) -> None:
    found = run(python, "-c", "import halfsilver; print(halfsilver.__file__)", cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(python.parent.parent)


@pytest.mark.docs
def test_readme_start_runs_as_it_stands(python: Path, tmp_path: Path) -> None:
    start = blocks(ROOT / "README.md", "python")[0]
    (tmp_path / "start.py").write_text(start.text)
    printed = run(python, "-W", "error", "start.py", cwd=tmp_path)
    assert "epsilon" in printed


@pytest.mark.docs
def test_console_script(python: Path, tmp_path: Path) -> None:
    options = ["--noise-multiplier=1.51", "--sampling-rate=0.0104166667", "--steps=9600", "--delta=1e-5"]
    printed = run(python.parent / "halfsilver", "epsilon", *options, "--json", cwd=tmp_path)
    assert json.loads(printed)["epsilon"]["pld"] == pytest.approx(3.230, rel=5e-3)


@pytest.mark.docs
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "halfsilver/py.typed" in names
    recipes = {path.name for path in (ROOT / "src/halfsilver/tasks/recipes").glob("*.toml")}
    assert {f"halfsilver/tasks/recipes/{name}" for name in recipes} <= set(names)
    assert "emnist-workstation.toml" in recipes
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"halfsilver"}
    assert not [name for name in names if name.endswith(".pyc")]


def test_source_distribution_holds_all_that_its_tests_read(wheel: Path) -> None:
    (source,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("benchmarks", "docs", "examples", "src", "tests")
    code = {path for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert {path.relative_to(ROOT).as_posix() for path in code} - names == set()
    assert {"pyproject.toml", "requirements.lock", "README.md", ".ci/run"} <= names


@pytest.mark.docs
def test_two_builds_have_one_sha256(wheel: Path, tmp_path: Path) -> None:
    """The first wheel comes from the source distribution, the second straight from the checkout, at another time."""
    run(sys.executable, "-m", "build", "--sdist", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    first, second = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}
        for folder in (wheel.parent, tmp_path)
    )
    assert first == second
    assert len(first) == 2
