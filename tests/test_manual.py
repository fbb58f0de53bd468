"""The reference manual: every parameter of every name on the API page (and others) is described, and nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from tests.markdown import ROOT

PACKAGE = ROOT / "src" / "halfsilver"

DIRECTIVE = re.compile(
    r"^\.\. auto(?:class|exception|function):: (halfsilver[\w.]*)\.(\w+)((?:\n +:.*)*)", re.MULTILINE
)
EXCLUDED = re.compile(r":exclude-members: (.*)")
ENTRY = re.compile(r"\*{0,2}(\w+)(?: \([^)]*\))?:(?: |$)")
ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})\b")


@dataclass(frozen=True)
class Entry:
    """One signature of a page, and the docstring that should describe its parameters."""

    label: str
    module: str
    parameters: tuple[str, ...]
    doc: str

    def __str__(self) -> str:
        return self.label


def _entries() -> Iterator[Entry]:
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    for module, name, options in DIRECTIVE.findall("\n".join(pages)):
        value = getattr(import_module(module), name)
        excluded = EXCLUDED.search(options)
        if inspect.isclass(value):
            yield _constructor(f"{module}.{name}", value)
            yield from _methods(f"{module}.{name}", value, set(excluded[1].split(", ")) if excluded else set())
        else:
            yield Entry(f"{module}.{name}", value.__module__, _parameters(value), inspect.getdoc(value) or "")


def _constructor(label: str, kind: type[Any]) -> Entry:
    """Protocols and exceptions without a constructor of their own take nothing that would be described."""
    plain = getattr(kind, "_is_protocol", False) or kind.__init__ is Exception.__init__
    doc = (inspect.getdoc(kind) or "") + "\n\n" + inspect.cleandoc(vars(kind).get("__init__", kind).__doc__ or "")
    return Entry(label, kind.__module__, () if plain else _parameters(kind), doc)


def _methods(label: str, kind: type[Any], excluded: set[str]) -> Iterator[Entry]:
    """Those that autodoc shows: methods of a mirror map, say, have their docstrings in the protocol."""
    for name, member in vars(kind).items():
        method = getattr(kind, name)
        is_method = inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)
        if is_method and inspect.getdoc(method) and not name.startswith("_") and name not in excluded:
            parameters = _parameters(method)
            taken = parameters[1:] if inspect.isfunction(member) else parameters  # without self
            yield Entry(f"{label}.{name}", kind.__module__, taken, inspect.getdoc(method) or "")


def _parameters(value: Any) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(value).parameters if name == "self" or not name.startswith("_"))


def _described(doc: str) -> list[str]:
    """Names that the Args: section has an entry for."""
    found, inside = [], False
    for line in doc.splitlines():
        if line and not line.startswith(" "):
            inside = line == "Args:"
        entry = ENTRY.match(line[4:]) if inside and line.startswith(" " * 4) else None
        if entry:
            found.append(entry[1])
    return found


ENTRIES = list(_entries())


def test_the_pages_are_read() -> None:
    labels = {entry.label for entry in ENTRIES}
    assert {"halfsilver.Ledger.open", "halfsilver.audit", "halfsilver.federated.Engine.contributions"} <= labels
    assert len(ENTRIES) > 60


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_each_parameter_is_described_and_nothing_else(entry: Entry) -> None:
    assert entry.doc.strip(), f"{entry.label} has no docstring"
    assert sorted(_described(entry.doc)) == sorted(entry.parameters)


def test_the_page_of_references_has_each_cited_paper() -> None:
    page = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
    listed = ARXIV.findall(page)
    assert len(listed) == len(set(listed)), "a paper is listed twice"
    cited = {
        number: path for path in PACKAGE.rglob("*.py") for number in ARXIV.findall(path.read_text(encoding="utf-8"))
    }
    missing = {number: path.name for number, path in cited.items() if number not in listed}
    assert not missing
