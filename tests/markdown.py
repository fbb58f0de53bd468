"""Code blocks of Markdown pages, as they stand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_FENCE = re.compile(r"^```(?P<language>\w+)[ \t]*\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block, and where it stands."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def source(self) -> str:
        """The text, moved down so that a traceback shows the line of the page."""
        return "\n" * self.line + self.text


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of `page` in that language, from the top."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page=page, line=text.count("\n", 0, found.start()) + 1, language=language, text=found["text"])
        for found in _FENCE.finditer(text)
        if found["language"] == language
    ]
