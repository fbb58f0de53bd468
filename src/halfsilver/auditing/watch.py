"""An onlooker's notes of a run: the bank after every update, the records read for it, and what the map was given."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from halfsilver._core.tensors import Batch, Tensors, axpy, batch_rows, norm, take_rows
from halfsilver.auditing.observe import Array
from halfsilver.mirror import MirrorMap, Mixture, PublicLoss, State, Step
from halfsilver.mirror.base import mixture_of
from halfsilver.privacy.schema import Schema

# Two passes over the same public rows may differ by rounding; relative to the norm of the direction.
_SAME = 1e-5


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


@final
class WatchedMap:
    """The map of an audited run, with notes of what it was given at the bank and what it says that it does with it.

    One step later, when the private side holds other records, it is given the same values again. `changed` counts the
    steps whose direction then comes out otherwise: such a map, or its public loss, depends on more than it should.
    """

    def __init__(self, mirror: MirrorMap, bank: Sequence[torch.Tensor], curvature: float) -> None:
        self._mirror, self._bank, self._curvature = mirror, bank, curvature
        self._released: dict[int, Array] = {}
        self._mixtures: dict[int, Mixture | str] = {}
        self._latest: tuple[Tensors, State, Step, Tensors] | None = None
        self.changed = 0

    def __repr__(self) -> str:
        return repr(self._mirror)

    @property
    def persistent(self) -> tuple[str, ...]:
        return self._mirror.persistent

    def init(self, *, params: Tensors, public: PublicLoss | None) -> State:
        return self._mirror.init(params=params, public=public)

    def direction(self, released: Tensors, state: State, step: Step) -> tuple[Tensors, State]:
        self._repeat()
        direction, after = self._mirror.direction(released, state, step)
        before = replace(step, params=_copies(step.params))
        self._latest = (_copies(released), dict(state), before, _copies(direction))
        places = [next(i for i, p in enumerate(step.params) if p is numbers) for numbers in self._bank]
        now = step.clock.step
        self._released[now] = np.stack([released[i].detach().double().flatten().cpu().numpy() for i in places])
        self._mixtures[now] = mixture_of(self._mirror, released, state, step, curvature=self._curvature)
        return direction, after

    def _repeat(self) -> None:
        if self._latest is None:
            return
        released, state, step, earlier = self._latest
        again, _ = self._mirror.direction(released, state, step)
        self.changed += norm(axpy(-1.0, again, earlier)) > _SAME * norm(earlier)

    @property
    def unread(self) -> str:
        """Why released values cannot be computed from updates of the bank, or nothing."""
        return next((mix for mix in self._mixtures.values() if isinstance(mix, str)), "")

    @property
    def elementwise(self) -> bool:
        return all(isinstance(mix, Mixture) and mix.elementwise for mix in self._mixtures.values())

    def scores(self, banks: Sequence[Array], lr: float) -> Array:
        """The released values at the bank, [T, 2, width], as plain SGD with `lr` shows them by going through `banks`.

        The public gradient of the bank is its numbers times the curvature, by this formula and not by the code of the
        public loss, so that private values in either of them show. If `unread`, they are what the map was given.
        """
        if self.unread:
            return np.stack([self._released[t] for t in range(len(banks) - 1)])
        return np.stack([self._before((a - b) / lr, a, t) for t, (a, b) in enumerate(pairwise(banks))])

    def _before(self, moved: Array, bank: Array, t: int) -> Array:
        mix = self._mixtures[t]
        assert isinstance(mix, Mixture)
        return np.asarray((moved - mix.public * self._curvature * bank) / mix.private)


def _copies(tensors: Tensors) -> Tensors:
    return [t.detach().clone() for t in tensors]
