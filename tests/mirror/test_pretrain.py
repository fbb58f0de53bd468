from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch
from halfsilver.errors import CheckpointCorrupt, ConfigError
from halfsilver.mirror import OneCycle, PretrainResult, pretrain


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


def test_a_schedule_sets_the_rate_before_each_step() -> None:
    """Each step takes the learning rate off the weight, whose gradient is 1; against torch's own one-cycle schedule."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=2.0)
    places: list[float] = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            places.append(model.weight.item())
        return torch.squeeze(model(batch), 1)

    schedule = OneCycle(warm_up=0.25, start=0.1)
    pretrain(model, loss_fn, torch.ones(6, 1), optimizer=sgd, epochs=4, holdout=0.0, batch_size=3, schedule=schedule)
    rates = [a - b for a, b in itertools.pairwise([*places, model.weight.item()])]
    assert rates == pytest.approx([2 * schedule(step / 8) for step in range(8)], rel=1e-5)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(  # its phases end one step earlier, at whole steps
        other, 2.0, total_steps=9, pct_start=3 / 9, div_factor=10, final_div_factor=1e9, cycle_momentum=False
    )
    assert rates[0] == pytest.approx(cycle.get_last_lr()[0], rel=1e-5)
    for _ in range(2):
        other.step()
        cycle.step()
    assert rates[2] == pytest.approx(cycle.get_last_lr()[0], rel=1e-5)


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "options", [{"schedule": OneCycle()}, {"lr_end": 0.1, "holdout": 0.2}], ids=["cycle", "cosine"]
)
def test_a_run_that_was_killed_ends_as_one_that_was_not(options: dict[str, Any], tmp_path: Path) -> None:
    def fresh() -> tuple[Any, dict[str, Any]]:
        model = network(nn.BatchNorm1d(32), nn.Dropout(0.2))
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
        return model, {"optimizer": sgd, "epochs": 5, "average": 0.8, "holdout": 0.0, **options}

    def stop(epoch: int, train_loss: float, holdout_loss: float) -> None:
        if epoch == 3:
            raise Killed

    whole, how = fresh()
    expected = pretrain(whole, squared, data(), **how)
    model, how = fresh()
    with pytest.raises(Killed):
        pretrain(model, squared, data(), **how, checkpoint=tmp_path / "state", after_epoch=stop)
    model, how = fresh()
    epochs: list[int] = []
    result = pretrain(
        model, squared, data(), **how, checkpoint=tmp_path / "state", after_epoch=lambda epoch, *_: epochs.append(epoch)
    )
    assert epochs == [4, 5]
    assert str(result) == str(expected)  # NaN, the held-out loss without such rows, differs from itself
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), whole.state_dict().values(), strict=True))
    model, how = fresh()
    with pytest.raises(CheckpointCorrupt, match=r"another call.*seed"):
        pretrain(model, squared, data(), **how, seed=1, checkpoint=tmp_path / "state")


def test_the_average_has_the_statistics_of_its_own_weights() -> None:
    """The input averages to 1, so the running mean of a layer with weight w is w, and its average is that of w."""
    layer, norm = nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, momentum=1.0)
    weights: list[float] = []

    def loss_fn(model: Any, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            weights.append(layer.weight.item())
        return torch.squeeze((model(batch) - 3 * batch).square() + layer.weight, 1)

    model = nn.Sequential(layer, norm)
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    pretrain(model, loss_fn, torch.tensor([[0.0], [2.0]]), optimizer=sgd, epochs=2, holdout=0.0, average=0.5)
    assert weights[0] != pytest.approx(weights[1])
    assert norm.running_mean is not None
    assert norm.running_mean.item() == pytest.approx(sum(weights) / 2, rel=1e-5)
