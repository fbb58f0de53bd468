"""A contender in a process of its own, so that what one library does to its process changes nobody else's time.

halfsilver, for example, keeps freed memory, which would make plain PyTorch in the same process faster as well.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

import torch

from benchmarks.speed.contenders import Contender, Named
from benchmarks.speed.timing import Sample, sample, warm_up

_CLOSING_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a contender did before the first timed step. `error` is None where it clips nothing."""

    seconds: float
    error: float | None
    detail: str


@dataclass(frozen=True)
class Apart:
    """A contender that waits in another process."""

    ready: Ready
    _connection: Connection

    def take(self, steps: int) -> Sample:
        """Time so many steps of it, while this process waits."""
        self._connection.send(steps)
        taken: Sample = self._connection.recv()
        return taken


@contextmanager
def apart(build: Callable[[], Contender], error: Callable[[Named], float], threads: int) -> Iterator[Apart | str]:
    """The contender that `build` makes; why it cannot run, as a text, where it fails.

    The process is forked, so this one must not have started threads: PyTorch has none as long as it computes with one.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(here, there, build, error, threads), daemon=True)
    process.start()
    there.close()
    try:
        yield _answer(here, process)
    finally:
        here.close()  # the other process ends when it reads that
        process.join(_CLOSING_SECONDS)
        process.kill()


def _answer(connection: Connection, process: ForkProcess) -> Apart | str:
    try:
        found: Ready | str = connection.recv()
    except EOFError:
        process.join(_CLOSING_SECONDS)
        return f"the process ended with exit code {process.exitcode}"
    return found if isinstance(found, str) else Apart(found, connection)


def _serve(
    other_end: Connection,
    connection: Connection,
    build: Callable[[], Contender],
    error: Callable[[Named], float],
    threads: int,
) -> None:
    other_end.close()
    torch.set_num_threads(threads)
    try:
        contender = build()
        found, seconds = warm_up(contender)
    except Exception as problem:  # whatever a rival raises: the row says so
        connection.send(f"{type(problem).__name__}: {problem}"[:400])
        return
    connection.send(Ready(seconds=seconds, error=None if found is None else error(found), detail=contender.detail))
    while True:
        try:
            steps = connection.recv()
        except EOFError:
            return
        gc.collect()
        connection.send(sample(contender, steps))
