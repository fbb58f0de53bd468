"""Where a setting is tried out: on public rows only, or on set-aside training rows as papers do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from halfsilver._core.tensors import Batch, batch_rows, map_batch
from halfsilver.errors import ConfigError
from halfsilver.mirror.rows import PublicRows
from halfsilver.mirror.users import pooled
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.users import PrivateUsers, TensorUsers
from halfsilver.study.problem import Problem, Recipe

NO_VALIDATION = (
    "A paper search scores on set-aside training examples, and validation=None. Set some aside, or use search='public'."
)
SearchMode = Literal["public search", "paper search"]
SEARCH: Mapping[str, SearchMode] = {"public": "public search", "paper": "paper search"}  # as the user says it

# Shares of the public rows in a public search; what is left stays the mirror.
_PSEUDO_PRIVATE, _VALIDATION = 0.4, 0.2
MIRROR_SHARE = 1 - _PSEUDO_PRIVATE - _VALIDATION
_FEWEST_USERS = 5
_FEWEST = 20  # public rows: enough for each part, and for a tenth of the mirror to be held out


@dataclass(frozen=True, kw_only=True)
class Arena:
    """A problem with the plan under which it is trained, and whether its "private" rows are really private."""

    problem: Problem
    plan: PrivacyPlan
    spends: bool


def make_plan(recipe: Recipe, population: int, epsilon: float | None, delta: float) -> PrivacyPlan:
    """The plan of a whole run: noise as the recipe gives it, or the least that keeps to `epsilon` by PLD."""
    values: dict[str, Any] = {
        "steps": recipe.steps(population),
        "sampling_rate": min(1.0, recipe.batch_size / population),
        "expected_batch_size": float(min(recipe.batch_size, population)),
        "max_grad_norm": recipe.max_grad_norm,
        "unit": "example" if recipe.local is None else "user",
    }
    if (recipe.noise_multiplier is None) == (epsilon is None):
        raise ConfigError(
            f"Expected either epsilon or the recipe's noise_multiplier to fix the noise, got epsilon={epsilon} and "
            f"noise_multiplier={recipe.noise_multiplier}."
        )
    if epsilon is None:
        return PrivacyPlan.from_dict({**values, "noise_multiplier": recipe.noise_multiplier})
    spare = _spare(recipe, values["steps"])
    return PrivacyPlan(**values, noise_multiplier=1.0, spare_steps=spare, delta=delta).with_least_noise(epsilon)


def _spare(recipe: Recipe, steps: int) -> int:
    return math.ceil(recipe.spare * steps)


def search_arena(problem: Problem, recipe: Recipe, plan: PrivacyPlan, mode: SearchMode) -> Arena:
    """The problem on which settings are compared: shorter runs with the noise, batch and clip norm of the real plan."""
    steps = recipe.steps(problem.population, recipe.search_share)
    shorter = replace(plan, steps=steps, spare_steps=_spare(recipe, steps))
    return _ARENAS[mode](problem, shorter)


def _paper(problem: Problem, plan: PrivacyPlan) -> Arena:
    if problem.validation is None:
        raise ConfigError(NO_VALIDATION)
    scored = replace(problem, test=problem.validation, curve=None)
    return Arena(problem=scored, plan=plan, spends=True)


def _public(problem: Problem, plan: PrivacyPlan) -> Arena:
    """Public rows in three parts: the mirror, a stand-in for the private rows, and rows to score on.

    The stand-in rows are repeated until one expected batch can be drawn from them: signal and noise of a step then
    stand to each other as in the real run.
    """
    if problem.public_users is not None:
        return _public_by_user(problem, plan)
    rows = len(PublicRows(problem.public))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    stand_in, scored = round(_PSEUDO_PRIVATE * rows), round(_VALIDATION * rows)
    if rows < _FEWEST:
        raise ConfigError(
            f"Expected at least {_FEWEST} public rows for a public search, got {rows}. Give more of them."
        )
    pseudo = order[:stand_in].repeat(math.ceil(plan.expected_batch_size / stand_in))
    part = replace(
        problem,
        private=rows_at(problem.public, pseudo),
        test=rows_at(problem.public, order[stand_in : stand_in + scored]),
        public=rows_at(problem.public, order[stand_in + scored :]),
        population=len(pseudo),
        curve=None,
    )
    rate = min(1.0, plan.expected_batch_size / len(pseudo))
    return Arena(problem=part, plan=replace(plan, sampling_rate=rate), spends=False)


def _public_by_user(problem: Problem, plan: PrivacyPlan) -> Arena:
    """The same with whole users in place of rows: nobody is in two parts.

    A user's update takes long, so the stand-ins are not repeated. All of them take part in each step instead, with the
    noise on their mean that the plan has on the mean of a cohort.
    """
    users = problem.public_users or ()
    if len(users) < _FEWEST_USERS:
        raise ConfigError(f"Expected at least {_FEWEST_USERS} public users for a public search, got {len(users)}.")
    order = torch.randperm(len(users), generator=torch.Generator().manual_seed(0)).tolist()
    stand_in, scored = round(_PSEUDO_PRIVATE * len(users)), round(_VALIDATION * len(users))
    pseudo = [users[i] for i in order[:stand_in]]
    mirror = [users[i] for i in order[stand_in + scored :]]
    part = replace(
        problem,
        private=private_users(pseudo),
        test=pooled([users[i] for i in order[stand_in : stand_in + scored]]),
        public=pooled(mirror),
        public_users=mirror,
        population=len(pseudo),
        curve=None,
    )
    cohort = min(float(stand_in), plan.expected_batch_size)
    small = replace(
        plan,
        expected_batch_size=cohort,
        sampling_rate=cohort / stand_in,
        noise_multiplier=plan.noise_multiplier * cohort / plan.expected_batch_size,
    )
    return Arena(problem=part, plan=small, spends=False)


_ARENAS: Mapping[SearchMode, Callable[[Problem, PrivacyPlan], Arena]] = {
    "paper search": _paper,
    "public search": _public,
}


def private_users(users: Sequence[Batch]) -> PrivateUsers:
    """Public users in the place of private ones, from the rows of each."""
    keys = [number for number, rows in enumerate(users) for _ in range(batch_rows(rows))]
    return PrivateUsers(TensorUsers(pooled(users), users=keys))


def rows_at(data: Any, index: Tensor) -> Any:
    """Some rows of a public data set, as a data set of the same kind."""
    tensors = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(tensors, Tensor | tuple | dict):
        return map_batch(lambda t: t[index.to(t.device)], tensors)
    return Subset(data, index.tolist())
