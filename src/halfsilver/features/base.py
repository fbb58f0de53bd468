"""What features are: settings that are fitted on public rows, and the map that results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, batch_rows, map_batch
from halfsilver.errors import require

View = Callable[[Batch], Batch]


class FeatureMap(Protocol):
    """Turns rows into features. It never changes, and the features of a row depend on no other row of the batch.

    Write your own with these three methods, and `joined`, `public_pca`, `Cached` and `PrivateData.mapped` take it.
    """

    def transform(self, x: Batch) -> Tensor:
        """Return the features of rows.

        Args:
            x: Rows, on dimension 0 of a tensor, or of each tensor in a tuple or dict.

        Returns:
            One row of features for each row of `x`, shape [N, D], in floating point.
        """

    def state(self) -> Mapping[str, Tensor]:
        """Return all tensors that the map consists of, by name. With `about` they determine the features."""

    def about(self) -> Mapping[str, Any]:
        """Return the settings of the map as JSON values."""


class Features(Protocol):
    """Settings of features: a value that has not seen a row yet."""

    def fit(self, public: Batch) -> FeatureMap:
        """Return the map that these settings and public rows give.

        Args:
            public: Public rows. They get no protection, so private rows must not be among them.

        Returns:
            The map, which the next call of `fit` does not change.
        """


def as_is(x: Batch) -> Batch:
    """Return the rows unchanged: the view of a record that is the record itself.

    Args:
        x: Rows.

    Returns:
        `x`.

    Example:
        >>> import torch
        >>> as_is(torch.tensor([[1, 2]]))
        tensor([[1, 2]])
    """
    return x


def flipped(x: Tensor) -> Tensor:
    """Return images mirrored from left to right, as a view of each record.

    Args:
        x: Images, with the width as their last dimension.

    Returns:
        The mirrored images.

    Example:
        >>> import torch
        >>> flipped(torch.tensor([[1, 2]]))
        tensor([[2, 1]])
    """
    return x.flip(-1)


def check_views(views: tuple[View, ...]) -> None:
    require(len(views) > 0 and all(map(callable, views)), "views", views, "to be functions of rows, at least one")


def over_views(compute: Callable[[Batch], Tensor], x: Batch, views: tuple[View, ...], rows: int) -> Tensor:
    """The mean over views of what `compute` gives, chunk by chunk.

    Every chunk has `rows` rows: the last one is filled up with copies of its first row. In chunks of another size a row
    may be rounded in another way, and the number of rows beside it would show in its features.
    """
    size = batch_rows(x)
    require(size > 0, "rows", size, "at least 1")
    parts = []
    for start in range(0, size, rows):
        index = torch.arange(start, start + rows)
        index[size - start :] = start
        chunk = map_batch(lambda t, index=index: t[index.to(t.device)], x)  # type: ignore[misc]
        mean = sum(compute(view(chunk)) for view in views) / len(views)
        assert isinstance(mean, Tensor)
        parts.append(mean[: size - start])
    return torch.cat(parts)


def name_of(function: Any) -> str:
    """Where a function is defined; for the key of a cache."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
