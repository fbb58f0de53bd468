"""Convolutions of the book-keeping backend: every way to hold their gradients, against autograd row by row."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfsilver.errors import UnsupportedLayer
from halfsilver.privacy.gradients.base import Adding, row_norms
from halfsilver.privacy.gradients.book import BookKeeping
from halfsilver.privacy.gradients.book.conv import layer as kernel
from halfsilver.privacy.gradients.book.conv import lines as unfolded
from halfsilver.privacy.gradients.book.conv.gram import Gram
from halfsilver.privacy.gradients.book.conv.strided import by_remainders, strided
from halfsilver.privacy.gradients.book.conv.ways import Products
from halfsilver.privacy.gradients.book.example_gradients import ExampleGradients
from halfsilver.privacy.gradients.book.tape import Tape
from halfsilver.privacy.gradients.vmap import Vmap

WAYS = ("lines", "patches", "patches in runs", "grouped", "gram")
ADDING = Adding(rows=6)


@dataclass(frozen=True)
class Case:
    """A convolution, its input and a weight for each output, so that the loss is linear in the output."""

    module: nn.Conv1d | nn.Conv2d
    x: Tensor
    at_output: Tensor


def in_channels_last(module: Any, x: Tensor) -> tuple[Any, Tensor]:
    return module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    dims, groups = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 1, 2, 3)))
    each = st.tuples(*[st.integers(1, 3)] * dims)
    kernel_size, dilation = draw(each), draw(st.tuples(*[st.integers(1, 2)] * dims))
    stride = draw(st.tuples(*[st.integers(1, 3)] * dims))
    padding: Any = draw(st.tuples(*[st.integers(0, 2)] * dims))
    if set(stride) == {1}:
        padding = draw(st.sampled_from((padding, "same", "valid")))
    mode = draw(st.sampled_from(("zeros", "zeros", "reflect", "replicate", "circular")))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    channels = [groups * draw(st.integers(1, 3)) for _ in range(2)]
    make: Any = (nn.Conv1d, nn.Conv2d)[dims - 1]
    module = make(*channels, kernel_size, stride, padding, dilation, groups, draw(st.booleans()), mode, dtype=dtype)
    rows, sizes = draw(st.integers(1, 5)), [draw(st.integers(5, 9)) for _ in range(dims)]
    x = torch.randn(rows, channels[0], *sizes, dtype=dtype)
    if dims == 2 and draw(st.booleans()):
        module, x = in_channels_last(module, x)
    return Case(module, x, torch.randn_like(module(x)))


def contributions(case: Case, way: str) -> list[ExampleGradients]:
    """What the kernel writes down, its way to hold the weight's gradients forced."""
    tape = Tape(len(case.x), case.x.device)

    def forced(products: Products, examples: int, shape: torch.Size) -> Any:
        ways = original(products, examples, shape) | {"gram": lambda: Gram(products, examples, shape)}
        return {way: ways[way.removesuffix(" in runs")]}

    original = kernel.weight_ways
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "weight_ways", forced)
        patch.setattr(unfolded, "_RUN", 1 if way.endswith(" in runs") else 2**20)
        out = kernel.conv(case.module, tape, case.x)
        tape.backward((out * case.at_output).flatten(1).sum(1))
    torch.testing.assert_close(out, case.module(case.x), equal_nan=True)
    found = tape.contributions(list(case.module.parameters()))
    assert None not in found
    return [c for c in found if c is not None]


def per_example(case: Case) -> list[Tensor]:
    """[rows, *shape] for each parameter, by autograd on one row at a time in float64.

    Plain layout: torch 2.13 gets grouped 1x1 convolutions of one channels_last row wrong in float64.
    """
    module: Any = copy.deepcopy(case.module).double()
    module = module.to(memory_format=torch.contiguous_format)
    rows = [
        torch.autograd.grad((module(x[None]) * g[None]).sum(), list(module.parameters()))
        for x, g in zip(case.x.double().contiguous(), case.at_output.double().contiguous(), strict=True)
    ]
    return [torch.stack(gradients) for gradients in zip(*rows, strict=True)]


def lengths(gradients: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(gradients.flatten(1), dim=1)
    return norms


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@settings(max_examples=30)
@given(data=st.data())
def test_norms_sums_and_gradients_are_those_of_autograd(
    way: str, dtype: torch.dtype, relative: float, data: st.DataObject
) -> None:
    case = data.draw(cases(dtype))
    weights = torch.rand(len(case.x), dtype=torch.float64)[: data.draw(st.integers(0, len(case.x)))]
    without_signs = per_example(Case(case.module, case.x.abs(), case.at_output.abs()))
    for c, right, terms in zip(contributions(case, way), per_example(case), without_signs, strict=True):
        rounding = relative * lengths(right) + 4 * torch.finfo(dtype).eps * lengths(terms)
        norms = c.norms()
        assert c.rows == len(case.x)
        assert ((norms.squared + norms.slack).sqrt() >= lengths(right) - rounding).all()
        assert ((norms.squared - norms.slack).clamp(min=0).sqrt() <= lengths(right) + rounding).all()
        expected = torch.einsum("i,i...->...", weights, right[: len(weights)])
        assert float((c.weighted_sum(weights, ADDING) - expected).norm()) <= float(rounding.sum())
        last = slice(len(case.x) - 1, len(case.x))
        assert float((c.gradients(last, torch.float64) - right[last]).norm()) <= float(rounding[-1])


def image_case(way: str, channels_last: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    """A layer of the size for which a way is meant."""
    torch.manual_seed(len(way))
    channels, size = {"patches": (3, 16), "gram": (32, 8)}.get(way, (16, 12))
    module, x = nn.Conv2d(channels, 32, 3, padding=1, dtype=dtype), torch.randn(6, channels, size, size, dtype=dtype)
    if channels_last:
        module, x = in_channels_last(module, x)
    return Case(module, x, torch.randn_like(module(x)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_norms_of_real_layers_need_next_to_no_slack(way: str, channels_last: bool) -> None:
    case = image_case(way, channels_last)
    for c, right in zip(contributions(case, way), per_example(case), strict=True):
        norms = c.norms()
        torch.testing.assert_close(norms.squared.sqrt(), lengths(right), rtol=1e-5, atol=0)
        assert (norms.slack <= 1e-3 * norms.squared).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_row_does_not_depend_on_its_neighbours(way: str, channels_last: bool, bad: float) -> None:
    case = image_case(way, channels_last)
    x, at_output = case.x.clone(), case.at_output.clone()
    x[[0, 3]], at_output[3] = bad, bad
    weights = torch.tensor([0.0, 0.3, 0.7, 0.0, 0.9, 0.5], dtype=torch.float64)
    for before, after in zip(
        contributions(case, way), contributions(Case(case.module, x, at_output), way), strict=True
    ):
        kept = weights != 0
        assert torch.equal(before.norms().squared[kept], after.norms().squared[kept])
        assert torch.equal(before.norms().slack[kept], after.norms().slack[kept])
        total = after.weighted_sum(weights, ADDING)
        assert torch.isfinite(total).all()
        assert torch.equal(before.weighted_sum(weights, ADDING), total)


def test_gram_norms_of_cancelling_images_are_bounded_by_their_slack() -> None:
    case = image_case("gram")
    x = torch.ones_like(case.x) + 1e-3 * case.x
    at_output = case.at_output - case.at_output.mean((2, 3), keepdim=True)
    cancelling = Case(case.module, x, at_output)
    gram, right = contributions(cancelling, "gram")[0], per_example(cancelling)[0]
    norms = gram.norms()
    assert (norms.squared + norms.slack >= lengths(right).square()).all()
    for row in range(gram.rows):
        alone = torch.zeros(gram.rows, dtype=torch.float64).index_fill_(0, torch.tensor(row), 1.0)
        bound = (norms.squared + norms.slack).sqrt()[row]
        assert float(gram.weighted_sum(alone, ADDING).norm()) <= float(bound) * (1 + 1e-4)
    direct = gram.gradients(slice(2, 4), torch.float64)
    torch.testing.assert_close(direct, right[2:4], rtol=1e-9, atol=1e-9)


@settings(max_examples=60)
@given(data=st.data())
def test_the_gradient_at_the_input_of_a_strided_convolution_is_that_of_autograd(data: st.DataObject) -> None:
    dims = data.draw(st.sampled_from((1, 2)))
    sizes = [data.draw(st.integers(5, 9)) for _ in range(dims)]
    kernel_size, stride = ([data.draw(st.integers(1, 4)) for _ in range(dims)] for _ in range(2))
    padding = [data.draw(st.integers(0, 2)) for _ in range(dims)]
    rows, inputs, outputs = (data.draw(st.integers(1, 3)) for _ in range(3))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(rows, inputs, *sizes, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(outputs, inputs, *kernel_size, dtype=torch.float64), torch.randn(outputs).double()
    layout = data.draw(st.sampled_from((torch.contiguous_format, torch.channels_last)[:dims]))
    expected = (nn.functional.conv1d, nn.functional.conv2d)[dims - 1](x, weight, bias, stride, padding)
    out = strided(x, weight, bias, stride, padding)
    torch.testing.assert_close(out, expected)
    g = torch.randn_like(out).contiguous(memory_format=layout)
    (right,) = torch.autograd.grad(expected, x, g)
    torch.testing.assert_close(torch.autograd.grad(out, x, g)[0], right)
    torch.testing.assert_close(by_remainders(g, weight, x.shape, stride, padding), right)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_at_inputs_do_not_depend_on_the_neighbours(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    g = torch.randn(16, 8, 6, 6).contiguous(memory_format=layout)
    weight, shape, others = torch.randn(8, 3, 4, 4), (16, 3, 14, 14), torch.arange(16) != 5
    before = by_remainders(g, weight, shape, (2, 2), (0, 0))
    changed = g.clone()
    changed[5] = torch.nan
    assert torch.equal(by_remainders(changed, weight, shape, (2, 2), (0, 0))[others], before[others])
    assert torch.equal(by_remainders(g.roll(1, 0), weight, shape, (2, 2), (0, 0)), before.roll(1, 0))


def test_the_layout_of_activations_and_of_their_gradients_is_kept() -> None:
    case = image_case("lines", channels_last=True)
    x, tape = case.x.requires_grad_(), Tape(len(case.x), case.x.device)
    out = kernel.conv(case.module, tape, x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    (back,) = torch.autograd.grad(out.sum(), x)
    assert back.is_contiguous(memory_format=torch.channels_last)


class Scaled(nn.Conv2d):
    """A convolution that is none: its kernel must not be used."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = super()._conv_forward(input, 3 * weight, bias)
        return out


class Network(nn.Module):
    """Images and lines; one module that is called twice; a frozen weight; a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1, dtype=torch.float64)
        self.twice = nn.Conv2d(4, 4, 3, padding="same", groups=2, dtype=torch.float64)
        self.scaled = Scaled(4, 4, 1, dtype=torch.float64)
        self.line = nn.Conv1d(4, 3, 5, dilation=2, dtype=torch.float64)
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.first(x)))
        x = self.scaled(self.twice(torch.tanh(x)))
        out: Tensor = self.line(x.flatten(2))
        return out.square().flatten(1).sum(1)


def test_whole_networks_agree_with_one_example_at_a_time() -> None:
    torch.manual_seed(0)
    model, x = Network(), torch.randn(5, 2, 9, 10, dtype=torch.float64)

    def loss(model: Any, batch: Any) -> Tensor:
        out: Tensor = model(batch[0])
        return out

    right, found = Vmap(model, loss, (x,)), BookKeeping(model, loss, (x,))
    clip, counted = float(row_norms(right.per_example((x,))).median()), torch.arange(5) != 2
    for mine, theirs in zip(
        found.clipped_sum((x,), clip, counted).tensors, right.clipped_sum((x,), clip, counted).tensors, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9 * clip)


def test_an_input_without_a_batch_is_refused() -> None:
    with pytest.raises(UnsupportedLayer, match="without a batch dimension"):
        kernel.conv(nn.Conv2d(1, 1, 3), Tape(1, torch.device("cpu")), torch.zeros(1, 5, 5))
