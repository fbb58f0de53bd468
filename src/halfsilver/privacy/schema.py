"""What is public about a private record: its structure, shapes and dtypes, and one made-up example of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        """Made-up records, the same on every call: variations of the example, or of noise where it is all zeros."""
        generator = torch.Generator().manual_seed(0)
        return pytree.tree_unflatten([_vary(leaf, rows, generator) for leaf in self.leaves], self.structure)


def _vary(leaf: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Shrinking an example by up to a tenth keeps probabilities and counts valid; 0 and 1 are valid as any index."""
    shape = (rows, *leaf.shape)
    if leaf.dtype.is_floating_point:
        if not leaf.any():
            return torch.randn(shape, generator=generator).to(leaf.dtype)
        return (leaf * (1 - 0.1 * torch.rand((rows, *[1] * leaf.dim()), generator=generator))).to(leaf.dtype)
    if not leaf.any():
        return torch.randint(0, 2, shape, generator=generator).to(leaf.dtype)
    return leaf.expand(shape).clone()


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
