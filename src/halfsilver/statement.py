"""The privacy statement: what is guaranteed, to whom, by which accountant; made from ledger and plan alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfsilver.privacy.accounting import epsilon_of, total_accountant, total_epsilon
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs import UNSAFE

STATEMENT_VERSION = 1


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
    plan: PrivacyPlan, ledger: Ledger, run_id: str, *, delta: float, stamps: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything that the guarantee says, for people and machines; `halfsilver verify` recomputes it."""
    run = ledger.runs[run_id]
    counts = ledger.counts()
    return {
        "statement_version": STATEMENT_VERSION,
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
        "all_runs_on_this_data": {
            "runs": len(ledger.runs),
            "unsafe_runs": sum(name.startswith(UNSAFE) for name in ledger.runs),
            "accountant": total_accountant(counts),
            "epsilon": total_epsilon(counts, delta),
            # Whether to mix plans may depend on outputs: the two accountants' failures then add up.
            "delta": delta if total_accountant(counts) == "pld" else 2 * delta,
        },
        "not_private_because": list(stamps),
    }
