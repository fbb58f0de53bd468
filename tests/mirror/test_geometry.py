"""Whitened: the same function at the start, gradients in the new coordinates, and DP-SGD where the shape is round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pack_padded_sequence

import halfsilver as hs
from halfsilver._core.averaging import Average
from halfsilver._core.tensors import flatten, trainable
from halfsilver.errors import ConfigError
from halfsilver.mirror.geometry import (
    Moments,
    ShapedConv,
    ShapedEmbedding,
    ShapedLinear,
    ShapedRecurrent,
    Whitened,
    leading_directions,
    whitening,
    windows,
    with_drawn_labels,
)
from halfsilver.privacy.gradients import make_backend
from halfsilver.privacy.gradients.base import ClippedSum
from halfsilver.privacy.gradients.book.any_module import AnyModule
from halfsilver.privacy.gradients.book.kernels import kernels_for
from halfsilver.privacy.gradients.linear import LinearModel
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.runs.verify import verify
from tests.privacy.test_book import one_by_one


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(30, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 30)
        with torch.no_grad():
            self.embedding.weight.mul_(torch.linspace(0.1, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return found


def loss_fn(model: Any, batch: Any) -> Tensor:
    logits = model(batch[0])
    losses = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1), reduction="none")
    return losses.reshape(len(batch[0]), -1).mean(1)


class Sequences(nn.Module):
    """Two layers in both directions on sequences of their own lengths, or all of one length with time first."""

    def __init__(self, kind: type[nn.RNNBase], *, packed: bool) -> None:
        super().__init__()
        make: Any = kind  # nn.RNNBase itself takes other arguments
        self.layer, self.packed = make(5, 6, 2, bidirectional=True), packed
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        rows: Any = x.transpose(0, 1)
        if self.packed:
            rows = pack_padded_sequence(rows, 1 + torch.arange(len(x)) % x.shape[1], enforce_sorted=False)
        state = self.layer(rows)[1]
        state = state[0] if isinstance(state, tuple) else state
        found: Tensor = self.head(state[-2:].transpose(0, 1).reshape(-1, 2 * self.layer.hidden_size))
        return found


def case(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    uneven = torch.tensor([9.0, 3.0, 1.0, 0.3, 0.1])
    classes = torch.randint(0, 4, (60,))
    if name == "layer":
        return nn.Linear(5, 4), (torch.randn(60, 5) * uneven + 2, classes)
    if name == "dense":
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
        return model, (torch.randn(60, 5) * uneven, classes)
    if name == "wide":  # above the size that gets a full matrix
        return nn.Sequential(nn.Linear(700, 6), nn.Tanh(), nn.Linear(6, 4)), (torch.randn(60, 700), classes)
    if name == "images":
        layers = [nn.Conv2d(1, 6, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 5, padding="same"), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8 * 36, 4)), (torch.randn(60, 1, 12, 12), classes)
    if name == "series":
        layers = [nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Conv1d(6, 40, 4, dilation=2), nn.Flatten(), nn.Linear(40 * 12, 4)]
        return nn.Sequential(*layers), (torch.randn(60, 2, 20), classes)
    if name == "encoder":  # reads weights of its linear layers in eval mode
        layer = nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(15, 4)).eval(), (torch.randn(60, 3, 5) * uneven, classes)
    if name in ("lstm", "gru", "rnn", "packed"):
        kinds = {"gru": nn.GRU, "rnn": nn.RNN}
        return Sequences(kinds.get(name, nn.LSTM), packed=name == "packed"), (torch.randn(60, 7, 5) * uneven, classes)
    return Language(), (torch.randint(0, 30, (60, 7)).square() // 30, torch.randint(0, 30, (60, 7)))


RECURRENT = ["lstm", "gru", "rnn"]
CASES = ["layer", "dense", "wide", "images", "series", "text", "encoder", *RECURRENT, "packed"]


@pytest.mark.parametrize("name", CASES)
def test_at_the_start_and_after_merging_the_function_is_the_same(name: str) -> None:
    """To 1e-5 of the outputs, not to the bit: V is W between two inverses."""
    model, rows = case(name)
    parameters, state = list(model.parameters()), {k: v.clone() for k, v in model.state_dict().items()}
    before = model(rows[0]).detach()
    kinds = {n: type(m) for n, m in model.named_modules()}
    shaped = Whitened(damping=0.1).shape(model, loss_fn, rows)
    assert any(isinstance(m, ShapedLinear) for m in shaped.model.modules())
    assert {id(p) for p in shaped.model.parameters()} == {id(p) for p in parameters}, "an optimizer stays valid"
    torch.testing.assert_close(shaped.model(rows[0]), before, rtol=1e-5, atol=1e-5)
    changed = [not torch.equal(v, state[k]) for k, v in zip(state, parameters, strict=True) if v.dim() > 1]
    assert any(changed)
    shaped.merge()
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    torch.testing.assert_close(model(rows[0]), before, rtol=1e-5, atol=1e-5)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_trained_weights_merge_into_the_function_that_was_trained(name: str) -> None:
    model, rows = case(name)
    shaped = Whitened().shape(model, loss_fn, rows)
    sgd = torch.optim.SGD(shaped.model.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        torch.autograd.backward([loss_fn(shaped.model, rows).mean()])
        sgd.step()
    trained = shaped.model(rows[0]).detach()
    shaped.merge()
    torch.testing.assert_close(model(rows[0]), trained, rtol=1e-4, atol=1e-4)


def gradients(model: nn.Module, rows: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    names = dict(model.named_parameters())
    found = torch.autograd.grad(loss_fn(model, rows).sum(), list(names.values()))
    return dict(zip(names, found, strict=True))


def test_gradients_are_those_of_the_weights_between_the_factors() -> None:
    """U_S G U_A, with G by autograd at the original layer, for each kind of layer."""
    model, rows = case("images")
    plain = gradients(model, rows)
    shaped = Whitened(damping=0.3).shape(model, loss_fn, rows)
    now = gradients(shaped.model, rows)
    window, channels, dense = (model.get_submodule(name) for name in ("0", "2", "4"))
    assert isinstance(window, ShapedConv)
    assert isinstance(channels, ShapedConv)
    assert isinstance(dense, ShapedLinear)
    wanted = window.after.mul_t(window.before.mul(plain["0.weight"].flatten(1)).T).T
    torch.testing.assert_close(now["0.layer.weight"].flatten(1), wanted.float(), rtol=1e-3, atol=1e-4)
    g = channels.before.mul(plain["2.weight"].movedim(1, -1)).movedim(-1, 1)
    wanted = channels.after.mul_t(g.flatten(1).T).T.reshape(g.shape)
    torch.testing.assert_close(now["2.layer.weight"], wanted.float(), rtol=1e-3, atol=1e-4)
    centred = plain["4.weight"].double() - plain["4.bias"].double().outer(dense.mean.double())
    wanted = dense.after.mul_t(dense.before.mul(centred).T).T
    torch.testing.assert_close(now["4.layer.weight"], wanted.float(), rtol=1e-3, atol=1e-4)
    wanted = dense.after.mul_t(plain["4.bias"]) * dense.scale.double()
    torch.testing.assert_close(now["4.layer.bias"], wanted.float(), rtol=1e-3, atol=1e-4)


def test_gradients_of_an_embedding() -> None:
    model, rows = case("text")
    plain = gradients(model, rows)["embedding.weight"]
    shaped = Whitened(damping=0.3).shape(model, loss_fn, rows)
    layer = shaped.model.get_submodule("embedding")
    assert isinstance(layer, ShapedEmbedding)
    wanted = layer.after.mul_t(plain) * layer.tokens.double()
    found = gradients(shaped.model, rows)["embedding.layer.weight"]
    torch.testing.assert_close(found, wanted.float(), rtol=1e-3, atol=1e-5)
    counts = torch.bincount(rows[0].reshape(-1), minlength=30)
    assert layer.tokens[counts.argmax()] < layer.tokens[counts.argmin()], "frequent tokens move less"


@pytest.mark.parametrize("name", [*RECURRENT, "packed"])
def test_gradients_of_a_recurrent_layer(name: str) -> None:
    """G M^T at the input weights of both directions, G as it was inside."""
    model, rows = case(name)
    plain = gradients(model, rows)
    shaped = Whitened(damping=0.3).shape(model, loss_fn, rows)
    layer = shaped.model.get_submodule("layer")
    assert isinstance(layer, ShapedRecurrent)
    assert layer.hidden_size == 6
    with pytest.raises(AttributeError):
        _ = layer.weight_ih_l0  # V, where W is wanted
    now = gradients(shaped.model, rows)
    for end in ("", "_reverse"):
        wanted = layer.before.mul(plain[f"layer.weight_ih_l0{end}"])
        torch.testing.assert_close(now[f"layer.layer.weight_ih_l0{end}"], wanted.float(), rtol=1e-3, atol=1e-4)
        inside = [f"{part}{end}" for part in ("weight_hh_l0", "weight_ih_l1", "bias_ih_l0")]
        for key in inside:
            torch.testing.assert_close(now[f"layer.layer.{key}"], plain[f"layer.{key}"], rtol=1e-3, atol=1e-4)


def test_whitened_inputs_of_a_recurrent_layer_are_rounder_and_as_large() -> None:
    model, rows = case("lstm")
    Whitened(damping=0.01).shape(model, loss_fn, rows)
    layer = model.get_submodule("layer")
    assert isinstance(layer, ShapedRecurrent)
    x = rows[0].reshape(-1, 5)
    z = layer.before(x)
    assert float(z.square().sum() / x.square().sum()) == pytest.approx(1, rel=1e-4)
    values = [torch.linalg.eigvalsh(t.T @ t) for t in (x, z)]
    assert values[0][-1] / values[0][0] > 1000
    assert values[1][-1] / values[1][0] < 60


@pytest.mark.parametrize("name", [*RECURRENT, "text", "images", "encoder"])
def test_book_keeping_clips_in_the_new_coordinates_as_one_row_at_a_time(name: str) -> None:
    model, rows = case(name)
    Whitened(damping=0.3).shape(model.eval(), loss_fn, rows)
    batch = (rows[0][:9], rows[1][:9])
    each = [flatten(g).double() for g in one_by_one(model, loss_fn, batch, 9)]
    clip = float(torch.stack([g.norm() for g in each]).median())
    expected = sum(g * min(1.0, clip / float(g.norm())) for g in each)
    backend = make_backend(hs.Performance(backend="book"), model, loss_fn, batch)
    kinds = {type(kernel) for kernel in kernels_for(model).values()}
    assert AnyModule not in kinds or name == "encoder", "each layer inside has a kernel of its own"
    found = flatten(backend.clipped_sum(batch, clip).tensors).double()
    assert float((found - expected).norm()) <= 1e-3 * clip * 9  # each is clipped a little below the norm


@pytest.mark.parametrize("size", [6, 600])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_factor_is_the_inverse_root_of_the_damped_moment(size: int, transposed: bool) -> None:
    """Against dense float64 algebra; with full rank, a large side is exact as well."""
    rows = torch.randn(2 * size, size, dtype=torch.float64) * torch.logspace(0, -1, size, dtype=torch.float64)
    moment = rows.T @ rows
    factor = whitening(moment, 0.5, size, transposed=transposed)
    m = factor.mul(torch.eye(size, dtype=torch.float64)).T
    product = m @ m.T if transposed else m.T @ m
    wanted = (moment / moment.diagonal().mean() + 0.5 * torch.eye(size, dtype=torch.float64)) / 1.5
    torch.testing.assert_close(product @ wanted, torch.eye(size, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    x = torch.randn(3, size, dtype=torch.float64)
    torch.testing.assert_close(factor.solve(factor.mul(x)), x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(factor.solve_t(factor.mul_t(x)), x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(factor(x.float()), factor.mul(x).float(), rtol=1e-4, atol=1e-4)


def test_leading_directions_are_those_of_a_whole_decomposition() -> None:
    rows = torch.randn(900, 600, dtype=torch.float64) * torch.logspace(0, -9, 600, dtype=torch.float64)
    matrix = rows.T @ rows
    values, vectors = leading_directions(matrix, 20)
    exact, directions = torch.linalg.eigh(matrix)
    torch.testing.assert_close(values, exact[-20:], rtol=1e-3, atol=0.0)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(20, dtype=torch.float64), rtol=0.0, atol=1e-10)
    overlap = (directions[:, -10:].T @ vectors).square().sum(1)
    assert overlap.min() > 0.99
    assert (directions[:, :10].T @ vectors).square().sum(1).max() < 0.01, "and not those of small eigenvalues"


def test_without_leading_directions_a_large_side_needs_its_diagonal_alone() -> None:
    x, gradient = torch.randn(50, 600) * torch.logspace(0, -1, 600), torch.randn(50, 3)
    scales = []
    for rank in (0, 128):
        moments = Moments(torch.nn.Linear(600, 3), rank)
        moments.add(x, gradient)
        scales.append(moments.sides(1.0).before.scale)
        assert torch.as_tensor(moments._inputs).dim() == (2 if rank else 1)
    torch.testing.assert_close(scales[0], scales[1])


def test_a_round_moment_and_one_that_no_row_reaches_give_the_identity() -> None:
    x = torch.randn(4, 5)
    for moment in (3 * torch.eye(5), torch.zeros(5, 5), torch.ones(5)):
        torch.testing.assert_close(whitening(moment, 0.1, 2)(x), x)


@pytest.mark.parametrize("name", ["layer", "dense", "images"])
def test_public_gradients_keep_their_median_norm(name: str) -> None:
    """So a clip norm keeps its meaning. Exact up to labels, which the geometry draws anew."""

    def norms(model: nn.Module) -> Tensor:
        params = {k: p.detach() for k, p in model.named_parameters()}
        buffers = dict(model.named_buffers())

        def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            whole = {**params, **buffers}
            return loss_fn(lambda v: functional_call(model, whole, (v,)), (x[None], y[None])).sum()

        found = vmap(grad(one), (None, 0, 0))(params, *rows)
        return torch.stack([g.flatten(1).square().sum(1) for g in found.values()]).sum(0).sqrt()

    model, rows = case(name)
    before = norms(model)
    shaped = Whitened(labels="public").shape(model, loss_fn, rows)
    assert float((norms(shaped.model) / before).median()) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("name", CASES)
def test_other_coordinates_carry_weights_averages_and_momentum_over(name: str) -> None:
    """The function stays to 1e-4; momentum, which is one gradient here, becomes the gradient there, by autograd."""
    model, rows = case(name)
    shaped = Whitened(damping=0.3).shape(model.eval(), loss_fn, rows)
    params, modules = trainable(shaped.model), list(shaped.model.modules())
    average = [torch.randn_like(p) * 0.1 + p.detach() for p in params]
    with torch.no_grad():
        for p in params:  # factors would hardly differ at the same weights
            p.mul_(1 + 0.5 * torch.randn_like(p))
    sgd = torch.optim.SGD(params, lr=0.0, momentum=0.9)

    def differentiate() -> list[Tensor]:
        return list(torch.autograd.grad(loss_fn(shaped.model, rows).sum(), params))

    def results() -> tuple[Tensor, Tensor]:
        now = shaped.model(rows[0]).detach()
        with Average(0.5, 1, average).in_place_of(params):
            return now, shaped.model(rows[0]).detach()

    for p, g in zip(params, differentiate(), strict=True):
        p.grad = g
    sgd.step()
    before, factors, momenta = results(), state(shaped.model), [sgd.state[p]["momentum_buffer"].clone() for p in params]
    shaped.renew(average, sgd)
    assert list(shaped.model.modules()) == modules
    assert not all(torch.allclose(t, factors[k], rtol=0.01) for k, t in state(shaped.model).items())
    for then, now in zip(before, results(), strict=True):
        torch.testing.assert_close(now, then, rtol=1e-4, atol=1e-4)
    new = [sgd.state[p]["momentum_buffer"] for p in params]
    for found, wanted in zip(new, differentiate(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    assert not all(torch.allclose(a, b, rtol=0.01) for a, b in zip(new, momenta, strict=True)), "or nothing is shown"
    shaped.merge()
    torch.testing.assert_close(model(rows[0]), before[0], rtol=1e-4, atol=1e-4)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.named_buffers()}


def test_an_error_while_coordinates_are_measured_leaves_the_old_ones() -> None:
    model, rows = case("images")

    def fails(model: Any, batch: Any) -> Tensor:
        if stop:
            raise KeyboardInterrupt
        return loss_fn(model, batch)

    stop = False
    shaped = Whitened().shape(model, fails, rows)
    stop, before, factors = True, model(rows[0]).detach(), state(model)
    with pytest.raises(KeyboardInterrupt):
        shaped.renew([], torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(model(rows[0]), before, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(t, factors[k]) for k, t in state(model).items())


def plan(steps: int = 6, spare: int = 0) -> hs.PrivacyPlan:
    return hs.PrivacyPlan(
        steps=steps,
        spare_steps=spare,
        sampling_rate=0.5,
        expected_batch_size=100,
        noise_multiplier=4.0,  # the accountant is fast there
        max_grad_norm=0.5,
        delta=1e-4,
    )


def trained(
    folder: Path,
    geometry: Any,
    *,
    backend: Any = "auto",
    steps: int = 6,
    spare: int = 0,
    optimizer: str = "SGD",
    **options: Any,
) -> nn.Module:
    torch.manual_seed(0)
    x = torch.randn(260, 5) * torch.tensor([9.0, 3.0, 1.0, 0.3, 0.1])
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    trainer = hs.Trainer(
        model,
        loss_fn,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        if optimizer == "SGD"
        else torch.optim.Adam(model.parameters(), lr=0.1),
        plan=plan(steps, spare),
        geometry=geometry,
        performance=hs.Performance(backend=backend, micro_batch_size=64),
        unsafe_seed=7,
        progress=False,
        **options,
    )
    trainer.fit((x[60:], y[60:]), (x[:60], y[:60]), run_dir=folder)
    return model


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainable(model)])


@pytest.mark.parametrize("refresh", [None, 2])
def test_with_a_round_shape_it_is_dp_sgd(refresh: int | None, tmp_path: Path) -> None:
    round_shape = flat(trained(tmp_path / "a", Whitened(damping=1e9, refresh=refresh)))
    plain, whitened = flat(trained(tmp_path / "b", None)), flat(trained(tmp_path / "c", Whitened()))
    torch.testing.assert_close(round_shape, plain, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(whitened, plain, rtol=1e-2, atol=1e-2), "or the comparison shows nothing"


@pytest.mark.parametrize("backend", ["vmap", "hooks"])
def test_every_backend_computes_the_same(backend: str, tmp_path: Path) -> None:
    """New coordinates on the way included: a backend keeps no copy of the old ones."""
    geometry = Whitened(refresh=4)
    book = flat(trained(tmp_path / "a", geometry, backend="book"))
    torch.testing.assert_close(flat(trained(tmp_path / "b", geometry, backend=backend)), book, rtol=1e-3, atol=1e-4)


def test_a_run_that_is_interrupted_resumes_in_its_own_coordinates(tmp_path: Path) -> None:
    def interrupt(report: Any) -> None:
        if report.step == 3:
            raise KeyboardInterrupt

    whole = flat(trained(tmp_path / "a", Whitened(), average=0.5))
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "b", Whitened(), average=0.5, callbacks=[interrupt], checkpoint_seconds=0.0)
    resumed = flat(trained(tmp_path / "b", Whitened(), average=0.5))
    again = flat(trained(tmp_path / "b", Whitened(), average=0.5))
    assert torch.equal(resumed, again), "a finished run is loaded"
    assert resumed.shape == whole.shape
    assert verify(tmp_path / "b")["finished"] is True


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_run_with_new_coordinates_on_the_way_resumes_as_if_it_had_not_stopped(kind: str, tmp_path: Path) -> None:
    """Frozen releases; stopped at step 5 with the checkpoint at step 4, right after the second refresh."""

    def frozen(self: PrivateGradient) -> list[Tensor]:
        self.out.intend()
        self.out.noisy(ClippedSum.zeros(trainable(self._model), 1.0))
        steps.append(len(steps))
        return [torch.full_like(p, math.sin(steps[-1])) for p in trainable(self._model)]

    def interrupt(report: Any) -> None:
        if report.step == 5:
            raise KeyboardInterrupt

    def run(folder: str, **more: Any) -> Tensor:
        more |= {"average": 0.5, "checkpoint_seconds": 0.0, "optimizer": kind}
        return flat(trained(tmp_path / folder, Whitened(refresh=2), steps=7, spare=9, **more))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateGradient, "release", frozen)
        steps: list[int] = []
        whole = run("whole")
        steps = []
        with pytest.raises(KeyboardInterrupt):
            run("cut", callbacks=[interrupt])
        steps = steps[:4]
        assert torch.equal(run("cut"), whole)
        steps = []
        never = flat(trained(tmp_path / "never", Whitened(), steps=7, spare=9, average=0.5, optimizer=kind))
    assert not torch.allclose(never, whole, rtol=1e-3, atol=1e-3), "or new coordinates show nothing"
    assert verify(tmp_path / "cut")["finished"] is True


def test_maps_with_a_state_do_not_go_with_new_coordinates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Momentum.*keeps a state"):
        trained(tmp_path / "a", Whitened(refresh=2), mirror=hs.mirror.Momentum(0.5))
    trained(tmp_path / "b", Whitened(), mirror=hs.mirror.Momentum(0.5), steps=1)


def test_run_folders_from_before_the_option_open() -> None:
    assert repr(Whitened()) == "Whitened(damping=1.0, rank=128, labels='drawn', rows=4096)"
    assert repr(Whitened(refresh=3)) == "Whitened(damping=1.0, rank=128, labels='drawn', rows=4096, refresh=3)"


def test_an_optimizer_with_weight_decay_and_the_mirror_go_with_it(tmp_path: Path) -> None:
    trained(tmp_path / "a", Whitened(), mirror=hs.FirstOrder(0.5), average="uniform")


def test_what_cannot_be_whitened_is_left_alone() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    tied[1].weight = tied[0].weight
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    unused = nn.Linear(4, 3)
    tied[0].register_module("unused", unused)
    Whitened().shape(tied, loss_fn, (x, y))
    assert [type(m) for m in tied] == [nn.Linear, nn.Linear, ShapedLinear]
    assert tied[0].get_submodule("unused") is unused
    watched = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    watched[0].register_forward_hook(lambda module, args, output: None)
    Whitened().shape(watched, loss_fn, (x, y))
    assert [type(m) for m in watched] == [nn.Linear, ShapedLinear]
    limited = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 3))
    Whitened().shape(limited, loss_fn, (y, y))
    assert [type(m) for m in limited] == [nn.Embedding, ShapedLinear]
    with pytest.raises(ConfigError, match="call at least one layer"):
        Whitened().shape(nn.Sequential(nn.Linear(4, 3)), lambda m, batch: m[0].weight.sum() * batch[0].sum(1), (x, y))
    frozen = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Flatten())
    with pytest.raises(ConfigError, match="to whiten"):
        Whitened().shape(frozen, loss_fn, (x, y))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"damping": 0.0}, "damping=0.0 above 0"),
        ({"rank": -1}, "rank=-1 at least 0"),
        ({"labels": "mine"}, "labels='mine'"),
        ({"rows": 0}, "rows=0 at least 1"),
        ({"refresh": 0}, "refresh=0 at least 1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Whitened(**options)


def test_a_trainer_without_public_rows_says_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hs.Trainer(model, loss_fn, optimizer=sgd, plan=plan(), geometry=Whitened())
    with pytest.raises(ConfigError, match="needs public data"):
        trainer.fit((torch.randn(9, 5), torch.zeros(9, dtype=torch.int64)), run_dir=tmp_path)


def test_a_backend_that_was_made_for_other_layers_is_refused(tmp_path: Path) -> None:
    """It would compute gradients at V as if that were W."""
    model = nn.Linear(5, 1, bias=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    closed = hs.Performance(backend=LinearModel(model))
    trainer = hs.Trainer(model, loss_fn, optimizer=sgd, plan=plan(), geometry=Whitened(), performance=closed)
    rows = torch.randn(9, 5), torch.zeros(9)
    with pytest.raises(ConfigError, match="to be a name with a geometry"):
        trainer.fit(rows, tuple(t.clone() for t in rows), run_dir=tmp_path)


def test_labels_are_drawn_from_the_predictions() -> None:
    """n = 4000 draws of two classes at 0.8 / 0.2; alpha about 1e-6 by a normal bound of five deviations."""
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.8, 0.2]).log())
    batch = (torch.zeros(4000, 1), torch.zeros(4000, dtype=torch.int64))
    torch.manual_seed(0)
    drawn = with_drawn_labels(model, loss_fn, batch)[1].double().mean()
    assert abs(float(drawn) - 0.2) < 5 * (0.16 / 4000) ** 0.5
    assert abs(float(drawn) - 0.25) > 5 * (0.16 / 4000) ** 0.5, "a wrong share would be seen"


def test_windows_of_a_convolution() -> None:
    layer, x = nn.Conv2d(2, 3, (2, 3), stride=2, padding=1), torch.randn(4, 2, 7, 8)
    assert layer.bias is not None
    found = windows(layer, x) @ layer.weight.flatten(1).T + layer.bias
    torch.testing.assert_close(found.transpose(1, 2).reshape(4, 3, 4, 4), layer(x))


def test_gradients_of_an_earlier_pass_do_not_outlive_a_change_of_coordinates() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    rows = torch.randn(20, 1, 4, 4), torch.randint(0, 2, (20,))
    for _ in range(2):
        torch.autograd.backward([loss_fn(model, rows).sum()])
        shaped = Whitened().shape(model, loss_fn, rows)
        assert all(p.grad is None for p in model.parameters())
        torch.autograd.backward([loss_fn(model, rows).sum()])
        shaped.merge()
        assert all(p.grad is None for p in model.parameters())
