"""The privacy statement: what is guaranteed, to whom, by which accountant; made from ledger and plan alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from halfsilver.privacy.accounting import Accountant, Count, epsilon_of, total_accountant
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.selection import Plan, Selection
from halfsilver.privacy.strategies import Correlated
from halfsilver.runs.folder import UNSAFE

STATEMENT_VERSION = 2  # 1 gave the total of several mechanisms at twice the delta, no budget and no remarks
SELECTION_VERSION = 3  # of a selection, which has no figures by PLD

_ONE_STEP = "gaussian, rounded to a grid, on the sum of clipped gradients"
_CORRELATED = "gaussian with correlated noise, rounded to a grid, on the clipped gradients of all steps together"
_SELECTION = "the best of a random number of runs, which nobody learns; in each run: "
# Of runs in which units take turns: those of the others must not change with it.
EMPTY_PLACE = "empty-one-place"


def default_delta(plan: Plan) -> float:
    """1e-5, or a tenth of one over the declared population where that is less; never from the private size."""
    return min(1e-5, 0.1 / plan.population)


def stamps(config: Mapping[str, Any]) -> list[str]:
    """What takes the guarantee away, from a run's config."""
    found = {
        "unsafe_seed: noise and sampling can be reproduced": config.get("unsafe_seed") is not None,
        "metrics_not_private: metrics of private data were allowed": bool(config.get("metrics_not_private")),
        "backend: gradients were clipped by code that nothing checks": "backend" in config,
    }
    return [text for text, holds in found.items() if holds]


def make_statement(
    plan: Plan,
    ledger: Ledger,
    run_id: str,
    *,
    delta: float,
    stamps: Sequence[str] = (),
    remarks: Sequence[str] = (),
    version: int = STATEMENT_VERSION,
) -> dict[str, Any]:
    """Everything that the guarantee says, for people and machines; `halfsilver verify` recomputes it.

    `stamps` say what takes the guarantee away, and `remarks` what else a reader of the model should know.
    """
    total = total_now(ledger, delta, version)  # first, because it reads what the ledger holds by now
    selects = isinstance(plan, Selection)
    made: dict[str, Any] = {
        "statement_version": SELECTION_VERSION if selects else version,
        "adjacency": EMPTY_PLACE if plan.sampler == "separated" else ledger.adjacency,
        "unit": plan.unit,
        "sampler": plan.sampler,
        "mechanism": _mechanism(plan),
        "plan": plan.to_dict(),
        "delta": delta,
        "epsilon_planned": {by: plan.epsilon(delta, by) for by in plan.accountants},
        "spent_so_far": spent_by(plan, ledger.runs[run_id].spent, delta),
        "all_runs_on_this_data": total,
        "not_private_because": list(stamps),
    }
    return made if version == 1 else {**made, "remarks": list(remarks)}


def _mechanism(plan: Plan) -> str:
    if isinstance(plan, Selection):
        return _SELECTION + _mechanism(plan.each)
    return _CORRELATED if isinstance(plan.noise, Correlated) else _ONE_STEP


def spent_by(plan: Plan, steps: int, delta: float) -> dict[str, Any]:
    """What so many steps of the plan cost. The steps of a selection are selections."""
    by = plan.accountants[0]
    return {"steps": steps, f"epsilon_{by}": epsilon_of([plan.count(steps)], delta, by)}


def diverged(step: int, plan: Plan) -> str:
    """The remark on a run whose weights are no numbers any more."""
    return f"diverged: the weights are NaN or infinite after step {step} of {plan.steps}, and the run ended there"


def total_now(ledger: Ledger, delta: float, version: int = STATEMENT_VERSION) -> dict[str, Any]:
    """What all runs on the data have spent together, by the ledger as it is now."""
    counts = ledger.counts()  # this reads what others have appended, and `runs` then knows it
    return total_of(ledger, counts, len(ledger.runs), delta, version, external=len(ledger.externals))


def total_of(
    ledger: Ledger,
    counts: Sequence[Count],
    runs: int,
    delta: float,
    version: int = STATEMENT_VERSION,
    accountant: Accountant | None = None,
    *,
    external: int,
) -> dict[str, Any]:
    """The same when the ledger held these steps, its first `runs` runs and its first `external` entries of elsewhere.

    The reading is an odometer's (see `total_accountant`). With a budget, `composition` is "filter": the budget holds
    for all that is ever granted, even where plans were chosen after outputs had been seen. An epsilon of None is
    infinite: then what was spent elsewhere has a larger delta.
    """
    accountant = accountant or total_accountant(counts)
    epsilon = epsilon_of(counts, delta, accountant)
    total: dict[str, Any] = {
        "runs": runs,
        "unsafe_runs": sum(name.startswith(UNSAFE) for name in islice(ledger.runs, runs)),
        "accountant": accountant,
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": delta,
    }
    if version == 1:
        return {**total, "delta": delta if accountant == "pld" else 2 * delta}
    if external:  # only then, as statements of versions before have no such entry
        entries = ledger.externals[:external]
        total["external"] = [{"why": e.why, "count": e.spent.count, **e.event()} for e in entries]
    if any(run.plan.sampler == "separated" for run in islice(ledger.runs.values(), runs)):
        total["adjacency"] = EMPTY_PLACE  # the weaker one holds for the total, whatever a single run has
    budget = asdict(ledger.budget) if ledger.budget else None
    return {**total, "composition": "filter" if budget else "odometer", "budget": budget}
