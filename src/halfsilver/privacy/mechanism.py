"""Left of the bar: ledger, sample, per-example gradient, clip, sum, noise. What `release` returns may be published."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from halfsilver._core.distributed import World
from halfsilver._core.model_state import ModelState, untouched
from halfsilver._core.random import own_randomness
from halfsilver._core.sharded import Pieces, reshard, whole_model
from halfsilver._core.tensors import Batch, LossFn, Tensors, batch_leaves, batch_rows, map_batch, take_rows, trainable
from halfsilver.errors import ConfigError
from halfsilver.privacy.copies import PublicCopies, as_private
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import Entropy, OsEntropy
from halfsilver.privacy.gradients import ClippedSum, GradientBackend, Speed, make_backend
from halfsilver.privacy.gradients.base import Adding, Tunable
from halfsilver.privacy.gradients.probe import PROBE_ROWS, probe
from halfsilver.privacy.gradients.rows import default_rows, fastest_rows, padded_rows
from halfsilver.privacy.gradients.users import clipped_user_gradient
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.releases import Releases
from halfsilver.privacy.sampling import poisson_chunks
from halfsilver.privacy.silence import silent

# One durable ledger record covers about a second of steps, and at most a fiftieth of the plan: a kill loses no more.
_BLOCK_SECONDS = 1.0
_BLOCK_SHARE = 50

Chunk = torch.Tensor | slice  # numbers of units

_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)

# Records by which several ranks see whether they have the same data.
_COMPARED = 64


@final
class PrivateGradient:
    """The one object through which private rows influence anything.

    Guarantee: the sequence of all values that `release` ever returned, over crashes and resumes, is one composition of
    the plan's mechanism, and every one of them was in the ledger, on disk, before a private row was read for it.

    In a `world` of several ranks, each is given the same data and owns every `world.size`-th unit of it: samples of
    these shares, drawn independently, are together one Poisson sample. Only rank 0 has, and needs, the ledger.

    A private row that is also one of `public_rows`, which come in batches, contributes nothing: see `PublicCopies`.
    `probe_rows` are some public rows on which the model is tried, besides made-up ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        private: PrivateData,
        plan: PrivacyPlan,
        *,
        ledger: Ledger | None,
        run_id: str,
        public_example: Any = None,
        public_rows: Iterable[Batch] = (),
        probe_rows: Batch | None = None,
        speed: Speed | None = None,
        entropy: Entropy | None = None,
        world: World | None = None,
    ) -> None:
        speed = speed or Speed()
        self._world, self._given = world or World(), model
        self._model, self._loss_fn, self.plan = whole_model(model), speed.precise(loss_fn), plan
        self._entropy = entropy or OsEntropy()
        self._params, self._here = trainable(model), plan.expected_batch_size / self._world.size
        self._device = self._params[0].device
        self._channels_last = any(
            p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
            for p in self._params
        )
        self._adding = Adding.of(plan.expected_batch_size, plan.sampling_rate, self._world.size)
        self._added = 0
        self._state, self._careful = ModelState(self._model), False
        with self._world.together(), untouched(self._model):
            self._pieces = Pieces(self._params, self._world)
            self._open(private, public_example)
            with own_randomness(0, [self._device]):  # a public data set may draw, too
                self._copies = PublicCopies(self._schema, public_rows if self._records.fixed_shape else ())
            self._backend = self._checked_backend(speed, loss_fn, probe_rows)
            rows = speed.micro_batch_size or self._choose_rows()
        self._rows = self._world.from_lead(lambda: rows)  # one measurement for all: the slowest rank sets the pace
        with self._world.together(), untouched(self._model):
            self._padding = self._made_up(padded_rows(self._rows) if self._records.fixed_shape else 1)
            self.out = Releases(
                self._params, plan, ledger=ledger, run_id=run_id, entropy=self._entropy, world=self._world
            )
            block = self._steps_per_block()
        self._world.require_same("the private data", self._population, "Give each rank all records, in one order.")
        self.out.register(block)

    def _open(self, private: PrivateData, public_example: Any) -> None:
        plan = self.plan
        self._records, self._users = private._open()
        if (plan.unit == "user") != (self._users is not None):
            raise ConfigError(
                f"Expected plan.unit={plan.unit!r} to go with the private data: unit='user' needs "
                "PrivateData(..., users=keys), and keys need unit='user'."
            )
        self._schema = private._schema(public_example)
        self._population = self._users.size() if self._users else self._records.size()

    def _checked_backend(self, speed: Speed, loss_fn: LossFn, public: Batch | None) -> GradientBackend:
        if not isinstance(speed.backend, str):
            if self._model is not self._given:
                raise ConfigError("Expected the name of a backend for sharded parameters, not an object made for them.")
            return speed.backend
        made_up = self._made_up(PROBE_ROWS)
        alike = None if public is None else as_private(public, self._schema)
        probe(self._model, self._loss_fn, made_up, None if alike is None else self._to_device(alike))
        return make_backend(speed, self._model, loss_fn, made_up)

    def _choose_rows(self) -> int:
        """As many as run fastest. A user's records are not clipped one by one, and are read in parts of fixed size."""
        if self._users is not None or not self._records.fixed_shape:
            return default_rows(self._model, self._here)
        with own_randomness(0, [self._device]):
            return fastest_rows(self._backend, self._model, self._made_up, self.plan, 1 / self._world.size)

    def _made_up(self, rows: int) -> Batch:
        return self._to_device(self._schema.synthetic(rows))

    def _steps_per_block(self) -> int:
        """How many steps a ledger record covers, from a rehearsal on made-up rows: private timing must not show in it.

        The rehearsal has the shape of every private batch, so that it also meets a lack of memory first.
        """
        with own_randomness(0, [self._device]):
            if self._users is None and isinstance(self._backend, Tunable):
                self._backend.tune(self._padding, self._adding)
            started = time.monotonic()
            self._rehearse()
        pieces = max(1.0, self._here / self._rows)
        wanted = int(_BLOCK_SECONDS / ((time.monotonic() - started) * pieces + 1e-6))
        return max(1, min(wanted, self.plan.steps // _BLOCK_SHARE))

    def _rehearse(self) -> None:
        """One private pass, on made-up rows."""
        made_up = map_batch(torch.clone, self._padding)
        if self._users is None:
            self._backend.clipped_sum(made_up, self.plan.max_grad_norm, None, self._adding)
        else:
            clipped_user_gradient(self._model, self._loss_fn, [made_up], self.plan.max_grad_norm)

    def release(self) -> Tensors:
        """One noisy mean gradient at the model's current parameters, in their dtypes and lying as they do.

        Raises `BudgetExceeded`, before any row is read, once plan or budget are used up. Nothing else that is left
        behind depends on the private rows: no ledger record, no exception, no global random state. How long it takes
        does.

        Each rank gets its own pieces of the sum without noise, and to these it alone adds noise, from its own entropy;
        what the ranks then exchange are released values. So noise is drawn once for each number, and by all ranks in
        parallel.
        """
        with self._private_step():
            share = self._clipped_sum()
        total = ClippedSum(self._pieces.sum(share.tensors), share.sensitivity)
        return self._pieces.placed(self.out.noisy(total))

    def usable_units(self) -> float:
        """How many units of one sample contribute, with the plan's noise: one more step of the plan, in the ledger.

        A unit counts if it can be read, is not public as well, is finite, and its gradient can be computed. One unit
        changes the count by at most 1, so the noise of the plan hides it as it hides a clipped gradient.
        """
        with self._private_step():
            here = self._usable()
        total = self._world.total(float(here))
        return self._world.from_lead(lambda: self.out.noisy_number(total))

    @contextmanager
    def _private_step(self) -> Iterator[None]:
        """Everything that comes before a private row is read, and the generators with which it is."""
        reshard(self._given)
        if [id(p) for p in trainable(self._given)] != [id(p) for p in self._params]:
            raise ConfigError("Expected the same parameters to be trainable as at the start. Make a new Trainer.")
        self.out.intend()
        self._compare_data()
        whole_model(self._given)
        seed = int(self._entropy.words(1)) & (2**63 - 1)  # for dropout and for data sets that draw
        with self._world.together(), own_randomness(seed, [self._device]):
            yield

    def _compare_data(self) -> None:
        """Once, refuse to go on if ranks have the data in different orders: a record could be in several shares then.

        Looks at some records of each rank; nothing is kept of them, and if they agree nothing follows from them.
        """
        if self.out.count or self._world.size == 1:
            return
        with self._world.together(), own_randomness(0, [self._device]):
            seen = hashlib.sha256()
            size = self._records.size()
            some = torch.arange(min(size, _COMPARED)) * size // max(1, min(size, _COMPARED))
            for t in batch_leaves(self._fetch(some)):
                seen.update(t.to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            if self._users is not None:
                seen.update(json.dumps([int(self._users.order[i]) for i in some]).encode())
        self._world.require_same("the private data", seen.hexdigest(), "Give each rank all records, in one order.")

    def _clipped_sum(self) -> ClippedSum:
        """Of a sample of the units that this rank owns. Nothing in it waits for another rank.

        Guarantee: every private pass ran on the model as it is now, and leaves it so. A write that a version shows is
        undone after the pass that made it. A write that no version shows is found at the end: the same sample is then
        added up again, with a look at every value after each pass.
        """
        chunks = self._sample()
        self._state.record()
        try:
            total = self._added_up(chunks, careful=False)
            if self._state.put_back(values=True):
                total = self._added_up(chunks, careful=True)
        except BaseException:
            self._state.put_back(values=True)
            raise
        return total

    def _sample(self) -> list[Chunk]:
        owned = len(range(self._world.rank, self._population, self._world.size))
        return [*poisson_chunks(owned, self.plan.sampling_rate, self._rows, self._entropy)]

    def _usable(self) -> int:
        """Of a sample, as `_clipped_sum` has it; with a look at every value after each pass."""
        chunks, self._careful, self._added = self._sample(), True, 0
        self._state.record()
        try:
            return sum(self._usable_among(units) for units in map(self._in_data, chunks))
        finally:
            self._state.put_back(values=True)

    def _usable_among(self, units: Chunk) -> int:
        if self._users is None:
            return self._usable_rows(self._fetch(units))
        members = range(units.start, units.stop) if isinstance(units, slice) else units.tolist()
        sums = (part for user in members for part in self._sum_of_user(user))
        return sum(any(bool(t.any()) for t in part.tensors) for part in sums)  # zero: no row, or none that is finite

    def _usable_rows(self, batch: Batch) -> int:
        rows = batch_rows(batch)
        if rows and self._attempt(batch, rows) is not None:
            finite = [t.reshape(rows, -1).isfinite().all(1) for t in batch_leaves(batch) if t.layout == torch.strided]
            return int(torch.stack(finite).all(0).sum()) if finite else rows
        halves = [slice(0, rows // 2), slice(rows // 2, rows)] if rows > 1 else []
        return sum(self._usable_rows(take_rows(batch, half)) for half in halves)

    def _added_up(self, chunks: Iterable[Chunk], *, careful: bool) -> ClippedSum:
        self._careful, self._added = careful, 0
        total: ClippedSum | None = None
        for part in self._parts(map(self._in_data, chunks)):
            if total is None:
                total = part  # mostly the only one where a model is large: no second set of its parameters is needed
            else:
                total.add_(part)
        return total or ClippedSum.zeros(trainable(self._model), self.plan.max_grad_norm)

    def _parts(self, chosen: Iterable[Chunk]) -> Iterator[ClippedSum]:
        if self._users is None:
            pieces = map(self._fetch, chosen)
            yield from (part for piece in self._moved_up(pieces) for part in self._sum_of_examples(piece))
            return
        for units in chosen:
            members = range(units.start, units.stop) if isinstance(units, slice) else units.tolist()
            yield from (part for user in members for part in self._sum_of_user(user))

    def _moved_up(self, pieces: Iterable[Batch]) -> Iterator[Batch]:
        """Whole pieces again, where rows have been left out: the rest is added up as if those had not been drawn."""
        held: Batch | None = None
        for piece in pieces:
            held = piece if held is None else _joined(held, piece)
            if batch_rows(held) >= self._rows or not self._records.fixed_shape:
                full, held = _cut(held, self._rows)
                yield full
        if held is not None:
            yield held

    def _in_data(self, chosen: Chunk) -> Chunk:
        """Numbers within this rank's share as numbers in the data: rank r owns r, r + size, r + 2 size, ..."""
        if self._world.size == 1:
            return chosen
        numbers = torch.arange(chosen.start, chosen.stop) if isinstance(chosen, slice) else chosen
        return numbers * self._world.size + self._world.rank

    def _sum_of_examples(self, batch: Batch) -> Iterator[ClippedSum]:
        """The clipped sum of a batch; where that fails, of the examples for which it does not.

        A label out of range, say, raises inside the loss. The model itself has passed the probe, so the cause is a
        record: it contributes nothing, and no error tells of it.
        """
        rows = batch_rows(batch)
        part = self._attempt(batch, rows) if rows else None
        if part is not None:
            yield part
        elif rows > 1:
            yield from self._sum_of_examples(take_rows(batch, slice(0, rows // 2)))
            yield from self._sum_of_examples(take_rows(batch, slice(rows // 2, rows)))

    def _attempt(self, batch: Batch, rows: int) -> ClippedSum | None:
        """The clipped sum; None if the pass failed, if it is not finite, or if the pass wrote into the model.

        A write may have reached the other examples of the batch. By itself, the example that causes it is left out.
        """
        part, short = None, False
        with silent():
            try:
                padded, adding = self._padded(batch, rows), self._counted(rows)
                part = self._backend.clipped_sum(padded, self.plan.max_grad_norm, rows, adding)
            except _NO_MEMORY:
                short = True
        if short:
            self._require_memory()
        written = self._state.put_back(values=self._careful)
        if part is None or written or not all(math.isfinite(t.sum()) for t in part.tensors):
            return None
        return part

    def _require_memory(self) -> None:
        """Raise if made-up rows lack memory as well. If they do not, what asked for so much was a record."""
        try:
            self._rehearse()
        except _NO_MEMORY:
            rows = batch_rows(self._padding)
            raise MemoryError(
                f"There is not enough memory for a private pass over {rows} rows. Set Speed(micro_batch_size=...)."
            ) from None

    def _counted(self, rows: int) -> Adding:
        """How to add up the next `rows`: in float64 all the way once there are more than the margin pays for."""
        self._added += rows
        return replace(self._adding, exact=self._added > self._adding.rows // self._world.size)

    def _padded(self, batch: Batch, rows: int) -> Batch:
        """Made-up rows up to the one shape of all batches."""
        pads = self._records.fixed_shape and not getattr(self._backend, "any_shape", False)
        if getattr(self._backend, "any_shape", False):
            return batch  # the closed form runs no code but its own
        if rows == batch_rows(self._padding) or not pads:
            return map_batch(torch.clone, batch)  # a model may write into its input, and the rows may be read again
        columns = zip(batch_leaves(batch), batch_leaves(self._padding), strict=True)
        filled = [torch.cat([t, made_up[rows:]]) for t, made_up in columns]
        return pytree.tree_unflatten(filled, pytree.tree_structure(batch))

    def _sum_of_user(self, user: int) -> Iterator[ClippedSum]:
        assert self._users is not None
        parts = (self._fetch(rows) for rows in self._users.rows(user, self._rows))
        batches = (part for part in parts if batch_rows(part))
        found, short = None, False  # as above: nothing from a user who cannot be used, and no word about it
        with silent():
            try:
                clip = self.plan.max_grad_norm
                found = clipped_user_gradient(self._model, self._loss_fn, batches, clip, self._adding)
            except _NO_MEMORY:
                short = True
        if short:
            self._require_memory()
        if not self._state.put_back(values=self._careful) and found is not None:
            yield found

    def _fetch(self, chosen: Chunk) -> Batch:
        return self._to_device(self._copies.left_out_of(self._records.fetch(chosen, self._schema)))

    def _to_device(self, batch: Batch) -> Batch:
        """One layout, as there is one shape: C order, but for images if the model's own weights lie otherwise.

        In another order, rows would be rounded in another way; and slices and padded pieces differ in what they keep.
        """
        return map_batch(lambda t: self._laid_out(t.to(self._device, non_blocking=True)), batch)

    def _laid_out(self, t: torch.Tensor) -> torch.Tensor:
        if t.layout != torch.strided:
            return t
        last = t.dim() == 4 and self._channels_last
        return t.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _joined(first: Batch, second: Batch) -> Batch:
    return pytree.tree_map(lambda *columns: torch.cat(columns), first, second)


def _cut(batch: Batch, rows: int) -> tuple[Batch, Batch | None]:
    """The first `rows` of a batch, and what is left."""
    if batch_rows(batch) <= rows:
        return batch, None
    return take_rows(batch, slice(0, rows)), take_rows(batch, slice(rows, batch_rows(batch)))
