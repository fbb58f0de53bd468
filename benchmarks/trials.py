r"""Six kinds of user follow the pages in a fresh environment: minutes, lines typed, and whatever looks like an error.

    python -m build --wheel --outdir DIR
    python -m venv ENV && ENV/bin/pip install torch==2.13.0 DIR/*.whl ...     (as the pages say)
    python -m benchmarks.trials --python ENV/bin/python --out FILE

Each user types the code blocks of one page, from the top, into one session: Python, and commands of a shell in between.
Blocks that install something, or make the figures of the page, are left out. The user is done at the end of the block
that has the goal, and types the rest of the page as well. A line is one that is neither empty nor a comment. What
appears on stderr besides progress is kept. What FILE has of other users is kept, too.
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
# Who, the page, and words of the block with which the user has what the page is for.
PAGES = {
    "PyTorch, a table": ("docs/start.md", "trainer.fit("),
    "Opacus": ("docs/from-opacus.md", "engine.get_epsilon("),
    "Hugging Face": ("docs/huggingface.md", "trainer.train()"),
    "scikit-learn": ("docs/heads.md", "model.predict_proba("),
    "custodian": ("docs/custodian.md", "--html"),
    "engineer with torchrun": ("docs/processes.md", "torchrun"),
}
_NOT_TYPED = ("pip install", "-m benchmarks", "-m tools")  # the last two make figures of the pages, in a checkout
_BLOCK = re.compile(r"^```(python|bash)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)

# One session: Python blocks share their names, and commands run in between. Says how long each block took.
_SESSION = """
import json, os, subprocess, sys, time
names, seconds = {"__name__": "__main__"}, []
for language, text in json.load(sys.stdin):
    started = time.monotonic()
    if language == "python":
        exec(compile(text, "typed", "exec"), names)
    else:
        subprocess.run(text, shell=True, check=True, executable="/bin/bash")
    seconds.append(time.monotonic() - started)
    with open(os.environ["SECONDS_OF_BLOCKS"], "w") as file:
        json.dump(seconds, file)
"""


def typed(page: Path) -> list[tuple[str, str]]:
    """Language and text of the blocks of a page."""
    found = [(block[1], block[2]) for block in _BLOCK.finditer(page.read_text(encoding="utf-8"))]
    return [(language, text) for language, text in found if not any(word in text for word in _NOT_TYPED)]


def lines(blocks: list[tuple[str, str]]) -> int:
    every = [line.strip() for _, text in blocks for line in text.splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in every)


def trial(python: Path, page: str, goal: str) -> dict[str, Any]:
    blocks = typed(ROOT / page)
    done_after = next(k for k, (_, text) in enumerate(blocks, start=1) if goal in text)
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("r") as times:
        started = time.monotonic()
        done = subprocess.run(
            [str(python), "-c", _SESSION],
            input=json.dumps(blocks),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            env={
                "PATH": f"{python.parent}:/usr/bin:/bin",
                "HOME": folder,
                "OMP_NUM_THREADS": "1",
                "SECONDS_OF_BLOCKS": times.name,
            },
        )
        whole = time.monotonic() - started
        seconds = json.loads(times.read() or "[]")
    text = done.stderr.replace(str(python.parents[1]), "ENV").replace(folder, "FOLDER")
    said = [line for line in re.split(r"[\n\r]", text) if line.strip() and "%|" not in line]
    return {
        "page": page,
        "lines": lines(blocks[:done_after]),
        "seconds": sum(seconds[:done_after]),
        "lines_of_page": lines(blocks),
        "seconds_of_page": whole,
        "finished": done.returncode == 0,
        "stderr": [line[:300] for line in said[-20:]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--only", help="one of the users")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = {who: place for who, place in PAGES.items() if args.only in (None, who)}
    found = {who: trial(args.python.absolute(), *place) for who, place in chosen.items()}
    if args.out:
        kept = read_json(args.out)["trials"] if args.out.exists() else {}
        write_json(args.out, {"trials": {**kept, **found}, "versions": versions()})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
