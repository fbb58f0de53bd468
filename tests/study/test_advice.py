"""Advice from public rows: each part against an independent calculation."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset

import halfsilver as hs
from halfsilver.errors import ConfigError
from halfsilver.federated import InProcess, LocalTraining, PrivateUsers, TensorUsers
from halfsilver.mirror.rows import PublicRows
from halfsilver.study import advice as module
from halfsilver.study.advice import gradient_norms, update_norms
from halfsilver.study.batches import best_batch
from halfsilver.study.rehearsal import Rehearsed, rehearse_noise
from halfsilver.study.stand_ins import Examples, Users


def loss_fn(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


ASKED: dict[str, Any] = {"population": 2000, "epsilon": 2.0, "delta": 1e-5, "epochs": 5}


@pytest.fixture(scope="module")
def advice() -> hs.study.Advice:
    return hs.advise(model(), loss_fn, rows(100, 1), rows(120, 2), **ASKED)


@pytest.mark.paper
def test_the_batch_has_nearly_the_least_noise_and_enough_steps(advice: hs.study.Advice) -> None:
    """Against plans that are calibrated one by one, smaller and larger ones."""
    plan = advice.plan
    assert plan.epsilon() <= 2.0

    def noise(batch: int) -> float:
        other = hs.PrivacyPlan.calibrate(epsilon=2, delta=1e-5, population=2000, batch_size=batch, epochs=5)
        return other.noise_multiplier / math.sqrt(batch)

    own = plan.noise_multiplier / math.sqrt(plan.expected_batch_size)
    assert plan.steps >= 50
    largest = max(size for size in (32, 64, 128, 256, 512) if 5 * 2000 / size >= 50)
    assert own <= 1.08 * noise(largest)  # options are compared by RDP
    assert advice.batches[-1].batch_size == largest
    if plan.expected_batch_size > 32:
        assert noise(round(plan.expected_batch_size) // 2) > 1.02 * min(own, noise(largest))
    assert plan.steps == round(5 * 2000 / plan.expected_batch_size)


def test_few_records_get_the_smallest_batch() -> None:
    size, options = best_batch(population=100, epsilon=4.0, delta=1e-3, epochs=1, fewest_steps=50)
    assert size == 32
    assert [option.batch_size for option in options] == [32]


def test_norms_and_alignment_against_plain_autograd() -> None:
    net, data = model(), rows(50, 3)
    gradients = []
    for i in range(50):
        one = (data[0][i : i + 1], data[1][i : i + 1])
        found = torch.autograd.grad(loss_fn(net, one).sum(), list(net.parameters()))
        gradients.append(torch.cat([g.flatten() for g in found]).double())
    each = torch.stack(gradients)
    norms, alignment = gradient_norms(net, loss_fn, PublicRows(data))
    torch.testing.assert_close(norms.sort().values, each.norm(dim=1).sort().values, rtol=1e-5, atol=1e-7)
    products = each @ each.T
    pairs = (products.sum() - products.diagonal().sum()) / (50 * 49)
    expected = math.sqrt(max(0.0, float(pairs)) / float(each.square().sum(1).mean()))
    assert alignment == pytest.approx(expected, rel=1e-4)


def squared_error(model: Any, batch: Any) -> Tensor:
    difference: Tensor = model(batch[0]).mean(1) - batch[1]
    return difference**2


@pytest.mark.paper
def test_the_clip_norm_is_a_quantile(advice: hs.study.Advice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median where a temperature can correct what clipping does, the third quartile elsewhere."""
    monkeypatch.setattr(module, "_MOST_RATES", 1)
    norms, _ = gradient_norms(model(), loss_fn, PublicRows(rows(120, 2)))
    assert advice.plan.max_grad_norm == pytest.approx(float(norms.median()), rel=5e-3)
    assert advice.finish == hs.Finish()
    norms, _ = gradient_norms(model(), squared_error, PublicRows(rows(60, 2)))
    other = hs.advise(model(), squared_error, rows(100, 1), rows(60, 2), **ASKED)
    assert other.plan.max_grad_norm == pytest.approx(float(norms.quantile(0.75)), rel=5e-3)
    assert other.finish is None
    assert "the third quartile of gradient norms" in str(other)


def test_a_start_that_is_right_about_most_rows_has_no_clip_norm_of_zero() -> None:
    norms = torch.tensor([0.0, 0.0, 0.0, 5.0, 5.0])
    assert module.clip_norm(norms, hs.Finish()) == pytest.approx(0.5)


def test_a_network_gets_more_steps_than_a_linear_model() -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    assert (module._fewest_steps(model()), module._fewest_steps(network)) == (50, 500)
    for parameter in network[0].parameters():
        parameter.requires_grad_(False)
    assert module._fewest_steps(network) == 50


@pytest.mark.paper
def test_more_steps_than_the_least_noise_leaves() -> None:
    """At a large epsilon more records per step have less and less noise, and the fewest steps decide."""
    asked: dict[str, Any] = {"population": 20_000, "epsilon": 20.0, "delta": 1e-5, "epochs": 10}
    for fewest, size in ((50, 2048), (100, 1024), (500, 256), (10**6, 32)):
        found, compared = best_batch(**asked, fewest_steps=fewest)
        assert found == size
        assert compared[-1].batch_size == 2048
        assert compared[-1].noise == 1


def test_a_large_model_is_rehearsed_on_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer from 6 to 2 takes 24 operations per row, so 30 steps of 25 rows take 18,000."""
    data = rows(120, 2)
    assert len(module._some(data, model(), loss_fn)[1]) == 120
    monkeypatch.setattr(module, "_MOST_OPERATIONS", 18_000)
    assert len(module._some(data, model(), loss_fn)[1]) == 50
    monkeypatch.setattr(module, "_MOST_OPERATIONS", 1)
    assert len(module._some(data, model(), loss_fn)[1]) == 40


@pytest.mark.paper
def test_the_rate_is_no_larger_than_those_of_good_rehearsals(advice: hs.study.Advice) -> None:
    own = [t for t in advice.tried if t.kind == (advice.optimizer, advice.geometry is None)]
    best = min(own, key=lambda t: t.loss)
    assert best.loss < advice.start.held_out_loss
    assert min(t.learning_rate for t in own) < best.learning_rate
    assert advice.learning_rate <= max(t.learning_rate for t in own)
    assert advice.harm < 1


@pytest.mark.parametrize(
    ("logits", "start", "between", "expected"),
    [
        (False, 1.0, 1.15, -1),  # a factor of 1.2 per step: 1.25 against 1.1 is less, and so is half a step to 1.15
        (False, 1.0, 1.13, -1.5),
        (True, 0.8, 1.2, -1),  # 1/8 nat per step: 0.8 (1.25 - 1.1) is less, and so is half a step to 1.2
        (True, 0.8, 1.15, -1.5),
        (True, 5.0, 1.0, -3),  # the same multiples of a larger loss are more nats
    ],
)
def test_the_rate_goes_down_while_that_pays(
    monkeypatch: pytest.MonkeyPatch, logits: bool, start: float, between: float, expected: float
) -> None:
    search = object.__new__(module._Rehearsals)
    search.finish, search._start = module.FINISH if logits else None, start
    best, far = module._Point("SGD", None, 0), module._Point("SGD", None, 1)
    search.done = {best: Rehearsed(seen={}, unseen={}), far: Rehearsed(seen={}, unseen={})}
    monkeypatch.setattr(search, "_ahead", lambda one, other: False, raising=False)
    losses = {1: math.inf, 0: 2.0, -1: 1.25, -1.5: between, -2: 1.1, -3: 1.0, -3.5: 1.0, -4: 1.0}
    monkeypatch.setattr(search, "_harm", lambda point, stable: losses[point.place], raising=False)
    assert search.long(best) == (module._Point("SGD", None, expected), losses[expected])


@pytest.mark.parametrize(("by_user", "expected"), [(False, 3.0 / 2.0), (True, 3.0 / 2.5)])
def test_users_learnt_by_heart_are_no_harm(monkeypatch: pytest.MonkeyPatch, by_user: bool, expected: float) -> None:
    """The start has loss 2, the whole run 3, and without noise 2.5, which is what learning by heart does."""
    search = object.__new__(module._Rehearsals)
    search._by_user, search._start = by_user, 2.0
    point = module._Point("SGD", None, 0)
    monkeypatch.setattr(search, "_whole_run", lambda *_, noise: 3.0 if noise == 1 else 2.5, raising=False)
    assert search._harm(point, stable=point) == pytest.approx(expected)
    monkeypatch.setattr(search, "_whole_run", lambda *_, noise: math.inf, raising=False)
    assert search._harm(point, stable=point) == math.inf


def noise_harm(*, noise: float, pace: float) -> float:
    """Squared loss of a linear model, from its optimum of 0: 200 weights, 400 steps at pace 1."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 200, generator=draw)
    data = (x, torch.zeros(1000))
    net = nn.Linear(200, 1, bias=False)
    nn.init.constant_(net.weight, 1e-3)  # not 0, whose gradients no backend can be checked on
    plan = hs.PrivacyPlan(
        steps=400, sampling_rate=0.1, expected_batch_size=100.0, noise_multiplier=noise, max_grad_norm=100.0
    )
    trainer = hs.Trainer(
        net,
        lambda m, b: m(b[0])[:, 0].square(),
        optimizer=torch.optim.SGD(net.parameters(), lr=1e-3),
        plan=plan,
        progress=False,
    )
    return rehearse_noise(
        trainer, Examples(data), data, geometry=None, lr_factor=1.0, steps=round(400 / pace), records=50, pace=pace,
        noise=1.0, lr_end=1.0, average=None, finish=None,
    )  # fmt: skip


@pytest.mark.paper
def test_the_noise_of_a_whole_run_at_a_higher_pace() -> None:
    """From 0, each weight has variance lr s^2 (1 - exp(-4 lr t)) / 4 after t steps of size lr, where s is the noise on
    the mean gradient, here 1, and 2 the curvature. The loss is the sum over 200 weights, whose mean is known to 10 %.
    """
    expected = 200 * 1e-3 * (1 - math.exp(-4 * 0.4)) / 4
    assert noise_harm(noise=1.0, pace=1.0) == pytest.approx(expected, rel=0.3)
    assert noise_harm(noise=1.0, pace=8.0) == pytest.approx(expected, rel=0.3)
    assert noise_harm(noise=2.0, pace=8.0) > 2.5 * expected


def test_what_more_would_bring(advice: hs.study.Advice) -> None:
    """Twice the rows at the same epochs: at least half of the noise goes, as sigma falls and n doubles."""
    assert advice.less_noise["twice the private rows"] < 0.6

    def noise(epsilon: float) -> float:
        asked = {**ASKED, "epsilon": epsilon, "batch_size": round(advice.plan.expected_batch_size)}
        return hs.PrivacyPlan.calibrate(**asked, accountant="rdp").noise_multiplier

    assert advice.less_noise["twice the epsilon"] == pytest.approx(noise(4.0) / noise(2.0))
    assert all(0 < factor < 1 for factor in advice.less_noise.values())


def test_an_advised_run(advice: hs.study.Advice, tmp_path: Path) -> None:
    net = model()
    accuracy = {"accuracy": lambda m, b: torch.eq(m(b[0]).argmax(1), b[1]).double()}
    trainer = advice.trainer(net, loss_fn, metrics=accuracy)
    trainer.fit(rows(2000, 0), rows(100, 1), run_dir=tmp_path)
    assert trainer.evaluate(rows(500, 5))["accuracy"] > 0.9
    assert trainer.average == pytest.approx(1 - 10 / advice.plan.steps)
    assert advice.trainer(model(), loss_fn, average=None).average is None


def test_an_advice_comes_back_from_its_file(advice: hs.study.Advice) -> None:
    kept = json.loads(json.dumps(advice.to_json()))
    again = hs.study.Advice.from_json(kept)
    assert again.to_json() == advice.to_json()
    assert str(again) == str(advice)
    assert (again.plan, again.geometry, again.finish) == (advice.plan, advice.geometry, advice.finish)
    for wrong in ({}, {**kept, "geometry": "Round()"}, {**kept, "start": {"loss": 1.0}}):
        with pytest.raises(ConfigError, match="Not an advice"):
            hs.study.Advice.from_json(wrong)


@pytest.mark.paper
def test_it_is_in_words_and_leaves_the_model_alone(advice: hs.study.Advice) -> None:
    text = str(advice)
    for word in ("Batch:", "Clip norm:", "Learning rate:", "Geometry:", "Start:", "clip centre", "twice the epsilon"):
        assert word in text
    net = model()
    before, said = copy.deepcopy(net.state_dict()), list[str]()
    module.advise(net, loss_fn, rows(100, 1), rows(40, 2), **ASKED, tell=said.append)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert net.training
    assert any("rehearsal 1" in word for word in said)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"epochs": 0}, "epochs=0"), ({"population": 3}, "population=3"), ({"epsilon": -1.0}, "epsilon")],
)
def test_mistakes_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hs.advise(model(), loss_fn, rows(100, 1), rows(60, 2), **{**ASKED, **wrong})
    with pytest.raises(ConfigError, match="held-out rows"):
        hs.advise(model(), loss_fn, rows(100, 1), rows(10, 2), **ASKED)


def test_the_middle_of_seen_and_unseen_rows_is_the_loss_with_many_rows() -> None:
    """Least squares with 40 rows and 8 weights, 400 draws: the middle is within 3 standard errors of the loss of the
    best weights (noise variance 1, so it is 1), and neither the seen nor the unseen rows are.
    """
    draw = torch.Generator().manual_seed(0)
    seen, unseen, middles = [], [], []
    for _ in range(400):
        x, y = (torch.randn(80, *shape, generator=draw, dtype=torch.float64) for shape in ((8,), ()))
        weights = torch.linalg.lstsq(x[:40], y[:40, None]).solution[:, 0]
        losses = (y - x @ weights).square()
        done = Rehearsed(seen={"loss": losses[:40]}, unseen={"loss": losses[40:]})
        middles.append(module._middle(done)[0])
        seen.append(float(losses[:40].mean()))
        unseen.append(float(losses[40:].mean()))
    off = {
        name: (torch.tensor(v).mean() - 1) / (torch.tensor(v).std() / 20)
        for name, v in {"seen": seen, "unseen": unseen, "middle": middles}.items()
    }
    assert off["seen"] < -10
    assert off["unseen"] > 10
    assert abs(float(torch.tensor(middles).mean()) - 1) < 0.04  # of the next order: 8^2 / 40^2


def test_a_forecast_spans_start_seen_and_unseen_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    seen, unseen = torch.rand(50, generator=generator), 2 + torch.rand(60, generator=generator)
    done = Rehearsed(seen={"loss": seen}, unseen={"loss": unseen})
    one = module._forecasts(done, {"loss": loss_fn}, model(), rows(60, 2))["loss"]
    assert one.start == pytest.approx(float(loss_fn(model(), rows(60, 2)).mean().detach()))
    assert one.expected == pytest.approx(float(seen.mean() + unseen.mean()) / 2)
    assert one.low == pytest.approx(float(seen.mean() - 2 * seen.std() / 50**0.5))
    assert one.high == pytest.approx(float(unseen.mean() + 2 * unseen.std() / 60**0.5))
    lucky = Rehearsed(seen={"loss": 0 * seen}, unseen={"loss": 0 * unseen})
    assert module._forecasts(lucky, {"loss": loss_fn}, model(), rows(60, 2))["loss"].high > one.start


class Scaled(nn.Module):
    """A model without a layer that can be whitened."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        score = (x * self.scale).sum(1)
        return torch.stack([-score, score], 1)


@pytest.mark.paper
def test_a_model_that_cannot_be_whitened_gets_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_RATES", 1)
    said = list[str]()
    found = hs.advise(Scaled(), loss_fn, rows(100, 1), rows(60, 2), **ASKED, tell=said.append)
    assert found.geometry is None
    assert any("no layer that can be whitened" in word for word in said)
    assert {t.optimizer for t in found.tried} == {"SGD", "Adam"}


class Rows(Dataset[Any]):
    """Rows that are read one by one."""

    def __init__(self, *parts: tuple[Tensor, Tensor]) -> None:
        self.x, self.y = (torch.cat(columns) for columns in zip(*parts, strict=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@pytest.mark.paper
def test_the_noise_is_rehearsed_on_rows_of_a_data_set_as_on_its_tensors() -> None:
    """The stand-ins for private rows are the public ones themselves, and no private ones under another name."""

    def harm(data: Any) -> float:
        net = model()
        plan = hs.PrivacyPlan(steps=9, sampling_rate=0.5, expected_batch_size=50.0, noise_multiplier=1.0)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        return rehearse_noise(
            hs.Trainer(net, loss_fn, optimizer=sgd, plan=plan), Examples(data), data, geometry=None, lr_factor=1.0,
            steps=3, records=20, pace=3, noise=1.0, lr_end=1.0, average=None, finish=None,
        )  # fmt: skip

    both, wanted = Rows(rows(100, 1), rows(120, 2)), harm(rows(100, 1))
    for data in (Rows(rows(100, 1)), Subset(both, range(100))):
        assert harm(data) == wanted


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["whole", "subset"])
def test_a_data_set_gets_the_advice_that_its_tensors_get(advice: hs.study.Advice, part: str) -> None:
    both = Rows(rows(100, 1), rows(120, 2))
    given = [Rows(rows(100, 1)), Rows(rows(120, 2))]
    public, held_out = given if part == "whole" else [Subset(both, range(100)), Subset(both, range(100, 220))]
    found = hs.advise(model(), loss_fn, public, held_out, **ASKED)
    assert (found.plan, found.learning_rate) == (advice.plan, advice.learning_rate)


def test_a_step_on_rows_of_a_data_set_is_timed() -> None:
    assert 0 < module._seconds_per_row(model(), loss_fn, Rows(rows(100, 1))) < 1


@pytest.mark.paper
def test_compute_in_minutes_is_measured() -> None:
    asked = {name: value for name, value in ASKED.items() if name != "epochs"}
    found = hs.advise(model(), loss_fn, rows(100, 1), rows(60, 2), **asked, minutes=0.02)
    assert found.seconds_per_row is not None
    expected = 1.2 / found.seconds_per_row  # records in so many seconds
    assert found.plan.steps * found.plan.expected_batch_size == pytest.approx(expected, rel=0.05)
    assert "minutes at the speed measured here" in str(found)
    with pytest.raises(ConfigError, match="one of the two"):
        hs.advise(model(), loss_fn, rows(100, 1), rows(60, 2), **asked)


def test_compare_holds_out_a_third_of_few_public_rows(tmp_path: Path) -> None:
    """Of 90 rows that are 30, which are too few; said before anything is trained."""
    with pytest.raises(ConfigError, match=r"held-out public rows=30 at least 40.*more public rows than 90"):
        hs.compare(
            model, loss_fn, rows(400, 0), rows(90, 1), rows(50, 5), epsilon=2.0, delta=1e-4, population=400, epochs=2,
            methods="auto", out=tmp_path,
        )  # fmt: skip
    assert not list(tmp_path.rglob("*.safetensors"))


LOCAL = LocalTraining(lr=0.1, batch_size=4)


def users(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Users with 4 rows each."""
    return [rows(4, 1000 * seed + number) for number in range(count)]


def test_norms_of_updates_against_one_step_of_sgd() -> None:
    """A user with one batch sends its learning rate times the mean gradient."""
    net, some = model(), users(7, 3)
    each = []
    for data in some:
        found = torch.autograd.grad(loss_fn(net, data).mean(), list(net.parameters()))
        each.append(0.1 * torch.cat([g.flatten() for g in found]).double())
    norms, alignment = update_norms(net, loss_fn, Users(some, LOCAL))
    torch.testing.assert_close(norms, torch.stack(each).norm(dim=1), rtol=1e-5, atol=1e-7)
    products = torch.stack(each) @ torch.stack(each).T
    pairs = (products.sum() - products.diagonal().sum()) / (7 * 6)
    assert alignment == pytest.approx(math.sqrt(max(0.0, float(pairs)) / float(products.diagonal().mean())), rel=1e-4)


@pytest.mark.paper
def test_advice_for_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_MOST_RATES", 3)
    net, held_out = model(), users(12, 2)
    found = hs.advise(net, loss_fn, users(10, 1), held_out, **{**ASKED, "population": 600}, local=LOCAL)
    assert found.plan.unit == "user"
    assert found.plan.epsilon() <= 2
    assert found.plan.population == pytest.approx(600)
    norms, _ = update_norms(net, loss_fn, Users(held_out, LOCAL))
    assert found.plan.max_grad_norm == pytest.approx(float(norms.median()), rel=5e-3)
    assert "users" in str(found)
    assert "norms of updates of held-out users" in str(found)
    assert "twice the private users" in found.less_noise
    x, y = (torch.cat(columns) for columns in zip(*users(600, 0), strict=True))
    private = InProcess(PrivateUsers(TensorUsers((x, y), users=[i // 4 for i in range(len(y))])), LOCAL)
    trainer = found.trainer(net, loss_fn)
    before = trainer.evaluate(rows(500, 5))["loss"]
    trainer.fit(private, run_dir=tmp_path)
    assert trainer.evaluate(rows(500, 5))["loss"] < 0.6 * before
    with pytest.raises(ConfigError, match="number of held-out users=3"):
        hs.advise(net, loss_fn, users(10, 1), users(3, 2), **ASKED, local=LOCAL)
    asked = {name: value for name, value in ASKED.items() if name != "epochs"}
    with pytest.raises(ConfigError, match=r"minutes=2.*users"):
        hs.advise(net, loss_fn, users(10, 1), users(6, 2), **asked, minutes=2, local=LOCAL)
