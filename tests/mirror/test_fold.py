"""Folded networks: the same function, no batch norm, and private training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfsilver as hs
from halfsilver.errors import UnsupportedLayer
from halfsilver.mirror import fold_batch_norm
from halfsilver.tasks.networks import residual_cnn


def used(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with batch norms as after training: scales that are not 1, some negative, shifts, means."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.weight.normal_()
                module.bias.normal_()
        model.train()
        for _ in range(3):
            model(x)
    return model.eval()


def norms(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("bias", [False, True])
def test_dense_and_convolutional_layers(bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 4, 6)
    model = nn.Sequential(nn.Conv1d(4, 5, 3, bias=bias), nn.BatchNorm1d(5), nn.ReLU(),
                          nn.Flatten(), nn.Linear(20, 3, bias=bias), nn.BatchNorm1d(3, affine=False))  # fmt: skip
    used_model = used_plain(model, x)
    folded = fold_batch_norm(used_model)
    assert (len(norms(used_model)), norms(folded)) == (2, [])
    torch.testing.assert_close(folded(x), used_model(x), rtol=1e-5, atol=1e-5)


def used_plain(model: nn.Module, x: Tensor) -> nn.Module:
    model.train()
    for _ in range(3):
        model(2 * x + 1)
    return model.eval()


def test_the_residual_network_in_eval_mode_and_its_copy() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3, 16, 16)
    model = used(residual_cnn(4), x)
    before = copy.deepcopy(model.state_dict())
    folded = fold_batch_norm(model.train())
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert (len(norms(model)), norms(folded)) == (8, [])
    expected = model.eval()(x)
    torch.testing.assert_close(folded(x) / expected.abs().max(), expected / expected.abs().max(), rtol=0, atol=1e-5)
    assert {name for name, _ in folded.named_modules()} == {name for name, _ in model.named_modules()}


def test_frozen_layers_stay_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)).eval()
    model[0].requires_grad_(False)
    folded: Any = fold_batch_norm(model)
    assert [p.requires_grad for p in folded[0].parameters()] == [False, False]
    assert [p.requires_grad for p in folded[2].parameters()] == [True, True]


class Twice(nn.Module):
    """The output of the convolution goes two ways, so the norm cannot become part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y + self.norm(y)  # type: ignore[no-any-return]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)), "'0' does not directly follow"),
        (Twice(), "'norm' does not directly follow"),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)), "track_running_stats"),
        (Branches(), "cannot trace"),
    ],
    ids=["first", "twice", "no statistics", "branches"],
)
def test_what_cannot_be_folded_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedLayer, match=message):
        fold_batch_norm(model)


def test_a_folded_network_trains_privately(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 3, 8, 8), torch.randint(0, 10, (40,))
    model = fold_batch_norm(used(residual_cnn(2), x))
    before = copy.deepcopy(model.state_dict())
    plan = hs.PrivacyPlan(steps=2, sampling_rate=0.5, expected_batch_size=20, noise_multiplier=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    hs.Trainer(model, loss_fn, optimizer=sgd, plan=plan).fit((x, y), run_dir=tmp_path / "run")
    after = model.state_dict()
    assert not any(torch.equal(after[name], before[name]) for name in after)
