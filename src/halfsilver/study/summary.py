"""The summary of a study, from the files in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.folder import read_json
from halfsilver.runs.statement import total_now
from halfsilver.study.arena import SearchMode
from halfsilver.study.problem import METHODS
from halfsilver.study.verdict import verdict

STAMPS: Mapping[SearchMode, str] = {
    "paper search": (
        "search not accounted: settings were chosen by further private runs, which only the total counts, and scored "
        "on set-aside training rows without noise, which no epsilon counts"
    ),
    "public search": "",
}


def summary_of(folder: Path, ledger: Path | None = None) -> dict[str, Any]:
    """The summary of the study in `folder`, finished or not."""
    about = read_json(folder / "study.json")
    methods = [m for m in METHODS if m in about["seeds"]]
    jobs = [(m, seed) for m in methods for seed in range(about["seeds"][m])]
    files = [folder / "runs" / f"{m}-seed-{seed}" / "result.json" for m, seed in jobs]
    runs = [read_json(file) for file in files if file.exists()]
    choices = {m: folder / "search" / m / "choice.json" for m in methods}
    own = {
        STAMPS[about["search"]]: True,
        "quick: too short to publish": about["quick"],
        "not finished: some runs of this study are still missing": len(runs) < len(jobs),
    }
    theirs = [*about["problem"].get("stamps", []), *(s for r in runs for s in r["stamps"])]
    given = PrivacyPlan.from_dict(about["plan"]).epsilon(about["delta"]) if about["epsilon"] is None else None
    return {
        **about,
        "epsilon": about["epsilon"] if given is None else given,
        "steps": about["plan"]["steps"],
        "choices": {m: read_json(path) for m, path in choices.items() if path.exists()},
        "runs": runs,
        "ledger": ledger_totals(ledger or folder / "ledger.jsonl", about["delta"]),
        "verdict": verdict(runs),
        "stamps": sorted({s for s in (*(text for text, holds in own.items() if holds), *theirs) if s}),
    }


def ledger_totals(path: Path, delta: float) -> dict[str, Any]:
    """What all runs on the private data have spent together."""
    if not path.exists():
        return {"runs": 0, "epsilon": 0.0, "delta": delta, "accountant": "pld"}
    return total_now(Ledger.open(path, create=False), delta)
