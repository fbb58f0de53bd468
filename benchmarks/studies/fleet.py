"""A plan for a fleet on paper: epsilon, noise, memory and traffic of a server with very many devices; and a simulation.

    python -m benchmarks.studies.fleet --out benchmarks/results/fleet.json

10^8 users, 6,500 per round, 2,000 rounds, a model of 3 million parameters. For several separations of two rounds of one
user: the noise in the sum of all rounds so far (root mean square, in clip norms over the cohort) with correlated noise,
and with independent noise with and without a claim on secret sampling. The simulation draws the noise of all rounds for
2,000 numbers by the code that trains, and compares the measured figure with the computed one.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfsilver.privacy.correlated import buffered, prefix_error
from halfsilver.privacy.entropy import OsEntropy
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.noise import grid, noise_scale, noisy_mean
from halfsilver.privacy.noise_chain import NoiseChain
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.strategies import Banded, Correlated, Participation
from halfsilver.runs.folder import versions, write_json

USERS, COHORT, ROUNDS, PARAMETERS, DELTA = 10**8, 6_500, 2_000, 3_000_000, 1e-10
EPSILONS, SEPARATIONS, NUMBERS = (2.0, 8.0), (50, 100, 500, 2000), 2_000


def measured(plan: PrivacyPlan) -> float:
    """The noise in the prefix sums of a run with the plan, in clip norms over the cohort, from noise that is drawn."""
    assert isinstance(plan.noise, Correlated)
    scale = noise_scale(plan.step_noise, 1.0) / grid(1.0, NUMBERS)
    chain = NoiseChain(plan.noise.coefficients, NUMBERS, rounds=plan.steps, scale=scale)
    total, squares = torch.zeros(NUMBERS, dtype=torch.float64), 0.0
    for _ in range(plan.steps):
        nobody: list[Tensor] = [torch.zeros(NUMBERS, dtype=torch.float64)]
        (noise,) = noisy_mean(
            ClippedSum(nobody, 1.0), plan.step_noise, OsEntropy(), expected=1.0, dtypes=[torch.float64], chain=chain
        )
        total += noise
        squares += float(total.square().mean())
    return math.sqrt(squares / plan.steps)


def row(epsilon: float, separation: int) -> dict[str, Any]:
    once = Participation(rounds=ROUNDS, separation=separation)
    noise = Correlated(separation=separation, strategy=buffered(once))
    asked: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "population": USERS, "batch_size": COHORT}
    plan = PrivacyPlan.calibrate(**asked, steps=ROUNDS, unit="user", noise=noise)
    computed = plan.noise_multiplier * float(prefix_error(noise.coefficients.column(ROUNDS), once))
    alone = plan.noise_multiplier * float(prefix_error(Banded((1.0,)).column(ROUNDS), once))
    return {
        "epsilon": epsilon,
        "separation": separation,
        "participations": once.times,
        "noise_multiplier": plan.noise_multiplier,
        "buffers": len(noise.coefficients.decays),  # type: ignore[union-attr]
        "correlated": computed,
        "correlated_measured": measured(plan),
        "independent": alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for epsilon in EPSILONS:
        asked: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "population": USERS, "batch_size": COHORT}
        sampled = PrivacyPlan.calibrate(**asked, steps=ROUNDS, unit="user")
        by_coins = sampled.noise_multiplier * math.sqrt((ROUNDS + 1) / 2)
        for separation in SEPARATIONS:
            rows.append({**row(epsilon, separation), "sampled": by_coins})
            print({k: v if isinstance(v, int) else round(v, 3) for k, v in rows[-1].items()}, flush=True)
    server = {
        "sum_bytes": 8 * PARAMETERS,
        "noise_bytes_of_four_buffers": 4 * 8 * PARAMETERS,
        "download_bytes_per_round": 4 * PARAMETERS * COHORT,
        "upload_bytes_per_round": 4 * PARAMETERS * COHORT,
        "participation_bytes": 4 * USERS,
    }
    setting = {"users": USERS, "cohort": COHORT, "rounds": ROUNDS, "parameters": PARAMETERS, "delta": DELTA}
    write_json(args.out, {**setting, "rows": rows, "server": server, "versions": versions()})


if __name__ == "__main__":
    main()
