"""One workload: make the contenders, hold each against the oracle, then let them race."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.speed import oracle
from benchmarks.speed.apart import Apart, Ready, apart
from benchmarks.speed.contenders import BASE, CONTENDERS, Contender, Options
from benchmarks.speed.models import Workload
from benchmarks.speed.timing import Ratio, measure, ratios

Row = dict[str, Any]

# Rivals whose clipped sum is known to be wrong, and why: they are reported, but do not fail the run.
KNOWN = {
    (model, contender): "Opacus 1.6 unfolds a channels_last input as if it were contiguous"
    for model in ("cifar_cl", "emnist_cl")
    for contender in ("opacus_hooks", "opacus_ghost")
}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """Rows of ratios; who did not run, and why; whose clipped sum is wrong, and how far off."""

    rows: list[Row] = field(default_factory=list)
    skipped: list[Row] = field(default_factory=list)
    wrong: list[Row] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.rows.extend(other.rows)
        self.skipped.extend(other.skipped)
        self.wrong.extend(other.wrong)


def race(
    workload: Workload,
    names: Iterable[str],
    reps: int,
    options: Options,
    say: Say,
    *,
    exactly: bool = False,
    threads: int = 1,
) -> Report:
    """All of `names` on one workload, the base among them. Nobody is timed whose clipped sum is wrong."""
    report, wanted = Report(), oracle.expected(workload)
    if wanted.clipped < oracle.LEAST_CLIPPED:
        raise AssertionError(f"only {wanted.clipped:.0%} of the examples of {workload.name} are clipped")
    with ExitStack() as stack:
        contenders: dict[str, Apart] = {}
        for name in dict.fromkeys([BASE, *names]):
            say(f"{workload.name}: {name}")
            right = wanted.first_half if CONTENDERS[name].pda else wanted.total
            made = stack.enter_context(
                apart(partial(_quietly, name, workload, options), partial(oracle.relative_error, wanted=right), threads)
            )
            if _may_start(name, made, workload, report):
                assert isinstance(made, Apart)
                contenders[name] = made
        say(f"{workload.name}: {len(contenders)} contenders take turns")
        take = {name: made.take for name, made in contenders.items()}
        first = {name: made.ready.seconds for name, made in contenders.items()}
        measured = ratios(measure(take, first, reps, exactly=exactly))
    for name, ratio in measured.items():
        report.rows.append(_row(workload, name, ratio, contenders[name].ready, wanted))
    report.rows.extend(_best_opacus(workload, report.rows))
    return report


def _quietly(name: str, workload: Workload, options: Options) -> Contender:
    """In its own process: Opacus and torch.func remark on their own internals."""
    warnings.simplefilter("ignore")
    return build(name, workload, options)


def _may_start(name: str, made: Apart | str, workload: Workload, report: Report) -> bool:
    """Whether the contender runs and its clipped sum is right; if not, the report says so."""
    if isinstance(made, str):
        if name == BASE:
            raise RuntimeError(f"{workload.name}: {name}: {made}")
        report.skipped.append({**_names(workload, name), "reason": made})
        return False
    error = made.ready.error
    if error is None or error <= oracle.TOLERANCE:
        return True
    known = KNOWN.get((workload.name, name))
    report.wrong.append({**_names(workload, name), "error": error, "tolerance": oracle.TOLERANCE, "known": known})
    return False


def build(name: str, workload: Workload, options: Options) -> Contender:
    entry = CONTENDERS[name]
    entry.prepare()
    return entry.build(workload, workload.model(entry.recurrent()), options)


def _names(workload: Workload, name: str) -> Row:
    """A mirror step has a table of its own: its base is plain SGD on private and public rows together."""
    if CONTENDERS[name].pda:
        return {"model": f"{workload.name}+pda", "contender": name.removesuffix("_pda")}
    return {"model": workload.name, "contender": name}


def _row(workload: Workload, name: str, ratio: Ratio, ready: Ready, wanted: oracle.Expected) -> Row:
    return {
        **_names(workload, name),
        "ratio": round(ratio.median, 4),
        "min": round(ratio.least, 4),
        "max": round(ratio.most, 4),
        "reps": ratio.reps,
        "cpu_ratio": round(ratio.cpu, 4),
        "seconds": round(ratio.seconds, 5),
        "error": ready.error,
        "clipped": round(wanted.clipped, 3),
        "detail": ready.detail,
    }


def _best_opacus(workload: Workload, rows: list[Row]) -> list[Row]:
    """For the second table: DP-SGD on all rows by the fastest of Opacus's modes, out of the same repetitions."""
    mirror = any(r["model"] == f"{workload.name}+pda" for r in rows)
    modes = [r for r in rows if r["contender"].startswith("opacus_")]
    if not mirror or not modes:
        return []
    best = min(modes, key=lambda r: float(r["ratio"]))
    return [{**best, "model": f"{workload.name}+pda", "contender": "opacus_best", "detail": best["contender"]}]
