r"""Six kinds of user follow the pages in a fresh environment: minutes, lines typed, and whatever looks like an error.

    python -m build --wheel --outdir DIR
    python -m venv ENV && ENV/bin/pip install torch==2.13.0 DIR/*.whl ...     (as the pages say)
    python -m benchmarks.trials --python ENV/bin/python --out FILE

Each user types the code blocks of one page, from the top, into one session: Python, and commands of a shell in between.
Blocks that install something, or make the figures of the page, are left out. A line is one that is neither empty nor a
comment. What appears on stderr besides progress is kept. What FILE has of other users is kept, too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from halfsilver.runs.folder import read_json, versions, write_json

ROOT = Path(__file__).parent.parent
PAGES = {
    "PyTorch, a table": "docs/start.md",
    "Opacus": "docs/from-opacus.md",
    "Hugging Face": "docs/huggingface.md",
    "scikit-learn": "docs/heads.md",
    "custodian": "docs/custodian.md",
    "engineer with torchrun": "examples/distributed.py",
}
_NOT_TYPED = ("pip install", "-m benchmarks", "-m tools")  # the last two make figures of the pages, in a checkout
_BLOCK = re.compile(r"^```(python|bash)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)

# One session: Python blocks share their names, and commands run in between.
_SESSION = """
import json, subprocess, sys
names = {"__name__": "__main__"}
for language, text in json.load(sys.stdin):
    if language == "python":
        exec(compile(text, "typed", "exec"), names)
    else:
        subprocess.run(text, shell=True, check=True, executable="/bin/bash")
"""


def typed(page: Path) -> list[tuple[str, str]]:
    """The blocks of a page, or the command that starts a script."""
    if page.suffix == ".py":
        return [("bash", f"torchrun --nproc-per-node 2 {page}")]
    found = [(block[1], block[2]) for block in _BLOCK.finditer(page.read_text(encoding="utf-8"))]
    return [(language, text) for language, text in found if not any(word in text for word in _NOT_TYPED)]


def lines(page: Path, blocks: list[tuple[str, str]]) -> int:
    text = page.read_text() if page.suffix == ".py" else "\n".join(text for _, text in blocks)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def trial(python: Path, page: Path) -> dict[str, Any]:
    blocks = typed(page)
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        done = subprocess.run(
            [str(python), "-c", _SESSION],
            input=json.dumps(blocks),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
        )
    text = done.stderr.replace(str(python.parents[1]), "ENV").replace(folder, "FOLDER")
    said = [line for line in re.split(r"[\n\r]", text) if line.strip() and "%|" not in line]
    return {
        "page": str(page.relative_to(ROOT)),
        "seconds": time.monotonic() - started,
        "lines": lines(page, blocks),
        "finished": done.returncode == 0,
        "stderr": [line[:300] for line in said[-20:]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--only", help="one of the users")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = {who: page for who, page in PAGES.items() if args.only in (None, who)}
    found = {who: trial(args.python.absolute(), ROOT / page) for who, page in chosen.items()}
    if args.out:
        kept = read_json(args.out)["trials"] if args.out.exists() else {}
        write_json(args.out, {"trials": {**kept, **found}, "versions": versions()})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
