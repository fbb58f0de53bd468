"""The pictures of the examples are those of the committed figures, and the page shows every script."""

from __future__ import annotations

import pytest

from tools import gallery

PAGE = gallery.ROOT / "docs" / "examples.md"


def test_the_pictures_follow_from_the_figures() -> None:
    assert gallery.main(["--check"]) == 0, "make them again: python -m tools.gallery"


def test_a_picture_that_is_out_of_date_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "MADE", {"example-brackets.svg": lambda: b"another"})
    assert gallery.main(["--check"]) == 1


def test_the_page_names_every_example_and_every_picture() -> None:
    page = PAGE.read_text(encoding="utf-8")
    examples = [path for path in (gallery.ROOT / "examples").iterdir() if path.name[0] not in "._"]
    names = {f"examples/{path.name}" for path in examples} | {f"pictures/{name}" for name in gallery.MADE}
    assert {name for name in names if name not in page} == set()
