"""What is printed for people, where nobody may be looking: in a pipe, in CI, without colours."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfsilver.cli import app as cli
from halfsilver.runs.progress import progress_bar
from halfsilver.tasks import named

CONTROL = re.compile(r"[^\n -~\u00a0-\uffff]")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def bar(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, shown: bool | None = None, **env: str) -> str:
    """What fifty updates leave on standard error."""
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "120", **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(50, 0, lambda: 1.5, shown) as show:
        for updates in range(1, 51):
            show(updates)
    return stream.getvalue()


def test_a_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "epsilon 1.5" in bar(Terminal(), monkeypatch)
    assert COLOUR.search(bar(Terminal(), monkeypatch))
    assert not COLOUR.search(bar(Terminal(), monkeypatch, NO_COLOR="1"))
    assert bar(io.StringIO(), monkeypatch) == ""
    assert bar(Terminal(), monkeypatch, CI="true") == ""
    assert bar(Terminal(), monkeypatch, shown=False) == ""


def test_a_bar_that_was_asked_for_is_one_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    text = bar(io.StringIO(), monkeypatch, shown=True, CI="true")
    assert text.count("\n") == 1
    assert "50/50" in text
    assert not CONTROL.search(text)


@pytest.mark.parametrize("env", [{}, {"CI": "true"}, {"NO_COLOR": "1"}, {"CI": "true", "NO_COLOR": "1"}], ids=str)
def test_tables_in_a_pipe_are_plain_text(env: dict[str, str]) -> None:
    words = ["epsilon", "--noise-multiplier", "1", "--sampling-rate", "1", "--steps", "1", "--delta", "1e-5"]
    done = CliRunner().invoke(cli.app, words, env=env)
    assert "delta" in done.output
    assert not CONTROL.search(done.output)


def test_brackets_in_a_path_are_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, rich drops [seed0] as the name of a style, and fails at [/b]."""
    result = {"final": {}, "epsilon": {"pld": 5.0}, "delta": 1e-4, "steps": 1, "folder": "r[seed0]a[/b]"}
    monkeypatch.setattr(named, "run_of_task", lambda task, **options: result)
    words = ["run", "emnist", "--method", "public", "--data", str(tmp_path)]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert "r[seed0]a[/b]" in done.stdout


def test_help_describes_the_arguments_in_plain_brackets() -> None:
    """Of each command; typer and click do not lose them, nor escape brackets for a page that nobody makes."""
    for name in ("compare", "advise", "audit", "overlap", "doctor", "verify"):
        shown = CliRunner().invoke(cli.app, [name, "--help"]).output
        arguments = shown.partition("Arguments:\n")[2].partition("\n\n")[0]
        assert "\\" not in shown
        assert re.match(r"  \[?[A-Z]+\]? +\w+", arguments), f"{name} --help does not describe its arguments:\n{shown}"
