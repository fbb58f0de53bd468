"""What a path holds: a study, its summary as one file, or a single run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfsilver.errors import ConfigError
from halfsilver.runs.folder import RunFolder, read_json


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
        from halfsilver.study.summary import summary_of

        return summary_of(path).to_json()
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
