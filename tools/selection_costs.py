"""What a selection costs: the table of docs/select.md.

    python -m tools.selection_costs

One run has epsilon 1 by RDP at delta 1e-5: 1000 steps on samples of 1 % with noise multiplier 1.5132.
"""

from __future__ import annotations

from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.selection import Selection

EACH = PrivacyPlan(steps=1000, sampling_rate=0.01, expected_batch_size=500, noise_multiplier=1.5132, delta=1e-5)


def table() -> str:
    """One line for each expected number of runs."""
    lines = [
        "| expected runs | ε, `eta=0` | ε, `eta=1` | half of the time at most | 99 % of the time at most |",
        "|---|---|---|---|---|",
    ]
    for trials in (5, 10, 30):
        flat, geometric = (Selection(each=EACH, trials=trials, eta=eta) for eta in (0.0, 1.0))
        half, most = (f"{flat.quantile(p)} or {geometric.quantile(p)} runs" for p in (0.5, 0.99))
        lines.append(f"| {trials} | {flat.epsilon():.2f} | {geometric.epsilon():.2f} | {half} | {most} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
