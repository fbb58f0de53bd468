"""What a path holds: a study, its summary as one file, or a single run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfsilver.errors import CheckpointCorrupt, ConfigError, HalfsilverError
from halfsilver.runs.folder import RunFolder, read_json
from halfsilver.study.records import Json, Summary, present


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a run had spent when its statement was written."""

    steps: int = 0
    epsilon_pld: float | None = None
    epsilon_rdp: float | None = None  # of a selection
    more: Json = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The parts of a statement.json that a report shows."""

    plan: Json = field(default_factory=dict)
    epsilon_planned: Mapping[str, float] = field(default_factory=dict)
    delta: float | None = None
    unit: str = "example"
    adjacency: str = ""
    mechanism: Any = None
    sampler: Any = None
    spent_so_far: Spent = field(default_factory=Spent)
    not_private_because: Sequence[str] = ()
    remarks: Sequence[str] = ()
    all_runs_on_this_data: Json = field(default_factory=dict)
    more: Json = field(default_factory=dict)

    @property
    def selects(self) -> bool:
        """Whether it is about the best of several runs, which is one step of its ledger and counted by RDP."""
        return "trials" in self.plan

    @property
    def epsilon(self) -> float | None:
        """The figure to publish."""
        return self.epsilon_planned.get("rdp" if self.selects else "pld")

    @classmethod
    def from_json(cls, record: Json) -> Statement:
        return cls(**present(cls, record, spent_so_far=lambda spent: Spent(**present(Spent, spent))))


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """The files of a run folder that a report needs."""

    name: str
    config: Json
    statement: Statement
    history: Sequence[Json]


def load(path: Path) -> Summary | OneRun:
    """The summary of a study (as far as it has come), or a run; `ConfigError` for anything else."""
    if path.is_file():
        return _summary(path)
    if (path / "summary.json").is_file():
        return _summary(path / "summary.json")
    if (path / "study.json").is_file():
        from halfsilver.study.summary import summary_of

        return summary_of(path)
    run = RunFolder(path)
    if run.config.is_file() and run.statement.is_file():
        config, statement = read_json(run.config), read_json(run.statement)
        with shown(path):
            typed = Statement.from_json(statement)
        return OneRun(name=path.resolve().name, config=config, statement=typed, history=run.history())
    raise ConfigError(
        f"Expected path={str(path)!r} to be a study (a folder with study.json, or its summary as a .json file) or the "
        "folder of a run (with config.json and statement.json)."
    )


def _summary(path: Path) -> Summary:
    record = read_json(path)
    if "runs" not in record:
        raise ConfigError(f"Expected {path} to be the summary of a study, but it has no 'runs'. Name its folder.")
    with shown(path):
        return Summary.from_json(record)


@contextmanager
def shown(path: Path) -> Iterator[None]:
    """A value of a kind that a report cannot show is the fault of the files."""
    try:
        yield
    except HalfsilverError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(
            f"{path} holds values that cannot be shown: {type(error).__name__}: {error}. Restore it from a copy."
        ) from error
