"""Several views of a record in one gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, LossFn, map_batch
from halfsilver.errors import require

_unchanged: ContextVar[bool] = ContextVar("unchanged", default=False)


@contextmanager
def unchanged_views() -> Iterator[None]:
    """All views are the record itself: two ways to compute one gradient can be compared only without chance."""
    token = _unchanged.set(True)
    try:
        yield
    finally:
        _unchanged.reset(token)


def views(loss_fn: LossFn, augment: Callable[[Batch], Batch], k: int) -> LossFn:
    """The mean loss over `k` augmented views of each record, to be given to `Trainer` as its loss.

    The gradient of a record is then the mean over its views, *before* it is clipped. A record still contributes one
    clipped gradient, so epsilon does not change. The time of a step grows with `k`. Views are computed one after the
    other, so its memory does not, unless the model needs a backend other than "book".

    Guarantee: the sensitivity is that of one record, if `augment` changes each record by itself. One that blends
    records is found on made-up rows and refused before a private row is read.

    Args:
        loss_fn: ``loss_fn(model, batch)`` returns one loss per example.
        augment: Returns a changed batch of the same shapes. It draws from torch's global generator, which private steps
            seed anew, and must change each record by itself: no mixup.
        k: Number of views, at least 1.

    Returns:
        A loss function.

    Raises:
        ConfigError: `k` is out of its range.

    References:
        De et al. (2022), Unlocking High-Accuracy Differentially Private Image Classification through Scale,
        arXiv:2204.13650: augmentation multiplicity.

    >>> import torch
    >>> loss = views(lambda model, batch: model(batch).square().squeeze(1), lambda x: x + torch.randn_like(x), k=4)
    >>> loss(torch.nn.Linear(2, 1), torch.ones(3, 2)).shape
    torch.Size([3])
    """
    require(k >= 1, "k", k, "at least 1")
    return Views(loss_fn, augment, k)


@final
@dataclass(frozen=True)
class Views:
    """The loss function that `views` returns: the mean of `k` losses of one view each."""

    loss_fn: LossFn
    augment: Callable[[Batch], Batch]
    k: int

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        return torch.stack([self.share(model, batch) for _ in range(self.k)]).sum(0)

    def share(self, model: Any, batch: Batch) -> Tensor:
        """What one more view adds to the mean."""
        batch = map_batch(torch.clone, batch)  # an augmentation may write into its input
        return self.loss_fn(model, batch if _unchanged.get() else self.augment(batch)) / self.k


def by_view(loss_fn: LossFn) -> tuple[int, LossFn]:
    """A number and a loss function that, called so many times, adds up to `loss_fn`."""
    return (loss_fn.k, loss_fn.share) if isinstance(loss_fn, Views) else (1, loss_fn)
