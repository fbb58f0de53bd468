"""The first Ctrl-C or SIGTERM ends a run between two blocks of steps, with a checkpoint. The second acts at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_log = logging.getLogger("halfsilver")

# Whoever set another handler, or ignores the signal, keeps it.
_DEFAULTS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

TERMINATED = 128 + signal.SIGTERM  # the exit code of a run that SIGTERM ended


@contextmanager
def caught_signal() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of the signal that came, or 0. Only the main thread can catch one.

    A signal for which nobody called `stop` is sent again when the block has ended: it is not lost.
    """
    came = [0]

    def note(number: int, frame: FrameType | None) -> None:
        came[0] = number
        restore()
        _log.warning("%s: the run ends in a moment, with a checkpoint.", signal.Signals(number).name)

    def restore() -> None:
        for number in mine:
            if signal.getsignal(number) is note:
                signal.signal(number, _DEFAULTS[number])

    in_main = threading.current_thread() is threading.main_thread()
    mine = [number for number, usual in _DEFAULTS.items() if in_main and signal.getsignal(number) == usual]
    for number in mine:
        signal.signal(number, note)
    try:
        yield lambda: came[0]
    finally:
        restore()
    if came[0]:
        signal.raise_signal(came[0])


def stop(number: int, step: int, steps: int) -> None:
    """Leave as the signal asks for, after the checkpoint of `step` was written."""
    _log.warning("Stopped after step %d of %d. Call fit again with the same run_dir, and it resumes.", step, steps)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
