"""Benchmarks: one short file each.

`TASKS` holds, by name, the functions that make a task's `Problem` from the folder of data sets. Nothing is imported or
read until one of them is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfsilver.study.problem import Problem

__all__ = ["TASKS"]


def _task(name: str) -> Callable[..., Problem]:
    def problem(data: Path, **options: Any) -> Problem:
        made: Problem = import_module(f"halfsilver.tasks.{name}").problem(data, **options)
        return made

    return problem


_NAMES = ("emnist", "cifar10", "wikitext2", "stackexchange")
TASKS: Mapping[str, Callable[..., Problem]] = {name: _task(name) for name in _NAMES}
