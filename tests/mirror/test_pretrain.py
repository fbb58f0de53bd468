from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch
from halfsilver.errors import ConfigError
from halfsilver.mirror import PretrainResult, pretrain


def squared(model: Any, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x)[:, 0], y, reduction="none")


def data(rows: int = 120) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 6, generator=generator)
    return x, x @ torch.arange(6.0) / 5 + 0.3 * torch.randn(rows, generator=generator)


def network(*layers: nn.Module) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 32), *layers, nn.ReLU(), nn.Linear(32, 1))


def run(model: nn.Module, **options: Any) -> PretrainResult:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return pretrain(model, squared, data(), optimizer=optimizer, **options)


def test_it_converges_stops_early_and_says_so() -> None:
    result = run(network())
    assert result.epochs == result.best_epoch + 10 < 200
    assert len(result.history) == result.epochs + 1
    assert (result.train_loss, result.holdout_loss) == result.history[result.best_epoch]
    assert result.holdout_loss == min(holdout for _, holdout in result.history)
    assert result.holdout_loss < 0.2 * result.history[0][1]


def test_the_best_weights_are_left_in_the_model() -> None:
    long, short = network(), network()
    result = run(long)
    run(short, epochs=result.best_epoch)
    assert all(torch.equal(a, b) for a, b in zip(long.parameters(), short.parameters(), strict=True))


def test_it_depends_on_the_seed_alone_and_leaves_the_generators() -> None:
    weights = []
    for global_seed, seed in [(1, 0), (2, 0), (1, 5)]:
        model = network(nn.Dropout(0.2))
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        run(model, epochs=3, seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        weights.append(model[0].weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_training_flags_are_kept_and_gradients_cleared() -> None:
    model = network(nn.BatchNorm1d(32), nn.Dropout(0.1))
    model[1].eval()
    flags = [m.training for m in model.modules()]
    run(model, epochs=2, batch_size=107)  # 108 training rows: no batch of a single row
    assert [m.training for m in model.modules()] == flags
    assert all(p.grad is None for p in model.parameters())


def test_transform_sees_training_batches_only() -> None:
    rows = 0

    def augment(batch: Batch) -> Batch:
        nonlocal rows
        rows += len(batch[0])
        return batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]

    result = run(network(), epochs=3, transform=augment)
    assert rows == 3 * 108
    assert result.epochs == 3


def test_training_that_diverges_keeps_the_first_weights() -> None:
    model = network()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    result = pretrain(model, squared, data(), optimizer=optimizer, patience=3)
    assert (result.best_epoch, result.epochs) == (0, 3)
    assert torch.equal(model[0].weight, before)


def test_the_default_optimizer_trains_what_is_trainable() -> None:
    model = network()
    model[0].requires_grad_(False)
    frozen = model[0].weight.clone()
    result = pretrain(model, squared, data(), epochs=5)
    assert torch.equal(model[0].weight, frozen)
    assert result.holdout_loss < result.history[0][1]


@pytest.mark.parametrize(
    "options",
    [{"holdout": 1e-9}, {"holdout": 1.0}, {"epochs": 0}, {"patience": 0}, {"batch_size": 0}],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        pretrain(network(), squared, data(), **options)


def test_without_holdout_all_rows_are_trained_on_for_all_epochs() -> None:
    rows = torch.randn(30, 3)
    seen: list[int] = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(len(batch))
        return torch.sum(model(batch).square(), 1)

    model = nn.Linear(3, 2)
    result = pretrain(model, loss_fn, rows, epochs=4, patience=1, holdout=0.0, batch_size=10)
    assert (result.epochs, result.best_epoch, sum(seen)) == (4, 4, 120)
    assert math.isnan(result.holdout_loss)


def test_the_average_is_what_is_tested_and_left() -> None:
    """With a learning rate of 0 after the first epoch, by hand: the exponential average of the weights of two steps."""
    rows, decay = torch.ones(8, 1), 0.5
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 4.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)  # the loss is w^2 / 2: each step takes away a quarter of w
    loss = lambda m, b: m(b).square().squeeze(1) / 2  # noqa: E731
    pretrain(model, loss, rows, optimizer=sgd, epochs=3, holdout=0.0, batch_size=8, average=decay)
    first, second, third = 3.0, 2.25, 1.6875
    by_hand = decay * ((first + second) / 2) + (1 - decay) * third
    assert model.weight.item() == pytest.approx(by_hand)


def test_the_learning_rate_falls_by_a_cosine() -> None:
    """Each step takes the learning rate off the weight, whose gradient is 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=2.0)
    places: list[float] = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            places.append(model.weight.item())
        return torch.squeeze(model(batch), 1)

    pretrain(model, loss_fn, torch.ones(4, 1), optimizer=sgd, epochs=4, holdout=0.0, batch_size=4, lr_end=0.1)
    rates = [a - b for a, b in itertools.pairwise([*places, model.weight.item()])]
    assert rates == pytest.approx([2 * (0.1 + 0.45 * (1 + math.cos(math.pi * t / 4))) for t in range(4)])
