"""The JSON schema of a recipe file, made from the dataclasses that it is read into, for editors that check TOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from halfsilver.study.problem import Recipe
from halfsilver.tasks.recipes import MORE

_KINDS: Mapping[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    dict: {"type": "object"},
    tuple[float, ...]: {"type": "array", "items": {"type": "number"}},
}


def recipe_schema() -> dict[str, Any]:
    """Names, types, defaults, and what must be there. Ranges are checked when a recipe is read."""
    recipe = _of(Recipe)
    del recipe["properties"]["name"]  # the file's own
    recipe["required"].remove("name")
    grid = recipe["properties"]["grid"]  # where alpha ends may be given as the paper's K
    grid["properties"]["alpha_K"] = grid["properties"]["alpha_end"]
    grid["not"] = {"required": ["alpha_end", "alpha_K"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "halfsilver recipe",
        "type": "object",
        "additionalProperties": False,
        "required": ["recipe"],
        "properties": {"recipe": recipe, **{name: _of(kind) for name, kind in MORE.items()}},
    }


def _of(kind: Any) -> dict[str, Any]:
    """Of a field's type. An optional value is one that is left out: TOML has no null."""
    if not is_dataclass(kind):
        (own,) = {k for k in (get_args(kind) if kind not in _KINDS else (kind,)) if k is not NoneType}
        return dict(_KINDS[own]) if own in _KINDS else _of(own)
    hints = get_type_hints(kind)
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING],
        "properties": {f.name: _of(hints[f.name]) | _default(f) for f in fields(kind)},
    }


def _default(f: Field[Any]) -> dict[str, Any]:
    if f.default in (MISSING, None):
        return {}
    return {"default": list(f.default) if isinstance(f.default, tuple) else f.default}
