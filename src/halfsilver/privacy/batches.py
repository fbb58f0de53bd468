"""Private rows as the gradient code takes them: one batch of fixed shape and layout after the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch.utils import _pytree as pytree

from halfsilver._core.distributed import World
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, Tensors, batch_leaves, batch_rows, map_batch, take_rows
from halfsilver.errors import ConfigError
from halfsilver.privacy.copies import PublicCopies, as_private
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import Entropy
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.ranges import Ranges
from halfsilver.privacy.read_ahead import ReadAhead
from halfsilver.privacy.sampling import poisson_chunks, turn_chunks
from halfsilver.privacy.strategies import Correlated

Chunk = torch.Tensor | slice  # numbers of units

# Records by which several ranks see whether they have the same data.
_COMPARED = 64


@final
class PrivateBatches:
    """Draws units, reads their rows, leaves out public copies and rows out of range, and brings batches into one form.

    In a `world` of several ranks, rank r owns units r, r + size, r + 2 size, ... Samples of these shares, drawn
    independently, are together one Poisson sample.

    `rows` is how many rows a batch holds; `use` sets it, because it is measured on made-up batches first.
    """

    def __init__(
        self,
        private: PrivateData,
        plan: PrivacyPlan,
        params: Tensors,
        *,
        public_example: Any,
        public_rows: Iterable[Batch],
        world: World,
    ) -> None:
        self._records, self._users = private._open()
        if (plan.unit == "user") != (self._users is not None):
            raise ConfigError(
                f"Expected plan.unit={plan.unit!r} to go with the private data: unit='user' needs "
                "PrivateData(..., users=keys), and keys need unit='user'."
            )
        self._schema = private._schema(public_example)
        self._plan, self._world, self.device = plan, world, params[0].device
        self._channels_last = any(
            p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
            for p in params
        )
        self.population = self._users.size() if self._users else self._records.size()
        self.of_users, self.fixed_shape = self._users is not None, self._records.fixed_shape
        self.form_is_known = self._records.schema() is not None  # of all records, without reading one
        with own_randomness(0, [self.device]):  # a public data set may draw, too
            self._copies = PublicCopies(self._schema, public_rows if self.fixed_shape else ())
        self._classes, self._ranges = private._classes(), Ranges()
        self.rows = 1
        self.padding: Batch = ()

    def use(self, rows: int) -> None:
        """Batches of so many rows, padded with made-up ones where fewer are left."""
        self.rows, self.padding = rows, self.made_up(rows if self.fixed_shape else 1)
        if isinstance(self._records, ReadAhead):
            self._records.start(self._schema, rows)

    def learn_ranges(self, model: torch.nn.Module, loss_fn: LossFn, public: Batch | None) -> None:
        """Find out, on made-up rows and some public ones, which labels and tokens the model has a place for."""
        shown = None if public is None else self.in_private_form(public)
        self._ranges = Ranges.of(model, loss_fn, self.made_up(2), self._classes, shown)

    def made_up(self, rows: int) -> Batch:
        """Rows of the private ones' form, made from public knowledge alone."""
        return self._to_device(self._schema.synthetic(rows))

    def in_private_form(self, public: Batch) -> Batch | None:
        """Public rows of the private ones' form; None if theirs is another."""
        alike = as_private(public, self._schema)
        return None if alike is None else self._to_device(alike)

    # ---- private

    def sample(self, entropy: Entropy, step: int) -> list[Chunk]:
        """A Poisson sample of the units that this rank owns, or those whose turn it is, in chunks of at most `rows`."""
        if isinstance(self._plan.noise, Correlated):
            mine = (self._world.rank, self._world.size)
            return list(turn_chunks(self.population, self._plan.batches_per_pass, self.rows, step, mine))
        owned = len(range(self._world.rank, self.population, self._world.size))
        chunks = poisson_chunks(owned, self._plan.sampling_rate, self.rows, entropy)
        return [self._in_data(chunk) for chunk in chunks]

    def examples(self, chunks: Iterable[Chunk]) -> Iterator[Batch]:
        """Batches of `rows` rows. Where rows are left out, the following ones move up as if those were never drawn."""
        held: Batch | None = None
        for batch in self._fetched(chunks):
            held = batch if held is None else _joined(held, batch)
            if batch_rows(held) >= self.rows or not self.fixed_shape:
                full, held = _cut(held, self.rows)
                yield full
        if held is not None:
            yield held

    def users(self, chunks: Iterable[Chunk]) -> Iterator[Iterator[Batch]]:
        """For each drawn user, batches of that user's rows."""
        assert self._users is not None
        for chunk in chunks:
            members = range(chunk.start, chunk.stop) if isinstance(chunk, slice) else chunk.tolist()
            for user in members:
                batches = (self.fetch(rows) for rows in self._users.rows(user, self.rows))
                yield (batch for batch in batches if batch_rows(batch))
                if isinstance(self._records, ReadAhead):
                    self._records.require_readers()  # that they are gone is no record's doing, and must be heard

    def fetch(self, chunk: Chunk) -> Batch:
        return self._prepared(self._records.fetch(chunk, self._schema))

    def _fetched(self, chunks: Iterable[Chunk]) -> Iterator[Batch]:
        """The rows of each chunk in turn, and read ahead where the records can be."""
        if isinstance(self._records, ReadAhead):
            return map(self._prepared, self._records.fetch_all(chunks, self._schema, self.rows))
        return map(self.fetch, chunks)

    def _prepared(self, batch: Batch) -> Batch:
        return self._to_device(self._ranges.inside(self._copies.left_out_of(batch)))

    def piece(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """A copy of these rows of the batch at their places in the one shape of all batches, made-up rows elsewhere.

        A copy, because a model may write into its input, and the rows may be read again.
        """
        if not self.fixed_shape or len(rows) == batch_rows(self.padding):
            return map_batch(torch.clone, batch)
        places = torch.tensor(rows, device=self.device)
        return pytree.tree_map(lambda t, made: made.clone().index_copy_(0, places, t[places]), batch, self.padding)

    def digest(self) -> str:
        """Of some records: ranks that have the same data in the same order have the same digest."""
        seen = hashlib.sha256()
        size = self._records.size()
        some = torch.arange(min(size, _COMPARED)) * size // max(1, min(size, _COMPARED))
        for t in batch_leaves(self.fetch(some)):
            seen.update(t.to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if self._users is not None:
            seen.update(json.dumps([int(self._users.order[i]) for i in some]).encode())
        return seen.hexdigest()

    def _in_data(self, chosen: Chunk) -> Chunk:
        """Numbers within this rank's share as numbers in the data."""
        if self._world.size == 1:
            return chosen
        numbers = torch.arange(chosen.start, chosen.stop) if isinstance(chosen, slice) else chosen
        return numbers * self._world.size + self._world.rank

    def _to_device(self, batch: Batch) -> Batch:
        """One layout, as there is one shape: C order, but for images if the model's own weights lie otherwise.

        In another order, rows would be rounded in another way; and slices and padded pieces differ in what they keep.
        """
        return map_batch(lambda t: self._laid_out(t.to(self.device, non_blocking=True)), batch)

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
