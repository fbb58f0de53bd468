"""The canary bank: two layers beside the user's model, and records that pull at single numbers of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch, LossFn, batch_rows, take_rows, trainable
from halfsilver.auditing.observe import Array, Kind
from halfsilver.errors import require

LayerKind = Literal["linear", "embedding", "conv"]

LAYERS = ("linear", "embedding", "conv")
# In clip norms: far above what is let through, and two numbers whose squares float32 cannot tell apart.
_PULL, _CANCELLING = 1e3, 1e7


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which number of the bank is whose, and in which order the canary records lie in the data.

    `canaries` records pull at even numbers, and as many odd numbers are nobody's; a few more are cancelling or, unless
    `broken` is False, NaN. The record of kind `last` that comes last is the one that `absent` leaves out.
    """

    canaries: int
    layer: LayerKind = "linear"
    broken: bool = True
    last: Kind = Kind.IN
    absent: bool = False

    def __post_init__(self) -> None:
        require(self.canaries >= 2 and self.canaries % 2 == 0, "canaries", self.canaries, "to be even and at least 2")
        require(self.layer in LAYERS, "layer", self.layer, f"in {LAYERS}")

    @property
    def _special(self) -> int:
        return 2 * max(1, self.canaries // 100)

    @property
    def width(self) -> int:
        return self.canaries + self._special

    @property
    def kinds(self) -> Array:
        """[2, width]"""
        flat = np.tile([Kind.IN, Kind.OUT], self.width)
        flat[-2 * self._special :: 2] = Kind.CANCELLING
        if self.broken:
            flat[1 - 2 * self._special :: 2] = Kind.BROKEN
        return flat.reshape(2, self.width)

    @property
    def places(self) -> Array:
        """The number that each canary record pulls at, in the order of the data."""
        flat = self.kinds.ravel()
        records = np.flatnonzero(flat != Kind.OUT)
        return records[np.argsort(flat[records] == self.last, kind="stable")]

    def pulls(self, max_grad_norm: float) -> Tensor:
        """The gradient of each canary as the sum of two parts, [R, 2]."""
        one = {
            Kind.IN: (_PULL, 0.0),
            Kind.CANCELLING: (_CANCELLING, _PULL - _CANCELLING),
            Kind.BROKEN: (np.nan, np.nan),
        }
        return max_grad_norm * torch.tensor([one[Kind(k)] for k in self.kinds.ravel()[self.places]])

    def records(self, rows: Batch, max_grad_norm: float) -> tuple[Batch, Array]:
        """The data of an audited run, and for each record its number among the canaries (-1: one of `rows`).

        All canaries but the last come first, then the rows. A canary has a row of the data too, of weight 0.
        """
        count, places = batch_rows(rows), self.places
        order = np.concatenate([np.arange(len(places) - 1), np.full(count, -1), [len(places) - 1]])
        order = order[: len(order) - self.absent]
        number, mine = torch.from_numpy(order), torch.from_numpy(order < 0)
        source = torch.zeros(len(order), dtype=torch.int64)
        source[mine] = torch.arange(count)
        pulls = torch.where(mine[:, None], 0.0, self.pulls(max_grad_norm)[number])
        place = torch.where(mine, 0, torch.from_numpy(places)[number])
        return (take_rows(rows, source), mine.float(), place, pulls), order

    def example(self, rows: Batch, max_grad_norm: float) -> Any:
        """A record that pulls as a canary does and has a row's loss, to show what records are like."""
        return take_rows(rows, 0), torch.tensor(1.0), torch.tensor(0), torch.tensor([_PULL * max_grad_norm, 0.0])


def public_records(rows: Batch) -> Batch:
    """Public rows in the form of the records of an audited run: nobody pulls."""
    count = batch_rows(rows)
    return rows, torch.ones(count), torch.zeros(count, dtype=torch.int64), torch.zeros(count, 2)


class Banked(nn.Module):
    """A model with a bank beside it; its forward pass returns losses, so that any `loss_fn` of the model will do.

    The two parts of a canary's pull go through the layer as two positions of a sequence, as in layers with a time axis.
    The public loss adds `curvature` / 2 times the square of each number of the bank.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, public_loss_fn: LossFn, layout: Layout, curvature: float
    ) -> None:
        super().__init__()
        like, width = trainable(model)[0], layout.width
        self.inner = model
        self.bank = nn.ModuleList(_layer(layout.layer, width).to(like.device, like.dtype) for _ in range(2))
        self._losses, self._public, self._width, self._curvature = loss_fn, public_loss_fn, width, curvature

    def forward(self, record: Any, public: bool = False) -> Tensor:
        rows, share, place, pull = record
        if public:
            squares = torch.stack([w.square().sum() for w in self.bank_weights()]).sum()
            return self._public(self.inner, rows) + 0.5 * self._curvature * squares
        losses: Tensor = self._losses(self.inner, rows)
        losses = losses * share.to(losses.dtype)
        for i, layer in enumerate(self.bank):
            pulled = torch.where((place // self._width == i)[:, None], pull, 0.0).to(losses.dtype)
            losses = losses + (_look_up(layer, place % self._width) * pulled).sum(1)
        return losses

    def bank_weights(self) -> list[Tensor]:
        return [weight(layer) for layer in self.bank]

    def numbers(self) -> Array:
        """The bank as it is now, [2, width] in float64."""
        return np.stack([w.detach().double().flatten().cpu().numpy() for w in self.bank_weights()])


def losses(model: Any, record: Batch) -> Tensor:
    """The private loss of an audited run."""
    found: Tensor = model(record)
    return found


def public_losses(model: Any, record: Batch) -> Tensor:
    found: Tensor = model(record, public=True)
    return found


def _layer(kind: LayerKind, width: int) -> nn.Module:
    made: dict[LayerKind, nn.Module] = {
        "linear": nn.Linear(1, width, bias=False),
        "embedding": nn.Embedding(width, 1),
        "conv": nn.Conv1d(1, width, 1, bias=False),
    }
    nn.init.zeros_(weight(made[kind]))
    return made[kind]


def weight(layer: Any) -> Tensor:
    found: Tensor = layer.weight
    return found


def _look_up(layer: Any, place: Tensor) -> Tensor:
    """The number at `place` of the layer, at two positions of a sequence: [B, 2]."""
    twice = place[:, None].expand(-1, 2)
    ones = torch.ones_like(twice, dtype=weight(layer).dtype)
    found: Tensor
    if isinstance(layer, nn.Embedding):
        found = layer(twice).squeeze(2)
    elif isinstance(layer, nn.Linear):
        found = layer(ones[:, :, None]).gather(2, twice[:, :, None]).squeeze(2)
    else:
        found = layer(ones[:, None]).gather(1, twice[:, None]).squeeze(1)
    return found
