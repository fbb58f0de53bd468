"""Private records through a feature map: computed once, inside the boundary, batch by batch in one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, batch_rows, map_batch, take_rows
from halfsilver.errors import ConfigError, PrivateDataError
from halfsilver.privacy.pieces import alike, in_parts, sizes_from
from halfsilver.privacy.ranges import Ranges
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
    and kept. Every call of `transform` has the same number of rows, filled up with made-up ones, so that the number of
    records cannot show in the rounding of one. The largest number up to `rows` is taken at which made-up rows are
    rounded alike at all places. If a call fails, some records are tried at a time, at their own places among made-up
    ones. Bad ones are left out, and the others get their features from one last call with made-up rows in place of
    those.
    """

    fixed_shape = True

    def __init__(self, source: Records, schema: Schema, transform: Transform, column: Column, rows: int) -> None:
        self._source, self._given, self._transform, self._column = source, schema, transform, column

        def made_up(rows: int) -> Batch:
            return _of(schema.synthetic(rows), column)

        for self._rows in sizes_from(rows):
            with own_randomness(0):
                self._example = _rehearsed(transform, made_up(self._rows), self._rows)
                if alike(lambda x: [transform(map_batch(torch.clone, x))], made_up, self._rows):
                    break
        self._made_up = schema.synthetic(self._rows)
        with own_randomness(0):
            self._ranges = Ranges(transform, made_up(self._rows)) if torch.cuda.is_available() else Ranges()
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
        usable = self._ranges.usable(x)
        if usable is not None:
            good, bad = good & usable, (~usable).nonzero().flatten()
            x = pytree.tree_map(lambda rows, other: rows.index_copy(0, bad, other[bad]), x, made_up)
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
    for row in (0, rows - 1):  # one of them might be what others are compared with, such as the largest
        others = transform(take_rows(x, torch.full((rows,), row)))
        if not torch.allclose(features[row], others[row], rtol=1e-3, atol=1e-4 * float(features.abs().max())):
            raise PrivateDataError(
                "The features of a made-up row change with the rows beside it, or from call to call. Then one record "
                "would show in the features of others. Put the module in eval mode, and leave out statistics of the "
                "batch."
            )
    return features.detach().cpu()


def _read(source: Records, schema: Schema, made_up: Batch, start: int, count: int) -> tuple[Batch, Tensor]:
    """Records from `start` on, at the places 0 .. count - 1 of a batch of made-up rows, and which could be read."""
    good = torch.zeros(batch_rows(made_up), dtype=torch.bool)
    batch = map_batch(Tensor.cpu, source.fetch(slice(start, start + count), schema))
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

    def attempt(rows: Sequence[int]) -> Tensor | None:
        index = torch.tensor(rows, dtype=torch.long)
        piece = pytree.tree_map(lambda made, one: made.index_copy(0, index, one[index]), made_up, x)
        return _silently(transform, piece, example)

    features, given = torch.zeros_like(example), good.nonzero().flatten().tolist()
    good[:] = False
    for rows, found in in_parts(attempt, given):
        features[rows], good[rows] = found[rows], True
    return features


def _silently(transform: Transform, x: Batch, example: Tensor) -> Tensor | None:
    with silent():
        features = transform(map_batch(torch.clone, x)).detach()
        if type(features) is Tensor and not oddity(features) and features.shape == example.shape:
            return features.to(example.device, example.dtype)
    return None
