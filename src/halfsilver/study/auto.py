"""A study as advised: plan, optimizer, learning rate and geometry come from `advise`, and nothing is searched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halfsilver.errors import ConfigError, require
from halfsilver.mirror.pretrain import held_out_rows
from halfsilver.mirror.rows import PublicRows
from halfsilver.mirror.users import pooled
from halfsilver.runs.folder import read_json, write_json
from halfsilver.study.advice import (
    FEWEST_HELD_OUT,
    FEWEST_USERS,
    FINISH,
    GEOMETRY,
    LR_END,
    Advice,
    advise,
    average_for,
    clip_norm,
    gradient_norms,
)
from halfsilver.study.arena import rows_at
from halfsilver.study.jobs import Tell
from halfsilver.study.method import PUBLIC, Method
from halfsilver.study.problem import Problem, Recipe, Setting
from halfsilver.study.start import load_start, make_start, new_model

NAME = "advised"
_SHARE_OF_USERS = 0.3  # held out
SEED = 0  # of the start that is looked at, which is that of the study's first runs


@dataclass(frozen=True, kw_only=True)
class Advised:
    """What a study needs of an advice."""

    recipe: Recipe
    methods: tuple[Method, ...]
    settings: dict[str, Setting]


def advise_problem(
    problem: Problem, recipe: Recipe, *, epsilon: float, delta: float, start: Path, seed: int = SEED, tell: Tell
) -> Advice:
    """Advice for a problem, from the public rows that the pretraining of `recipe` holds out, or from held-out users.

    Pretraining writes to `start`, unless it has done so before. The number of epochs is that of the recipe.
    """
    public, held_out = parts(problem, recipe, seed)
    if not start.exists():
        tell("pretraining")
    make_start(starting(problem), recipe, seed, start)
    model = new_model(problem, seed)
    load_start(model, start)
    return advise(
        model,
        problem.loss_fn,
        public,
        held_out,
        population=problem.population,
        epsilon=epsilon,
        delta=delta,
        epochs=recipe.steps(problem.population) * min(recipe.batch_size, problem.population) / problem.population,
        metrics=problem.metrics,
        local=recipe.local and replace(recipe.local, max_examples=recipe.public_examples or recipe.local.max_examples),
        tell=tell,
    )


def starting(problem: Problem) -> Problem:
    """The problem whose public rows train the start: where records are users, without the held-out ones."""
    if problem.public_users is None:
        return problem
    users = list(problem.public_users[: -_held_out_users(problem)])
    return replace(problem, public=pooled(users), public_users=users)


def _held_out_users(problem: Problem) -> int:
    users = len(problem.public_users or ())
    count = max(FEWEST_USERS, round(_SHARE_OF_USERS * users))
    hint = "Advice needs public users that the start has not seen, and others for the start."
    require(count < users, "number of public users", users, f"more than {FEWEST_USERS}", hint)
    return count


def parts(problem: Problem, recipe: Recipe, seed: int) -> tuple[Any, Any]:
    """The public rows or users that pretraining uses, and those that it holds out."""
    if problem.public_users is not None:
        count = _held_out_users(problem)
        return problem.public_users[:-count], problem.public_users[-count:]
    share, why = recipe.pretrain.holdout, "Advice needs public rows that the start has not seen."
    require(share > 0, "pretrain.holdout of the recipe", share, "above 0", why)
    rows = len(PublicRows(problem.public))
    train, held_out = held_out_rows(rows, share, seed)
    hint = f"Give more public rows than {rows}, or a recipe whose pretrain.holdout is above {share:.3g}. {why}"
    require(
        len(held_out) >= FEWEST_HELD_OUT, "held-out public rows", len(held_out), f"at least {FEWEST_HELD_OUT}", hint
    )
    return rows_at(problem.public, train), rows_at(problem.public, held_out)


def held_out_share(rows: int) -> float:
    """The share of public rows to hold out for advice: a third of few rows, 400 of more, and a tenth of many.

    >>> [round(rows * held_out_share(rows)) for rows in (150, 3000, 10_000)]
    [50, 400, 1000]
    """
    return max(0.1, min(1 / 3, 400 / rows))


def public_clip_norm(problem: Problem, recipe: Recipe, *, folder: Path, tell: Tell) -> float:
    """The third quartile of gradient norms of the public rows that the start of a study in `folder` has not seen.

    It is kept there for when the study is resumed. 1 where the start has no gradient left on three rows in four.
    """
    file = folder / "clip.json"
    if not file.exists():
        start = folder / "start" / f"seed-{SEED}.safetensors"
        if not start.exists():
            tell("pretraining")
        make_start(problem, recipe, SEED, start)
        model = new_model(problem, SEED)
        load_start(model, start)
        seen, held_out = held_out_rows(len(PublicRows(problem.public)), recipe.pretrain.holdout, SEED)
        rows = rows_at(problem.public, held_out if len(held_out) else seen)  # of fewer than six rows none is held out
        norms, _ = gradient_norms(model, problem.loss_fn, PublicRows(rows))
        found = clip_norm(norms, finish=None) or 1.0
        tell(f"clip norm {found:.3g}, from {len(norms)} held-out public rows")
        write_json(file, {"max_grad_norm": float(f"{found:.3g}"), "rows": len(norms)})
    return float(read_json(file)["max_grad_norm"])


def advised_study(
    problem: Problem, recipe: Recipe, *, epsilon: float, delta: float, folder: Path, tell: Tell
) -> Advised:
    """Recipe, methods and settings of the study "auto" in `folder`, where the advice is kept for when it is resumed."""
    if recipe.local is not None:
        raise ConfigError(
            "Expected a task whose records are examples. For users, ask hs.advise(local=...), hold the same public "
            "users out of pretraining, and train with advice.trainer(...)."
        )
    file = folder / "advice.json"
    if not file.exists():
        start = folder / "start" / f"seed-{SEED}.safetensors"
        advice = advise_problem(problem, recipe, epsilon=epsilon, delta=delta, start=start, tell=tell)
        tell(str(advice))
        write_json(file, advice.to_json())
    kept = read_json(file)
    plan = kept["plan"]
    size = round(plan["expected_batch_size"])
    method = Method(
        name=NAME,
        geometry=None if kept["geometry"] is None else GEOMETRY,
        finish=None if kept["finish"] is None else FINISH,
        learning_rates=(kept["learning_rate"],),
        description="as advised from public rows",
    )
    return Advised(
        recipe=replace(
            recipe,
            name=f"{recipe.name}, advised",
            batch_size=size,
            epochs=plan["steps"] * size / problem.population,
            rounds=None,
            max_grad_norm=plan["max_grad_norm"],
            cold_max_grad_norm=None,
            clip_released=False,
            average=average_for(plan["steps"]),
            lr_end=LR_END,
            optimizer=kept["optimizer"],
            momentum=None,
        ),
        methods=(PUBLIC, method),
        settings={NAME: Setting(kept["learning_rate"])},
    )
