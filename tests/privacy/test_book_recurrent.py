"""Book-keeping for LSTM, GRU and RNN: the module's own outputs, and plain autograd's gradients."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from halfsilver._core.tensors import flatten, trainable
from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients import Performance, make_backend
from halfsilver.privacy.gradients.base import row_norms
from halfsilver.privacy.gradients.book import BookKeeping
from halfsilver.privacy.gradients.book.kernels import KERNELS
from halfsilver.privacy.gradients.book.outer import Outer, SharedLeft
from halfsilver.privacy.gradients.book.tape import Tape
from halfsilver.privacy.gradients.vmap import Vmap
from tests.cases import MANY

SHAPES = settings(max_examples=20 * MANY, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DEAD = 1e-18  # of a parameter without any gradient: what is added for squares that may have been lost
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
ROWS, STEPS = 5, 6


class Model(nn.Module):
    """A recurrent layer that gets its input, and on request its initial states, from layers that train."""

    def __init__(self, layer: nn.RNNBase, *, start: bool = False, read: Sequence[int] = (0, 1, 2)) -> None:
        super().__init__()
        self.layer, self.first, self.read = layer, nn.Linear(layer.input_size, layer.input_size), read
        self.states = layer.num_layers * (1 + layer.bidirectional)
        widths = [layer.proj_size or layer.hidden_size, *[layer.hidden_size] * isinstance(layer, nn.LSTM)]
        self.starts = nn.ModuleList(nn.Linear(layer.input_size, self.states * w) for w in widths if start)

    def forward(self, x: Tensor) -> list[Tensor]:
        """The layer's results, with the example first."""
        x = self.first(x)
        starts = [start(x.mean(1)).view(len(x), self.states, -1) for start in self.starts]
        hx: Any = [state.transpose(0, 1) for state in starts]
        hx = (tuple(hx) if isinstance(self.layer, nn.LSTM) else hx[0]) if hx else None
        out, last = self.layer(x if self.layer.batch_first else x.transpose(0, 1), hx)
        last = last if isinstance(last, tuple) else (last,)
        results = [out if self.layer.batch_first else out.transpose(0, 1), *(t.transpose(0, 1) for t in last)]
        return [results[i] for i in self.read if i < len(results)]


def loss(model: Callable[..., list[Tensor]], x: Tensor) -> Tensor:
    """Gradients at the results that are not constant."""
    return torch.stack([((1 + k) * t.flatten(1)).sin().sum(1) for k, t in enumerate(model(x))]).sum(0)


def make(kind: str, *sizes: int, dtype: torch.dtype = torch.float32, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    layer: nn.RNNBase = KINDS[kind](*sizes, dtype=dtype, **options)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.7)
    return layer


def check(model: nn.Module, x: Tensor, loss_fn: Callable[..., Tensor] = loss) -> None:
    """Norms by parameter and the clipped sum against one-example-at-a-time autograd in float64."""
    exact, wide = copy.deepcopy(model).double(), x.double()
    oracle, backend = Vmap(exact, loss_fn, wide), BookKeeping(model, loss_fn, x)
    gradients, tolerance = oracle.per_example(wide), TOLERANCE[x.dtype]
    norms = row_norms(gradients)
    for contribution, each in zip(backend._contributions(x), gradients, strict=True):
        squared = torch.zeros(len(x)) if contribution is None else contribution.norms().squared
        lengths = each.flatten(1).norm(dim=1)
        assert ((squared.sqrt() - lengths).abs() <= tolerance * lengths + 1e-2 * tolerance * norms + DEAD).all()
    margins = 0.0 if x.dtype == torch.float64 else 2e-3  # a float32 backend aims lower than the oracle in float64
    for clip, allowed in ((1e6, tolerance), (float(norms.median()) or 1.0, tolerance + margins)):
        expected = flatten(oracle.clipped_sum(wide, clip).tensors)
        found = flatten(backend.clipped_sum(x, clip).tensors)
        assert float((found - expected).norm()) <= allowed * float(norms.clamp(max=clip).sum())


@SHAPES
@given(st.data())
def test_against_autograd(data: st.DataObject) -> None:
    """Sizes, layers, directions, biases, layouts, projections; initial states given or not; any of the results used."""
    kind, dtype = data.draw(st.sampled_from(list(KINDS))), data.draw(st.sampled_from(list(TOLERANCE)))
    size, flag = st.integers(1, 6), st.booleans()
    options: dict[str, Any] = {name: data.draw(flag) for name in ("bidirectional", "bias", "batch_first")}
    hidden = data.draw(size)
    if kind == "LSTM" and hidden > 1:
        options["proj_size"] = data.draw(st.integers(0, hidden - 1))
    if kind == "RNN":
        options["nonlinearity"] = data.draw(st.sampled_from(["tanh", "relu"]))
    layer = make(kind, data.draw(size), hidden, data.draw(st.integers(1, 3)), dtype=dtype, **options)
    read = data.draw(st.sampled_from([(0,), (1,), (0, 1, 2), (0, 2), (1, 2)]))
    model = Model(layer, start=data.draw(flag), read=read).to(dtype)
    check(model, torch.randn(data.draw(st.integers(1, ROWS)), data.draw(size), layer.input_size, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given_states", [True, False])
def test_results_are_the_modules_own(kind: str, batch_first: bool, given_states: bool) -> None:
    """To 1e-6 in float32, dropout between layers included: it draws what the module draws."""
    layer = make(kind, 3, 4, 3, batch_first=batch_first, bidirectional=True, dropout=0.4)
    x = torch.randn(ROWS, ROWS, 3)
    state = torch.randn(6, ROWS, 4)
    hx: Any = None if not given_states else (state, state.flip(0)) if kind == "LSTM" else state
    tape = Tape(ROWS, x.device)
    torch.manual_seed(1)
    found = KERNELS[KINDS[kind]](layer, tape, x, hx)
    torch.manual_seed(1)
    expected = layer(x, hx)
    leaves = torch.utils._pytree.tree_leaves
    assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(expected)
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_stays_what_it_was(kind: str) -> None:
    layer = make(kind, 3, 4, 2, bidirectional=True)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    model, x = Model(layer), torch.randn(ROWS, STEPS, 3)
    BookKeeping(model, loss, x).clipped_sum(x, 1.0)
    assert "forward" not in vars(layer)
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())
    make(kind, 3, 4, 2, bidirectional=True).load_state_dict(layer.state_dict(), strict=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_bad_row_contributes_nothing_and_changes_no_other(kind: str, value: float) -> None:
    model, x = Model(make(kind, 3, 4, 2, batch_first=True)), torch.randn(ROWS, STEPS, 3)
    backend = BookKeeping(model, loss, x)
    others, poisoned = x.clone(), x.clone()
    others[2], poisoned[2, 1, 1] = 0.0, value
    clean, found = (flatten(backend.clipped_sum(t, 0.5).tensors) for t in (others, poisoned))
    lost = flatten(backend.clipped_sum(torch.zeros_like(x), 0.5).tensors) / ROWS
    assert torch.isfinite(found).all()
    if value != 3e38:  # which saturates the gates, and may leave a gradient that can be measured
        torch.testing.assert_close(found, clean - lost, rtol=0, atol=1e-5)
    assert float((found - (clean - lost)).norm()) <= 0.5


def test_padding_rows_do_not_count() -> None:
    model, x = Model(make("LSTM", 3, 4)), torch.randn(ROWS, STEPS, 3)
    backend = BookKeeping(model, loss, x)
    padded, alone = backend.clipped_sum(x, 0.5, torch.arange(len(x)) < 3), backend.clipped_sum(x[:3], 0.5)
    torch.testing.assert_close(flatten(padded.tensors), flatten(alone.tensors), rtol=0, atol=1e-6)


def _parameter(layer: nn.Module, name: str) -> nn.Parameter:
    return layer.get_parameter(name)


@pytest.mark.parametrize("kind", KINDS)
def test_cancelling_sequences(kind: str) -> None:
    """Without memory, equal inputs whose gradients are opposite: what is left of a norm is far below its Gram terms."""
    layer = make(kind, 12, 4, batch_first=True)
    with torch.no_grad():
        nn.init.zeros_(_parameter(layer, "weight_hh_l0"))
        if kind != "RNN":  # f of an LSTM and z of a GRU: closed
            _parameter(layer, "bias_ih_l0")[4:8] = -100.0
    model = Model(layer, read=(0,)).requires_grad_(False)
    _parameter(layer, "weight_ih_l0").requires_grad_()

    def cancelling(model: Callable[..., list[Tensor]], x: Tensor) -> Tensor:
        (out,) = model(x)
        return 3e3 * (out[:, 0] - out[:, 1]).sum(1) + 1e-1 * out[:, 2].sum(1)

    x = torch.randn(1, 3, 12)
    x[:, 1] = x[:, 0]
    exact = Vmap(copy.deepcopy(model).double(), cancelling, x.double()).clipped_sum(x.double(), 1e-3)
    backend = BookKeeping(model, cancelling, x)
    (contribution,) = backend._contributions(x)
    assert contribution is not None
    norms = contribution.norms()
    assert norms.terms is not None
    assert (norms.terms > 1e6 * norms.squared).all(), "nothing cancels: nothing is tested"
    found = flatten(backend.clipped_sum(x, 1e-3).tensors)
    assert float(found.norm()) <= 1e-3
    assert float((found - flatten(exact.tensors)).norm()) <= 0.2 * 1e-3  # factors are float32: 3e3 u of 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_called_twice_shared_and_frozen(kind: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make(kind, 4, 4, 2, batch_first=True)
            self.layer.weight_hh_l1 = _parameter(self.layer, "weight_hh_l0")  # one matrix for both layers
            _parameter(self.layer, "bias_ih_l0").requires_grad_(False)
            _parameter(self.layer, "weight_ih_l1").requires_grad_(False)

        def forward(self, x: Tensor) -> list[Tensor]:
            out, last = self.layer(x)
            return [self.layer(out, last)[0]]

    check(Twice().double(), torch.randn(ROWS, STEPS, 4, dtype=torch.float64))


@pytest.mark.nightly
def test_more_rows_than_may_be_summed_at_once() -> None:
    check(Model(make("LSTM", 2, 3, batch_first=True)), torch.randn(200, 3, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_runs_the_loops_in_the_weights_precision(kind: str) -> None:
    model, x = Model(make(kind, 3, 4, batch_first=True)), torch.randn(ROWS, STEPS, 3)

    def in_bfloat16(model: Callable[..., list[Tensor]], x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model, x)

    found = flatten(BookKeeping(model, in_bfloat16, x).clipped_sum(x, 0.5).tensors)
    expected = flatten(BookKeeping(model, loss, x).clipped_sum(x, 0.5).tensors)
    assert float((found - expected).norm()) <= 3e-2 * 0.5 * ROWS


def test_passes_the_check_of_the_library() -> None:
    model = nn.Sequential(nn.Embedding(11, 5), Model(make("LSTM", 5, 4, 2, batch_first=True, dropout=0.5)))
    backend = make_backend(Performance(backend="book"), model, loss, torch.randint(0, 11, (4, STEPS)))
    assert isinstance(backend, BookKeeping)


def _packed(layer: nn.LSTM, x: Tensor) -> Any:
    return layer(pack_padded_sequence(x, [STEPS] * ROWS, batch_first=True))[0].data.view(ROWS, -1)


def _unbatched(layer: nn.LSTM, x: Tensor) -> Any:
    return layer(x[:, 0])[0]


def _output_changed(layer: nn.LSTM, x: Tensor) -> Any:
    return layer(x.transpose(0, 1))[0].mul_(2.0).transpose(0, 1)


def _input_changed(layer: nn.LSTM, x: Tensor) -> Any:
    x = x.transpose(0, 1).contiguous()
    out = layer(x)[0].transpose(0, 1)
    x.mul_(2.0)
    return out


def _differentiated_twice(layer: nn.LSTM, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    out = layer(x.transpose(0, 1))[0].transpose(0, 1)
    (slope,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    return out * slope.mean()


REFUSED: dict[Callable[[nn.LSTM, Tensor], Any], str] = {
    _packed: "is given a PackedSequence",
    _unbatched: "is given 2 dimensions, not 3",
    _output_changed: "changed in place",
    _input_changed: "changed in place",
    _differentiated_twice: "more than once",
}


@pytest.mark.parametrize("use", REFUSED)
def test_refused(use: Callable[[nn.LSTM, Tensor], Any]) -> None:
    layer, x = make("LSTM", 3, 3), torch.randn(ROWS, STEPS, 3)
    backend = BookKeeping(layer, lambda model, x: use(model, x).flatten(1).sum(1), x)
    with pytest.raises(UnsupportedLayer, match=REFUSED[use]):
        backend.clipped_sum(x, 1.0)


def test_a_wrong_initial_state_is_refused_as_by_the_module() -> None:
    layer, x = make("GRU", 3, 3), torch.randn(ROWS, STEPS, 3)
    backend = BookKeeping(layer, lambda model, x: model(x.transpose(0, 1), torch.zeros(2, ROWS, 3))[0].sum((0, 2)), x)
    with pytest.raises(RuntimeError, match="Expected hidden size"):
        backend.clipped_sum(x, 1.0)


def test_nothing_is_kept() -> None:
    """Once the sum is there, no tensor of the pass is left, and none has to wait for the garbage collector."""
    model, x = Model(make("LSTM", 3, 4, 2, bidirectional=True)), torch.randn(ROWS, STEPS, 3)
    backend = BookKeeping(model, loss, x)

    def alive() -> int:
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    backend.clipped_sum(x, 1.0)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        backend.clipped_sum(x, 1.0)
        assert alive() == before
    finally:
        gc.enable()
    assert all(p.grad is None for p in trainable(model))


def test_a_shared_gram_matrix_is_the_same() -> None:
    left, a, b = torch.randn(ROWS, STEPS, 4), torch.randn(ROWS, STEPS, 3), torch.randn(ROWS, STEPS, 2)
    shared = SharedLeft(left)
    for right in (a, b):
        expected, found = (Outer(x, right, (4, right.shape[2])).norms() for x in (left, shared))
        assert torch.equal(found.squared, expected.squared)
        assert torch.equal(found.slack, expected.slack)
    assert "gram" in vars(shared)
