"""Requests out, replies in, with a bounded wait and bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

_MOST_AT_ONCE = 16  # replies in memory
_THREADS = 256  # more than may ever be stuck: see `exchange`
_TRIES = 5

T = TypeVar("T")

Came = Queue[Message | None]  # None: one request is settled


def patiently(call: Callable[[], T], pause: float) -> T:
    """The value of `call`, if need be at the fifth attempt: a busy link answers now and then with an error."""
    for _ in range(_TRIES - 1):
        try:
            return call()
        except Exception:
            time.sleep(pause)
    return call()


def exchange(grid: Grid, messages: Sequence[Message], *, seconds: float, poll: float) -> Iterator[Message]:
    """Yield replies as they arrive, until all are there or `seconds` have passed.

    Replies are pulled one by one, because the link hands a reply out once. With several in one call, an unreadable one
    would lose the others, and all of them would be in memory together. Each is pulled on a thread of its own, because a
    node that announces a reply and does not send it blocks the pull for minutes. A pull that fails is a missing reply.
    If the link is gone for good, the next round detects it.
    """
    until = time.monotonic() + seconds
    numbers = [i for i in patiently(lambda: grid.push_messages(messages), poll) if i] if messages else []
    waiting, came, over = SimpleQueue[tuple[str, int]](), Came(maxsize=_MOST_AT_ONCE), Event()
    for number in numbers:
        waiting.put((number, _TRIES))
    for _ in range(min(_THREADS, len(numbers))):
        Thread(target=_pull, args=(grid, waiting, came, over, poll), daemon=True).start()
    try:
        yield from _until(came, len(numbers), until)
    finally:
        over.set()


def _until(came: Came, count: int, until: float) -> Iterator[Message]:
    while count:
        try:
            reply = came.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return
        if reply is None:
            count -= 1
        else:
            yield reply


def _pull(grid: Grid, waiting: SimpleQueue[tuple[str, int]], came: Came, over: Event, poll: float) -> None:
    """Ask for one reply after the other, around and around, until the round is over."""
    while not over.is_set():
        try:
            number, tries = waiting.get(timeout=poll)
        except Empty:
            continue
        try:
            replies = list(grid.pull_messages([number]))
        except Exception:  # the link is busy, or the reply cannot be read
            replies, tries = [], tries - 1
        if replies or not tries:
            _hand_over([*replies, None], came, over, poll)
        else:
            waiting.put((number, tries))
            over.wait(poll)


def _hand_over(items: Sequence[Message | None], came: Came, over: Event, poll: float) -> None:
    """Put the items as soon as there is room, but not after the round is over, when nobody takes them."""
    for item in items:
        while not over.is_set():
            with suppress(Full):
                came.put(item, timeout=poll)
                break
