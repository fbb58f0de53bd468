from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from halfsilver._core.tensors import Batch, flatten, trainable, unflatten
from halfsilver.errors import ConfigError
from halfsilver.mirror import PublicLoss

MakePublic = Callable[..., PublicLoss]
X = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randn(30, generator=torch.Generator().manual_seed(1))


def squared(model: Any, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x)[:, 0], y, reduction="none")


def network(*layers: nn.Module) -> Any:
    """A small network with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), *layers, nn.Linear(4, 1))


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_gradient_and_value_are_those_of_the_mean_loss() -> None:
    model = network(nn.Tanh())
    public = PublicLoss(model, squared, (X, Y), chunk_size=7)
    mean = squared(model, (X, Y)).mean()
    expected = torch.autograd.grad(mean, list(model.parameters()))
    for got, want in zip(public.gradient(), expected, strict=True):
        assert torch.allclose(got, want, atol=1e-6)
    assert public.value() == pytest.approx(mean.item(), rel=1e-6)


def test_other_parameters_and_another_dtype_take_the_inputs_with_them() -> None:
    model = network(nn.BatchNorm1d(4)).eval()
    model[0].bias.requires_grad_(False)
    public = PublicLoss(model, squared, (X, Y))
    point = [p.detach().double() + 0.1 for p in trainable(model)]
    single = public.gradient([p.float() for p in point])
    double = public.gradient(point)
    assert [g.dtype for g in double] == [torch.float64] * 5
    assert all(torch.allclose(a.double(), b, atol=1e-5) for a, b in zip(single, double, strict=True))
    assert public.gradient()[0].dtype == torch.float32


# ---- its own randomness, and no trace


@contextmanager
def generators_untouched() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
    yield
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def disturb(seed: int) -> None:
    """What a private pass may do to the global generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.rand(seed % 13)


@pytest.mark.parametrize("step", [None, 0, 7])
def test_gradient_is_bit_identical_whatever_the_global_generators_did(step: int | None) -> None:
    public = PublicLoss(network(nn.Dropout(0.5)), squared, (X, Y), batch_size=8, seed=3)
    results = []
    for seed in range(1, 6):
        disturb(seed)
        with generators_untouched():
            results.append(public.gradient(step=step))
    assert all(equal(results[0], other) for other in results[1:])


def test_every_method_leaves_the_generators_alone_even_when_it_fails() -> None:
    public = PublicLoss(network(nn.Dropout(0.5)), squared, (X, Y), batch_size=8)
    with generators_untouched():
        public.value(step=1)
        public.hvp([torch.ones_like(p) for p in trainable(public.model)])
        public.hessian()

    def failing(model: Any, batch: Batch) -> Tensor:
        torch.rand(3)
        raise RuntimeError("stop")

    with generators_untouched(), pytest.raises(RuntimeError, match="stop"):
        PublicLoss(network(), failing, (X, Y)).gradient()


def test_transforms_of_a_dataset_draw_from_seed_and_step_alone() -> None:
    class Jittered(Dataset[Any]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            noise = torch.randn(5) + random.random() + np.random.rand()  # noqa: NPY002
            return X[i] + noise, Y[i]

    public = PublicLoss(network(), squared, Jittered(), batch_size=6)
    disturb(1)
    first = public.gradient(step=4)
    disturb(2)
    assert equal(first, public.gradient(step=4))
    assert not equal(first, public.gradient(step=5))


def test_dropout_differs_between_steps_and_seeds() -> None:
    model = network(nn.Dropout(0.5))
    public = PublicLoss(model, squared, (X, Y))
    assert not equal(public.gradient(step=0), public.gradient(step=1))
    other = PublicLoss(model, squared, (X, Y), seed=1)
    assert not equal(public.gradient(step=0), other.gradient(step=0))


def test_the_public_pass_leaves_no_trace_in_the_model() -> None:
    model = network(nn.BatchNorm1d(4), nn.Dropout(0.3))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model[2].eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    flags = [m.training for m in model.modules()]
    public = PublicLoss(model, squared, (X, Y), batch_size=8)
    public.gradient(step=0)
    public.value()
    public.hessian()
    public.hvp([torch.ones_like(p) for p in model.parameters()])
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert all(p.grad is None for p in list(model.parameters())[1:])


# ---- batches


class Counter:
    """A loss that writes down which rows it saw, by their first feature."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        self.seen.append(batch[0][:, 0].tolist())
        return squared(model, batch)


def test_a_step_draws_batch_size_different_rows_and_always_the_same() -> None:
    loss = Counter()
    public = PublicLoss(network(), loss, (X, Y), batch_size=8)
    for step in (0, 1, 0):
        public.gradient(step=step)
    first, second, again = loss.seen
    assert first == again != second
    assert len(set(first)) == 8


@pytest.mark.parametrize(("batch_size", "step"), [(None, 3), (8, None), (30, 3), (99, 3)])
def test_the_whole_set_is_used_in_chunks_otherwise(batch_size: int | None, step: int | None) -> None:
    loss = Counter()
    PublicLoss(network(), loss, (X, Y), batch_size=batch_size, chunk_size=12).gradient(step=step)
    assert [len(rows) for rows in loss.seen] == [12, 12, 6]
    assert [x for rows in loss.seen for x in rows] == X[:, 0].tolist()


def from_dict(model: Any, batch: Batch) -> Tensor:
    return squared(model, (batch["x"], batch["y"]))


@pytest.mark.parametrize(
    ("dataset", "loss_fn"),
    [
        ((X, Y), squared),
        (TensorDataset(X, Y), squared),
        ([(x, y) for x, y in zip(X, Y, strict=True)], squared),
        ({"x": X, "y": Y}, from_dict),
        ([{"x": x, "y": y, "name": "row"} for x, y in zip(X, Y, strict=True)], from_dict),
        (torch.cat([X, Y[:, None]], 1), lambda m, b: squared(m, (b[:, :5], b[:, 5]))),
    ],
    ids=["tuple", "TensorDataset", "rows", "dict", "rows of dicts", "tensor"],
)
def test_every_kind_of_dataset_gives_the_same_gradient(dataset: Any, loss_fn: Any) -> None:
    model = network(nn.Tanh())
    expected = PublicLoss(model, squared, (X, Y), batch_size=8).gradient(step=2)
    assert equal(PublicLoss(model, loss_fn, dataset, batch_size=8).gradient(step=2), expected)


def test_refusals_say_what_to_do() -> None:
    model = network()
    with pytest.raises(ConfigError, match="collate_fn"):
        PublicLoss(model, squared, DataLoader(TensorDataset(X, Y), collate_fn=list))
    with pytest.raises(ConfigError, match=r"\[29, 30\]"):
        PublicLoss(model, squared, (X, Y[1:]))
    with pytest.raises(ConfigError, match="at least 1"):
        PublicLoss(model, squared, (X[:0], Y[:0]))
    with pytest.raises(ConfigError, match="batch_size=0"):
        PublicLoss(model, squared, (X, Y), batch_size=0)
    with pytest.raises(ConfigError, match=r"shape \(30,\); got shape \(\)"):
        PublicLoss(model, lambda m, b: squared(m, b).mean(), (X, Y)).gradient()
    with pytest.raises(ConfigError, match="trainable"):
        PublicLoss(network().requires_grad_(False), squared, (X, Y))


# ---- second derivatives


def test_hvp_and_hessian_against_autograd() -> None:
    model = network(nn.Tanh()).double()
    data = X.double(), Y.double()
    public = PublicLoss(model, squared, data, chunk_size=11)
    like = [p.detach() for p in model.parameters()]

    def psi(flat: Tensor) -> Tensor:
        named = dict(zip(dict(model.named_parameters()), unflatten_differentiably(flat, like), strict=True))
        return squared(lambda x: torch.func.functional_call(model, named, (x,)), data).mean()

    expected = torch.autograd.functional.hessian(psi, flatten(like))  # type: ignore[no-untyped-call]
    assert torch.allclose(public.hessian(), expected, atol=1e-12)
    vector = torch.randn(len(expected), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert torch.allclose(flatten(public.hvp(unflatten(vector, like))), expected @ vector, atol=1e-12)


def unflatten_differentiably(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [p.numel() for p in like])
    return [part.reshape(p.shape) for part, p in zip(parts, like, strict=True)]


def test_hessian_is_float64_and_exact_for_float32_models(least_squares: MakePublic) -> None:
    public = least_squares(torch.float32)
    x, _ = public.rows.batch(slice(None), torch.device("cpu"))
    columns = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    assert torch.allclose(public.hessian(), columns.T @ columns / len(x), atol=1e-12)


def test_linear_losses_and_unused_parameters_have_zero_derivatives() -> None:
    model = nn.ModuleDict({"used": nn.Linear(5, 1), "spare": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)
    linear = PublicLoss(model, lambda m, b: m(b[0])[:, 0], (X, Y))
    assert [float(g.abs().sum()) > 0 for g in linear.gradient()] == [True, True, False, False]
    assert not linear.hessian().any()
    assert not flatten(linear.hvp([torch.ones_like(p) for p in model.parameters()])).any()
    curved = PublicLoss(model, squared, (X, Y)).hessian()
    assert curved[:6, :6].any()
    assert not curved[6:].any()
    assert not curved[:, 6:].any()


def test_tied_weights_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5, bias=False)
            self.second = nn.Linear(5, 5, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.second(self.first(x)))

    model = Tied()
    (expected,) = torch.autograd.grad(squared(model, (X, Y)).mean(), [model.first.weight])
    (got,) = PublicLoss(model, squared, (X, Y)).gradient()
    assert torch.allclose(got, expected, atol=1e-6)
