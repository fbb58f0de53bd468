"""`hs.head`: the last layer of a network on frozen features, then all weights."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import pytest
import torch
from dp_accounting import pld
from torch import Tensor, nn

import halfsilver as hs
from halfsilver.errors import ConfigError
from halfsilver.features import as_is
from halfsilver.probing import _Coordinates, _features, _full, _gradients
from halfsilver.runs.verify import verify

Rows = tuple[Tensor, Tensor]


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(count: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator) * torch.tensor([4.0, 2.0, 1.0, 1.0, 0.5, 0.2])
    return x, (x[:, :3].sum(1) > 0).long() + (x[:, 3] > 1).long()


def network(norm: bool = True) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20) if norm else nn.Identity(), nn.Tanh())
        return nn.Sequential(first, nn.Linear(20, 3))


OPTIONS: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-4, "population": 3000, "unsafe_seed": 1}


@pytest.mark.nightly
def test_the_last_layer_learns_and_nothing_else_changes(tmp_path: Path) -> None:
    model, test = network(), rows(1000, 3)
    before, first = copy.deepcopy(model), loss_fn(model.eval(), test).mean()
    found = hs.head(model, loss_fn, rows(3000, 1), rows(150, 2), run_dir=tmp_path, **OPTIONS)
    assert found.layer == "1"
    assert 3.9 < found.epsilon <= 4.0
    assert loss_fn(model.eval(), test).mean() < 0.9 * first
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    assert changed == {"1.weight", "1.bias"}
    assert (tmp_path / "head" / "statement.json").exists()


@pytest.mark.nightly
def test_then_all_weights_learn_within_one_epsilon(tmp_path: Path) -> None:
    model = network(norm=False)
    before = copy.deepcopy(model.state_dict())
    how = hs.FineTune(batch_size=300, epochs=1, learning_rate=0.1, share=0.4)
    found = hs.head(model, loss_fn, rows(3000, 1), rows(150, 2), run_dir=tmp_path, fine_tune=how, **OPTIONS)
    assert not torch.equal(before["0.0.weight"], model.state_dict()["0.0.weight"])
    assert 3.99 < found.epsilon <= 4.0
    assert len(found.runs) == 2
    assert hs.Ledger.open(tmp_path / "ledger.jsonl").spent(1e-4, "pld") == found.epsilon
    assert all(verify(tmp_path / run)["finished"] for run in ("head", "all"))


@pytest.mark.nightly
def test_a_plan_after_another_spends_the_rest_by_an_independent_composition() -> None:
    first = hs.PrivacyPlan.calibrate(epsilon=1, delta=1e-5, population=1000, batch_size=1000, steps=10)
    second = hs.PrivacyPlan.calibrate(
        epsilon=2, delta=1e-5, population=1000, batch_size=50, steps=100, spare_steps=0, after=[first]
    )
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(first.noise_multiplier), 10))
    sampled = dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(second.noise_multiplier))
    accountant.compose(dpa.SelfComposedDpEvent(sampled, 100))
    assert 1.999 < accountant.get_epsilon(1e-5) <= 2
    with pytest.raises(ConfigError, match=r"below epsilon=0\.9"):
        second.with_least_noise(0.9, after=[first])
    with pytest.raises(ConfigError, match="unit"):
        hs.PrivacyPlan.calibrate(
            epsilon=2, delta=1e-5, population=1000, batch_size=50, steps=9, unit="user", after=[first]
        )


def test_settings_follow_from_public_features() -> None:
    """Without a geometry all three have closed forms."""
    last, y = network()[1], rows(300, 2)[1]
    assert isinstance(last, nn.Linear)
    features = torch.randn(300, 20, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 20)
    found = _Coordinates.of(last, loss_fn, (features, y), None)
    with_one = torch.cat([features, torch.ones(300, 1)], 1).double()
    moment = with_one.T @ with_one / 300
    assert found.stable == pytest.approx(3 / float(torch.linalg.eigvalsh(moment)[-1]), rel=0.01)
    assert found.logit == pytest.approx(math.sqrt(float(moment.trace())), rel=0.1)  # 32 draws of 63 numbers
    chances = last(features).softmax(1).detach()
    lengths = []
    for label in range(3):
        residual = chances - nn.functional.one_hot(torch.tensor(label), 3)
        lengths.append(residual.norm(dim=1) * with_one.norm(dim=1))
    assert found.gradient == pytest.approx(float(torch.stack(lengths).median()), rel=0.1)
    own = _gradients(last, loss_fn, (features[:5], y[:5]))
    for row in range(5):
        one = torch.autograd.grad(
            loss_fn(last, (features[row : row + 1], y[row : row + 1])).sum(), [*last.parameters()]
        )
        torch.testing.assert_close(own[row], torch.cat([g.flatten() for g in one]))


def test_the_path_leaves_a_half_on_a_logit() -> None:
    """n = 2,000 draws of the sum of all noise; the standard error of the standard deviation is below 2 %."""
    last, public = network()[1], rows(100, 2)
    assert isinstance(last, nn.Linear)
    features = _features(network(), "1", [as_is]).transform(public[0])
    found = _Coordinates.of(last, loss_fn, (features, public[1]), None)
    plan = hs.PrivacyPlan.calibrate(**_full(2.0, 1e-5, 5000, 50, 1.5))
    size = found.path(plan) / 50 * plan.noise_multiplier * 1.5 / 5000 * math.sqrt(50)
    noise = size * torch.randn(2000, 3, 21, generator=torch.Generator().manual_seed(0))
    logits = noise @ torch.cat([features, torch.ones(100, 1)], 1).T
    assert float(logits.std()) == pytest.approx(0.5, rel=0.2)  # the scale was measured with 32 draws, to about 7 %


def test_held_out_rows_ask_for_a_longer_path_where_there_is_more_to_learn() -> None:
    model, (x, y) = network(), rows(500, 5)
    last = model[1]
    assert isinstance(last, nn.Linear)
    features = _features(model, "1", [as_is]).transform(x)
    found = _Coordinates.of(last, loss_fn, (features, y), None)
    generator = torch.Generator().manual_seed(0)
    known = torch.multinomial(last(features).softmax(1), 1, generator=generator)[:, 0]  # nothing is left to learn
    assert found.best_path((features, y), 1.0) >= 8 * found.best_path((features, known), 1.0)
    with pytest.raises(ConfigError, match="at least 100"):
        found.best_path((features[:50], y[:50]), 1.0)


def test_features_are_kept_and_views_are_averaged(tmp_path: Path) -> None:
    model = network()
    options = {**OPTIONS, "steps": 2, "learning_rate": 0.1, "max_grad_norm": 1.0, "geometry": None}
    hs.head(
        model, loss_fn, rows(3000, 1), rows(50, 2), run_dir=tmp_path / "a", cache=tmp_path / "features",
        views=(as_is, torch.neg), **options,
    )  # fmt: skip
    assert len(list((tmp_path / "features").glob("*.safetensors"))) >= 2
    assert (tmp_path / "features" / "PRIVATE.txt").exists()


class Sure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(x)
        return found.log_softmax(1)


class Joined(Sure):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.last(x), x], 1)


def test_what_cannot_be_a_head_is_refused(tmp_path: Path) -> None:
    def run(model: nn.Module, public: Any = None, **options: Any) -> None:
        hs.head(model, loss_fn, rows(30, 1), public or rows(50, 2), run_dir=tmp_path, **(OPTIONS | options))

    with pytest.raises(ConfigError, match="output of the layer"):
        run(Sure())
    with pytest.raises(ConfigError, match="inside the model"):
        run(network(), layer="0")
    with pytest.raises(ConfigError, match="the last one"):
        run(network(), layer="0.0")
    with pytest.raises(ConfigError, match="features of shape"):
        run(Joined())
    with pytest.raises(ConfigError, match="steps"):
        run(network(), steps=0)
    with pytest.raises(ConfigError, match="integer labels"):
        run(network(), (rows(50, 2)[0], torch.zeros(50)))
    with pytest.raises(ConfigError, match="share"):
        hs.FineTune(batch_size=1, epochs=1, learning_rate=1, share=1.0)
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("handle", [False, True])
def test_private_rows_are_not_taken_as_public_ones(handle: bool, tmp_path: Path) -> None:
    """Features of rows share no memory with the rows, so the trainer would not notice."""
    mine = rows(300, 1)
    private = hs.PrivateData(mine) if handle else mine
    some = (mine[0][:150], mine[1][:150])
    with pytest.raises(ConfigError, match="given as public"):
        hs.head(network(), loss_fn, private, some, run_dir=tmp_path, **OPTIONS)
    with pytest.raises(ConfigError, match="given as held_out"):
        hs.head(network(), loss_fn, private, rows(50, 2), held_out=some, run_dir=tmp_path, **OPTIONS)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_each_module_keeps_its_mode(tmp_path: Path) -> None:
    model = network().train()
    model[0].eval()
    options = {**OPTIONS, "steps": 1, "learning_rate": 0.1, "max_grad_norm": 1.0, "geometry": None}
    hs.head(model, loss_fn, rows(300, 1), rows(50, 2), run_dir=tmp_path, **options)
    assert model.training
    assert not model[0].training
