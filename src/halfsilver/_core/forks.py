"""Worker processes that are forked: they have what this process has, and nothing has to be serialised."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable
from mmap import mmap
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import final

import torch
from torch import Tensor

from halfsilver._core import system
from halfsilver._core.warning_filters import warning_filter, warning_filters

START_SECONDS = 60.0
# Newer Pythons warn of a fork beside threads; `Fork.is_ready` is the answer.
BESIDE_THREADS = warning_filter("ignore", ".*multi-threaded, use of fork", DeprecationWarning)


@final
class Fork:
    """A forked copy of this process that does `work` until it is killed, and our end of the pipe to it.

    Says nothing: an error could tell of private rows. A fork does not copy torch's threads, and a parallel region would
    wait for them forever, so it uses one thread. It ends with this process, also if that is killed.
    """

    def __init__(self, work: Callable[[Connection], None], prepare: Callable[[], None] = lambda: None) -> None:
        self.connection, theirs = Pipe()
        arguments = (work, prepare, theirs, os.getpid())
        self._process = get_context("fork").Process(target=_run, args=arguments, daemon=True)
        with warning_filters(BESIDE_THREADS):
            self._process.start()
        theirs.close()  # else its end of the pipe would stay open when it dies

    def is_ready(self) -> bool:
        """Wait until it has started and done what it had to prepare. If it cannot, it is ended."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll(START_SECONDS):
                self.connection.recv_bytes()
                return True
        self.end()
        return False

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it is dead, which whoever waits for an answer finds
            self.connection.send_bytes(message)

    def answer(self) -> bytes | None:
        """Its next answer; None if it has died before."""
        try:
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        self._process.kill()  # it has nothing to put in order
        self._process.join()
        self.connection.close()


def shared(like: Tensor) -> Tensor:
    """Zeros in memory that forks share. It has no name, so nothing is left of it, however the processes end."""
    size = like.numel()
    memory = torch.frombuffer(mmap(-1, max(1, size) * like.element_size()), dtype=like.dtype)
    return memory[:size].view(like.shape)


def _run(work: Callable[[Connection], None], prepare: Callable[[], None], connection: Connection, parent: int) -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked to stop, and sees to the workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        system.end_with_parent(parent)
        faulthandler.disable()  # it would tell of a row that ends the process
        torch.set_num_threads(1)
        prepare()
        connection.send_bytes(b"ready")
        work(connection)
    except BaseException:
        os._exit(1)
