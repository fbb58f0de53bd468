"""What is public about a private record: its structure, shapes and dtypes, and one made-up example of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from halfsilver._core.tensors import Batch, as_column
from halfsilver.errors import ConfigError, PrivateDataError

_NAMES = hasattr(Tensor, "names")  # of dimensions, which newer versions of torch have no more


@dataclass(frozen=True, eq=False)
class Schema:
    """One made-up record, flattened; every private record must have its structure and shapes."""

    leaves: tuple[Tensor, ...]
    structure: Any

    @classmethod
    def of_record(cls, record: Any) -> Schema:
        leaves, structure = pytree.tree_flatten_with_path(plain(record))
        return cls(tuple(_made_up(x, pytree.keystr(path)) for path, x in leaves), structure)

    @classmethod
    def of_columns(cls, columns: Batch) -> Schema:
        """From the metadata of tensors with one row per record: no row is read, and no row could change it."""
        leaves, structure = _flatten(columns)
        return cls(tuple(torch.zeros(t.shape[1:], dtype=t.dtype) for t in leaves), structure)

    def beside(self, record: Any, loose: Sequence[bool]) -> Schema:
        """This schema of private columns, which must have the kinds and shapes of a public record of its structure.

        Columns that are `loose`, those of frames, are numbers of one kind, and get the dtype of the public ones.
        """
        paths, structure = pytree.tree_flatten_with_path(plain(record))
        if structure != self.structure:
            return self
        leaves, public = [], Schema.of_record(record).leaves
        for (path, _), own, other, free in zip(paths, self.leaves, public, loose or repeat(False), strict=False):
            if own.shape != other.shape or not (free or _kind(own) == _kind(other)):
                raise ConfigError(
                    f"Expected private column{pytree.keystr(path)} to hold {_kind(other)} numbers of shape "
                    f"{tuple(other.shape)}, as the public rows or the example do, not {_kind(own)} ones of shape "
                    f"{tuple(own.shape)}. Bring both to one form; if they differ on purpose, give public_loss_fn."
                )
            leaves.append(other if free else own)
        return Schema(tuple(leaves), self.structure)

    def cast(self, columns: Batch) -> Batch:
        """Columns in the dtypes of the schema. Rows with NaN or a fraction for a whole number are left out."""
        leaves, structure = pytree.tree_flatten(columns)
        made = [t.to(like.dtype) for t, like in zip(leaves, self.leaves, strict=True)]
        pairs = [(t, cast) for t, cast in zip(leaves, made, strict=True) if t.dtype.is_floating_point]
        exact = [
            (cast.to(t.dtype) == t).reshape(len(t), -1).all(1) for t, cast in pairs if not cast.is_floating_point()
        ]
        return pytree.tree_unflatten([t[torch.stack(exact).all(0)] if exact else t for t in made], structure)

    @property
    def shapes(self) -> tuple[tuple[torch.Size, torch.dtype], ...]:
        return tuple((t.shape, t.dtype) for t in self.leaves)

    @property
    def columns(self) -> list[str] | None:
        """Names of the columns, where a record is a dict of them."""
        example = pytree.tree_unflatten(self.leaves, self.structure)
        return list(example) if isinstance(example, dict) else None

    def conform(self, record: Any) -> list[Tensor]:
        """The record's tensors, plain and in the schema's dtypes; ValueError where structure, shape or kind differ."""
        leaves, structure = _flatten(record)
        if structure != self.structure:
            raise ValueError("structure")
        return [_conforming(torch.as_tensor(x), like) for x, like in zip(leaves, self.leaves, strict=True)]

    def conform_all(self, columns: Mapping[str, list[Any]]) -> Batch:
        """All rows of a table at once, as `conform` and `stack` give them; ValueError or TypeError if one differs.

        A column of a table has one kind of number, so a row is read here as it is by itself. Columns without entries
        are left to `conform`.
        """
        names = sorted(columns)
        if pytree.tree_structure(dict.fromkeys(names)) != self.structure:
            raise ValueError("structure")
        found = []
        for name, like in zip(names, self.leaves, strict=True):
            column = torch.as_tensor(columns[name])
            if column.shape != (len(columns[name]), *like.shape) or not like.numel():
                raise ValueError("shape")
            found.append(column.to(like.device, like.dtype))
        return pytree.tree_unflatten(found, self.structure)

    def stack(self, records: Sequence[list[Tensor]]) -> Batch:
        """Records that conform; so alike are their tensors then that it cannot fail."""
        columns = [
            torch.stack([r[k] for r in records]) if records else like.new_empty((0, *like.shape))
            for k, like in enumerate(self.leaves)
        ]
        return pytree.tree_unflatten(columns, self.structure)

    def synthetic(self, rows: int) -> Batch:
        """Made-up records, the same on every call, the first of them whatever their number: variations of the example.

        Where a column is all zeros, they are noise, or 0 and 1. All records differ, as far as the columns allow.
        """
        made = [_vary(leaf, rows, torch.Generator().manual_seed(i)) for i, leaf in enumerate(self.leaves)]
        return pytree.tree_unflatten(made, self.structure)


# Rows are drawn so many at once: what a generator gives for a row may depend on how many are asked for.
_DRAWN = 16
# Entries of whole numbers that are counted through like digits, so that no two rows are alike.
_COUNTED = 16


def _kind(t: Tensor) -> str:
    return "bool" if t.dtype == torch.bool else "floating-point" if t.is_floating_point() else "whole"


def _vary(leaf: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Shrinking an example by up to a tenth keeps probabilities and counts valid; 0 and 1 are valid as any index."""
    whole, zeros = not leaf.dtype.is_floating_point, not leaf.any()
    draw = torch.randn if zeros and not whole else torch.rand
    shape = (_DRAWN, *(leaf.shape if zeros or whole else [1] * leaf.dim()))
    times = range(max(1, math.ceil(rows / _DRAWN)))
    drawn = torch.cat([draw(shape, generator=generator, dtype=torch.float64) for _ in times])[:rows]
    if whole:
        return _vary_whole(leaf, drawn)
    return (drawn if zeros else leaf * (1 - 0.1 * drawn)).to(leaf.dtype)


def _vary_whole(leaf: Tensor, drawn: Tensor) -> Tensor:
    """Whole numbers are lowered by up to a half, and 1 to 0: labels, tokens, masks and lengths stay valid so.

    Negative ones stay, because they are marks, and so do the first and last of three or more along the last dimension:
    a mask then never hides all.
    """
    high = leaf.long() if leaf.any() else torch.ones(leaf.shape, dtype=torch.long)
    low = torch.where(high < 0, high, high // 2)
    if leaf.any() and leaf.dim() and leaf.shape[-1] >= 3:
        low[..., 0], low[..., -1] = high[..., 0], high[..., -1]
    made, number = low + (drawn * (high - low + 1)).long(), torch.arange(len(drawn))
    for k in (high > low).flatten().nonzero().flatten().tolist()[:_COUNTED]:
        least, choices = low.flatten()[k], (high - low).flatten()[k] + 1
        entry = made.view(len(made), -1)[:, k]
        entry.copy_(least + (entry[0] - least + number) % choices)
        number = number // choices
    return made.to(leaf.dtype)


def oddity(t: Tensor) -> str:
    """What keeps a tensor from being dense, real numbers without names of dimensions; "" for one that is."""
    if t.is_nested:  # which may call itself strided, and has no shape
        return "nested"
    if t.layout != torch.strided:
        return "sparse"
    if _NAMES and any(getattr(t, "names", ())):
        return "named"
    return "meta" if t.is_meta else "quantized" if t.is_quantized else "complex" if t.is_complex() else ""


def _conforming(t: Tensor, like: Tensor) -> Tensor:
    if odd := oddity(t):
        raise ValueError(odd)
    if t.shape != like.shape:
        raise ValueError("shape")
    if type(t) is Tensor:
        return (t.detach() if t.requires_grad else t).to(like.device, like.dtype)
    copy = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    copy.copy_(t.detach())  # because the class of `t` may do as it likes when it is stacked
    return copy


def require_plain(columns: Batch) -> None:
    """Columns of private data have to be dense and real. Like their shapes, that belongs to the table and to no row."""
    for path, t in pytree.tree_flatten_with_path(columns)[0]:
        if isinstance(t, Tensor) and (odd := oddity(t)):
            raise PrivateDataError(
                f"Expected private columns as dense tensors of real numbers, but column{pytree.keystr(path)} is {odd}. "
                "Give it as a dense tensor (to_dense, dequantize), complex numbers as two of real ones (view_as_real)."
            )


def _made_up(leaf: Any, place: str) -> Tensor:
    try:
        made = torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"Expected numbers in record{place}, got {type(leaf).__name__}. Turn it into numbers, or leave it out (of "
            "Hugging Face's data sets by select_columns), on the private side as well as on the public one."
        ) from error
    if odd := oddity(made):
        raise ConfigError(f"Expected a dense tensor of real numbers in record{place}, got a {odd} one.")
    return made


def _flatten(record: Any) -> tuple[list[Any], Any]:
    leaves, structure = pytree.tree_flatten(plain(record))
    return leaves, structure


def plain(record: Any) -> Any:
    """Lists as tuples, mappings as dicts with sorted keys, and in them numbers as tensors: spellings of one record."""
    if isinstance(record, Mapping):
        return {key: plain(as_column(record[key])) for key in sorted(record)}
    if isinstance(record, list | tuple):
        return tuple(plain(value) for value in record)
    return record
