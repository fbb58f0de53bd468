"""The summary of a study, from the files in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.folder import read_json
from halfsilver.runs.statement import total_now
from halfsilver.study.arena import SearchMode
from halfsilver.study.records import Choice, Result, StudyRecord, Summary
from halfsilver.study.verdict import verdict

STAMPS: Mapping[SearchMode, str] = {
    "paper search": (
        "search not accounted: settings were chosen by further private runs, which only the total counts, and scored "
        "on set-aside training rows without noise, which no epsilon counts"
    ),
    "public search": "",
}


def summary_of(folder: Path, ledger: Path | None = None) -> Summary:
    """The summary of the study in `folder`, finished or not."""
    record = read_json(folder / "study.json")
    study = StudyRecord.from_json(record)
    delta: float = record["delta"]
    arms = study.all_arms()
    jobs = [(arm.name, seed) for arm in arms for seed in range(study.seeds[arm.name])]
    files = [folder / "runs" / f"{name}-seed-{seed}" / "result.json" for name, seed in jobs]
    runs = [Result.from_json(read_json(file)) for file in files if file.exists()]
    choices = {arm.name: folder / "search" / arm.name / "choice.json" for arm in arms}
    stamps = [
        STAMPS[record["search"]],
        "quick: too short to publish" if study.quick else "",
        "not finished: some runs of this study are still missing" if len(runs) < len(jobs) else "",
        *study.problem.get("stamps", ()),
        *(stamp for run in runs for stamp in run.stamps),
    ]
    if study.epsilon is None:  # the recipe gives the noise
        study = replace(study, epsilon=PrivacyPlan.from_dict(dict(study.plan)).epsilon(delta))
    return Summary(
        study=study,
        steps=study.plan["steps"],
        choices={name: Choice.from_json(read_json(path)) for name, path in choices.items() if path.exists()},
        runs=runs,
        ledger=ledger_totals(ledger or folder / "ledger.jsonl", delta),
        verdict=verdict(runs, arms),
        stamps=sorted({stamp for stamp in stamps if stamp}),
    )


def ledger_totals(path: Path, delta: float) -> dict[str, Any]:
    """What all runs on the private data have spent together."""
    if not path.exists():
        return {"runs": 0, "epsilon": 0.0, "delta": delta, "accountant": "pld"}
    return total_now(Ledger.open(path, create=False), delta)
