"""Book-keeping: every kernel against plain autograd, tied, shared and frozen weights, and modules without a kernel."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from halfsilver._core.tensors import Batch, LossFn, flatten, take_rows, trainable
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients import Performance, make_backend
from halfsilver.privacy.gradients.base import Adding, row_norms
from halfsilver.privacy.gradients.book import BookKeeping, tune
from halfsilver.privacy.gradients.book.outer import Outer
from halfsilver.privacy.gradients.vmap import Vmap
from tests.cases import MANY

SHAPES = settings(max_examples=50 * MANY, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
ROWS, STEPS, WIDTH = 5, 6, 4


def squares(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    """A loss whose gradient at the output is not constant."""
    out = model(x)
    scale = torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype).view(out.shape[1:])
    return ((out * scale).sin() * out).flatten(1).sum(1)


def one_by_one(model: nn.Module, loss_fn: LossFn, batch: Batch, rows: int) -> list[list[Tensor]]:
    """Plain autograd on each example alone, [example][parameter]: independent of the library."""
    params = trainable(model)
    losses = [loss_fn(model, take_rows(batch, slice(i, i + 1))).sum() for i in range(rows)]
    return [list(torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)) for loss in losses]


def check(model: nn.Module, batch: Batch, loss_fn: LossFn = squares, rows: int = ROWS) -> BookKeeping:
    """Norms and the clipped sum of each parameter's gradients, where half of the examples are clipped."""
    gradients = one_by_one(model, loss_fn, batch, rows)
    dtype = gradients[0][0].dtype
    backend = BookKeeping(model, loss_fn, batch)
    for c, *each in zip(backend._contributions(batch), *gradients, strict=True):
        if c is not None:
            expected = torch.stack([g.double().norm() for g in each])
            assert ((c.norms().squared.sqrt() - expected).abs() <= TOLERANCE[dtype] * expected + 1e-12).all()
    norms = torch.stack([flatten(g).double().norm() for g in gradients])
    clip = float(norms.median()) or 1.0
    factors = (clip / norms).clamp(max=1.0).tolist()
    total = sum(flatten(g).double() * w for g, w in zip(gradients, factors, strict=True))
    found = flatten([t.double() for t in backend.clipped_sum(batch, clip).tensors])
    assert float((found - total).norm()) <= 2e-3 * float(total.norm())
    loose = flatten([t.double() for t in backend.clipped_sum(batch, 1e6).tensors])
    plain = sum(flatten(g).double() for g in gradients)
    assert float((loose - plain).norm()) <= 10 * TOLERANCE[dtype] * float(norms.sum())
    return backend


sizes, dtypes = st.integers(1, 9), st.sampled_from(list(TOLERANCE))


@SHAPES
@given(st.data())
def test_linear(data: st.DataObject) -> None:
    """No time axis, one, or two; wide or narrow, so that both ways of the norm are met."""
    dtype, shape = data.draw(dtypes), data.draw(st.lists(st.integers(1, 12), max_size=2))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    layer = nn.Linear(data.draw(sizes), data.draw(sizes), bias=data.draw(st.booleans()), dtype=dtype)
    with tune.tuning(Adding(rows=ROWS), torch.device("cpu")):
        check(layer, torch.randn(ROWS, *shape, layer.in_features, dtype=dtype))


@SHAPES
@given(st.data())
def test_embedding(data: st.DataObject) -> None:
    dtype, shape = data.draw(dtypes), data.draw(st.lists(st.integers(1, 8), max_size=2))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    padding = data.draw(st.sampled_from([None, 0, 2]))
    layer = nn.Embedding(3, data.draw(sizes), padding_idx=padding, dtype=dtype)
    with torch.no_grad():
        layer.weight.normal_()
    check(layer, torch.randint(0, 3, (ROWS, *shape)))


@SHAPES
@given(st.data())
def test_norm_layers(data: st.DataObject) -> None:
    dtype, kind = data.draw(dtypes), data.draw(st.sampled_from([nn.LayerNorm, nn.RMSNorm, nn.GroupNorm]))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    shape = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=3))
    if kind is nn.GroupNorm:
        shape = [data.draw(st.sampled_from([2, 4])), 3, *shape[1:]]
        layer: nn.Module = nn.GroupNorm(2, shape[0], dtype=dtype)
    else:
        layer = kind(shape[data.draw(st.integers(0, len(shape) - 1)) :], dtype=dtype)
    for p in layer.parameters():
        nn.init.normal_(p)
    check(layer, torch.randn(ROWS, *shape, dtype=dtype))


class Shared(nn.Module):
    """One linear layer called twice, activations in place, and an output layer tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(11, WIDTH, padding_idx=0), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.out = nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.relu_(self.middle(self.embed(tokens)))
        return self.out(self.frozen(torch.tanh_(self.middle(x))))  # type: ignore[no-any-return]


def test_tied_shared_and_frozen_weights() -> None:
    model = Shared()
    check(model, torch.randint(0, 11, (ROWS, STEPS)))
    assert model.frozen.weight.grad is None
    check(model.double(), torch.randint(0, 11, (ROWS, STEPS)))


def test_frozen_weight_with_a_trained_bias() -> None:
    layer = nn.Linear(WIDTH, 3)
    layer.weight.requires_grad_(False)
    check(layer, torch.randn(ROWS, STEPS, WIDTH))


class Odd(nn.Module):
    """A parameter of its own, which no kernel knows, around a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, power: int = 1) -> dict[str, Tensor]:
        return {"out": self.inner(x * self.scale**power), "in": x}


class Around(nn.Module):
    def __init__(self, middle: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x)) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.middle, self.first(x)))  # type: ignore[no-any-return]


def test_a_module_without_a_kernel_falls_back_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Around(Odd(), lambda m, x: m(x, power=2)["out"])
    with caplog.at_level(logging.INFO, logger="halfsilver"):
        backend = check(model, torch.randn(ROWS, STEPS, WIDTH))
    assert [r.getMessage() for r in caplog.records] == [
        "No fast kernel for Odd at 'middle': this module runs on a slower path."
    ]
    assert len(backend._kernels) == 3


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "middle",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False)),
        lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
        lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
        lambda: nn.PReLU(),
        lambda: nn.ConvTranspose1d(STEPS, STEPS, 3, padding=1),
    ],
)
def test_other_modules(middle: Callable[[], nn.Module]) -> None:
    def call(module: nn.Module, x: Tensor) -> Any:
        if isinstance(module, nn.MultiheadAttention):
            return module(x, x, x, need_weights=False)[0]
        return module(x, x) if isinstance(module, nn.Bilinear) else module(x)

    check(Around(middle(), call), torch.randn(ROWS, STEPS, WIDTH))


def test_dropout_in_a_fallback_draws_once() -> None:
    """Forward and gradient see one mask, and each example its own: the gradient is zero exactly where the output is."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(50))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = F.dropout(x * self.scale, 0.5)
            return self.seen

    torch.manual_seed(0)
    outputs = []

    def loss(model: Callable[..., Tensor], x: Tensor) -> Tensor:
        outputs.append(model(x))
        return outputs[-1].sum(1)

    backend = BookKeeping(Dropped(), loss, torch.ones(ROWS, 50))
    (found,) = backend._contributions(torch.ones(ROWS, 50))
    assert found is not None
    assert torch.equal(found.gradients(slice(None), torch.float32), outputs[-1].detach())
    assert len({tuple(row) for row in outputs[-1].tolist()}) == ROWS


def test_input_changed_in_place_is_refused() -> None:
    """Plain autograd would raise as well; here nothing but our own watch can see it."""

    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            out = self.last(h)
            h += 1
            return out  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedLayer, match="in place"):
        BookKeeping(Careless(), squares, torch.randn(2, WIDTH)).clipped_sum(torch.randn(2, WIDTH), 1.0)


def test_a_weight_used_outside_its_module_is_refused() -> None:
    class Direct(Shared):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.embed(tokens) @ self.embed.weight.T  # type: ignore[no-any-return]

    batch = torch.randint(1, 11, (4, STEPS))
    with pytest.raises(UnsupportedLayer, match="outside of its module"):
        make_backend(Performance(backend="book"), Direct(), squares, batch)
    assert make_backend(Performance(), Direct(), squares, batch).name == "vmap"


def test_forward_methods_are_put_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    backend = BookKeeping(model, squares, torch.randn(2, WIDTH))
    with pytest.raises(RuntimeError):
        backend.clipped_sum(torch.randn(2, WIDTH + 1), 1.0)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cancelling_sequences_are_measured_directly(dtype: torch.dtype) -> None:
    """Row 0: factors of size 1e3 that cancel almost. Its Gram norm is mere rounding; its clipped part must not be.

    Held against exact arithmetic on the very factors; the bound S of outer.py exceeds the norm by about 1e6.
    """
    torch.manual_seed(0)
    a = 1e3 * torch.randn(3, 2, 8, dtype=torch.float64)
    a[0, 1] = -a[0, 0] * (1 + 1e-9)
    a = a.to(dtype)

    def loss(model: Callable[..., Tensor], x: Tensor) -> Tensor:
        return model(x).sum((1, 2))

    layer = nn.Linear(8, 2, bias=False, dtype=dtype)
    backend = BookKeeping(layer, loss, a)
    exact = a.double().sum(1)[:, None, :].expand(3, 2, 8)
    clip = 0.5 * float(exact[0].norm()) if float(exact[0].norm()) else 1.0
    expected = sum(g * min(1.0, clip / max(float(g.norm()), 1e-300)) for g in exact)
    (found,) = backend.clipped_sum(a, clip).tensors
    assert float((found.double() - expected).norm()) <= 2e-3 * clip * 3
    alone = backend.clipped_sum(a, clip, torch.arange(len(a)) < 1).tensors[0].double()
    assert float((alone - exact[0] * min(1.0, clip / max(float(exact[0].norm()), 1e-300))).norm()) <= 2e-3 * clip


def test_rounding_bound_covers_the_computed_norm() -> None:
    """squared + slack is at least the true squared norm, for factors from 1e-30 to 1e12 and partial cancellation."""
    torch.manual_seed(1)
    for _ in range(300):
        size, other = (10.0 ** float(torch.empty(()).uniform_(-30, 12)) for _ in range(2))
        left, right = torch.randn(4, 7, 5) * size, torch.randn(4, 7, 3) * other
        left[:, 1] = -left[:, 0] * (1 + 1e-4)
        right[:, 1] = right[:, 0]
        found = Outer(left, right, (5, 3)).norms()
        true = (left.double().mT @ right.double()).square().sum((1, 2))
        known = torch.isfinite(found.squared + found.slack)
        assert (found.squared + found.slack >= true * (1 - 1e-6))[known].all()
        assert known.all() or size > 1e9 or other > 1e9


def test_ways_are_measured_on_made_up_rows_only() -> None:
    layer, x = nn.Linear(37, 41), torch.randn(3, 5, 37)
    backend = BookKeeping(layer, squares, x)
    before = dict(tune._choices)
    backend.clipped_sum(x, 1.0)
    assert tune._choices == before
    backend.tune(x, Adding(rows=len(x)))
    (key,) = set(tune._choices) - set(before)
    assert tune._choices[key] in ("gram", "multiply")


@pytest.mark.parametrize("way", ["gram", "multiply"])
def test_both_ways_of_a_linear_layer_agree(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "fastest", lambda key, ways: ways[way]())
    monkeypatch.setattr("halfsilver.privacy.gradients.book.outer.fastest", lambda key, ways: ways[way]())
    check(nn.Linear(WIDTH, 3, bias=False), torch.randn(ROWS, STEPS, WIDTH))


def test_autocast_keeps_norms_and_sums_in_float32() -> None:
    """bfloat16 activations: within their precision of the float32 result, and the bound holds to float32's margin."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(8, STEPS, 16)

    def half(model: Callable[..., Tensor], x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model, x).float()

    backend, full = BookKeeping(model, half, x), BookKeeping(model, squares, x)
    clip = float(row_norms(Vmap(model, squares, x).per_example(x)).min()) / 2
    found, expected = (flatten(b.clipped_sum(x, clip).tensors).double() for b in (backend, full))
    assert 1e-5 < float((found - expected).norm() / expected.norm()) < 3e-2
    assert all(t.dtype != torch.bfloat16 for t in backend.clipped_sum(x, clip).tensors)
    whole = [t.double() for t in backend.clipped_sum(x, clip).tensors]
    for i in range(8):
        others = backend.clipped_sum(x, clip, torch.arange(8) != i).tensors
        difference = flatten([a - b.double() for a, b in zip(whole, others, strict=True)])
        assert 0.9 * clip < float(difference.norm()) <= clip


def lora(**options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 11))
    config = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **options)
    return peft.get_peft_model(base, config)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["1", "3"]},
        {"target_modules": ["0", "1"]},
        {"target_modules": ["1"], "modules_to_save": ["3"]},
        {"target_modules": ["1", "3"], "use_dora": True},
        {"target_modules": ["1", "3"], "bias": "all"},
        {"target_modules": ["1"], "use_rslora": True},
    ],
    ids=str,
)
def test_lora_layers_work_or_are_refused(options: dict[str, Any]) -> None:
    model, batch = lora(**options), torch.randint(0, 11, (4, STEPS))
    try:
        backend = make_backend(Performance(backend="book"), model, squares, batch)
    except UnsupportedLayer:
        assert make_backend(Performance(), model, squares, batch).name in ("hooks", "vmap")
        return
    gradients = one_by_one(model, squares, batch, 4)
    expected = sum(flatten(g).double() for g in gradients)
    found = flatten(backend.clipped_sum(batch, 1e6).tensors).double()
    assert float((found - expected).norm()) <= 1e-4 * math.fsum(float(flatten(g).norm()) for g in gradients)


def moved(backend: BookKeeping, x: Tensor, clip: float) -> float:
    """How far the last row moves the sum of all, in units of the clip norm."""
    whole, less = (backend.clipped_sum(x, clip, torch.arange(len(x)) < rows).tensors for rows in (len(x), len(x) - 1))
    return float(flatten([a.double() - b.double() for a, b in zip(whole, less, strict=True)]).norm()) / clip


def total(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return 10 * model(x).flatten(1).sum(1)


@pytest.mark.parametrize("steps", [1, 256, pytest.param(1024, marks=pytest.mark.nightly)])
def test_equal_tokens_add_up_within_the_bound(steps: int) -> None:
    """Every token of every row is the same: 128 x 1024 equal additions to one entry, which all round the same way."""
    layer = nn.Embedding(4, 8)
    tokens = torch.ones(128, steps, dtype=torch.int64)
    assert 0.99 < moved(BookKeeping(layer, total, tokens[:2]), tokens, 1.0) <= 1.0


@pytest.mark.parametrize("width", [512, 4096, 32_768])
def test_wide_constant_factors_stay_within_the_bound(width: int) -> None:
    """Tokens that are constant vectors, half of which cancel: the inner products of such factors round one way."""
    signs = torch.cat([torch.ones(9), -torch.ones(7)])

    def loss(model: Callable[..., Tensor], x: Tensor) -> Tensor:
        return (model(x) * signs[:, None]).sum((1, 2))

    x = torch.full((3, 16, width), 0.7)
    backend = BookKeeping(nn.Linear(width, 16, bias=False), loss, x)
    (alone,) = backend.clipped_sum(x, 1.0, torch.arange(3) < 1).tensors
    assert 0.99 < float(alone.double().norm()) <= 1.0
    found = Outer(x.new_ones(3, 16, 16) * signs[:, None], x, (16, width)).norms()
    assert (found.squared + found.slack >= (2 * 4 * 0.7) ** 2 * width * (1 - 1e-6)).all()


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [64, 256])
def test_partly_cancelling_sequences_stay_within_the_bound(steps: int) -> None:
    """A recurrent layer that is called twice, on sequences whose two halves nearly cancel."""
    torch.manual_seed(0)
    layer = nn.RNN(1, 4, batch_first=True)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0] - 0.9 * self.layer(x.flip(1))[0]  # type: ignore[no-any-return]

    x = torch.cat([torch.ones(128, steps // 2, 1), -torch.ones(128, steps // 2, 1)], dim=1)
    assert 0.9 < moved(BookKeeping(Twice(), total, x[:2]), x, 0.01) <= 1.0


def test_margin_is_that_of_the_least_precise_parameter() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.embed = nn.Linear(1, 1, dtype=torch.float64), nn.Embedding(4, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            gate: Tensor = self.first(torch.zeros(len(tokens), 1, dtype=torch.float64))
            return torch.mul(self.embed(tokens), gate[:, None].float())

    tokens = torch.ones(128, 8, dtype=torch.int64)
    assert moved(BookKeeping(Mixed(), total, tokens[:2]), tokens, 1.0) <= 1.0


def test_rows_without_a_gradient_are_not_multiplied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a row of zeros was multiplied out")

    monkeypatch.setattr("halfsilver.privacy.gradients.book.backend._direct", refuse)
    x = torch.randn(ROWS, STEPS, WIDTH)
    backend = BookKeeping(nn.Linear(WIDTH, WIDTH), lambda model, x: 0 * model(x).sum((1, 2)), x)
    assert all(not t.any() for t in backend.clipped_sum(x, 1.0).tensors)


def test_data_that_asks_for_a_gradient() -> None:
    layer, x = nn.Linear(WIDTH, 3), torch.randn(ROWS, WIDTH, requires_grad=True)
    check(layer, x)
    assert x.grad is None


def test_a_weight_that_still_does_nothing_is_noticed() -> None:
    """A hand-written low-rank layer: its second factor starts at zero, so that no gradient of the first shows yet."""

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(F.linear(x, self.a.weight))  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedLayer, match="outside of its module"):
        BookKeeping(LowRank(), squares, torch.randn(2, WIDTH)).clipped_sum(torch.randn(2, WIDTH), 1.0)


def test_keyword_arguments_and_positions_given_once() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.out = nn.Embedding(11, WIDTH), nn.Embedding(STEPS, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            places = torch.arange(tokens.shape[1])[None]
            return self.out(input=self.words(input=tokens) + self.places(places))  # type: ignore[no-any-return]

    check(Positions(), torch.randint(0, 11, (ROWS, STEPS)))


def test_renormalising_embeddings_are_refused() -> None:
    layer = nn.Embedding(3, 2, max_norm=100.0)
    with pytest.raises(UnsupportedLayer, match="max_norm"):
        BookKeeping(layer, squares, torch.tensor([[0]])).clipped_sum(torch.tensor([[0]]), 1.0)


def test_gram_matrices_of_many_rows_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = torch.randn(7, 5, 3), torch.randn(7, 5, 4)
    whole = Outer(left, right, (3, 4)).norms()
    monkeypatch.setattr("halfsilver.privacy.gradients.book.outer.LARGEST", 4 * 25 * 2)
    parts = Outer(left, right, (3, 4)).norms()
    torch.testing.assert_close(parts.squared, whole.squared)
    torch.testing.assert_close(parts.slack, whole.slack)
