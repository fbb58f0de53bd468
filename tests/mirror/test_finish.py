"""The last step after training. Everything is seeded, so nothing here is left to chance."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional

import halfsilver as hs
from halfsilver.errors import ConfigError
from halfsilver.mirror import Calibrated
from halfsilver.study.calibration import calibration_error


def loss_fn(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels drawn from the softmax of 2 x, of which the model below is twice too sure."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=draw)
    return x, torch.multinomial((2 * x).softmax(1), 1, generator=draw)[:, 0]


def model_of(factor: float) -> nn.Linear:
    model = nn.Linear(4, 4, bias=False)
    model.weight.data.copy_(factor * torch.eye(4))
    return model


def mean_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float(loss_fn(model, data).mean())


def test_the_temperature_is_that_of_an_independent_fit() -> None:
    """Against scipy's Nelder-Mead on the same penalised loss."""
    held_out = rows(600, 0)
    finished = hs.Finish().fit(model_of(8.0), loss_fn, held_out)
    logits = 8 * held_out[0].double()

    def objective(log_temperature: Any) -> float:
        value = float(log_temperature[0])
        return float(functional.cross_entropy(logits / math.exp(value), held_out[1])) + value**2 / 2 / 600

    expected = math.exp(minimize(objective, [0.0], method="Nelder-Mead", options={"xatol": 1e-6}).x[0])
    assert finished.temperature == pytest.approx(expected, rel=1e-3)
    assert finished.temperature == pytest.approx(4.0, rel=0.2)  # labels are those of 2 x
    assert finished.loss_after < finished.loss_before


def test_the_finished_model_computes_what_was_fitted() -> None:
    held_out = rows(600, 0)
    finished = hs.Finish(bias=True).fit(model_of(8.0), loss_fn, held_out)
    assert mean_loss(finished.model, held_out) == pytest.approx(finished.loss_after, rel=1e-5)
    assert finished.bias is not None
    expected = held_out[0] * 8 / finished.temperature + finished.bias
    torch.testing.assert_close(finished.model(held_out[0]).detach(), expected)
    fresh = rows(4000, 1)  # it helps on rows that it was not fitted to
    assert mean_loss(finished.model, fresh) < 0.7 * mean_loss(model_of(8.0), fresh)


def test_a_bias_corrects_class_frequencies() -> None:
    x, y = rows(3000, 0)
    keep = (y != 0) | (torch.arange(3000) % 4 == 0)  # class 0 is four times rarer than the model believes
    held_out = (x[keep], y[keep])
    finished = hs.Finish(bias=True).fit(model_of(2.0), loss_fn, held_out)
    assert finished.bias is not None
    shift = finished.bias - finished.bias[1:].mean()
    assert float(shift[0]) == pytest.approx(-math.log(4), abs=0.25)


def test_a_part_of_the_way_is_taken_only_where_it_helps() -> None:
    held_out, start = rows(600, 0), model_of(2.0)
    broken = copy.deepcopy(start)
    broken.weight.data += torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) * 4
    tried = hs.Finish(shares=(0.25, 0.5, 0.75))
    finished = tried.fit(broken, loss_fn, held_out, start=start)
    assert finished.share == 0.25
    with torch.no_grad():
        expected = start.weight + 0.25 * (broken.weight - start.weight)
    torch.testing.assert_close(finished.model.models[0].weight, expected)  # type: ignore[union-attr,index]
    torch.manual_seed(0)  # a random start that happens to be good could help
    good = tried.fit(model_of(2.0), loss_fn, held_out, start=nn.Linear(4, 4, bias=False))
    assert good.share == 1.0


def test_logits_of_several_models_are_averaged_where_that_helps() -> None:
    held_out, noise = rows(600, 0), torch.Generator().manual_seed(1)
    models = [model_of(2.0) for _ in range(4)]
    for model in models:
        model.weight.data += torch.randn(4, 4, generator=noise)
    finished = hs.Finish().fit(models[0], loss_fn, held_out, others=models[1:])
    assert finished.joined == 4
    assert "mean logits of 4 models" in str(finished)
    assert mean_loss(finished.model, held_out) == pytest.approx(finished.loss_after, rel=1e-5)


def test_modes_and_weights_stay() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    first = hs.Finish().fit(model, loss_fn, rows(100, 0))
    assert model.training
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert hs.Finish().fit(model, loss_fn, rows(100, 0)).loss_before == first.loss_before  # no dropout


def test_what_does_not_fit_is_refused() -> None:
    held_out = rows(600, 0)
    with pytest.raises(ConfigError, match="held-out rows"):
        hs.Finish().fit(model_of(1.0), loss_fn, rows(10, 0))
    with pytest.raises(ConfigError, match="only by calling it"):
        hs.Finish().fit(model_of(1.0), lambda m, b: m.weight.sum() * b[0][:, 0], held_out)
    with pytest.raises(ConfigError, match="calls the model"):
        hs.Finish().fit(model_of(1.0), lambda m, b: b[0][:, 0], held_out)
    with pytest.raises(ConfigError, match="does not fit"):
        hs.Finish(shares=(0.5,)).fit(model_of(1.0), loss_fn, held_out, start=nn.Linear(3, 3, bias=False))
    with pytest.raises(ConfigError, match="shares"):
        hs.Finish(shares=(1.5,))
    with pytest.raises(ConfigError, match="temperature"):
        Calibrated([model_of(1.0)], temperature=0.0)


def test_calibration_error_against_a_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    confidence = torch.rand(500, generator=draw)
    correct = (torch.rand(500, generator=draw) < 0.5).double()
    expected = 0.0
    for k in range(10):
        inside = [i for i in range(500) if k / 10 <= float(confidence[i]) < (k + 1) / 10]
        if inside:
            gap = sum(float(confidence[i]) - float(correct[i]) for i in inside) / len(inside)
            expected += len(inside) / 500 * abs(gap)
    assert calibration_error(confidence, correct, bins=10) == pytest.approx(expected)
    assert calibration_error(torch.ones(4), torch.ones(4)) == 0.0


def test_the_rows_that_pretraining_holds_out() -> None:
    """Rows outside the training part never reach the loss while the model is in training mode."""
    from halfsilver.mirror import pretrain
    from halfsilver.mirror.pretrain import held_out_rows

    x = torch.arange(50.0)[:, None]
    seen: set[int] = set()

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                seen.update(x[:, 0].int().tolist())
            return super().forward(x)

    pretrain(Spy(1, 1), lambda model, batch: model(batch[0])[:, 0].square(), (x, x), epochs=1, holdout=0.2, seed=3)
    train, held_out = held_out_rows(50, 0.2, 3)
    assert seen == set(train.tolist())
    assert len(held_out) == 10
    assert not seen & set(held_out.tolist())
