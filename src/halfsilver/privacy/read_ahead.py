"""Records of a data set, read by worker processes while the model computes."""

from __future__ import annotations

import os
import signal
import weakref
from array import array
from collections import deque
from collections.abc import Generator, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfsilver._core import system
from halfsilver._core.forks import BESIDE_THREADS, Fork, shared
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, batch_leaves, batch_rows
from halfsilver._core.warning_filters import warning_filters
from halfsilver.errors import ConfigError, require
from halfsilver.privacy.records import Indices, Records
from halfsilver.privacy.schema import Schema

_BUFFERS = 2  # of each worker: one holds the piece that is wanted, the other the one after it
_SECONDS = 0.1  # between two looks whether a process that does not answer is alive


@final
class ReadAhead:
    """Records of `source`, read by forked workers: each reads its share of a piece, and then of the one after it.

    Guarantee: the rows are those that `source` gives, in the same order. What a record sets off stays in the process
    that reads it. A record that kills that process is left out like any other that cannot be read, and no other record
    is lost with it. A worker never reads a record itself, but has a process for it that it replaces. So a worker that
    is gone is no record's doing, and is an error.

    Rows come back through memory that the processes share, in the form that the schema says, and of an answer only a
    number is read. So nothing that was made of a record is unpickled. All see the data set as it was at the start.
    Workers end by `close`, with this object, or with the process.
    """

    def __init__(self, source: Records, workers: int) -> None:
        self._source, self._count = source, workers
        self._workers: list[_Worker] = []
        self._owner = os.getpid()
        self._schema: Schema | None = None
        self._rows = 0
        self._read: object = None
        self._gone = False
        self._ends = weakref.finalize(self, _end_all, self._workers, os.getpid())

    @property
    def fixed_shape(self) -> bool:
        return self._source.fixed_shape

    @property
    def dataset(self) -> Any:
        return getattr(self._source, "dataset", None)

    def size(self) -> int:
        return self._source.size()

    def schema(self) -> Schema | None:
        return self._source.schema()

    def problem(self, index: int, schema: Schema) -> str:
        return self._source.problem(index, schema)

    def start(self, schema: Schema, rows: int) -> None:
        """Start the workers, for pieces of at most so many rows, unless they serve already. No record is read."""
        if os.getpid() != self._owner:  # a fork of the process that started them, which alone may talk to them
            self._workers.clear()
            self._owner = os.getpid()
        idle = not any(worker.asked for worker in self._workers)
        if self._workers and idle and schema is self._schema and rows <= self._rows:
            return
        self.close()
        devices = sorted({like.device.type for like in schema.leaves} - {"cpu"})
        require(not devices, "example on", devices, "to be on the CPU", "Workers cannot use a GPU.")
        self._schema, self._rows = schema, rows
        try:
            for _ in range(self._count):
                self._workers.append(_Worker(self._source, schema, -(-rows // self._count)))
            waited = [worker.is_ready() for worker in self._workers]
            ready = all(waited)
        except (OSError, AssertionError):  # of processes that may not fork
            ready = False
        if not ready:
            self.close()
            self._gone = True
            self.require_readers()
        self._gone = False

    def require_readers(self) -> None:
        """Raise if a worker could not be started, or is gone."""
        if self._gone:
            raise ConfigError(
                "A process that reads private rows could not be started, or was ended from outside. See whether memory "
                "and processes are short, or give PrivateData no workers."
            )

    def fetch(self, indices: Indices, schema: Schema) -> Batch:
        rows = indices.stop - indices.start if isinstance(indices, slice) else len(indices)
        (batch,) = self.fetch_all([indices], schema, rows)
        return batch

    def fetch_all(self, pieces: Iterable[Indices], schema: Schema, rows: int) -> Generator[Batch]:
        """The rows of each of `pieces`, which have at most so many, in turn. A later read ends this one."""
        self.start(schema, rows)
        read = self._read = object()
        try:
            for number, indices in enumerate(pieces):
                self._ask(indices, number % _BUFFERS)
                if number:
                    yield self._take(schema)
            if self._workers[0].asked:
                yield self._take(schema)
        finally:
            # A worker in the middle of something would answer at the next read.
            if self._read is read and any(worker.asked for worker in self._workers):
                self.close()

    def close(self) -> None:
        """End the workers. A later read starts new ones."""
        _end_all(self._workers, self._owner)

    def _ask(self, indices: Indices, buffer: int) -> None:
        if isinstance(indices, slice):
            indices = torch.arange(indices.start, indices.stop, device="cpu")
        for worker, share in zip(self._workers, indices.tensor_split(self._count), strict=True):
            worker.ask(share.tolist(), buffer)

    def _take(self, schema: Schema) -> Batch:
        shares = [worker.take() for worker in self._workers]
        whole = [share for share in shares if share is not None]
        if len(whole) < len(shares):
            self.close()
            self._gone = True
            self.require_readers()
        return pytree.tree_unflatten([torch.cat(columns) for columns in zip(*whole, strict=True)], schema.structure)


class _Worker:
    """A worker, what it was asked for, and the memory in which its rows come."""

    def __init__(self, source: Records, schema: Schema, rows: int) -> None:
        self._source, self._schema = source, schema
        self._buffers = [
            [shared(like.expand(max(1, rows), *like.shape)) for like in schema.leaves] for _ in range(_BUFFERS)
        ]
        self.asked: deque[int] = deque()
        self._fork = Fork(self._serve)

    def is_ready(self) -> bool:
        return self._fork.is_ready()

    def ask(self, rows: list[int], buffer: int) -> None:
        seed = int(torch.randint(2**62, (), device="cpu"))  # of the private step, for data sets that draw
        self.asked.append(buffer)
        self._fork.send(array("q", [buffer, seed, *rows]).tobytes())

    def take(self) -> list[Tensor] | None:
        """The columns of the rows that were asked for first; None if the worker is gone."""
        buffer, answer = self.asked.popleft(), self._fork.answer()
        return None if answer is None else [column[: array("q", answer)[0]] for column in self._buffers[buffer]]

    def end(self) -> None:
        self._fork.end()

    # ---- in the worker

    def _serve(self, connection: Connection) -> None:
        reader: _Reader | None = None
        while True:
            buffer, seed, *rows = array("q", connection.recv_bytes())
            reader = reader or _Reader(self._read)
            count = reader.read(buffer, 0, seed, rows) if rows else 0
            if count is None:
                reader.end()
                reader, count = None, self._apart(buffer, 0, seed, rows)
            connection.send_bytes(array("q", [count]).tobytes())

    def _apart(self, buffer: int, start: int, seed: int, rows: list[int]) -> int:
        """Read by processes that read nothing else: all rows, else each half by itself, until one row is left out."""
        reader = _Reader(self._read)
        count = reader.read(buffer, start, seed, rows)
        reader.end()
        if count is not None or len(rows) == 1:
            return count or 0
        half = len(rows) // 2
        first = self._apart(buffer, start, seed, rows[:half])
        return first + self._apart(buffer, start + first, seed + half, rows[half:])

    # ---- in its reader

    def _read(self, connection: Connection) -> None:
        process = os.getpid()
        while True:
            buffer, start, seed, *rows = array("q", connection.recv_bytes())
            with own_randomness(seed):
                wanted = torch.tensor(rows, dtype=torch.int64, device="cpu")
                batch = self._source.fetch(wanted, self._schema)
            if os.getpid() != process:  # a record has forked
                return
            for column, found in zip(self._buffers[buffer], batch_leaves(batch), strict=True):
                column[start : start + len(found)] = found
            connection.send_bytes(array("q", [batch_rows(batch)]).tobytes())


class _Reader:
    """A process that reads, forked by a worker. By `os.fork`, because multiprocessing has no children of children."""

    def __init__(self, work: Any) -> None:
        self._connection, theirs = Pipe()
        worker = os.getpid()
        with warning_filters(BESIDE_THREADS):
            self._process = os.fork()
        if not self._process:
            try:
                self._connection.close()
                system.end_with_parent(worker)
                system.own_file_offsets()
                work(theirs)
            finally:
                os._exit(1)
        theirs.close()
        self._ended = False

    def read(self, buffer: int, start: int, seed: int, rows: list[int]) -> int | None:
        """Read these rows to a place in the shared memory. How many there are; None if the process has died."""
        try:
            self._connection.send_bytes(array("q", [buffer, start, seed, *rows]).tobytes())
            while not self._connection.poll(_SECONDS):
                # Not only by the pipe, which a process that a record has started may hold open.
                if self._has_ended() and not self._connection.poll(0):
                    return None
            return array("q", self._connection.recv_bytes())[0]
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        if not self._has_ended():
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        self._connection.close()

    def _has_ended(self) -> bool:
        self._ended = self._ended or os.waitpid(self._process, os.WNOHANG)[0] != 0
        return self._ended


def _end_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # and not in a forked copy of the owner
        for worker in workers:
            worker.end()
        workers.clear()
