"""One contract for every gradient backend: agreement with the oracle, and a bound that no record can break."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from torch import Tensor, nn
from torch.nn import functional

from halfsilver._core.tensors import Batch, LossFn, flatten, take_rows, trainable
from halfsilver.errors import ConfigError, UnsupportedLayer
from halfsilver.privacy import gradients
from halfsilver.privacy.gradients import BACKENDS, ClippedSum, Performance, make_backend
from halfsilver.privacy.gradients.base import Adding, GradientBackend, clip_factors, row_norms
from halfsilver.privacy.gradients.linear import LinearModel, Link, SparseRecords, predictions, with_row_norms
from halfsilver.privacy.gradients.rows import default_rows, expected_pieces, fastest_rows
from halfsilver.privacy.gradients.softmax import SoftmaxModel, softmax_records
from halfsilver.privacy.gradients.users import clipped_user_gradient
from halfsilver.privacy.gradients.vmap import Vmap
from halfsilver.privacy.plan import PrivacyPlan
from tests.cases import MANY

CASES = settings(max_examples=100 * MANY, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
SPECIAL = [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e38, 1e-40, -1e-40, 0.0, 65504.0, 1.0, -1.0]


def one_by_one(model: nn.Module, loss_fn: LossFn, batch: Batch, clip: float) -> Tensor:
    """Independent of the library: clip each example's plain autograd gradient to `clip`, in float64, and add up."""
    params = trainable(model)
    total = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
    for i in range(len(torch.utils._pytree.tree_leaves(batch)[0])):
        loss = loss_fn(model, take_rows(batch, slice(i, i + 1))).sum()
        grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
        g = flatten(grads).double()
        total += g * min(1.0, clip / float(g.norm()))
    return total


class Tied(nn.Module):
    """A small language model whose output layer shares the embedding, with a frozen layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(self.frozen(self.embed(tokens))) @ self.embed.weight.T)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = (
            nn.Embedding(11, 5),
            nn.LSTM(5, 4, batch_first=True),
            nn.Linear(4, 11),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(tokens))[0])  # type: ignore[no-any-return]


def class_loss(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def token_loss(model: Callable[..., Tensor], tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 5)
    )


def tokens(rows: int) -> Tensor:
    return torch.randint(0, 11, (rows, 7))


def images(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 1, 8, 8), "y": torch.randint(0, 5, (rows,))}


MODELS: dict[str, tuple[Callable[[], nn.Module], LossFn, Callable[[int], Batch], set[str]]] = {
    "cnn": (cnn, class_loss, images, set(BACKENDS)),
    "tied": (Tied, token_loss, tokens, {"vmap"}),
    "lstm": (Lstm, token_loss, tokens, {"vmap", "book"}),
}


@pytest.mark.parametrize("clip", [0.05, 1e6])
@pytest.mark.parametrize("rows", [1, 5, 150])
@pytest.mark.parametrize(("kind", "name"), [(k, b) for k, v in MODELS.items() for b in sorted(v[3])])
def test_equals_plain_autograd(kind: str, name: str, rows: int, clip: float) -> None:
    """All clipped, none clipped, and more rows than a float32 part: relative error 2e-3 (the margins) or 1e-5."""
    if kind != "cnn" and rows == 150:
        rows = 20
    torch.manual_seed(0)
    make, loss_fn, data, _ = MODELS[kind]
    model, batch = make(), data(rows)
    backend = BACKENDS[name](model, loss_fn, data(4))
    found = backend.clipped_sum(batch, clip)
    expected = one_by_one(model, loss_fn, batch, clip)
    tolerance = 2e-3 if clip < 1 else 1e-5
    assert float((flatten(found.tensors) - expected).norm()) <= tolerance * float(expected.norm())
    assert found.sensitivity == clip
    assert rows <= 128 or all(t.dtype == torch.float64 for t in found.tensors)
    assert_no_trace(model)


def assert_no_trace(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is None
        assert not [a for a in vars(p) if "sample" in a]
    for m in model.modules():
        assert not hasattr(m, "activations")
        assert not m._forward_hooks
        assert not m._backward_hooks


@pytest.mark.parametrize("kind", ["tied", "lstm"])
def test_what_opacus_cannot_do_is_refused(kind: str) -> None:
    make, loss_fn, data, _ = MODELS[kind]
    model = make()
    with pytest.raises(UnsupportedLayer, match="Use backend="):
        make_backend(Performance(backend="hooks"), model, loss_fn, data(4))
    assert_no_trace(model)
    assert make_backend(Performance(), model, loss_fn, data(4)).name == ("book" if kind == "lstm" else "vmap")


def test_auto_takes_book_keeping_where_it_works() -> None:
    model = cnn()
    assert make_backend(Performance(), model, class_loss, images(4)).name == "book"
    with pytest.raises(ConfigError, match="backend='fast'"):
        make_backend(Performance(backend="fast"), model, class_loss, images(4))  # type: ignore[arg-type]


def test_default_micro_batch_size() -> None:
    assert default_rows(cnn(), 500) == 64
    assert default_rows(cnn(), 1e6) == 512
    assert default_rows(nn.Linear(20_000, 20_000, device="meta"), 500) == 1
    with pytest.raises(ConfigError, match="micro_batch_size"):
        Performance(micro_batch_size=0)
    with pytest.raises(ConfigError, match="autocast"):
        Performance(autocast=torch.float32)


class Paced:
    """A backend whose time for a batch is known: a fixed part, one for each row, and one for rows beyond 128."""

    name = "paced"

    def __init__(self) -> None:
        self.tuned: list[int] = []

    def tune(self, batch: Batch, adding: Adding) -> None:
        self.tuned.append(len(batch))

    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        self.now += 0.004 + 2e-4 * len(batch) + 2e-3 * max(0, len(batch) - 128)
        return ClippedSum([], max_grad_norm)

    now = 0.0


def test_fastest_micro_batch_size_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, model = Paced(), cnn()
    monkeypatch.setattr("halfsilver.privacy.gradients.rows.clock", lambda device: backend.now)
    plan = PrivacyPlan(steps=1000, sampling_rate=0.01, expected_batch_size=250, noise_multiplier=1.0)
    for _ in range(2):
        found = fastest_rows(backend, model, lambda rows: torch.zeros(rows, 3), plan, 1.0)
        assert found[0] == 128
        assert found[-1] == 1, "one row is never rounded by its place"
    assert backend.tuned == [64, 128, 256], "measured once, and no further than needed"
    vmap = BACKENDS["vmap"](model, class_loss, images(2))
    assert fastest_rows(vmap, model, images, plan, 1.0)[0] == 64
    few = PrivacyPlan(steps=1000, sampling_rate=1.0, expected_batch_size=20, noise_multiplier=1.0)
    assert fastest_rows(vmap, model, images, few, 1.0) == [24, 32, 64, 16, 8, 1]
    large = nn.Linear(3000, 3000, device="meta")
    assert fastest_rows(vmap, large, images, plan, 1.0) == [8, 1], "more gradients than that take too much memory"
    backend.tuned.clear()
    assert fastest_rows(backend, large, lambda rows: torch.zeros(rows, 3), plan, 1.0)[0] == 64
    assert backend.tuned == [8, 16, 32, 64]


def test_expected_pieces_against_simulation() -> None:
    """20,000 Poisson batches a case; the mean number of pieces to 2 %."""
    rng = np.random.default_rng(0)
    for rows, expected in ((16, 16.0), (24, 16.0), (64, 500.0), (8, 3.0)):
        pieces = np.ceil(rng.poisson(expected, 20_000) / rows).clip(min=1).mean()
        assert abs(expected_pieces(rows, expected, 0.0) / pieces - 1) < 0.02


# The sensitivity bound. A record is (a, g), the input and the output gradient of a linear layer with a time axis, so
# that a case controls all that a gradient is made of: sum_t g_t a_t' for the weight, sum_t g_t for the bias.


def bilinear_loss(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    a, g = batch
    return torch.sum(model(a) * g, (1, 2))


@st.composite
def records(draw: st.DrawFn, rows: int) -> tuple[Tensor, Tensor]:
    a, g = (torch.stack([draw_record(draw, width) for _ in range(rows)]) for width in (3, 2))
    return a, g


def draw_record(draw: st.DrawFn, width: int, steps: int = 4) -> Tensor:
    """One [steps, width] array of a drawn kind; its values come from a drawn seed, cheaper than drawing each."""
    kind = draw(st.sampled_from(["plain", "special", "mixed", "cancelling", "zero"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    plain = rng.normal(size=(steps, width)).astype(np.float32).astype(np.float64)
    special = rng.choice(SPECIAL, size=(steps, width))
    values = {"special": special, "mixed": np.where(rng.random((steps, width)) < 0.2, special, plain)}.get(kind, plain)
    if kind == "cancelling":  # pairs of steps that cancel but for a tiny rest
        values[1::2] = -values[::2] * (1 + draw(st.sampled_from([0.0, 1e-7, -1e-6, 1e-4])))
    scale = 0.0 if kind == "zero" else draw(st.sampled_from([1.0, 1.0, 1e-8, 1e4, 1e10, 1e15]))
    return torch.from_numpy(values * scale if kind not in ("special", "mixed") else values)


def assert_bounded(make: Callable[[], GradientBackend], a: Tensor, g: Tensor, clip: float) -> None:
    """|sum(D) - sum(D minus a record)| <= C, exactly, for the last record; and everything is finite."""
    backend = make()
    whole = flatten(backend.clipped_sum((a, g), clip).tensors)
    rest = flatten(backend.clipped_sum((a[:-1], g[:-1]), clip).tensors)
    assert torch.isfinite(whole).all()
    assert float((whole - rest).norm()) <= clip


@pytest.mark.parametrize("name", sorted(BACKENDS))
@CASES
@given(data=st.data())
def test_no_record_breaks_the_bound(name: str, data: st.DataObject) -> None:
    """2,000 cases a backend, in float32, float64 and float16 (which book-keeping refuses)."""
    dtypes = [torch.float32, torch.float64, *([torch.float16] if name != "book" else [])]
    dtype = data.draw(st.sampled_from(dtypes))
    clip = data.draw(st.sampled_from([1.0, 1e-3, 10.0]))
    a, g = (t.to(dtype) for t in data.draw(records(rows=data.draw(st.integers(2, 4)))))
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    assert_bounded(
        lambda: BACKENDS[name](model, bilinear_loss, (torch.ones_like(a[:2]), torch.ones_like(g[:2]))), a, g, clip
    )


def squared_loss(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Here the output gradient depends on the weights, and a prediction that cancels decides the gradient's sign."""
    return 0.5 * model(batch).flatten(1).square().sum(1)


class ConvNet(nn.Module):
    """Convolution, GroupNorm, embedding-like sharing over positions and a linear layer with a time axis."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.out(self.norm(self.conv(x.transpose(1, 2)))))


@pytest.mark.parametrize("model_type", ["linear", "conv"])
@pytest.mark.parametrize("name", sorted(BACKENDS))
@settings(CASES, max_examples=25 * MANY)
@given(data=st.data())
def test_no_record_breaks_the_bound_through_the_mechanism(name: str, model_type: str, data: st.DataObject) -> None:
    """500 cases a backend and model, with padding to one shape as in training, row added or removed, empty included.

    The model's own rounding is in play: rows whose prediction cancels must not change with the number of rows.
    """
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    rows, clip = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1.0, 1e-3, 10.0]))
    x = data.draw(records(rows=rows))[0].to(dtype)
    torch.manual_seed(data.draw(st.integers(0, 3)))
    model = (nn.Linear(3, 2, bias=False) if model_type == "linear" else ConvNet()).to(dtype)
    if data.draw(st.booleans()):  # predictions that are nothing but rounding
        w = trainable(model)[0].detach().reshape(-1)[:3].double()
        x = (x.double() - (x.double() @ w)[..., None] * w / w.square().sum()).to(dtype) * 1e4
    backend = BACKENDS[name](model, squared_loss, torch.ones(2, 4, 3, dtype=dtype))
    padding = torch.ones(8, 4, 3, dtype=dtype)
    drop = data.draw(st.integers(0, rows - 1))
    keep = [i for i in range(rows) if i != drop]
    sums = []
    for part in (x, x[keep]):
        batch = torch.cat([part, padding[len(part) :]])
        sums.append(flatten(backend.clipped_sum(batch, clip, torch.arange(len(batch)) < len(part)).tensors))
    assert torch.isfinite(sums[0]).all()
    assert float((sums[0] - sums[1]).norm()) <= clip


def test_a_row_rounds_the_same_whatever_stands_beside_it() -> None:
    """What the padding relies on: at one shape 0 of 200 predictions change with place and neighbours.

    At other shapes many do (on some machines), which is what the padding is for.
    """
    torch.manual_seed(0)
    model = nn.Linear(64, 1, bias=False)
    x = torch.randn(200, 64)
    x = (x - (x @ model.weight.T) * model.weight / model.weight.square().sum()).detach() * 1e4
    with torch.no_grad():
        fixed = [model(torch.cat([x[i : i + 1], torch.randn(15, 64)])).ravel()[0] for i in range(200)]
        again = [
            model(torch.cat([torch.randn(9, 64), x[i : i + 1], torch.randn(6, 64)])).ravel()[9] for i in range(200)
        ]
    assert sum(a != b for a, b in zip(fixed, again, strict=True)) == 0


class Folded(nn.Module):
    """Hands its linear layer B * T rows: hooks would take each time step for an example."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.out(x.flatten(0, 1)).reshape(*x.shape[:2], 2))


class Reused(nn.Module):
    """Uses a layer's weight once more behind the layer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.drop(functional.linear(self.out(x), self.out.weight)) * 1e-4)


@pytest.mark.parametrize("model_type", [Folded, Reused])
def test_gradients_that_hooks_get_wrong_are_refused(model_type: type[nn.Module]) -> None:
    """Also with small gradients and with dropout, where a comparison without clipping would show nothing."""
    model, example = model_type(), torch.randn(4, 5, 3)
    with pytest.raises(UnsupportedLayer, match="Use backend="):
        make_backend(Performance(backend="hooks"), model, squared_loss, example)
    assert make_backend(Performance(), model, squared_loss, example).name == "vmap"
    if isinstance(model, Reused):
        assert model.drop.p == 0.5


def test_a_nan_row_does_not_erase_the_others_where_zero_input_has_no_gradient() -> None:
    """h / |h| has no gradient at 0, so a bad row must not be replaced by zeros."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    loss = lambda m, b: (lambda h: (h / h.norm(dim=1, keepdim=True))[:, 0])(m(b))  # noqa: E731
    x = torch.randn(6, 3)
    bad = torch.cat([x, torch.full((1, 3), math.nan)])
    for name, backend in BACKENDS.items():
        made = backend(model, loss, torch.randn(4, 3))
        found, expected = (flatten(made.clipped_sum(b, 0.1).tensors) for b in (bad, x))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=name)


@CASES
@given(data=st.data())
def test_no_record_breaks_the_bound_of_the_closed_form(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    links: list[Link] = ["squared", "logistic"]
    link = data.draw(st.sampled_from(links))
    clip = data.draw(st.sampled_from([1.0, 1e-3, 10.0]))
    a, g = data.draw(records(rows=data.draw(st.integers(2, 4))))
    outputs = 1 if link == "logistic" else data.draw(st.sampled_from([1, 2]))
    x, y = a.flatten(1).to(dtype), g[:, 0, :outputs].to(dtype)
    y = y[:, 0] if outputs == 1 else y
    torch.manual_seed(0)
    backend = LinearModel(nn.Linear(12, outputs, bias=False).to(dtype), link)
    whole, rest = (backend.clipped_sum(with_row_norms(x[:k], y[:k]), clip).tensors[0] for k in (len(x), len(x) - 1))
    assert torch.isfinite(whole).all()
    assert float((whole - rest).norm()) <= clip


EXPONENTS = st.integers(-300, 300)


@CASES
@given(
    features=st.lists(EXPONENTS, min_size=3, max_size=3),
    target=EXPONENTS,
    way=st.sampled_from([("squared", 1), ("squared", 2), ("logistic", 1)]),
)
def test_a_row_of_the_closed_form_is_clipped_where_squares_leave_the_range(
    features: list[int], target: int, way: tuple[Link, int]
) -> None:
    """The derivative of the squared loss has no bound, so a norm that underflows to 0 would leave a row as it is."""
    link, outputs = way
    x = torch.cat([torch.eye(3, dtype=torch.float64), 10.0 ** torch.tensor([features], dtype=torch.float64)])
    y = torch.tensor([1.0, -1.0, 1.0, 10.0**target], dtype=torch.float64)
    if outputs > 1:
        y = torch.stack([y, -y / 2], dim=1)
    backend = LinearModel(nn.Linear(3, outputs, bias=False, dtype=torch.float64), link)
    sparse = SparseRecords.make(csr_matrix(x.numpy()), y)
    kept = SparseRecords.make(csr_matrix(x[:3].numpy()), y[:3])
    for whole, rest in (
        (with_row_norms(x, y), with_row_norms(x[:3], y[:3])),
        (sparse.fetch(slice(0, 4), sparse.schema()), kept.fetch(slice(0, 3), kept.schema())),
    ):
        sums = [backend.clipped_sum(batch, 1.0).tensors[0] for batch in (whole, rest)]
        assert float((sums[0] - sums[1]).norm()) <= 1.0


def test_a_row_that_names_a_column_twice_erases_nobody() -> None:
    """What others put into the column would be rounded away between 1e20 and -1e20, whose sum the norm does not see."""
    x, y = np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 0.0]]), torch.tensor([5.0, 5.0, -1.0], dtype=torch.float64)
    twice = csr_matrix(x)
    twice = csr_matrix((np.append(twice.data, [1e20, -1e20]), np.append(twice.indices, [0, 0]), [0, 2, 4, 6]), (3, 2))
    backend = LinearModel(nn.Linear(2, 1, bias=False, dtype=torch.float64))
    with torch.no_grad():
        backend._model.weight.zero_()
    made = [SparseRecords.make(matrix, y) for matrix in (twice, csr_matrix(x))]
    sums = [backend.clipped_sum(one.fetch(slice(0, 3), one.schema()), 10.0).tensors[0] for one in made]
    torch.testing.assert_close(*sums)
    assert len(twice.data) == 6  # the caller's matrix is as it was


def test_a_weight_of_the_softmax_form_does_not_lift_a_row_over_the_clip() -> None:
    """A norm that underflows to 0, times a large weight."""
    x, labels = torch.eye(2, dtype=torch.float64), torch.tensor([0, 1])
    x, weights = (
        torch.cat([x, torch.full((1, 2), 1e-170, dtype=torch.float64)]),
        torch.tensor([1.0, 1.0, 1e300], dtype=torch.float64),
    )
    labels, none = torch.cat([labels, labels[:1]]), torch.zeros(3, 0, dtype=torch.float64)
    backend = SoftmaxModel(nn.Linear(2, 2, bias=False, dtype=torch.float64))
    sums = [
        backend.clipped_sum(softmax_records(x[:k], labels[:k], weights[:k], none[:k]), 1.0).tensors[0] for k in (3, 2)
    ]
    assert float((sums[0] - sums[1]).norm()) <= 1.0


@CASES
@given(data=st.data())
def test_no_user_breaks_the_bound(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16]))
    a, g = (t.to(dtype) for t in data.draw(records(rows=3)))
    model = nn.Linear(3, 2).to(dtype)
    found = clipped_user_gradient(model, bilinear_loss, [(a[:2], g[:2]), (a[2:], g[2:])], 0.5)
    assert float(flatten(found.tensors).norm()) <= 0.5


def test_the_bound_test_has_teeth() -> None:
    """A norm from Gram matrices without our rounding bound lets a cancelling sequence through at many times C."""
    from opacus.grad_sample.linear import compute_linear_norm_sample

    model = nn.Linear(3, 2, bias=False)
    rest = torch.linspace(1e-7, 1e-6, 200)[:, None, None] * torch.tensor([[[0.0], [1.0]]])
    a = torch.tensor([[[1e4, 2e4, 3e4], [1e4, 2e4, 3e4]]]) * (1 + rest)
    g = torch.tensor([[[1e4, 0.0], [-1e4, 0.0]]]).expand(200, 2, 2)
    norms = compute_linear_norm_sample(model, [a], g)[model.weight]
    true = torch.einsum("nti,ntj->nij", g.double(), a.double()).flatten(1).norm(dim=1)
    factors = clip_factors(torch.nan_to_num(norms), 1.0, 1e-4)
    assert float((true * factors).max()) > 5


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_bad_rows_leave_the_others_alone(name: str) -> None:
    """NaN, Inf and overflowing examples contribute zero; the rest of the sum is what it is without them."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    a, g = torch.randn(6, 4, 3), torch.randn(6, 4, 2)
    bad_a, bad_g = a.clone(), g.clone()
    bad_a[1, 0, 0], bad_a[3, 2, 1], bad_g[4, 1, 1] = math.nan, math.inf, math.nan
    backend = BACKENDS[name](model, bilinear_loss, (a[:2], g[:2]))
    found = flatten(backend.clipped_sum((bad_a, bad_g), 0.5).tensors)
    good = [0, 2, 5]
    expected = flatten(backend.clipped_sum((a[good], g[good]), 0.5).tensors)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.used(x))


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_unused_parameters_get_zero(name: str) -> None:
    a, g = torch.randn(3, 4, 3), torch.randn(3, 4, 2)
    found = BACKENDS[name](HalfUsed(), bilinear_loss, (a, g)).clipped_sum((a, g), 1.0)
    assert float(found.tensors[2].norm()) == float(found.tensors[3].norm()) == 0.0
    assert float(found.tensors[0].norm()) > 0


def test_closed_form_equals_the_oracle_and_caches_norms() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(300, 20), torch.randn(300)
    model = nn.Linear(20, 1, bias=False)
    for link, loss in (
        ("squared", functional.mse_loss),
        ("logistic", functional.binary_cross_entropy_with_logits),
    ):
        target, scale = (y, 0.5) if link == "squared" else ((y > 0).float(), 1.0)
        loss_fn = lambda m, b, f=loss, s=scale: s * f(m(b[0]).squeeze(1), b[1], reduction="none")  # noqa: E731
        found = LinearModel(model, link).clipped_sum(with_row_norms(x, target), 0.5).tensors[0]  # type: ignore[arg-type]
        expected = one_by_one(model, loss_fn, (x, target), 0.5)
        assert float((found.flatten() - expected).norm()) <= 2e-3 * float(expected.norm())
    with pytest.raises(UnsupportedLayer, match="bias=False"):
        LinearModel(nn.Linear(3, 1))
    with pytest.raises(UnsupportedLayer, match="one output"):
        LinearModel(nn.Linear(3, 2, bias=False), "logistic")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_form_with_several_outputs_equals_the_oracle(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(300, 20, dtype=dtype), torch.randn(300, 4, dtype=dtype)
    model = nn.Linear(20, 4, bias=False, dtype=dtype)
    loss_fn = lambda m, b: 0.5 * (m(b[0]) - b[1]).square().sum(1)  # noqa: E731
    found = LinearModel(model).clipped_sum(with_row_norms(x, y), 5.0).tensors[0]
    expected = one_by_one(model, loss_fn, (x, y), 5.0)
    assert float((found.flatten() - expected).norm()) <= 2e-3 * float(expected.norm())
    rows = SparseRecords.make(csr_matrix(x.double().numpy()), y.double())
    again = LinearModel(model.double()).clipped_sum(rows.fetch(slice(0, 300), rows.schema()), 5.0).tensors[0]
    assert float((again.flatten() - expected).norm()) <= 2e-3 * float(expected.norm())


def test_user_gradients_are_summed_before_the_clip() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 2), (torch.randn(5, 4, 3), torch.randn(5, 4, 2))
    grads = Vmap(model, bilinear_loss, batch).per_example(batch)
    total = flatten([g.sum(0) for g in grads]).double()
    for clip in (0.1, 1e6):
        halves = [take_rows(batch, s) for s in (slice(0, 2), slice(2, 5))]
        found = flatten(clipped_user_gradient(model, bilinear_loss, halves, clip).tensors)
        expected = total * min(1.0, clip / float(total.norm()))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_dropout_draws_differ_between_examples() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 1, bias=False))
    x = torch.ones(2, 50)
    grads = Vmap(model, lambda m, b: m(b).squeeze(1), x).per_example(x)[0]
    assert not torch.equal(grads[0], grads[1])
    assert np.isfinite(grads.numpy()).all()


def test_linear_rows_round_alike_in_batches_of_any_size() -> None:
    """What a row contributes is the same to the last bit, whichever and however many rows stand beside it."""
    torch.manual_seed(0)
    x, weight = torch.randn(700, 300), torch.randn(300)
    alone = predictions(x, weight)
    for rows in (1, 2, 63, 127, 128, 129, 255, 400, 699):
        assert torch.equal(predictions(x[:rows], weight), alone[:rows])


def test_half_precision_does_not_look_like_a_mistake() -> None:
    """On a trained network bfloat16 moves the clipped sum by more than a check at full precision allows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6)
    example = {"x": torch.randn(4, 1, 8, 8), "y": torch.tensor([0, 1, 2, 0])}
    speed = Performance(backend="book", autocast=torch.bfloat16)
    exact = Vmap(model, class_loss, example)
    clip = 0.5 * float(row_norms(exact.per_example(example)).min())
    rounded = Vmap(model, speed.precise(class_loss), example).clipped_sum(example, clip)
    pairs = zip(rounded.tensors, exact.clipped_sum(example, clip).tensors, strict=True)
    assert max(float((a - b).norm()) for a, b in pairs) > 0.02 * clip
    assert make_backend(speed, model, class_loss, example).name == "book"


def test_half_precision_is_held_against_the_oracle_at_that_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a network is sure of made-up labels, rounding takes much of the small gradients, in the oracle too."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    x = torch.randn(4, 1, 8, 8)
    example = {"x": x, "y": model(x).argmax(1)}
    speed = Performance(backend="book", autocast=torch.bfloat16)
    exact = Vmap(model, class_loss, example)
    clip = 0.5 * float(row_norms(exact.per_example(example)).min())
    rounded = Vmap(model, speed.precise(class_loss), example).clipped_sum(example, clip)
    pairs = zip(rounded.tensors, exact.clipped_sum(example, clip).tensors, strict=True)
    monkeypatch.setattr(gradients, "_ROUGH", 0.15)
    assert max(float((a - b).norm()) for a, b in pairs) > 0.15 * clip
    assert make_backend(speed, model, class_loss, example).name == "book"


def test_a_backend_that_breaks_the_bound_in_half_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right at full precision, and 5 % too long in half of it: its sum may pass for rounding, one row may not."""

    class TooLong:
        name = "book"

        def __init__(self, model: nn.Module, loss_fn: LossFn, example: Batch) -> None:
            self.right, self.factor = Vmap(model, loss_fn, example), 1.0 if loss_fn is class_loss else 1.05

        def clipped_sum(
            self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
        ) -> ClippedSum:
            return self.right.clipped_sum(batch, self.factor * max_grad_norm, counted, adding)

    torch.manual_seed(0)
    model, example = cnn(), images(4)
    monkeypatch.setitem(BACKENDS, "book", TooLong)
    assert isinstance(make_backend(Performance(backend="book"), model, class_loss, example), TooLong)
    with pytest.raises(UnsupportedLayer, match="lets an example contribute"):
        make_backend(Performance(backend="book", autocast=torch.bfloat16), model, class_loss, example)
