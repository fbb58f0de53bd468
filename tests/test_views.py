"""Several views of a record: the mean of their gradients is clipped, once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import halfsilver as hs
from halfsilver._core.tensors import Batch, trainable
from halfsilver.errors import ConfigError, UnsupportedLayer
from halfsilver.privacy.gradients import BACKENDS

CHANGES: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x.flip(-1), lambda x: x.roll(1, 2)]


def loss_fn(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def in_turn() -> Callable[[Batch], Batch]:
    """The three changes one after the other, as an augmentation that is known."""
    changes = cycle(CHANGES)
    return lambda batch: (next(changes)(batch[0]), batch[1])


def model_and_rows() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 5)
    )
    return model, (torch.randn(6, 1, 8, 8), torch.randint(0, 5, (6,)))


@pytest.mark.parametrize("backend", ["book", "vmap"])
def test_the_mean_over_views_is_clipped(backend: str) -> None:
    """Against plain autograd: for each record the mean gradient of its three views, clipped, and added up."""
    model, (x, y) = model_and_rows()
    params = trainable(model)
    means = []
    for i in range(6):
        views = [change(x[i : i + 1]) for change in CHANGES]
        losses = [loss_fn(model, (view, y[i : i + 1])).sum() for view in views]
        grads = [torch.autograd.grad(loss, params) for loss in losses]
        means.append(torch.stack([torch.cat([g.flatten() for g in one]).double() for one in grads]).mean(0))
    norms = torch.stack(means).norm(dim=1)
    clip = float(norms.median())
    expected = torch.stack([g * min(1.0, clip / float(g.norm())) for g in means]).sum(0)
    made = BACKENDS[backend](model, hs.views(loss_fn, in_turn(), 3), (x[:2], y[:2]))
    total = made.clipped_sum((x, y), clip)
    actual = torch.cat([t.flatten() for t in total.tensors]).double()
    assert float((actual - expected).norm()) < 2e-3 * float(expected.norm())  # clipping leaves room for rounding
    clipped_apart = sum(
        g * min(1.0, clip / float(g.norm())) for g in (torch.cat([p.flatten() for p in torch.autograd.grad(
            loss_fn(model, (CHANGES[1](x[i : i + 1]), y[i : i + 1])).sum(), params)]).double() for i in range(6))
    )  # fmt: skip
    assert float((actual - torch.as_tensor(clipped_apart)).norm()) > 0.1 * clip


class Words(nn.Module):
    """Embedding, recurrent and linear layers over time: few and many terms beside the size of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(50, 6), nn.LSTM(6, 5, batch_first=True)
        self.wide, self.narrow = nn.Linear(5, 40), nn.Linear(40, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.narrow(self.wide(self.recurrent(self.embedding(tokens))[0])).mean(1)
        return out


@pytest.mark.nightly
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 5), steps=st.integers(1, 7), k=st.integers(1, 5), seed=st.integers(0, 1000))
def test_layers_over_time(rows: int, steps: int, k: int, seed: int) -> None:
    """Book-keeping, which takes views one after the other, against vmap, which takes them together."""
    torch.manual_seed(seed)
    model, batch = Words(), (torch.randint(0, 50, (rows, steps)), torch.randint(0, 2, (rows,)))

    def changes() -> Callable[[Batch], Batch]:
        shifts = cycle(range(k))
        return lambda batch: ((batch[0] + next(shifts)) % 50, batch[1])

    def total(backend: str, clip: float) -> Tensor:
        made = BACKENDS[backend](model, hs.views(loss_fn, changes(), k), batch)
        return torch.cat([t.flatten().double() for t in made.clipped_sum(batch, clip).tensors])

    for clip in (1e-2, 1e3):  # all are clipped, and none
        torch.testing.assert_close(total("book", clip), total("vmap", clip), rtol=1e-3, atol=1e-5 * clip * rows)


def test_memory_does_not_grow_with_the_number_of_views() -> None:
    model, batch = model_and_rows()
    seen: list[StorageWeakRef] = []
    alive: list[int] = []

    def changed(batch: Batch) -> Batch:
        alive.append(sum(not storage.expired() for storage in seen))  # type: ignore[no-untyped-call]
        view = batch[0].flip(-1)
        seen.append(StorageWeakRef(view.untyped_storage()))  # type: ignore[no-untyped-call]
        return view, batch[1]

    loss = hs.views(loss_fn, changed, 8)
    BACKENDS["book"](model, loss, batch).clipped_sum(batch, 1.0)
    assert len(alive) == 8
    assert max(alive) <= 1
    # In one pass, as where another function hides that the loss has views, all of them are kept.
    BACKENDS["book"](model, lambda model, batch: loss(model, batch), batch).clipped_sum(batch, 1.0)
    assert max(alive) >= 7


def test_a_run_with_views(tmp_path: Path) -> None:
    model, rows = model_and_rows()
    plan = hs.PrivacyPlan.calibrate(epsilon=5, delta=1e-3, population=6, batch_size=3, steps=2)

    def noisy(batch: Batch) -> Batch:
        return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]

    trainer = hs.Trainer(
        model, hs.views(loss_fn, noisy, 4), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), plan=plan
    )
    assert trainer.fit(rows, run_dir=tmp_path).stopped == "finished"


def test_views_that_blend_records_are_refused(tmp_path: Path) -> None:
    model, rows = model_and_rows()
    plan = hs.PrivacyPlan.calibrate(epsilon=5, delta=1e-3, population=6, batch_size=3, steps=2)
    blend = hs.views(loss_fn, lambda batch: (batch[0] + batch[0].flip(0), batch[1]), 2)
    trainer = hs.Trainer(model, blend, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    with pytest.raises(UnsupportedLayer, match="depends on another example"):
        trainer.fit(rows, run_dir=tmp_path)


def test_no_view_is_refused() -> None:
    with pytest.raises(ConfigError, match="k=0"):
        hs.views(loss_fn, lambda batch: batch, 0)
