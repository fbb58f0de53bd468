"""Losses that draw random numbers: each example has its own, and a check that compares two passes draws them alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfsilver as hs
from halfsilver._core.tensors import norm, take_rows
from halfsilver.errors import ConfigError, UnsupportedLayer
from halfsilver.privacy.gradients import BACKENDS, Performance, make_backend
from halfsilver.privacy.gradients.book import BookKeeping
from halfsilver.privacy.gradients.vmap import Vmap

GENERATOR = nn.Linear(4, 6).requires_grad_(False)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * (spread / 2).exp()), mean, spread


def evidence(model: Any, x: Tensor) -> Tensor:
    out, mean, spread = model(x)
    return torch.as_tensor((out - x).square().sum(1) + 0.5 * (mean.square() + spread.exp() - spread - 1).sum(1))


def diffusion(model: Any, x: Tensor) -> Tensor:
    kept = 1 - torch.randint(0, 10, (len(x), 1)) / 11
    noise = torch.randn_like(x)
    noisy = torch.cat([kept.sqrt() * x + (1 - kept).sqrt() * noise, kept], 1)
    return torch.as_tensor((model(noisy) - noise).square().mean(1))


def adversary(model: Any, x: Tensor) -> Tensor:
    made = GENERATOR(torch.randn(len(x), 4))
    return functional.softplus(-model(x)[:, 0]) + functional.softplus(model(made)[:, 0])


class Noise(nn.Module):
    """Gaussian noise, scaled by a weight of its own, for which no kernel knows the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.randn_like(x)


class Sequence(nn.Module):
    """Its oracle goes one example at a time, because vmap has no LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps = x[:, None] + 0.3 * torch.randn(len(x), 7, 6)
        return torch.as_tensor(self.out(self.cells(steps)[0][:, -1]))


def squared(model: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().sum(1))


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "variational": (Vae, evidence),
    "diffusion": (lambda: nn.Linear(7, 6), diffusion),
    "adversarial": (lambda: nn.Linear(6, 1), adversary),
    "noise layer": (lambda: nn.Sequential(nn.Linear(6, 5), Noise(), nn.Linear(5, 2)), squared),
    "one by one": (Sequence, squared),
}


def rows(n: int = 4) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("case", CASES)
def test_they_train(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, loss_fn = CASES[case][0](), CASES[case][1]
    plan = hs.PrivacyPlan(steps=3, sampling_rate=0.5, expected_batch_size=30, noise_multiplier=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    result = hs.Trainer(model, loss_fn, optimizer=sgd, plan=plan).fit(rows(60), rows(20), run_dir=tmp_path)
    assert (result.stopped, result.updates) == ("finished", 3)


@pytest.mark.parametrize("case", CASES)
def test_book_keeping_serves_them_and_each_row_is_clipped_with_the_numbers_that_it_drew(case: str) -> None:
    """Norm and sum are of one pass: whatever is drawn, one row contributes the clip norm and no more."""
    torch.manual_seed(0)
    model, loss_fn = CASES[case][0](), CASES[case][1]
    backend = make_backend(Performance(), model, loss_fn, rows())
    assert isinstance(backend, BookKeeping)
    for seed in range(20):
        torch.manual_seed(seed)
        size = norm(backend.clipped_sum(rows(8), 1e-3, torch.arange(8) == 0).tensors)
        assert 0.99e-3 < size <= 1e-3


class Wrong:
    """Book-keeping with a fault; the contract of the others is kept."""

    name = "wrong"

    def __init__(self, model: nn.Module, loss_fn: Any, example: Any) -> None:
        self.right, self.oracle = BookKeeping(model, loss_fn, example), Vmap(model, loss_fn, example)

    def clipped_sum(self, batch: Any, clip: float, counted: Any = None, adding: Any = None) -> Any:
        return getattr(self, self.fault)(batch, clip, counted, adding)

    fault = ""

    def unclipped(self, batch: Any, clip: float, counted: Any, adding: Any) -> Any:
        return self.right.clipped_sum(batch, 1.05 * clip, counted, adding)

    def missing(self, batch: Any, clip: float, counted: Any, adding: Any) -> Any:
        total = self.right.clipped_sum(batch, clip, counted, adding)
        total.tensors[0].zero_()
        return total

    def shifted(self, batch: Any, clip: float, counted: Any, adding: Any) -> Any:
        return self.right.clipped_sum(batch + 0.2, clip, counted, adding)

    def mixed(self, batch: Any, clip: float, counted: Any, adding: Any) -> Any:
        return self.right.clipped_sum(batch + 0.3 * (batch.mean(0) - batch), clip, counted, adding)

    def twice(self, batch: Any, clip: float, counted: Any, adding: Any) -> Any:
        """The norm is that of one pass, and the sum that of another one, which draws anew."""
        grads, others = self.oracle.per_example(batch), self.oracle.per_example(batch)
        norms = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
        total = self.right.clipped_sum(batch, clip, counted, adding)
        weights = clip / norms if counted is None else clip / norms * counted
        total.tensors[:] = [torch.einsum("n,n...->...", weights, g).double() for g in others]
        return total


FAULTS = ("unclipped", "missing", "shifted", "twice", "mixed")


@pytest.mark.parametrize(
    ("case", "fault"),
    # In a batch of one, nothing shows what mixes rows: so are they compared where the oracle goes one by one.
    [(c, f) for c in CASES for f in FAULTS if (c, f) != ("one by one", "mixed")],
)
def test_a_wrong_backend_is_still_found(case: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10 of 10 draws of weights, and the right one is refused in none."""
    right: Any = "right"
    monkeypatch.setitem(BACKENDS, right, BookKeeping)
    monkeypatch.setitem(BACKENDS, "book", type("Faulty", (Wrong,), {"fault": fault}))
    for seed in range(10):
        torch.manual_seed(seed)
        model, loss_fn = CASES[case][0](), CASES[case][1]
        with pytest.raises(UnsupportedLayer, match=r"computes wrong gradients|clip norms"):
            make_backend(Performance(backend="book"), model, loss_fn, rows())
        assert make_backend(Performance(backend=right), model, loss_fn, rows()).name == "book"


SHARED: dict[str, Any] = {
    "number": lambda model, x: (model(x) * torch.randn(())).square().sum(1),
    "vector": lambda model, x: model(x + torch.randn(6)).square().sum(1),
    "augmentation": hs.views(squared, lambda x: x.flip(-1) if torch.rand(()) < 0.5 else x, 1),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_number_that_examples_share_is_drawn_for_each(name: str) -> None:
    """Who shares it changes with a removed record, so a bound for each row would not bound what one record does."""
    model = nn.Linear(6, 3)
    with pytest.raises(UnsupportedLayer, match="one random number for several examples"):
        make_backend(Performance(backend="book"), model, SHARED[name], rows())
    backend = make_backend(Performance(), model, SHARED[name], rows())
    assert isinstance(backend, Vmap)
    alike = take_rows(rows(1), torch.zeros(64, dtype=torch.int64))
    torch.manual_seed(0)
    grads = backend.per_example(alike)[0]
    assert not torch.equal(grads, grads[:1].expand_as(grads))


@pytest.mark.parametrize("backend", ["auto", "book", "vmap"])
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_numbers_of_python_and_numpy_are_refused(draw: Any, backend: Any) -> None:
    """Also of vmap, which runs such code once for all examples."""
    with pytest.raises(ConfigError, match="Python's random or NumPy"):
        make_backend(Performance(backend=backend), nn.Linear(6, 2), lambda m, x: squared(m, x) * draw(), rows())


def test_a_generator_of_its_own_is_named() -> None:
    own = torch.Generator()

    def loss_fn(model: Any, x: Tensor) -> Tensor:
        return squared(model, x + torch.randn(x.shape, generator=own))

    names: list[Any] = ["auto", "vmap"]
    for name in names:
        with pytest.raises(UnsupportedLayer, match=r"changes from call to call: draw by torch's global generator"):
            make_backend(Performance(backend=name), nn.Linear(6, 2), loss_fn, rows())


def test_a_hinge_may_be_flat_at_some_made_up_rows() -> None:
    model, x = nn.Linear(6, 1, bias=False), rows()
    with torch.no_grad():
        model.weight.copy_(x[:1])

    def hinge(model: Any, x: Tensor) -> Tensor:
        return functional.relu(model(x)[:, 0] - 0.1)

    x[1] = -x[0]
    assert hinge(model, x)[0] > 0
    assert hinge(model, x)[1] == 0
    assert make_backend(Performance(), model, hinge, x).name == "book"
    with pytest.raises(ConfigError, match="on which no backend can be checked"):
        make_backend(Performance(), model, lambda m, x: 0 * hinge(m, x), x)
