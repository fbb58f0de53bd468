"""A progress bar with time left and epsilon spent, where there is a terminal to show it on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[int], None]

_EPSILON_EVERY = 5.0  # seconds; a PLD composition takes a third of one


@contextmanager
def progress_bar(total: int, done: int, spent: Callable[[], float], shown: bool | None) -> Iterator[Update]:
    """Yield a function that is told the number of updates made.

    `shown=None`: only with rich, and on a terminal that somebody looks at; some CI systems give their jobs one as well.
    """
    if shown is False or (shown is None and (not sys.stderr.isatty() or "CI" in os.environ)):
        yield lambda updates: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda updates: None
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("spent so far: epsilon {task.fields[epsilon]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=total, completed=done, epsilon="...")
        yield _updater(lambda n, text: bar.update(task, completed=n, epsilon=text), total, spent)


def _updater(show: Callable[[int, str], None], total: int, spent: Callable[[], float]) -> Update:
    last, text = time.monotonic() - _EPSILON_EVERY + 1, "..."

    def update(updates: int) -> None:
        nonlocal last, text
        if time.monotonic() - last > _EPSILON_EVERY or updates == total:
            last, text = time.monotonic(), f"{spent():.3g}"
        show(updates, text)

    return update


@contextmanager
def telling(tell: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Yield `tell`, or a function that shows its text beside a moving bar and the time that has gone by.

    The bar needs rich and a terminal that somebody looks at; without them the text is dropped.
    """
    if tell is not None or not sys.stderr.isatty() or "CI" in os.environ:
        yield tell or (lambda text: None)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda text: None
        return
    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)
