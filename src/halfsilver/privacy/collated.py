"""Rows as a data collator of `transformers` makes them, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Dataset


@final
class Collated(Dataset[Any]):
    """Rows of a data set after a collator, which is called with each row by itself: nothing of a row depends on others.

    Args:
        rows: The data set.
        collate: A function of a list of rows that returns columns by name.
    """

    def __init__(self, rows: Any, collate: Callable[[Sequence[Any]], Mapping[str, Any]]) -> None:
        self.dataset, self._collate = rows, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        made = self._collate([self.dataset[int(index)]])
        return {name: torch.as_tensor(values)[0] for name, values in made.items()}
