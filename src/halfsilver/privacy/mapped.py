"""Private records through a feature map: computed once, inside the boundary, batch by batch in one shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, batch_rows, map_batch, take_rows
from halfsilver.errors import ConfigError, PrivateDataError
from halfsilver.privacy.read_ahead import ReadAhead
from halfsilver.privacy.records import Records
from halfsilver.privacy.schema import Schema, oddity
from halfsilver.privacy.silence import silent

Transform = Callable[[Any], Tensor]
Column = int | str


@final
class MappedRecords:
    """Records of a source with `column` replaced by its features.

    The features are computed when the first record is fetched, which is after the ledger's record of the first step,
    and kept. Every call of `transform` has `rows` rows, filled up with made-up ones, so that the number of records
    cannot show in the rounding of one. If it fails, each record of that batch is tried alone, at its own place among
    made-up ones: the others get the same features as if the bad one were not there. The bad one is left out.
    """

    fixed_shape = True

    def __init__(self, source: Records, schema: Schema, transform: Transform, column: Column, rows: int) -> None:
        self._source, self._given, self._transform, self._column, self._rows = source, schema, transform, column, rows
        self._made_up = schema.synthetic(rows)
        with own_randomness(0):
            self._example = _rehearsed(transform, _of(self._made_up, column), rows)
        self._kept: tuple[Batch, Tensor] | None = None

    def size(self) -> int:
        return self._source.size()

    def schema(self) -> Schema:
        return Schema.of_columns(_with(self._made_up, self._column, self._example))

    def fetch(self, indices: Tensor | slice, schema: Schema) -> Batch:
        batch, usable = self._features()
        rows = torch.arange(indices.start, indices.stop) if isinstance(indices, slice) else indices
        return take_rows(batch, rows[usable[rows]])

    def problem(self, index: int, schema: Schema) -> str:
        return "" if self._features()[1][index] else "the record cannot be read, or the map fails on it"

    def _features(self) -> tuple[Batch, Tensor]:
        """All records with their features, and which of them can be used."""
        if self._kept is None:
            with own_randomness(0):
                parts = [self._part(start) for start in range(0, self.size(), self._rows)]
            empty = take_rows(_with(self._made_up, self._column, self._example), slice(0, 0))
            batches = [empty, *(batch for batch, _ in parts)]
            usable = [torch.zeros(0, dtype=torch.bool), *(good for _, good in parts)]
            if isinstance(self._source, ReadAhead):
                self._source.close()  # everything is read
            self._kept = pytree.tree_map(lambda *pieces: torch.cat(pieces), *batches), torch.cat(usable)
        return self._kept

    def _part(self, start: int) -> tuple[Batch, Tensor]:
        count = min(self._rows, self.size() - start)
        batch, good = _read(self._source, self._given, self._made_up, start, count)
        x, made_up = _of(batch, self._column), _of(self._made_up, self._column)
        features = _mapped(self._transform, x, made_up, good, self._example)
        return take_rows(_with(batch, self._column, features), slice(0, count)), good[:count]


def _of(batch: Batch, column: Column) -> Batch:
    if isinstance(batch, Tensor):
        return batch
    try:
        return batch[column]
    except (LookupError, TypeError):
        names = list(batch) if isinstance(batch, dict) else list(range(len(batch)))
        raise ConfigError(f"Expected column={column!r} to be one of the record's: {names}.") from None


def _with(batch: Batch, column: Column, features: Tensor) -> Batch:
    if isinstance(batch, Tensor):
        return features
    if isinstance(batch, dict):
        return {**batch, column: features}
    return tuple(features if i == column else entry for i, entry in enumerate(batch))


def _rehearsed(transform: Transform, x: Batch, rows: int) -> Tensor:
    """The features of made-up rows. What is wrong with the map itself is found here, where it may be told."""
    features = transform(map_batch(torch.clone, x))
    if not isinstance(features, Tensor) or oddity(features) or features.dim() < 2 or len(features) != rows:
        got = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise PrivateDataError(f"Expected transform to return one row of features for each of {rows} rows, got {got}.")
    others = transform(map_batch(lambda t: t[:1].expand(t.shape).clone(), x))
    if not torch.allclose(features[0], others[0], rtol=1e-3, atol=1e-4 * float(features.abs().max())):
        raise PrivateDataError(
            "The features of a made-up row change with the rows beside it, or from call to call. Then one record would "
            "show in the features of others. Put the module in eval mode, and leave out statistics of the batch."
        )
    return features.detach()


def _read(source: Records, schema: Schema, made_up: Batch, start: int, count: int) -> tuple[Batch, Tensor]:
    """Records from `start` on, at the places 0 .. count - 1 of a batch of made-up rows, and which could be read."""
    good = torch.zeros(batch_rows(made_up), dtype=torch.bool)
    batch = source.fetch(slice(start, start + count), schema)
    if batch_rows(batch) == count:
        good[:count] = True
        return pytree.tree_map(lambda rows, other: torch.cat([rows, other[count:]]), batch, made_up), good
    filled = map_batch(torch.clone, made_up)
    for place in range(count):  # some record cannot be read, and the others must stay at their places
        record = source.fetch(slice(start + place, start + place + 1), schema)
        if batch_rows(record):
            good[place] = True
            filled = pytree.tree_map(
                lambda rows, one, at=place: rows.index_copy(0, torch.tensor([at]), one), filled, record
            )
    return filled, good


def _mapped(transform: Transform, x: Batch, made_up: Batch, good: Tensor, example: Tensor) -> Tensor:
    """Features of a batch; `good` becomes false where the map fails on a record."""
    whole = _silently(transform, x, example)
    if whole is not None:
        return whole
    features = torch.zeros_like(example)
    for place in good.nonzero().flatten().tolist():
        index = torch.tensor([place])
        alone = pytree.tree_map(lambda rows, one, at=index: rows.index_copy(0, at, one[at]), made_up, x)
        found = _silently(transform, alone, example)
        if found is None:
            good[place] = False
        else:
            features[place] = found[place]
    return features


def _silently(transform: Transform, x: Batch, example: Tensor) -> Tensor | None:
    with silent():
        features = transform(map_batch(torch.clone, x)).detach()
        if type(features) is Tensor and not oddity(features) and features.shape == example.shape:
            return features.to(example.device, example.dtype)
    return None
