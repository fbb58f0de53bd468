"""Every Python block and every shown command of README and docs runs as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.markdown import PAGES, ROOT, Block, blocks

MAIN = "import sys; from halfsilver.cli.app import main; sys.exit(main())"
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"")


def _id(value: Path | Block) -> str:
    page = value if isinstance(value, Path) else value.page
    name = str(page.relative_to(ROOT))
    return name if isinstance(value, Path) else f"{name}:{value.line}"


@pytest.mark.docs
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=_id)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top to bottom in one namespace, the way a reader pastes them, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        exec(compile(block.source, str(page), "exec", dont_inherit=True), namespace)


def test_the_start_is_short() -> None:
    """From a fresh environment to an open report of the first private model: fewer than 20 lines to type."""
    page = ROOT / "README.md"
    typed = [*blocks(page, "bash"), blocks(page, "python")[0]]
    lines = [line for block in typed for line in block.text.splitlines() if line.strip()]
    assert [line for line in lines if line.startswith("halfsilver report")]
    assert len(lines) < 20


def _commands(block: Block) -> list[tuple[list[str], str]]:
    """Pairs of a command, after its prompt ``$``, and the output printed below it."""
    first, *rest = ("\n" + block.text).split("\n$ ")
    assert not first.strip(), f"{_id(block)}: a console block starts with a prompt"
    pairs = [part.partition("\n") for part in rest]
    return [(shlex.split(command), output.strip()) for command, _, output in pairs]


@pytest.mark.docs
@pytest.mark.parametrize("block", [b for p in PAGES for b in blocks(p, "console")], ids=_id)
def test_commands_print_what_is_shown(block: Block, tmp_path: Path) -> None:
    env = os.environ | {"NO_COLOR": "1", "COLUMNS": "100", "PYTHONPATH": str(ROOT / "src")}
    for (program, *arguments), shown in _commands(block):
        assert program == "halfsilver"
        command = [sys.executable, "-c", MAIN, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert [line.rstrip() for line in done.stdout.strip().splitlines()] == shown.splitlines()


def test_links_within_the_repository_lead_somewhere() -> None:
    for page in [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            name = "".join(target)
            if "://" not in name:
                assert (page.parent / name).exists(), f"{page.name} links to {name}"


def test_files_named_by_the_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    there = {p.name for folder in ("src", "tests") for p in (ROOT / folder).rglob("*.py")}
    assert set(re.findall(r"\b\w+\.py\b", page)) <= there
