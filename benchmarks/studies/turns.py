"""Sampled batches, batches in turn, and correlated noise: how much noise is in the sum of all steps so far?

    python -m benchmarks.studies.turns --out benchmarks/results/turns.json

A plan has 100 batches in a pass, and some passes. The figure is the root mean square, over all steps, of the standard
deviation of the noise in the sum of all releases so far, in clip norms over the batch size; lower is better. It does
not depend on data. Arms, all at the same epsilon:

    sampled       Poisson samples and independent noise: needs secret coins
    in turn       batches in a fixed order, independent noise: no claim on sampling
    correlated    batches in a fixed order, noise with four buffers
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

import halfsilver as hs
from halfsilver.privacy.correlated import buffered, prefix_error
from halfsilver.privacy.strategies import Banded, Participation, Strategy
from halfsilver.runs.folder import versions, write_json

BATCHES, DELTA = 100, 1e-6
EPSILONS, PASSES = (0.5, 2.0, 8.0), (1, 4, 16)


def row(epsilon: float, passes: int) -> dict[str, Any]:
    """The noise of each arm."""
    steps = passes * BATCHES
    once = Participation(rounds=steps, separation=BATCHES)
    asked: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "population": BATCHES, "batch_size": 1}
    sampled = hs.PrivacyPlan.calibrate(**asked, steps=steps)
    whole = hs.PrivacyPlan.calibrate(**{**asked, "batch_size": BATCHES}, steps=1)  # one release of all
    noise: dict[str, Strategy] = {
        "in turn": Banded((1.0,)),
        "correlated": buffered(once),
    }
    found = {name: float(prefix_error(s.column(steps), once)) * whole.noise_multiplier for name, s in noise.items()}
    alone = sampled.noise_multiplier * math.sqrt((steps + 1) / 2)  # t steps have sigma sqrt(t)
    return {"epsilon": epsilon, "passes": passes, "sampled": alone, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(epsilon, passes) for passes in PASSES for epsilon in EPSILONS]
    write_json(args.out, {"batches": BATCHES, "delta": DELTA, "rows": rows, "versions": versions()})
    for r in rows:
        print("  ".join(f"{r[name]:10.4g}" for name in r))


if __name__ == "__main__":
    main()
