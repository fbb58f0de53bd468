"""Independent jobs over worker processes of one thread each; with one worker, here and now."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from halfsilver._core import system
from halfsilver.errors import require

Work = TypeVar("Work")
Tell = Callable[[str], None]
Pool = ProcessPoolExecutor | None  # None: no further process


@contextmanager
def workers(count: int) -> Iterator[Pool]:
    """`count` processes, which end when this one does, killed or not; none for a count of 1."""
    require(count >= 1, "workers", count, "at least 1")
    if count == 1:
        yield None
        return
    context = get_context("spawn")  # a fork would copy locks and threads of torch
    with ProcessPoolExecutor(count, mp_context=context, initializer=_prepare, initargs=(os.getpid(),)) as pool:
        yield pool


def _prepare(parent: int) -> None:
    system.end_with_parent(parent)
    system.keep_freed_memory()
    import torch

    torch.set_num_threads(1)


def do_all(pool: Pool, execute: Callable[[Work], str], jobs: Sequence[Work], tell: Tell) -> None:
    """Run all jobs, in this order as far as there are workers; the first error ends it."""
    started = time.monotonic()
    for done, text in enumerate(_finished(pool, execute, jobs), 1):
        tell(f"{text} ({done} of {len(jobs)}, {time.monotonic() - started:.0f} s)")


def _finished(pool: Pool, execute: Callable[[Work], str], jobs: Sequence[Work]) -> Iterable[str]:
    if pool is None:
        yield from (execute(job) for job in jobs)
        return
    futures = [pool.submit(execute, job) for job in jobs]
    try:
        yield from (future.result() for future in as_completed(futures))
    finally:
        for future in futures:
            future.cancel()
