"""Run the example of docs/choosing.md, and write what it prints and its figures: ``python -m tools.choosing``."""

from __future__ import annotations

import os
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from halfsilver.report import write_advice

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "docs" / "choosing.md", ROOT / "docs" / "pictures"
SHOWN = ("batches", "norms", "rates")


def example(text: str) -> str:
    """The first block of code on the page."""
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found.group(1)


def page(text: str, printed: str) -> str:
    """The page with what the advice prints today."""
    return re.sub(r"```text\n.*?```", lambda _: f"```text\n{printed}\n```", text, count=1, flags=re.DOTALL)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("example.py").write_text(example(text), encoding="utf-8")
        names: dict[str, Any] = runpy.run_path("example.py")
        write_advice(names["advice"], folder)
        for name in SHOWN:
            (PICTURES / f"advice-{name}.svg").write_bytes((Path(folder) / "figures" / f"{name}.svg").read_bytes())
    PAGE.write_text(page(text, str(names["advice"])), encoding="utf-8")


if __name__ == "__main__":
    main()
