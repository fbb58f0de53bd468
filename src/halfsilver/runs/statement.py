"""The privacy statement: what is guaranteed, to whom, by which accountant; made from ledger and plan alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from halfsilver.privacy.accounting import Accountant, MechanismCount, epsilon_of, total_accountant
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.folder import UNSAFE

STATEMENT_VERSION = 2  # 1 gave the total of several mechanisms at twice the delta, no budget and no remarks


def default_delta(plan: PrivacyPlan) -> float:
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
    plan: PrivacyPlan,
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
    run = ledger.runs[run_id]
    made: dict[str, Any] = {
        "statement_version": version,
        "adjacency": ledger.adjacency,
        "unit": plan.unit,
        "sampler": plan.sampler,
        "mechanism": "gaussian, rounded to a grid, on the sum of clipped gradients",
        "plan": plan.to_dict(),
        "delta": delta,
        "epsilon_planned": {"pld": plan.epsilon(delta), "rdp": plan.epsilon(delta, "rdp")},
        "spent_so_far": {
            "steps": run.spent,
            "epsilon_pld": epsilon_of([plan.count(run.spent)], delta, "pld"),
        },
        "all_runs_on_this_data": total_now(ledger, delta, version),
        "not_private_because": list(stamps),
    }
    return made if version == 1 else {**made, "remarks": list(remarks)}


def diverged(step: int, plan: PrivacyPlan) -> str:
    """The remark on a run whose weights are no numbers any more."""
    return f"diverged: the weights are NaN or infinite after step {step} of {plan.steps}, and the run ended there"


def total_now(ledger: Ledger, delta: float, version: int = STATEMENT_VERSION) -> dict[str, Any]:
    """What all runs on the data have spent together, by the ledger as it is now."""
    counts = ledger.counts()  # this reads what others have appended, and `runs` then knows it
    return total_of(ledger, counts, len(ledger.runs), delta, version)


def total_of(
    ledger: Ledger,
    counts: Sequence[MechanismCount],
    runs: int,
    delta: float,
    version: int = STATEMENT_VERSION,
    accountant: Accountant | None = None,
) -> dict[str, Any]:
    """The same when the ledger held these steps and its first `runs` runs.

    The reading is an odometer's (see `total_accountant`). With a budget, `composition` is "filter": the budget holds
    for all that is ever granted, even where plans were chosen after outputs had been seen.
    """
    accountant = accountant or total_accountant(counts)
    total = {
        "runs": runs,
        "unsafe_runs": sum(name.startswith(UNSAFE) for name in islice(ledger.runs, runs)),
        "accountant": accountant,
        "epsilon": epsilon_of(counts, delta, accountant),
        "delta": delta,
    }
    if version == 1:
        return {**total, "delta": delta if accountant == "pld" else 2 * delta}
    budget = asdict(ledger.budget) if ledger.budget else None
    return {**total, "composition": "filter" if budget else "odometer", "budget": budget}
