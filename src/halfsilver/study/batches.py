"""Batch size and number of steps at a fixed epsilon and compute: which has the least noise at the end of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from halfsilver.privacy.plan import PrivacyPlan

FEWEST_STEPS = 50  # of any run: with fewer, it ends before it has used what it could learn
SMALLEST_BATCH = 32
_WITHIN = 1.05  # of the least noise: a smaller batch leaves more steps


@dataclass(frozen=True, kw_only=True)
class BatchOption:
    """One batch size at the epsilon and the compute that were asked for.

    Args:
        batch_size: Expected records per step.
        steps: Number of steps.
        noise_multiplier: The noise that keeps to epsilon, by RDP. That of a plan is a little less.
        noise: Noise at the end of a run of given learning rate times steps, sigma / sqrt(batch size), as a multiple of
            the least of all options.
    """

    batch_size: int
    steps: int
    noise_multiplier: float
    noise: float


def best_batch(
    *, population: int, epsilon: float, delta: float, epochs: float, fewest_steps: int
) -> tuple[int, tuple[BatchOption, ...]]:
    """The smallest batch within 5 % of the least noise at this epsilon and compute, and all that were compared.

    Each option has `epochs` passes over the records. Options with fewer than 50 steps are left out, unless none has
    more. If the batch has fewer than `fewest_steps` steps, it is the largest that has as many, or the smallest of all.
    The noise of each is calibrated by RDP, which is fast and good enough to compare them.

    Args:
        population: The declared number of private records, at least 32.
        epsilon: The budget.
        delta: At most 1 / population.
        epochs: Passes over the private records, above 0.
        fewest_steps: The steps that the model needs, even if they cost noise.
    """
    sizes = [SMALLEST_BATCH]
    while 2 * sizes[-1] < population:
        sizes.append(2 * sizes[-1])
    sizes.append(population)
    enough = [size for size in sizes if round(epochs * population / size) >= FEWEST_STEPS] or sizes[:1]
    plans = []
    for size in reversed(enough):  # from the largest: with less and less noise per step, until it grows in all
        plan = _rough_plan(population=population, epsilon=epsilon, delta=delta, epochs=epochs, batch_size=size)
        plans.append(plan)
        if plan.steps >= fewest_steps and _per_root(plan) > 2 * min(map(_per_root, plans)):
            break
    least = min(map(_per_root, plans))
    options = [
        BatchOption(
            batch_size=round(plan.expected_batch_size),
            steps=plan.steps,
            noise_multiplier=plan.noise_multiplier,
            noise=_per_root(plan) / least,
        )
        for plan in reversed(plans)
    ]
    quiet = [plan for plan in plans if _per_root(plan) <= _WITHIN * least]
    chosen = quiet[-1]
    if chosen.steps < fewest_steps:
        chosen = next((plan for plan in plans if plan.steps >= fewest_steps), plans[-1])
    return round(chosen.expected_batch_size), tuple(options)


def _rough_plan(**asked: Any) -> PrivacyPlan:
    return PrivacyPlan.calibrate(**asked, accountant="rdp")


def _per_root(plan: PrivacyPlan) -> float:
    return plan.noise_multiplier / math.sqrt(plan.expected_batch_size)


def end_noise(*, population: int, epsilon: float, delta: float, epochs: float, batch_size: int) -> float:
    """Noise on a weight after a run whose learning rate times steps is 1, by RDP: sigma / (B sqrt(steps)).

    Args:
        population: The declared number of private records.
        epsilon: The budget.
        delta: At most 1 / population.
        epochs: Passes over the private records, above 0.
        batch_size: Expected records per step.
    """
    plan = _rough_plan(population=population, epsilon=epsilon, delta=delta, epochs=epochs, batch_size=batch_size)
    return plan.noise_multiplier / (plan.expected_batch_size * math.sqrt(plan.steps))
