"""Recipes of the benchmark tasks: TOML files in this folder, TASK-NAME.toml.

A file has a table [recipe] with the fields of `Recipe` and, in tables of their own, of `Pretrain`, `Grid` and, where
users train themselves, `LocalTraining`; and beside it, all optional: epsilon, delta, [task] (options of the task) and
[paper] (what the paper reports for it). Where alpha ends may be given as `alpha_end`, or as `alpha_K`: the paper's K,
in epochs, of cos(pi t / 2K).
"""

from __future__ import annotations

import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib.resources import files
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from halfsilver._core.local_training import LocalTraining
from halfsilver.errors import ConfigError
from halfsilver.study.problem import Grid, Pretrain, Recipe

__all__ = ["load", "names", "parse"]

T = TypeVar("T", Recipe, Pretrain, Grid, LocalTraining)

MORE: Mapping[str, type] = {"epsilon": float, "delta": float, "task": dict, "paper": dict}


def names(task: str) -> tuple[str, ...]:
    """The recipes of a task, in the order of the alphabet."""
    found = (entry.name for entry in files(__name__).iterdir())
    prefix, suffix = f"{task}-", ".toml"
    return tuple(sorted(n[len(prefix) : -len(suffix)] for n in found if n.startswith(prefix) and n.endswith(suffix)))


def load(task: str, name: str) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and what else its file holds: epsilon, delta, options of the task, the paper's figures."""
    if name not in names(task):
        raise ConfigError(f"Expected recipe={name!r} of task {task!r} in {names(task)}.")
    return parse((files(__name__) / f"{task}-{name}.toml").read_text(encoding="utf-8"), name)


def parse(text: str, name: str) -> tuple[Recipe, dict[str, Any]]:
    """A recipe from the text of its file; `ConfigError` names what is unknown, missing or of the wrong type."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers and nesting without end
        raise ConfigError(f"The recipe {name!r} is not TOML: {error}.") from error
    values = dict(_typed(name, "recipe", table.pop("recipe", None), dict))
    for key, value in table.items():
        if key not in MORE:
            raise ConfigError(f"The recipe {name!r} has an unknown key {key!r}; expected 'recipe' or {tuple(MORE)}.")
        table[key] = _typed(name, key, value, MORE[key])
    grid = _alpha_ends(name, _typed(name, "recipe.grid", values.pop("grid", None), dict), values.get("epochs"))
    pretrain = _typed(name, "recipe.pretrain", values.pop("pretrain", {}), dict)
    made: dict[str, Any] = {
        "grid": _made(name, "recipe.grid.", Grid, grid),
        "pretrain": _made(name, "recipe.pretrain.", Pretrain, pretrain),
    }
    if "local" in values:
        local = _typed(name, "recipe.local", values["local"], dict)
        made["local"] = _made(name, "recipe.local.", LocalTraining, local)
    return _made(name, "recipe.", Recipe, {"name": name, **values, **made}), table


def _alpha_ends(name: str, grid: Mapping[str, Any], epochs: Any) -> dict[str, Any]:
    """The table with `alpha_K`, if it is there, turned into the weights at the end of the run."""
    if "alpha_K" not in grid:
        return dict(grid)
    if "alpha_end" in grid:
        raise ConfigError(f"The recipe {name!r} has both recipe.grid.alpha_end and alpha_K; expected one of them.")
    rest = {key: value for key, value in grid.items() if key != "alpha_K"}
    length = _typed(name, "recipe.epochs", epochs, float)
    spans = _typed(name, "recipe.grid.alpha_K", grid["alpha_K"], tuple[float, ...])
    if not all(k >= length for k in spans):
        raise ConfigError(f"The recipe {name!r} has recipe.grid.alpha_K={spans}; expected at least {length} epochs.")
    return {**rest, "alpha_end": [math.cos(math.pi * length / (2 * k)) for k in spans]}


def _made(name: str, path: str, kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from a table, each value of the type that its field declares."""
    hints, known = get_type_hints(kind), {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known:
            raise ConfigError(f"The recipe {name!r} has an unknown key '{path}{key}'; expected one of {tuple(known)}.")
    for key, field in known.items():
        if key not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"The recipe {name!r} lacks '{path}{key}'.")
    return kind(**{key: _typed(name, f"{path}{key}", value, hints[key]) for key, value in values.items()})


def _typed(name: str, path: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`: whole numbers serve as fractions and arrays as tuples; nothing else is converted."""
    if kind == tuple[float, ...]:
        return tuple(_typed(name, path, v, float) for v in _typed(name, path, value, list))
    allowed = get_args(kind) or (kind,)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool) and abs(value) < sys.float_info.max:
        return float(value)
    plain = tuple(k for k in allowed if isinstance(k, type))
    if isinstance(value, plain) and not (isinstance(value, bool) and bool not in plain):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"The recipe {name!r} has '{path}'={value!r}; expected a finite number.")
        return value
    if value is None:
        raise ConfigError(f"The recipe {name!r} lacks '{path}'.")
    wanted = " or ".join(k.__name__ for k in plain if k is not NoneType)
    raise ConfigError(f"The recipe {name!r} has '{path}'={value!r}; expected {wanted}.")
