"""A task by name, opened in whichever process needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from halfsilver.study.problem import Problem
from halfsilver.tasks import TASKS


@dataclass(frozen=True)
class TaskSource:
    """Opens a task's problem; unlike the problem itself, it can be sent to a worker process."""

    task: str
    data: str
    options: str  # JSON, so that the source can be the key of a cache

    @classmethod
    def of(cls, task: str, data: Path, options: Mapping[str, Any]) -> TaskSource:
        return cls(task, str(data), json.dumps(dict(options), sort_keys=True))

    def __call__(self) -> Problem:
        return _opened(self)


@lru_cache(maxsize=1)  # a process works on one study
def _opened(source: TaskSource) -> Problem:
    return TASKS[source.task](Path(source.data), **json.loads(source.options))
