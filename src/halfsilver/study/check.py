"""Checks before a study begins or is resumed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from halfsilver._core.tensors import trainable
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.finish import FEWEST_ROWS
from halfsilver.mirror.rows import PublicRows
from halfsilver.study.arena import MIRROR_SHARE, NO_VALIDATION, SearchMode
from halfsilver.study.method import Method
from halfsilver.study.problem import Problem, Recipe
from halfsilver.study.start import new_model


def require_usable(
    problem: Problem,
    recipe: Recipe,
    search: SearchMode,
    methods: Iterable[Method] = (),
    searched: Container[Method] = (),
) -> None:
    """Find the likely mistakes before anything is trained. `searched` are the methods whose settings are not given."""
    for method in methods:
        if method.finish is not None:
            share = MIRROR_SHARE if search == "public search" and method in searched else 1.0
            _require_held_out(method, problem, recipe, share)
    metrics = {"loss": problem.loss_fn, **problem.metrics}
    require(recipe.score in metrics, "score", recipe.score, f"to be one of {tuple(metrics)}")
    if search == "paper search" and problem.validation is None:
        raise ConfigError(NO_VALIDATION)
    model, rows = new_model(problem, 0), torch.arange(min(2, len(PublicRows(problem.public))))
    for name, fn in metrics.items():
        shape = tuple(fn(model, PublicRows(problem.public).batch(rows, trainable(model)[0].device)).shape)
        require(shape == (len(rows),), f"shape of {name} on {len(rows)} rows", shape, "to be one value per example")


def _require_held_out(method: Method, problem: Problem, recipe: Recipe, share: float) -> None:
    """Before a private step is taken: too few rows would be found out only when the trained model is finished."""
    if problem.public_users is not None:
        raise ConfigError(f"The method {method.name} has a finish, which is for examples. Leave it out for users.")
    rows = round(recipe.pretrain.holdout * round(share * len(PublicRows(problem.public))))
    name = f"number of public rows that pretraining holds out for the method {method.name}"
    advice = "A finish needs rows that the start has not seen: raise pretrain.holdout of the recipe."
    require(rows >= FEWEST_ROWS, name, rows, f"at least {FEWEST_ROWS}", advice)


def sizes(problem: Problem) -> dict[str, Any]:
    """Public numbers by which other data, or another model, are noticed."""
    parameters = sum(p.numel() for p in trainable(new_model(problem, 0)))
    rows = {name: len(PublicRows(data)) for name, data in (("public", problem.public), ("test", problem.test))}
    return {"population": problem.population, "rows": rows, "parameters": parameters}


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to resume a study of which something has changed."""
    for name, value in now.items():
        if _given(before.get(name)) != _given(value):
            was, is_now = _apart(before.get(name), value)
            raise ConfigError(
                f"Expected {name} of the study in {folder} to be unchanged: it was {was!r} and is now {is_now!r}. Use "
                "another folder for another study."
            )


def _given(value: Any) -> Any:
    """Without what is None: a recipe of an older version lacks the fields that have come since."""
    return {k: _given(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _apart(a: Any, b: Any) -> tuple[Any, Any]:
    """Of two dicts only what differs."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return a, b
    names = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
    return {n: a.get(n) for n in names}, {n: b.get(n) for n in names}
