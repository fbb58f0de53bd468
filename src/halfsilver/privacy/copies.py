"""Private rows that are public too: they contribute nothing, as rows of NaN do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch.utils import _pytree as pytree

from halfsilver._core.tensors import Batch, Tensors, batch_leaves, take_rows
from halfsilver.privacy.schema import Schema, plain


@final
class PublicCopies:
    """The rows of a public data set, known by their hashes, which are left out wherever they stand among private rows.

    Guarantee: whether a private row is left out depends on that row and on public rows alone. So one record moves a
    clipped sum by at most the clip norm, as before, and a copy of a public row by exactly nothing. There is no count,
    no log and no error, and the public rows stay as they are.

    Two rows are the same if all their tensors, labels included, have the same bytes in the private rows' dtypes: 0.0
    and -0.0 differ. A public image with another label is another record, because that label is not public. Public rows
    of another structure, shape or kind of number, and such as cannot be stacked, are no copies of anything.
    """

    def __init__(self, schema: Schema, public: Iterable[Batch] = ()) -> None:
        try:
            self._public = frozenset(_public_hashes(schema, public))
        except RuntimeError:  # rows of several lengths
            self._public = frozenset()

    def left_out_of(self, batch: Batch) -> Batch:
        """The rows of a private `batch` that are not public, in their order."""
        numbers = _hashes(batch_leaves(batch)) if self._public else []
        if self._public.isdisjoint(numbers):
            return batch
        kept = [i for i, number in enumerate(numbers) if number not in self._public]
        return take_rows(batch, torch.tensor(kept, dtype=torch.int64))


def _public_hashes(schema: Schema, public: Iterable[Batch]) -> Iterator[int]:
    for rows in public:
        alike = as_private(rows, schema)
        if alike is None:  # nor will the others be: a large set need not be read to its end
            return
        yield from _hashes(batch_leaves(alike))


def _hashes(columns: Tensors) -> list[int]:
    """One number for the bytes of each row.

    Python's own hash of bytes: 64 bits, fast, under a key that each process draws anew, unless PYTHONHASHSEED fixes it,
    and never writes down. Should two different rows share a number, which for a million against a million happens once
    in ten million runs, then one private row is left out for nothing.
    """
    parts = [t.detach().cpu().reshape(len(t), math.prod(t.shape[1:])).contiguous().view(torch.uint8) for t in columns]
    return [hash(row.tobytes()) for row in torch.cat(parts, dim=1).numpy()]


def as_private(rows: Batch, schema: Schema) -> Batch | None:
    """Public `rows` in the structure and dtypes of private ones; None where structure or shapes differ."""
    columns, structure = pytree.tree_flatten(plain(rows))
    if structure != schema.structure:
        return None
    pairs = list(zip(columns, schema.leaves, strict=True))
    alike = all(isinstance(t, torch.Tensor) and _fits(t, like) for t, like in pairs)
    return pytree.tree_unflatten([t.to(like.dtype) for t, like in pairs], structure) if alike else None


def _fits(column: torch.Tensor, like: torch.Tensor) -> bool:
    return column.shape[1:] == like.shape and torch.can_cast(column.dtype, like.dtype)
