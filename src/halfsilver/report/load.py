"""What a path holds: a study, its summary as one file, or a single run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfsilver.errors import ConfigError
from halfsilver.runs import RunFolder, read_json


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """The files of a run folder that a report needs."""

    name: str
    config: Mapping[str, Any]
    statement: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]


def load(path: Path) -> Mapping[str, Any] | OneRun:
    """The summary of a study (as far as it has come), or a run; `ConfigError` for anything else."""
    if path.is_file():
        return _summary(path)
    if (path / "summary.json").is_file():
        return _summary(path / "summary.json")
    if (path / "study.json").is_file():
        return _so_far(path)
    run = RunFolder(path)
    if run.config.is_file() and run.statement.is_file():
        return OneRun(
            name=path.resolve().name,
            config=read_json(run.config),
            statement=read_json(run.statement),
            history=run.history(),
        )
    raise ConfigError(
        f"Expected path={str(path)!r} to be a study (a folder with study.json, or its summary as a .json file) or the "
        "folder of a run (with config.json and statement.json)."
    )


def _summary(path: Path) -> Mapping[str, Any]:
    found = read_json(path)
    if "runs" not in found:
        raise ConfigError(f"Expected {path} to be the summary of a study, but it has no 'runs'. Name its folder.")
    return found


def _so_far(folder: Path) -> Mapping[str, Any]:
    """A study that has not ended yet: what is finished, and a verdict on that."""
    from halfsilver.study.study import STAMPS, ledger_totals
    from halfsilver.study.verdict import verdict

    about = read_json(folder / "study.json")
    runs = [read_json(path) for path in sorted(folder.glob("runs/*/result.json"))]
    choices = {path.parent.name: read_json(path) for path in sorted(folder.glob("search/*/choice.json"))}
    own = ["not finished: some runs of this study are still missing", STAMPS.get(about["search"], "")]
    return {
        **about,
        "choices": choices,
        "runs": runs,
        "ledger": ledger_totals(folder / "ledger.jsonl", about["delta"]),
        "verdict": verdict(runs),
        "stamps": [s for s in (*own, *(about.get("problem") or {}).get("stamps", ())) if s],
    }
