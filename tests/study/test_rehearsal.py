"""A rehearsal on public rows decides whether a geometry is used: yes for a useful one, no for one of wrong rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs
from halfsilver._core.tensors import trainable
from halfsilver.errors import ConfigError
from halfsilver.mirror.geometry import ShapedLinear
from halfsilver.study import choose_geometry

CANDIDATES = [hs.Whitened(damping=0.1), hs.Whitened(damping=1.0)]
SCALES = torch.logspace(0.5, -1.5, 20)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return 0.5 * torch.square(model(batch[0])[:, 0] - batch[1])


def rows(n: int, seed: int, scales: Tensor = SCALES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=generator) * scales
    return x, (x / SCALES).sum(1) / 4


def trainer(**options: Any) -> hs.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 1))
    plan = hs.PrivacyPlan.calibrate(
        epsilon=4, delta=1e-4, population=4000, batch_size=400, steps=100, max_grad_norm=2.0
    )
    given: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "plan": plan, **options}
    return hs.Trainer(model, loss_fn, **given)


@pytest.mark.paper
def test_a_geometry_of_the_right_rows_is_chosen() -> None:
    own = trainer()
    before = [p.clone() for p in trainable(own.model)]
    choice = choose_geometry(own, rows(400, 1), rows(400, 2), candidates=CANDIDATES, lr_factors=(1.0, 3.0), steps=20)
    assert choice.geometry is not None
    assert choice.ahead > choice.standard_error > 0
    assert str(choice).startswith("Chosen: Whitened(damping=")
    assert choice.rows == 200
    assert len(choice.tried) == 6
    for p, q in zip(trainable(own.model), before, strict=True):
        assert torch.equal(p, q), "the trainer itself is not trained"


def test_a_geometry_of_wrong_rows_is_turned_down() -> None:
    """Their large directions are the small ones of the private rows."""
    wrong = rows(400, 1, SCALES.flip(0))
    choice = choose_geometry(
        trainer(), wrong, rows(400, 2), candidates=[hs.Whitened(damping=0.001)], lr_factors=(1.0, 3.0), steps=20
    )
    assert choice.geometry is None
    assert choice.ahead < 0
    assert str(choice).startswith("Chosen: no geometry, learning rate times ")


def test_one_that_diverges_is_turned_down() -> None:
    high = trainer()
    choice = choose_geometry(high, rows(400, 1), rows(400, 2), candidates=[Explosive()], lr_factors=[1.0], steps=5)
    assert choice.geometry is None


class Explosive:
    """Coordinates in which every step is far too long."""

    def shape(self, model: Any, loss_fn: Any, public: Any) -> Any:
        shaped = hs.Whitened().shape(model, loss_fn, public)
        for _, _, layer in shaped.layers:
            assert isinstance(layer, ShapedLinear)
            layer.after.times_(1e4)
        return shaped


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"held_out": rows(39, 0)}, "number of held-out rows=39"),
        ({"candidates": []}, "candidates"),
        ({"lr_factors": [0.0]}, "lr_factors"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_geometry(trainer(), **{"public": rows(50, 1), "held_out": rows(50, 2), **wrong})


def test_users_are_refused() -> None:
    plan = hs.PrivacyPlan(
        steps=2, sampling_rate=0.1, expected_batch_size=5.0, noise_multiplier=1.0, max_grad_norm=1.0, unit="user"
    )
    with pytest.raises(ConfigError, match="For users"):
        choose_geometry(trainer(plan=plan), rows(50, 1), rows(50, 2))
