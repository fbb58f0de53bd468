"""One change of the library's code while a block runs, with a count of its calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Change:
    """`name` of `owner` becomes `instead`, which is given the real one and then the arguments of the call."""

    owner: Any
    name: str
    instead: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.owner.__name__.removeprefix('halfsilver.')}.{self.name}"


@contextmanager
def in_force(changes: Sequence[Change]) -> Iterator[Callable[[], dict[str, int]]]:
    """The library with these changes; yields how often each has been called, in this and in forked processes."""
    with ExitStack() as stack:
        counts = {str(change): stack.enter_context(_made(change)) for change in changes}
        yield lambda: {name: int(count.value) for name, count in counts.items()}


@contextmanager
def _made(change: Change) -> Iterator[Any]:
    real, count = getattr(change.owner, change.name), get_context("fork").Value("q", 0)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        with count.get_lock():
            count.value += 1
        return change.instead(real, *args, **kwargs)

    with mock.patch.object(change.owner, change.name, call):
        yield count
