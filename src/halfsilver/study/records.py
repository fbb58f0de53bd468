"""The records of a study as values: what its JSON files hold.

Reading is lenient, because a summary may be of another version or still incomplete: a part that is missing or null has
its default, and a part that this version does not know is kept in `more`. A complete file is written as it was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from halfsilver.study.method import Arm, arms_of
from halfsilver.study.problem import Setting

Json = Mapping[str, Any]
Figures = Mapping[str, float | None]  # by metric; None where the run diverged


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run: result.json. `plan`, `setting` and `noise_multiplier` are None where no private step was taken."""

    method: str = ""
    seed: int = 0
    setting: Setting | None = None
    epsilon: Mapping[str, float] = field(default_factory=dict)
    delta: float | None = None
    noise_multiplier: float | None = None
    steps: int = 0
    plan: Json | None = None
    final: Figures = field(default_factory=dict)
    trace: Sequence[Json] = ()
    stamps: Sequence[str] = ()
    curve: Sequence[Json] = ()
    seconds: float = 0.0
    more: Json = field(default_factory=dict)

    @property
    def epsilon_pld(self) -> float:
        """Epsilon of this run alone by the tight accountant."""
        return self.epsilon.get("pld") or 0.0

    @classmethod
    def from_json(cls, record: Json) -> Result:
        return cls(**present(cls, record, setting=_setting))

    def to_json(self) -> dict[str, Any]:
        return _whole(self, setting=None if self.setting is None else self.setting.to_json())


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A setting that a search tried, with what it scored."""

    setting: Setting
    figures: Figures

    @classmethod
    def from_json(cls, record: Json) -> Trial:
        setting = Setting(**record["setting"])
        return cls(setting=setting, figures={name: value for name, value in record.items() if name != "setting"})

    def to_json(self) -> dict[str, Any]:
        return {"setting": self.setting.to_json(), **self.figures}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a search chose for one method: choice.json.

    `difference` is how far the choice is ahead of `runner_up`, with the standard error of that over the scored rows.
    All three are None where no other setting finished.
    """

    setting: Setting | None = None
    score: str = "loss"
    tried: Sequence[Trial] = ()
    at_edge: bool | None = None
    runner_up: Setting | None = None
    difference: float | None = None
    standard_error: float | None = None
    more: Json = field(default_factory=dict)

    @property
    def chosen(self) -> Trial:
        """The trial of the chosen setting."""
        (trial,) = (trial for trial in self.tried if trial.setting == self.setting)
        return trial

    @classmethod
    def from_json(cls, record: Json) -> Choice:
        return cls(**present(cls, record, setting=_setting, runner_up=_setting, tried=_trials))

    def to_json(self) -> dict[str, Any]:
        whole = _whole(
            self,
            setting=None if self.setting is None else self.setting.to_json(),
            runner_up=None if self.runner_up is None else self.runner_up.to_json(),
            tried=[trial.to_json() for trial in self.tried],
        )
        compared = ("runner_up", "difference", "standard_error")
        return {name: value for name, value in whole.items() if name not in compared or value is not None}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of `method` minus `baseline` over the `n` seeds that both have, with its interval.

    `within_noise` is False only where an interval exists, excludes 0, and no pair was lost to a run that diverged.
    `relative` is the mean in shares of `baseline_mean`, where that is above 0. `level` is that of the interval itself:
    higher than asked for where `method` was picked as the best of several, so that it covers as often as asked for.
    """

    name: str = ""
    metric: str = ""
    method: str = ""
    baseline: str = ""
    mean: float = float("nan")
    low: float | None = None
    high: float | None = None
    n: int = 0
    within_noise: bool = True
    relative: float | None = None
    baseline_mean: float = float("nan")
    level: float = 0.95
    lost: Sequence[str] = ()
    more: Json = field(default_factory=dict)

    @classmethod
    def from_json(cls, record: Json) -> Difference:
        return cls(**present(cls, record))

    def to_json(self) -> dict[str, Any]:
        return _whole(self, lost=list(self.lost))


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Mean of one figure over the `n` seeds of a method; None where all diverged. One seed has no interval."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    more: Json = field(default_factory=dict)

    @classmethod
    def from_json(cls, record: Json) -> Mean:
        return cls(**present(cls, record))

    def to_json(self) -> dict[str, Any]:
        return _whole(self)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a study shows: sentences, and the figures that they state. `means` are by method and metric."""

    headline: str = ""
    sentences: Sequence[str] = ()
    differences: Sequence[Difference] = ()
    means: Mapping[str, Mapping[str, Mean]] = field(default_factory=dict)
    diverged: Sequence[Json] = ()
    confidence: float = 0.95
    more: Json = field(default_factory=dict)

    def mean(self, method: str, metric: str) -> Mean | None:
        """None where the method has no such figure."""
        return self.means[method].get(metric) if method in self.means else None

    def difference(self, name: str, metric: str) -> Difference | None:
        """None where no seed has both sides."""
        return next((d for d in self.differences if (d.name, d.metric) == (name, metric)), None)

    @classmethod
    def from_json(cls, record: Json) -> Verdict:
        return cls(**present(cls, record, differences=_differences, means=_means))

    def to_json(self) -> dict[str, Any]:
        means = {method: {name: mean.to_json() for name, mean in own.items()} for method, own in self.means.items()}
        return _whole(
            self,
            sentences=list(self.sentences),
            differences=[d.to_json() for d in self.differences],
            means=means,
            diverged=list(self.diverged),
        )


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """What was asked for and on what: study.json.

    `arms` records the methods that users define, and `settings` those that were given and not searched for.
    """

    schema_version: int = 1
    task: str = "custom"
    recipe: Json = field(default_factory=dict)
    epsilon: float | None = None
    delta: float | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)
    search: str = "search"
    quick: bool = False
    options: Json = field(default_factory=dict)
    population: int | None = None
    rows: Json = field(default_factory=dict)
    parameters: int | None = None
    plan: Json = field(default_factory=dict)
    methods: Sequence[str] = ()
    problem: Json = field(default_factory=dict)
    versions: Json = field(default_factory=dict)
    machine: Json = field(default_factory=dict)
    arms: Json = field(default_factory=dict)
    settings: Json = field(default_factory=dict)
    more: Json = field(default_factory=dict)

    def all_arms(self) -> list[Arm]:
        """Its methods in the order of tables and figures, users' own in the order in which they were given."""
        return arms_of(self.methods or self.seeds, self.arms)

    @classmethod
    def from_json(cls, record: Json) -> StudyRecord:
        return cls(**present(cls, record))

    def to_json(self) -> dict[str, Any]:
        whole = _whole(self, methods=list(self.methods), seeds=dict(self.seeds))
        rare = ("arms", "settings")
        return {name: value for name, value in whole.items() if name not in rare or value}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A study as far as it has come: summary.json, which is one flat object with `study` at its top level."""

    study: StudyRecord
    steps: int | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    runs: Sequence[Result] = ()
    ledger: Json = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    stamps: Sequence[str] = ()

    def arms(self) -> list[Arm]:
        """All methods that have runs or were asked for."""
        asked = [*self.study.methods, *(name for name in self.study.seeds if name not in self.study.methods)]
        return arms_of(dict.fromkeys([*asked, *(run.method for run in self.runs)]), self.study.arms)

    def runs_of(self, method: str) -> list[Result]:
        return [run for run in self.runs if run.method == method]

    @classmethod
    def from_json(cls, record: Json) -> Summary:
        own = {f.name for f in fields(cls)} - {"study"}
        study = StudyRecord.from_json({name: value for name, value in record.items() if name not in own})
        parts = {name: value for name, value in record.items() if name in own}
        values = present(cls, parts, choices=_choices, runs=_results, verdict=Verdict.from_json)
        return cls(study=study, **values)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.study.to_json(),
            "steps": self.steps,
            "choices": {method: choice.to_json() for method, choice in self.choices.items()},
            "runs": [run.to_json() for run in self.runs],
            "ledger": dict(self.ledger),
            "verdict": self.verdict.to_json(),
            "stamps": list(self.stamps),
        }


def present(kind: type[Any], record: Json, **readers: Any) -> dict[str, Any]:
    """The parts of `record` that have a value, each read by its reader, and those of other versions under `more`."""
    known = {f.name for f in fields(kind)} - {"more"}
    values = {name: value for name, value in record.items() if name in known and value is not None}
    read = {name: readers[name](value) if name in readers else value for name, value in values.items()}
    unknown = {name: value for name, value in record.items() if name not in known}
    return {**read, "more": unknown} if unknown else read


def _whole(record: Any, **written: Any) -> dict[str, Any]:
    """All parts as JSON has them: those of `written`, the others as they are, and those of other versions."""
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "more"}
    return {**values, **written, **record.more}


def _setting(record: Json) -> Setting | None:
    return Setting(**record) if record.get("lr") is not None else None


def _trials(records: Sequence[Json]) -> list[Trial]:
    return [Trial.from_json(record) for record in records]


def _differences(records: Sequence[Json]) -> list[Difference]:
    return [Difference.from_json(record) for record in records]


def _means(records: Mapping[str, Any]) -> dict[str, dict[str, Mean]]:
    return {
        method: {name: Mean.from_json(mean) for name, mean in own.items() if mean is not None}
        for method, own in records.items()
        if own is not None
    }


def _choices(records: Mapping[str, Any]) -> dict[str, Choice]:
    return {method: Choice.from_json(choice) for method, choice in records.items() if choice is not None}


def _results(records: Sequence[Json]) -> list[Result]:
    return [Result.from_json(record) for record in records]
