"""Studies at settings that are given and not searched for: what the benchmarks of this folder share."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from halfsilver.study.arena import make_plan
from halfsilver.study.problem import Recipe


def shortened(recipe: Recipe, population: int, epsilon: float, delta: float, share: float) -> Recipe:
    """The recipe for `share` of a whole run, with the noise that a whole one needs for `epsilon`."""
    noise = make_plan(recipe, population, epsilon, delta).noise_multiplier
    if recipe.epochs is not None:
        return replace(recipe, noise_multiplier=noise, epochs=share * recipe.epochs)
    return replace(recipe, noise_multiplier=noise, rounds=recipe.steps(population, share))


def share_starts(source: Path, target: Path) -> None:
    """Copy the starts of the study in `source`, so that the one in `target` begins with the same weights."""
    (target / "start").mkdir(parents=True, exist_ok=True)
    for file in sorted((source / "start").glob("seed-*.safetensors")):
        if not (target / "start" / file.name).exists():
            shutil.copy(file, target / "start" / file.name)
