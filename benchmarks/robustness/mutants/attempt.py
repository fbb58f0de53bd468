"""One audited run, of the library as it is or with a bug in it, and what each instrument said."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.robustness.mutants.catalogue import MUTANTS, RUNS, Setting
from benchmarks.robustness.mutants.change import in_force
from halfsilver.auditing.instruments import Finding, judge
from halfsilver.auditing.run import observe

# Of a false alarm in one run: 200 clean runs stay silent with a probability of at least 0.9998.
ALPHA = 1e-6


@dataclass(frozen=True, kw_only=True)
class Job:
    """`mutant` is "" for a clean run."""

    setting: Setting
    mutant: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run that raised an error has no findings, and counts for nothing. `calls` are those of the changed code."""

    job: Job
    findings: Sequence[Finding] = ()
    calls: Mapping[str, int]
    error: str = ""

    @property
    def alarms(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.alarm]

    @property
    def in_force(self) -> bool:
        return not self.error and all(self.calls.values())


def attempt(job: Job) -> Outcome:
    """The loop runs with the bug; the instruments look at what it yielded without it."""
    setting, changes = job.setting, MUTANTS[job.mutant].bug() if job.mutant else []
    with tempfile.TemporaryDirectory() as folder, in_force(changes) as calls:
        try:
            run = RUNS[setting.loop]
            seen = observe(run, setting.plan, Path(folder) / "run", setting.layout, replay=setting.replay)
        except Exception as error:
            return Outcome(job=job, calls=calls(), error=f"{type(error).__name__}: {error}")
    return Outcome(job=job, calls=calls(), findings=judge(seen, ALPHA))
