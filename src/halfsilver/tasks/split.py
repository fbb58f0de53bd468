"""One rule that splits a training set into public, set-aside and private rows, by seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfsilver.errors import require

PUBLIC_PERCENT = 4  # of the training rows, as in the paper
VALIDATION_ROWS = 5_000
CURVE_ROWS = 10_000

_RULE = (
    "rows in the order of torch.randperm(rows) by a generator with this seed: "
    "first the public ones, then the set-aside ones, the rest is private"
)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Numbers of the rows in each part; together they are every row once."""

    public: Tensor
    validation: Tensor
    private: Tensor


@dataclass(frozen=True, kw_only=True)
class Split:
    """How many rows are public and how many are set aside; depends on the seed and never on a row's content."""

    seed: int
    public: int
    validation: int = VALIDATION_ROWS

    def parts(self, rows: int) -> Parts:
        """The same parts for the same seed and sizes, on every machine."""
        require(self.public >= 0, "public", self.public, "at least 0")
        require(self.validation >= 0, "validation", self.validation, "at least 0")
        taken = self.public + self.validation
        require(taken < rows, "public + validation", taken, f"below the {rows} training rows")
        order = permutation(rows, self.seed)
        public, validation, private = torch.split(order, [self.public, self.validation, rows - taken])
        return Parts(public=public, validation=validation, private=private)

    def about(self, rows: int) -> dict[str, Any]:
        """The rule and its numbers for the record of a study: sizes only, nothing of what the rows hold."""
        private = rows - self.public - self.validation
        counts = {"rows": rows, "public": self.public, "validation": self.validation, "private": private}
        return {"rule": _RULE, "seed": self.seed, **counts}


def public_share(rows: int) -> int:
    """Four per cent of the rows, rounded down.

    >>> public_share(50_000), public_share(99_845)
    (2000, 3993)
    """
    return rows * PUBLIC_PERCENT // 100


def permutation(rows: int, seed: int) -> Tensor:
    """A random order of the rows that depends on `seed` alone."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
