"""An onlooker's notes of a run: the bank after every update, and which canary records were read for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from halfsilver._core.tensors import Batch, Tensors, batch_rows, take_rows
from halfsilver.auditing.observe import Array
from halfsilver.errors import ConfigError
from halfsilver.mirror import Bregman, Chain, Clock, DualAveraging, Euclidean, FirstOrder, MirrorMap, Quadratic
from halfsilver.mirror.base import ClipReleased
from halfsilver.mirror.schedules import weight_at
from halfsilver.privacy.schema import Schema


@final
class Watch:
    """Notes the bank, and digests of all else that the model holds, after every step inside `watching`.

    `rest` are the trained parameters beside the bank. Of `model`, all that is not trained is noted as well: frozen
    parameters, buffers and the modes of its modules, which nothing in a run may change.
    """

    def __init__(
        self,
        order: Array,
        canaries: int,
        bank: Callable[[Optimizer], Array],
        rest: Tensors,
        model: nn.Module | None = None,
    ) -> None:
        self.order, self._canaries, self._bank, self._rest, self._model = order, canaries, bank, rest, model
        self._reads: list[Array] = []
        self._digest, self._fixed = hashlib.sha256(), hashlib.sha256()
        self.numbers: list[Array] = []
        self.read_for: list[Array] = []

    def read(self, indices: Any) -> None:
        """These records of the data are being read."""
        numbers = self.order[indices if isinstance(indices, slice) else np.asarray(indices)]
        self._reads.append(np.bincount(numbers[numbers >= 0], minlength=self._canaries))

    def forget_first(self) -> None:
        """Several processes compare some records, once, before the first step: those are not read for a step."""
        self.read_for[0] = self.read_for[0] - self._first

    def updated(self, optimizer: Optimizer) -> None:
        if not self.read_for:
            self._first = self._reads[0] if self._reads else 0
        self.numbers.append(self._bank(optimizer))
        self.read_for.append(sum(self._reads, np.zeros(self._canaries, dtype=np.int64)))
        self._reads.clear()
        for p in self._rest:
            self._digest.update(_bytes(p))
        for module in self._model.modules() if self._model is not None else ():
            held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            self._fixed.update(repr(module.training).encode())
            for t in (t for t in held if not t.requires_grad):
                self._fixed.update(_bytes(t))

    @property
    def rest(self) -> str:
        return self._digest.hexdigest()

    @property
    def fixed(self) -> str:
        return self._fixed.hexdigest()

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._reads.clear()  # of who looked at the data while setting up
        hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self.updated(optimizer))
        try:
            yield
        finally:
            hook.remove()


def _bytes(t: torch.Tensor) -> bytes:
    found: bytes = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


@final
class WatchedRecords:
    """Records in tensors, for `PrivateData.of`, that tell a `Watch` which of them are read."""

    fixed_shape: ClassVar[bool] = True

    def __init__(self, columns: Batch, watch: Watch, example: Any) -> None:
        self._columns, self._watch, self.example = columns, watch, example

    def size(self) -> int:
        return batch_rows(self._columns)

    @property
    def canaries(self) -> Array:
        """The number of each record among the canaries; -1 for a row of the data."""
        return self._watch.order

    def schema(self) -> Schema:
        return Schema.of_record(self.example)

    def fetch(self, indices: torch.Tensor | slice, schema: Schema) -> Batch:
        self._watch.read(indices)
        return take_rows(self._columns, indices)

    def rows(self, user: int, limit: int) -> Batch:
        """The same for `PrivateUsers`: every user has one record."""
        return self.fetch(slice(user, user + 1), self.schema())

    def problem(self, index: int, schema: Schema) -> str:
        return ""


def require_readable(mirror: MirrorMap, clock: Clock) -> None:
    """Refuse, before anything is run, a map behind which the released values cannot be told.

    The norm of what was released is known for all of a step, so a map that clips must come first.
    """
    if isinstance(mirror, Chain) and any(isinstance(m, ClipReleased | Chain) for m in mirror.maps[1:]):
        raise _unreadable(mirror)
    for step in range(clock.total_steps):
        _before(mirror, np.zeros(1), np.zeros(1), 1.0, 1.0, replace(clock, step=step))


def released(
    mirror: MirrorMap, banks: Sequence[Array], *, lr: float, curvature: float, norms: Sequence[float], clock: Clock
) -> Array:
    """What the mechanism must have released at the bank, [T, 2, width], for plain SGD to go through these values.

    The inverse of the map at numbers whose public loss is curvature / 2 times their square, by formulas of its own: a
    map that let private data through would show here.
    """
    pairs = enumerate(zip(banks[:-1], banks[1:], norms, strict=True))
    return np.stack(
        [_before(mirror, (a - b) / lr, a, curvature, norm, replace(clock, step=t)) for t, (a, b, norm) in pairs]
    )


def _before(mirror: MirrorMap, moved: Array, bank: Array, curvature: float, norm: float, clock: Clock) -> Array:
    """The released values behind one direction `moved`, taken at `bank`; `norm` is that of all released values."""
    match mirror:
        case Euclidean():
            return moved
        case FirstOrder(alpha=alpha):
            weight = weight_at(alpha, clock)
            if weight == 0:  # nothing that is released gets through
                raise _unreadable(mirror)
            return (moved - (1 - weight) * curvature * bank) / weight
        case Quadratic(normalize=False, hessian=None) | Bregman(constraint=None) | DualAveraging(constraint=None):
            return (curvature + mirror.damping) * moved
        case ClipReleased(max_norm=limit):
            return moved * max(1.0, norm / limit)
        case Chain(maps=maps):
            for inner in reversed(maps):
                moved = _before(inner, moved, bank, curvature, norm, clock)
            return moved
    raise _unreadable(mirror)


def _unreadable(mirror: MirrorMap) -> ConfigError:
    return ConfigError(
        f"The audit cannot read released values behind mirror={mirror!r}. Give the trainer Euclidean(): what a map "
        "does is free, and the mechanism before it is the same."
    )
