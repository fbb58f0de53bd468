"""Geometry: coordinates from public rows in which private gradients are clipped and noise is added.

A geometry is a model transform. Training runs unchanged in the new coordinates, so the private side needs no new code:
sensitivity, event, ledger and audit stay as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, eval_mode, trainable
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.rows import PublicRows

Labels = Literal["drawn", "public"]
Conv = nn.Conv1d | nn.Conv2d

_FULL = 512  # sides up to this get a full matrix, larger ones a diagonal and some leading directions
_LARGEST = 4096  # beyond, the diagonal alone
_PATCH = 128  # convolutions with windows of up to so many numbers are whitened as a whole, others by channel
_CHUNK = 256  # public rows per pass
_NORM_ROWS = 64  # public rows by which gradient norms before and after are compared


@runtime_checkable
class Geometry(Protocol):
    """A change of coordinates, made from public rows alone."""

    def shape(self, model: nn.Module, loss_fn: LossFn, public: Any) -> Shaped:
        """Put the layers of a model into new coordinates.

        Args:
            model: The model, at the start of private training. Its layers are replaced in place.
            loss_fn: Returns one loss per row.
            public: Public rows, as tensors or a data set.

        Returns:
            The model to train, and the way back.
        """
        ...


@final
@dataclass(frozen=True)
class Shaped:
    """A model in the coordinates of a geometry.

    Its trainable parameters are the same objects as before, with other values, so an optimizer that was made for the
    model stays valid.

    Args:
        model: The model to train. It is another object than the given one only if that was a single layer.
        layers: Each replaced layer: parent, name, and what stands there now.
    """

    model: nn.Module
    layers: tuple[tuple[nn.Module, str, ShapedLayer], ...]

    def merge(self) -> None:
        """Put the original layers back, with weights that compute what the shaped ones do."""
        for parent, name, shaped in self.layers:
            setattr(parent, name, shaped.merged())


@final
@dataclass(frozen=True, kw_only=True)
class Whitened:
    """Clip and add noise in coordinates in which public activations and gradients are round.

    A layer y = W a with output gradient b has the gradient G = b a^T. From public rows at the start, take the second
    moments A = E[a a^T] and S = E[b b^T], and train V in W = U_S V U_A, where U = (moment + damping)^-1/2. The gradient
    of V is U_S G U_A. DP-SGD on V takes the step

        W - lr U_S^2 [...] U_A^2,  with  [...] = U_S^-1 (mean clip(U_S G_i U_A, C) + noise) U_A^-1.

    For least squares with Hessian H this is theta - lr H^-1/2 [mean clip(H^-1/2 g_i, C) + z]: mirror descent with the
    quadratic mirror map, privatised in the norm of the mirror. Its noise costs d^2 where noise before the mirror costs
    tr(H) tr(H^-1), which is never less.

    Linear layers, convolutions and embeddings are transformed. Other layers, layers that share a weight and frozen ones
    keep their coordinates. Factors are scaled so that public gradients keep their median norm, so a clip norm keeps its
    meaning. At the start the function of the model changes by rounding alone (about 1e-6).

    Guarantee: as without it. The coordinates are a function of public rows and of the start, which is public or
    released, so they cost no privacy.

    Args:
        damping: Added to each moment, in units of its mean eigenvalue, above 0. Small values follow the public rows,
            large ones give DP-SGD. Raise it for few public rows (default: 1).
        rank: Leading directions of sides with more than 512 numbers, at least 0 (default: 128).
        labels: "drawn" takes labels from the model's own predictions, because rows that the start has memorised have no
            gradient. "public" takes those of the rows. Where labels cannot be drawn, those of the rows are used.
        rows: The most public rows to use (default: 4096).

    Raises:
        ConfigError: A value is out of its range.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        >>> x = torch.randn(100, 3) * torch.tensor([10.0, 1.0, 0.1])
        >>> loss_fn = lambda model, batch: -model(batch[0]).log_softmax(1).gather(1, batch[1][:, None])[:, 0]
        >>> before = model(x)
        >>> shaped = Whitened().shape(model, loss_fn, (x, torch.zeros(100, dtype=torch.int64)))
        >>> torch.allclose(shaped.model(x), before, atol=1e-4)
        True
        >>> shaped.merge()
        >>> torch.allclose(model(x), before, atol=1e-4)
        True

    References:
        Amid et al. (2022), Public Data-Assisted Mirror Descent for Private Model Training, arXiv:2112.00193.
        Martens and Grosse (2015), Optimizing Neural Networks with Kronecker-factored Approximate Curvature,
        arXiv:1503.05671.
    """

    damping: float = 1.0
    rank: int = 128
    labels: Labels = "drawn"
    rows: int = 4096

    def __post_init__(self) -> None:
        require(0 < self.damping < math.inf, "damping", self.damping, "above 0")
        require(self.rank >= 0, "rank", self.rank, "at least 0")
        require(self.labels in ("drawn", "public"), "labels", self.labels, "in ('drawn', 'public')")
        require(self.rows >= 1, "rows", self.rows, "at least 1")

    def shape(self, model: nn.Module, loss_fn: LossFn, public: Any) -> Shaped:
        """Put the layers of a model into whitened coordinates.

        Args:
            model: The model, at the start of private training. Its layers are replaced in place.
            loss_fn: Returns one loss per row.
            public: Public rows, as tensors or a data set.

        Returns:
            The model to train, and the way back.

        Raises:
            ConfigError: The model has no layer that can be whitened.
        """
        root = model if not isinstance(model, _KINDS) else nn.Sequential(model)
        places = list(_places(root))
        if not places:
            raise ConfigError("Expected a trainable nn.Linear, nn.Conv1d, nn.Conv2d or nn.Embedding to whiten.")
        rows, device = PublicRows(public), trainable(root)[0].device
        moments = {layer: Moments(layer) for _, _, layer in places}
        with own_randomness(0, [device]), eval_mode(root):
            for start in range(0, min(len(rows), self.rows), _CHUNK):
                batch = rows.batch(slice(start, min(start + _CHUNK, len(rows), self.rows)), device)
                for layer, seen in _watched(root, loss_fn, self._labelled(root, loss_fn, batch), list(moments)):
                    moments[layer].add(*seen)
            sides = {layer: found.sides(self.damping, self.rank) for layer, found in moments.items()}
            batch = rows.batch(slice(0, min(len(rows), _NORM_ROWS)), device)
            number = _norm_ratio(root, loss_fn, self._labelled(root, loss_fn, batch), sides)
        layers = []
        for parent, name, layer in places:
            sides[layer].after.times_(number)
            shaped = shaped_layer(layer, sides[layer])
            setattr(parent, name, shaped)
            layers.append((parent, name, shaped))
        return Shaped(root, tuple(layers))

    def _labelled(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> Batch:
        return batch if self.labels == "public" else with_drawn_labels(model, loss_fn, batch)


# ---- what is whitened


_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and layer of whatever can be whitened. Subclasses may read their weight in ways of their own."""
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    instances = Counter(id(child) for module in model.modules() for child in module.children())
    for parent in model.modules():
        if isinstance(parent, nn.MultiheadAttention):
            continue
        for name, layer in parent.named_children():
            if type(layer) not in _KINDS or instances[id(layer)] > 1 or uses[id(layer.weight)] > 1:
                continue
            if not all(p.requires_grad for p in layer.parameters()):
                continue
            if isinstance(layer, Conv) and (layer.groups > 1 or layer.padding_mode != "zeros"):
                continue
            yield parent, name, layer


def with_drawn_labels(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Batch:
    """The batch with labels drawn from the model's predictions; as it is where its last entry is not such a label.

    Args:
        model: Returns logits on the last axis, one row per label.
        loss_fn: Calls the model on the batch.
        batch: A tuple whose last entry holds integer labels.
    """
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        with torch.no_grad():
            loss_fn(model, batch)
    finally:
        handle.remove()
    logits = outputs[-1] if outputs else None
    if not isinstance(batch, tuple | list) or not isinstance(logits, Tensor):
        return batch
    labels = batch[-1]
    whole = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.shape == logits.shape[:-1]
    if not whole or logits.shape[-1] < 2:
        return batch
    chances = logits.float().softmax(-1)
    drawn = torch.multinomial(chances.reshape(-1, chances.shape[-1]), 1).reshape(labels.shape)
    return (*batch[:-1], drawn.to(labels.dtype))


def _watched(
    model: nn.Module, loss_fn: LossFn, batch: Batch, layers: Sequence[nn.Module]
) -> list[tuple[nn.Module, tuple[Tensor, Tensor]]]:
    """For each use of a layer, its input and the gradient of the summed losses by its output."""
    uses: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        output.retain_grad()
        uses.append((module, args[0].detach(), output))

    handles = [layer.register_forward_hook(note) for layer in layers]
    kept = [p.grad for p in model.parameters()]
    try:
        with torch.enable_grad():
            torch.autograd.backward([loss_fn(model, batch).sum()])
        # Autocast gives halves, whose moments would be too coarse.
        return [(layer, (_whole(x), _whole(y.grad.detach()))) for layer, x, y in uses if y.grad is not None]
    finally:
        for handle in handles:
            handle.remove()
        for p, grad in zip(model.parameters(), kept, strict=True):
            p.grad = grad


def _whole(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# ---- second moments


@dataclass
class Sides:
    """The factors on the input and on the output of a layer.

    For linear layers also the point around which inputs are taken, and the scale of the bias; for embeddings a scale
    per token.
    """

    before: Factor
    after: Factor
    mean: Tensor | None = None
    bias: float = 1.0
    tokens: Tensor | None = None


class Moments:
    """Second moments of a layer's inputs and output gradients, summed over public rows."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._count = 0
        self._inputs: Tensor | float = 0.0
        self._outputs: Tensor | float = 0.0
        self._sum: Tensor | float = 0.0

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """One use of the layer.

        Args:
            x: Its input.
            gradient: The gradient of the summed losses by its output.
        """
        if isinstance(self.layer, nn.Embedding):
            tokens = torch.bincount(x.reshape(-1), minlength=self.layer.num_embeddings).double()
            self._inputs = self._inputs + tokens
            b = gradient.reshape(-1, gradient.shape[-1])
        else:
            a, b = rows_of(self.layer, x, gradient)
            self._inputs = self._inputs + _moment(a)
            self._sum = self._sum + a.sum(0).double()
            self._count += len(a)
        self._outputs = self._outputs + _moment(b)

    def sides(self, damping: float, rank: int) -> Sides:
        """Factors from all that was added.

        Args:
            damping: In units of the mean eigenvalue.
            rank: Leading directions of large sides.
        """
        inputs, outputs = self._inputs, self._outputs
        if not isinstance(inputs, Tensor) or not isinstance(outputs, Tensor):
            raise ConfigError("Expected the loss to use every layer of the model on public rows.")
        after = whitening(outputs, damping, rank, transposed=True)
        if isinstance(self.layer, nn.Embedding):
            tokens = whitening(inputs, damping, 0).scale
            return Sides(whitening(torch.ones(1), damping, 0), after, tokens=tokens)
        if not isinstance(self.layer, nn.Linear) or self.layer.bias is None:
            return Sides(whitening(inputs, damping, rank), after)
        # The bias is the weight of an input 1. Around p / q, the inputs are orthogonal to it: with the damped moment
        # [[P, p], [p^T, q]] of (x, 1), its inverse form is |x - p / q|^2 in (P - p p^T / q)^-1, and 1 / q.
        assert isinstance(self._sum, Tensor)
        moment, mean = inputs / self._count, self._sum / self._count
        size = (float(_diagonal(moment).sum()) + 1) / (len(moment) + 1)
        cross, own = mean / size / (1 + damping), (1 / size + damping) / (1 + damping)
        around = cross.outer(cross) / own if moment.dim() == 2 else cross.square() / own
        before = inverse_root(damped(moment, damping, size) - around, rank)
        return Sides(before, after, mean=cross / own, bias=own**-0.5)


def rows_of(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients as rows: one per example, and per position where there are positions.

    Args:
        layer: A linear layer or a convolution.
        x: Its input.
        gradient: The gradient by its output.
    """
    if isinstance(layer, Conv):
        b = gradient.flatten(2).transpose(1, 2)
        a = windows(layer, x) if by_window(layer) else x.flatten(2).transpose(1, 2)
        return a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])


def by_window(layer: Conv) -> bool:
    """Whether the whole window of a convolution is one side, and not its channels alone."""
    return layer.weight[0].numel() <= _PATCH


def windows(layer: Conv, x: Tensor) -> Tensor:
    """The windows of a convolution, of shape (examples, positions, numbers in a window).

    Args:
        layer: The convolution.
        x: Its input.
    """
    size = layer.weight[0].numel()
    filters = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, *layer.weight.shape[1:])
    return _convolve(layer, x, filters).flatten(2).transpose(1, 2)


def _convolve(layer: Conv, x: Tensor, filters: Tensor) -> Tensor:
    function: Any = nn.functional.conv2d if isinstance(layer, nn.Conv2d) else nn.functional.conv1d
    found: Tensor = function(x, filters, None, layer.stride, layer.padding, layer.dilation)
    return found


def _moment(rows: Tensor) -> Tensor:
    rows = rows.double() if rows.shape[1] <= _FULL else rows.float()
    return (rows.T @ rows).double() if rows.shape[1] <= _LARGEST else rows.square().sum(0).double()


def _norm_ratio(model: nn.Module, loss_fn: LossFn, batch: Batch, sides: dict[nn.Module, Sides]) -> float:
    """Median ratio of public gradient norms, over whitened layers, before and after."""
    old: Tensor | float = 0.0
    new: Tensor | float = 0.0
    for layer, (x, gradient) in _watched(model, loss_fn, batch, list(sides)):
        side = sides[layer]
        if isinstance(layer, nn.Embedding):
            b, n = gradient.flatten(1, -2) if gradient.dim() > 2 else gradient[:, None], len(x)
            weight = (side.tokens if side.tokens is not None else torch.ones(1))[x].reshape(n, -1, 1)
            # Tokens of a row are taken as distinct: exact per token, and good enough for a scale.
            old = old + b.square().sum((1, 2))
            new = new + (side.after.mul_t(b) * weight).square().sum((1, 2)).float()
            continue
        a, b = (t.reshape(len(x), -1, t.shape[-1]) for t in rows_of(layer, x, gradient))
        if isinstance(layer, Conv) and not by_window(layer):
            a = windows(layer, x).reshape(len(x), b.shape[1], *layer.weight.shape[1:3], -1)
            whitened = side.before(a.flatten(3).transpose(2, 3)).flatten(2)
            a = a.flatten(3).transpose(2, 3).flatten(2)
        else:
            whitened = side.before(a if side.mean is None else a - side.mean.to(a))
        old = old + _squares(b, a)
        new = new + _squares(side.after.mul_t(b).to(b), whitened)
    ratio = (torch.as_tensor(old) / torch.as_tensor(new).clamp_min(1e-30)).sqrt().double()
    ratio = ratio[ratio.isfinite() & (ratio > 0)]
    return float(ratio.median()) if len(ratio) else 1.0


def _squares(b: Tensor, a: Tensor) -> Tensor:
    """|sum_t b_t a_t^T|^2 for each example."""
    if b.shape[1] ** 2 <= b.shape[2] * a.shape[2]:
        return ((b @ b.transpose(1, 2)) * (a @ a.transpose(1, 2))).sum((1, 2))
    return torch.stack([(y.T @ x).square().sum() for y, x in zip(b, a, strict=True)])


# ---- factors


@final
class Factor(nn.Module):
    """A frozen invertible matrix on the last axis: B = (I + Q diag(gain) Q^T) diag(scale), or a full one.

    `transposed` stands for B^T.
    """

    matrix: Tensor
    scale: Tensor
    basis: Tensor
    gain: Tensor

    def __init__(
        self,
        *,
        matrix: Tensor | None = None,
        scale: Tensor | None = None,
        basis: Tensor | None = None,
        gain: Tensor | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.transposed = transposed
        for name, value in {"matrix": matrix, "scale": scale, "basis": basis, "gain": gain}.items():
            self.register_buffer(name, torch.zeros(0) if value is None else value.float().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """M x for each row x."""
        return self._product(x, self.transposed)

    def mul(self, x: Tensor) -> Tensor:
        """The same in float64."""
        return self._product(x.double(), self.transposed)

    def mul_t(self, x: Tensor) -> Tensor:
        """M^T x for each row x, in float64."""
        return self._product(x.double(), not self.transposed)

    def solve(self, x: Tensor) -> Tensor:
        """M^-1 x for each row x, in float64."""
        return self._inverse(x.double(), self.transposed)

    def solve_t(self, x: Tensor) -> Tensor:
        """M^-T x for each row x, in float64."""
        return self._inverse(x.double(), not self.transposed)

    def times_(self, number: float) -> None:
        """Multiply the matrix by a number."""
        (self.matrix if self.matrix.numel() else self.scale).mul_(number)

    def _product(self, x: Tensor, transposed: bool) -> Tensor:
        if self.matrix.numel():
            matrix = self.matrix.to(x.dtype)
            return x @ (matrix if transposed else matrix.T)
        scale = self.scale.to(x.dtype)
        return self._turned(x, self.gain) * scale if transposed else self._turned(x * scale, self.gain)

    def _inverse(self, x: Tensor, transposed: bool) -> Tensor:
        if self.matrix.numel():
            inverse: Tensor = torch.linalg.inv(self.matrix.double())
            return x @ (inverse if transposed else inverse.T)
        scale, back = self.scale.double(), 1 / (1 + self.gain.double()) - 1
        return self._turned(x / scale, back) if transposed else self._turned(x, back) / scale

    def _turned(self, x: Tensor, gain: Tensor) -> Tensor:
        if not gain.numel():
            return x
        basis = self.basis.to(x.dtype)
        return x + ((x @ basis) * gain.to(x.dtype)) @ basis.T


def whitening(moment: Tensor, damping: float, rank: int, *, transposed: bool = False) -> Factor:
    """The factor M with M^T M = P^-1 (M M^T = P^-1 if transposed) for P = (S + damping) / (1 + damping).

    S is the moment over its mean eigenvalue, so that a round moment gives the identity. A vector is a diagonal moment.
    A side of more than 512 is scaled to a unit diagonal first, and then whitened along its leading directions only.

    Args:
        moment: A symmetric matrix, or its diagonal.
        damping: Above 0. Large values give the identity.
        rank: Leading directions of a large side.
        transposed: Which of the two products is the inverse.
    """
    size = float(_diagonal(moment).double().mean())
    if not 0 < size < math.inf:  # a layer that public rows never reach keeps its coordinates
        return Factor(scale=torch.ones(len(moment)), transposed=transposed)
    return inverse_root(damped(moment, damping, size), rank, transposed=transposed)


def damped(moment: Tensor, damping: float, size: float) -> Tensor:
    """(moment / size + damping) / (1 + damping), in float64.

    Args:
        moment: A symmetric matrix, or its diagonal.
        damping: At least 0.
        size: The unit, such as the mean eigenvalue.
    """
    one = torch.ones(len(moment), dtype=torch.float64, device=moment.device)
    return (moment.double() / size + damping * (one if moment.dim() == 1 else one.diag())) / (1 + damping)


def inverse_root(matrix: Tensor, rank: int, *, transposed: bool = False) -> Factor:
    """M with M^T M = P^-1, or M M^T = P^-1 if transposed; on large sides for the leading directions of P alone.

    Args:
        matrix: A positive matrix P, or its diagonal.
        rank: Leading directions of a large side.
        transposed: Which of the two products is the inverse.
    """
    scale = _diagonal(matrix).clamp_min(1e-12).rsqrt()
    if matrix.dim() == 2 and len(matrix) <= _FULL:
        values, vectors = torch.linalg.eigh(matrix)
        return Factor(matrix=(vectors * values.clamp_min(1e-12).rsqrt()) @ vectors.T, transposed=transposed)
    if matrix.dim() == 1 or rank == 0:
        return Factor(scale=scale, transposed=transposed)
    values, vectors = torch.linalg.eigh(scale[:, None] * matrix * scale)
    values, vectors = values[-rank:], vectors[:, -rank:]
    return Factor(scale=scale, basis=vectors, gain=values.rsqrt() - 1, transposed=transposed)


def _diagonal(moment: Tensor) -> Tensor:
    return moment if moment.dim() == 1 else moment.diagonal()


# ---- layers


class ShapedLayer(nn.Module):
    """A layer whose weight is V, where W = L V M with two frozen factors."""

    def merged(self) -> nn.Module:
        """The original layer, with W in place of V."""
        raise NotImplementedError


def shaped_layer(layer: nn.Module, sides: Sides) -> ShapedLayer:
    """The layer in new coordinates.

    Args:
        layer: A linear layer, convolution or embedding. Its parameters are kept, with other values.
        sides: Its factors.
    """
    if isinstance(layer, nn.Linear):
        return ShapedLinear(layer, sides)
    if isinstance(layer, nn.Embedding):
        return ShapedEmbedding(layer, sides)
    assert isinstance(layer, Conv)
    return ShapedConv(layer, sides)


@final
class ShapedLinear(ShapedLayer):
    """y = L (V M (x - m) + s c), with s the scale of the bias c."""

    mean: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear, sides: Sides) -> None:
        super().__init__()
        self.layer, self.before, self.after = layer, sides.before, sides.after
        self.register_buffer("mean", torch.zeros(0) if sides.mean is None else sides.mean.float())
        self.register_buffer("scale", torch.tensor(sides.bias))
        self.to(layer.weight.device)
        weight = layer.weight.detach().double()
        if layer.bias is not None:
            bias = layer.bias.detach().double()
            bias = bias + weight @ self.mean.double() if self.mean.numel() else bias
            layer.bias.data = (self.after.solve(bias) / self.scale.double()).to(layer.bias)
        layer.weight.data = self.after.solve(self.before.solve_t(weight).T).T.to(layer.weight).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        if not self.mean.numel():
            return self.after(self.layer(self.before(x)))  # type: ignore[no-any-return]
        # The layer adds its bias c as it is, so the input is divided by the scale that multiplies the sum.
        found: Tensor = self.after(self.layer(self.before(x - self.mean) / self.scale) * self.scale)
        return found

    def merged(self) -> nn.Linear:
        layer = self.layer
        weight = self.after.mul(self.before.mul_t(layer.weight.detach()).T).T
        if layer.bias is not None:
            bias = self.after.mul(layer.bias.detach()) * self.scale.double()
            layer.bias.data = (bias - weight @ self.mean.double() if self.mean.numel() else bias).to(layer.bias)
        layer.weight.data = weight.to(layer.weight).contiguous()
        return layer


@final
class ShapedConv(ShapedLayer):
    """A convolution between two frozen ones: over its window, or over its channels, and over its outputs.

    Whitened windows are numbers in channels, so a convolution of one position takes the place of the original.
    """

    def __init__(self, layer: Conv, sides: Sides) -> None:
        super().__init__()
        self.before, self.after = sides.before, sides.after
        self._window = by_window(layer)
        self.layer = _of_one_position(layer) if self._window else layer
        self._original = (layer,)  # in a tuple, so that its parameters are not registered twice
        self._shape = layer.weight.shape
        self.to(layer.weight.device)
        weight = self._rows(layer.weight.detach())
        if layer.bias is not None:
            layer.bias.data = self.after.solve(layer.bias.detach()).to(layer.bias)
        weight = self._from_rows(self.before.solve_t(weight))
        weight = self.after.solve(weight.flatten(1).T).T.reshape(weight.shape)
        shape = (len(weight), -1, *(1 for _ in self._shape[2:])) if self._window else self._shape
        layer.weight.data = weight.reshape(shape).to(layer.weight).contiguous()

    def _rows(self, weight: Tensor) -> Tensor:
        """What `before` acts on, on the last axis: whole windows, or channels."""
        return weight.flatten(1) if self._window else weight.reshape(self._shape).movedim(1, -1)

    def _from_rows(self, weight: Tensor) -> Tensor:
        return weight if self._window else weight.movedim(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        (original,) = self._original
        matrix = self.before.matrix
        if self._window:
            x = _convolve(original, x, matrix.reshape(len(matrix), *self._shape[1:]))
        else:
            x = _mixed(self.before, x)
        return _mixed(self.after, self.layer(x))

    def merged(self) -> nn.Module:
        (layer,) = self._original
        weight = self._from_rows(self.before.mul_t(self._rows(layer.weight.detach())))
        weight = self.after.mul(weight.flatten(1).T).T.reshape(self._shape)
        if layer.bias is not None:
            layer.bias.data = self.after.mul(layer.bias.detach()).to(layer.bias)
        layer.weight.data = weight.to(layer.weight).contiguous()
        return layer


def _of_one_position(layer: Conv) -> nn.Module:
    size, kind = layer.weight[0].numel(), type(layer)
    inner = kind(size, layer.out_channels, 1, bias=False, device="meta")
    inner.weight, inner.bias = layer.weight, layer.bias
    return inner


def _mixed(factor: Factor, x: Tensor) -> Tensor:
    """The factor on the channels, which are axis 1."""
    return factor(x.movedim(1, -1)).movedim(-1, 1)  # type: ignore[no-any-return]


@final
class ShapedEmbedding(ShapedLayer):
    """y = s L V[token], with a scale s per token: frequent ones move less for the same clipped gradient."""

    tokens: Tensor

    def __init__(self, layer: nn.Embedding, sides: Sides) -> None:
        super().__init__()
        assert sides.tokens is not None
        self.layer, self.after = layer, sides.after
        self.register_buffer("tokens", sides.tokens[:, None].clone())
        self.to(layer.weight.device)
        layer.weight.data = self.after.solve(layer.weight.detach() / self.tokens).to(layer.weight).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.after(self.layer(x) * self.tokens[x])
        return found

    def merged(self) -> nn.Embedding:
        layer = self.layer
        layer.weight.data = (self.after.mul(layer.weight.detach()) * self.tokens.double()).to(layer.weight)
        return layer
