"""Geometry: coordinates from public rows in which private gradients are clipped and noise is added.

A geometry is a model transform. Training runs unchanged in the new coordinates, so the private side needs no new code:
sensitivity, event, ledger and audit stay as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from halfsilver._core.distributed import World
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, eval_mode, trainable
from halfsilver.errors import ConfigError, require
from halfsilver.mirror.rows import PublicRows

Labels = Literal["drawn", "public"]
Conv = nn.Conv1d | nn.Conv2d
_Product = Callable[[Tensor], Tensor]

_FULL = 512  # sides up to this get a full matrix, larger ones a diagonal and some leading directions
_LARGEST = 4096  # beyond, the diagonal alone
_PATCH = 128  # convolutions with windows of up to so many numbers are whitened as a whole, others by channel
_FEW = 4  # a side has few leading directions if there are fewer than a quarter of its size
_ITERATIONS, _OVERSAMPLED = 8, 16  # of the subspace iteration
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
        refresh: After so many updates each, `Trainer` calls `renew`, or None for never (default).
        measure: Factors for the original layers, where those are in place. `renew` needs it.
    """

    model: nn.Module
    layers: tuple[tuple[nn.Module, str, ShapedLayer], ...]
    refresh: int | None = None
    measure: Callable[[], Mapping[nn.Module, Sides]] | None = None

    def merge(self) -> None:
        """Put the original layers back, with weights that compute what the shaped ones do."""
        for parent, name, shaped in self.layers:
            setattr(parent, name, shaped.merged())
        _forget_gradients(self.model)

    @torch.no_grad()
    def renew(self, average: Sequence[Tensor], optimizer: Optimizer) -> None:
        """Measure the factors anew at the current weights, and go on in these coordinates with the same function.

        Modules and parameters stay the same objects. With W = T(V) before and W = T'(V') afterwards, the weights and
        their average become T'^-1 T v. Momentum is a sum of gradients, and becomes T'^T T^-T g.

        Args:
            average: An average of the iterates, one tensor for each trainable parameter, or nothing. It is changed.
            optimizer: The optimizer. The momentum of `torch.optim.SGD` is changed; the state of others is forgotten,
                because squares of gradients have no counterpart in other coordinates.
        """
        assert self.measure is not None
        optimizer.zero_grad(set_to_none=True)  # of the old coordinates
        places = {id(p): i for i, p in enumerate(trainable(self.model))} if average else {}
        held = []
        for _, _, layer in self.layers:
            own = layer.own()
            points = {name: average[places[id(p)]] for name, p in own.items() if average}
            momentum = _momentum(optimizer, own)
            far = layer.to_original(points) if points else {}
            pull = _transposed(layer.from_original, layer.to_original(own), momentum) if momentum else {}
            held.append((layer, points, far, momentum, pull))
        self.merge()
        sides: Mapping[nn.Module, Sides] = {}
        try:
            sides = self.measure()
            World.current(trainable(self.model)[0].device).spread(
                [t for side in sides.values() for t in side.tensors()]
            )
        finally:  # whatever happens, the layers are the shaped ones again
            for parent, name, layer in self.layers:
                layer.take(sides.get(layer.original))
                setattr(parent, name, layer)
        for layer, points, far, momentum, pull in held:
            _copy(points, layer.from_original(far) if far else {})
            _copy(momentum, _transposed(layer.to_original, layer.own(), pull) if pull else {})
        if type(optimizer) is not torch.optim.SGD:
            optimizer.state.clear()


def _momentum(optimizer: Optimizer, own: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The buffers of SGD for these parameters, where it has any."""
    if type(optimizer) is not torch.optim.SGD:
        return {}
    found = {name: optimizer.state[p].get("momentum_buffer") for name, p in own.items() if p in optimizer.state}
    return {name: buffer for name, buffer in found.items() if buffer is not None}


def _transposed(
    function: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    like: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The transpose of a linear function at `values`; `like` has the shapes that the function takes."""
    with torch.enable_grad():
        leaves = {name: t.detach().double().requires_grad_() for name, t in like.items()}
        results = function(leaves)
        ends = [values[name].double() for name in results]
        return dict(zip(leaves, torch.autograd.grad(list(results.values()), list(leaves.values()), ends), strict=True))


def _copy(to: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        to[name].copy_(value)


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

    Linear layers, convolutions and embeddings are transformed. Of `nn.LSTM`, `nn.GRU` and `nn.RNN`, the input weights
    of the first layer are, W = V U_A; what lies inside (gates, states, further layers) keeps its coordinates. So do
    other layers, layers that share a weight, frozen ones, and those that no public row reaches. Factors are scaled so
    that public gradients keep their median norm, so a clip norm keeps its meaning. At the start the function of the
    model changes by rounding alone (about 1e-6).

    Guarantee: as without it. The coordinates are a function of public rows and of the start, which is public or
    released, so they cost no privacy.

    Args:
        damping: Added to each moment, in units of its mean eigenvalue, above 0. Small values follow the public rows,
            large ones give DP-SGD. Raise it for few public rows (default: 1).
        rank: Leading directions of sides with more than 512 numbers, at least 0 (default: 128).
        labels: "drawn" takes labels from the model's own predictions, because rows that the start has memorised have no
            gradient. "public" takes those of the rows. Where labels cannot be drawn, those of the rows are used.
        rows: The most public rows to use (default: 4096).
        refresh: Number of updates after which `Trainer` measures the coordinates anew, at the released weights of that
            moment; at least 1, or None for never (default). Weights, their average and the momentum of
            `torch.optim.SGD` are carried over. The state of other optimizers starts afresh. Mirror maps that keep a
            state are refused. Set it for long runs that end far from their start.

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
    refresh: int | None = None

    def __repr__(self) -> str:
        names = ("damping", "rank", "labels", "rows", "refresh")
        # Without what is off, so that run folders from before the option can still be opened.
        given = {name: getattr(self, name) for name in names if name != "refresh" or self.refresh is not None}
        return f"Whitened({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __post_init__(self) -> None:
        require(0 < self.damping < math.inf, "damping", self.damping, "above 0")
        require(self.rank >= 0, "rank", self.rank, "at least 0")
        require(self.labels in ("drawn", "public"), "labels", self.labels, "in ('drawn', 'public')")
        require(self.rows >= 1, "rows", self.rows, "at least 1")
        require(self.refresh is None or self.refresh >= 1, "refresh", self.refresh, "at least 1 or None")

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
            kinds = ", ".join(f"nn.{kind.__name__}" for kind in _KINDS)
            raise ConfigError(f"Expected a trainable layer to whiten, one of {kinds}.")
        measure = partial(self._sides, root, [layer for _, _, layer in places], loss_fn, PublicRows(public))
        sides = measure()
        if not sides:
            raise ConfigError("Expected the loss to call at least one layer that can be whitened on public rows.")
        layers = []
        for parent, name, layer in places:
            if layer in sides:
                shaped = shaped_layer(layer, sides[layer])
                setattr(parent, name, shaped)
                layers.append((parent, name, shaped))
        _forget_gradients(root)
        return Shaped(root, tuple(layers), self.refresh, measure)

    def _sides(
        self, root: nn.Module, layers: Sequence[nn.Module], loss_fn: LossFn, rows: PublicRows
    ) -> dict[nn.Module, Sides]:
        """Factors for each layer that public rows reach."""
        device = trainable(root)[0].device
        moments = {layer: Moments(layer, self.rank) for layer in layers}
        with own_randomness(0, [device]), eval_mode(root):
            for start in range(0, min(len(rows), self.rows), _CHUNK):
                batch = rows.batch(slice(start, min(start + _CHUNK, len(rows), self.rows)), device)
                for layer, seen in _watched(root, loss_fn, self._labelled(root, loss_fn, batch), layers):
                    moments[layer].add(*seen)
            sides = {layer: m.sides(self.damping) for layer, m in moments.items() if m.reached}
            batch = rows.batch(slice(0, min(len(rows), _NORM_ROWS)), device)
            number = _norm_ratio(root, loss_fn, self._labelled(root, loss_fn, batch), sides) if sides else 1.0
        for side in sides.values():
            side.after.times_(number)
        return sides

    def _labelled(self, model: nn.Module, loss_fn: LossFn, batch: Batch) -> Batch:
        return batch if self.labels == "public" else with_drawn_labels(model, loss_fn, batch)


# ---- what is whitened


_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding, nn.LSTM, nn.GRU, nn.RNN)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and layer of whatever can be whitened. Subclasses may read their weight in ways of their own."""
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    instances = Counter(id(child) for module in model.modules() for child in module.children())
    for parent in model.modules():
        if isinstance(parent, nn.MultiheadAttention):
            continue
        for name, layer in parent.named_children():
            if type(layer) not in _KINDS or instances[id(layer)] > 1:
                continue
            if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:  # would see V and M x
                continue
            if not all(p.requires_grad and uses[id(p)] == 1 for p in _shaped_parameters(layer)):
                continue
            if isinstance(layer, Conv) and (layer.groups > 1 or layer.padding_mode != "zeros"):
                continue
            if isinstance(layer, nn.Embedding) and layer.max_norm is not None:  # a norm in other coordinates
                continue
            yield parent, name, layer


def _forget_gradients(model: nn.Module) -> None:
    """Gradients of an earlier pass belong to other coordinates, and may have other shapes."""
    for p in model.parameters():
        p.grad = None


def _shaped_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """The parameters that get other coordinates. They must be the layer's own."""
    return list((input_weights(layer) if isinstance(layer, nn.RNNBase) else dict(layer.named_parameters())).values())


def input_weights(layer: nn.RNNBase) -> dict[str, nn.Parameter]:
    """The matrices of a recurrent layer that act on its input, by name: one per direction.

    Args:
        layer: An nn.LSTM, nn.GRU or nn.RNN.
    """
    names = ("weight_ih_l0", "weight_ih_l0_reverse")[: 1 + layer.bidirectional]
    return {name: layer.get_parameter(name) for name in names}


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
    """For each use of a layer, its input and the gradient of the summed losses by its output.

    Gradients inside a recurrent layer cannot be seen from outside; its gradient here is an empty tensor.
    """
    uses: list[tuple[nn.Module, Tensor, Tensor | None]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = args[0] if args else kwargs["input"]
        if isinstance(module, nn.RNNBase):
            uses.append((module, (x.data if isinstance(x, PackedSequence) else x).detach(), None))
            return
        output.retain_grad()
        uses.append((module, x.detach(), output))

    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    kept = [p.grad for p in model.parameters()]
    try:
        with torch.enable_grad():
            torch.autograd.backward([loss_fn(model, batch).sum()])
        gradients = [torch.zeros(0) if y is None else y.grad for _, _, y in uses]
        # Autocast gives halves, whose moments would be too coarse.
        pairs = zip(uses, gradients, strict=True)
        return [(layer, (_whole(x), _whole(b.detach()))) for (layer, x, _), b in pairs if b is not None]
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
    """The factors on the input and on the output of a layer. That on the output of a recurrent layer is not used.

    For linear layers also the point around which inputs are taken, and the scale of the bias; for embeddings a scale
    per token.
    """

    before: Factor
    after: Factor
    mean: Tensor | None = None
    bias: Tensor = field(default_factory=lambda: torch.tensor(1.0))
    tokens: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All numbers, to be sent to other processes."""
        found = [*self.before.buffers(), *self.after.buffers(), self.mean, self.bias, self.tokens]
        return [t for t in found if t is not None]


class Moments:
    """Second moments of a layer's inputs and output gradients, summed over public rows.

    Args:
        layer: The layer.
        rank: Leading directions of large sides. Without any, only the diagonal of such a side is kept.
    """

    def __init__(self, layer: nn.Module, rank: int) -> None:
        self.layer, self._rank = layer, rank
        self._count = 0
        self._inputs: Tensor | float = 0.0
        self._outputs: Tensor | float = 0.0
        self._sum: Tensor | float = 0.0

    @property
    def reached(self) -> bool:
        """Whether public rows have used the layer."""
        return isinstance(self._inputs, Tensor)

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """One use of the layer.

        Args:
            x: Its input.
            gradient: The gradient of the summed losses by its output. It is not used for recurrent layers.
        """
        if isinstance(self.layer, nn.RNNBase):
            self._inputs = self._inputs + _moment(x.reshape(-1, x.shape[-1]), self._rank)
            return
        if isinstance(self.layer, nn.Embedding):
            tokens = torch.bincount(x.reshape(-1), minlength=self.layer.num_embeddings).double()
            self._inputs = self._inputs + tokens
            b = gradient.reshape(-1, gradient.shape[-1])
        else:
            a, b = rows_of(self.layer, x, gradient)
            self._inputs = self._inputs + _moment(a, self._rank)
            self._sum = self._sum + a.sum(0).double()
            self._count += len(a)
        self._outputs = self._outputs + _moment(b, self._rank)

    def sides(self, damping: float) -> Sides:
        """Factors from all that was added.

        Args:
            damping: In units of the mean eigenvalue.
        """
        inputs, outputs, rank = self._inputs, self._outputs, self._rank
        assert isinstance(inputs, Tensor)
        if isinstance(self.layer, nn.RNNBase):
            return Sides(of_equal_size(whitening(inputs, damping, rank), inputs), Factor(scale=torch.ones(1)))
        assert isinstance(outputs, Tensor)
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
        return Sides(before, after, mean=cross / own, bias=torch.tensor(own**-0.5))


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


def _moment(rows: Tensor, rank: int) -> Tensor:
    size = rows.shape[1]
    if size > (_LARGEST if rank else _FULL):
        return rows.float().square().sum(0).double()
    rows = rows.double() if size <= _FULL else rows.float()
    return (rows.T @ rows).double()


def _norm_ratio(model: nn.Module, loss_fn: LossFn, batch: Batch, sides: dict[nn.Module, Sides]) -> float:
    """Median ratio of public gradient norms, over whitened layers, before and after."""
    old: Tensor | float = 0.0
    new: Tensor | float = 0.0
    for layer, (x, gradient) in _watched(model, loss_fn, batch, list(sides)):
        side = sides[layer]
        if isinstance(layer, nn.RNNBase):
            continue
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

    def copy_(self, other: Factor) -> None:
        """Take the values of another factor of the same kind and size."""
        for mine, theirs in zip(self.buffers(), other.buffers(), strict=True):
            mine.copy_(theirs)

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
    if not 0 < size < math.inf:  # no gradient, or no input: the side keeps its coordinates
        moment, size = damped(torch.zeros_like(moment), 1.0, 1.0), 0.5
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
    values, vectors = leading_directions(scale[:, None] * matrix * scale, rank)
    return Factor(scale=scale, basis=vectors, gain=values.rsqrt() - 1, transposed=transposed)


def leading_directions(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a positive matrix and their directions, by subspace iteration where these are few.

    A whole decomposition of a side of 4,000 takes ten times as long. Directions that have not quite converged make a
    slightly different factor, which is as invertible and as public.

    Args:
        matrix: A positive matrix.
        rank: How many directions.

    Returns:
        Eigenvalues in ascending order, and orthonormal columns.

    References:
        Halko, Martinsson and Tropp (2011), Finding Structure with Randomness, arXiv:0909.4061, algorithm 4.4.
    """
    size = len(matrix)
    if _FEW * rank >= size:
        values, vectors = torch.linalg.eigh(matrix)
        return values[-rank:], vectors[:, -rank:]
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(size, rank + _OVERSAMPLED, generator=generator, dtype=matrix.dtype).to(matrix.device)
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(matrix @ basis)[0]
    values, turn = torch.linalg.eigh(basis.T @ matrix @ basis)
    return values[-rank:], (basis @ turn)[:, -rank:]


def of_equal_size(factor: Factor, moment: Tensor) -> Factor:
    """The factor times the number with which E|M x|^2 = E|x|^2.

    Args:
        factor: M. It is changed.
        moment: E[x x^T] up to a number, or its diagonal where M is diagonal as well.
    """
    if moment.dim() == 1:
        size = float(factor.mul(moment.sqrt()).square().sum())
    else:  # tr(M A M^T), from the rows of A M^T and of M^T
        size = float((factor.mul(moment) * factor.mul(torch.eye(len(moment)).to(moment))).sum())
    if size > 0:
        factor.times_(math.sqrt(float(_diagonal(moment).sum()) / size))
    return factor


def _diagonal(moment: Tensor) -> Tensor:
    return moment if moment.dim() == 1 else moment.diagonal()


# ---- layers


Values = dict[str, Tensor]  # by the name of a parameter in its layer


class ShapedLayer(nn.Module):
    """A layer whose weight is V, where W = L V M with two frozen factors.

    Its parameters are those of the original layer. Models may also ask it for sizes and options of that layer.
    """

    def __init__(self, layer: nn.Module, sides: Sides) -> None:
        super().__init__()
        self._original = (layer,)  # in a tuple, so that its parameters are not registered twice
        self._hold(sides)
        self.to(next(layer.parameters()).device)
        self._put(self.from_original(self.own()))

    def __getattr__(self, name: str) -> Any:
        (layer,) = vars(self)["_original"]
        if name in getattr(layer, "__constants__", ()):
            return getattr(layer, name)
        return super().__getattr__(name)

    @property
    def original(self) -> nn.Module:
        """The layer that this one stands for. While it does, that layer holds V."""
        (layer,) = self._original
        return layer

    def own(self) -> dict[str, nn.Parameter]:
        """The parameters that have other coordinates."""
        return dict(self.original.named_parameters())

    def merged(self) -> nn.Module:
        """The original layer, with W in place of V."""
        self._put(self.to_original(self.own()))
        return self.original

    def take(self, sides: Sides | None) -> None:
        """Undo `merged`, with other factors from now on.

        Args:
            sides: Factors of the same kinds and sizes, or None for those that it has.
        """
        if sides is not None:
            self._replace(sides)
        self._put(self.from_original(self.own()))

    @torch.no_grad()
    def _put(self, values: Values) -> None:
        for name, p in self.own().items():
            if p.shape == values[name].shape:  # in place: cuDNN wants the weights of an LSTM in one block of memory
                p.copy_(values[name])
            else:
                p.data = values[name].to(p).contiguous()

    def _hold(self, sides: Sides) -> None:
        raise NotImplementedError

    def _replace(self, sides: Sides) -> None:
        raise NotImplementedError

    def from_original(self, values: Mapping[str, Tensor]) -> Values:
        """V for W: a linear function, in float64.

        Args:
            values: By the names of `own`.
        """
        raise NotImplementedError

    def to_original(self, values: Mapping[str, Tensor]) -> Values:
        """W for V: a linear function, in float64.

        Args:
            values: By the names of `own`.
        """
        raise NotImplementedError


def shaped_layer(layer: nn.Module, sides: Sides) -> ShapedLayer:
    """The layer in new coordinates.

    Args:
        layer: A linear or recurrent layer, a convolution or an embedding. Its parameters are kept, with other values.
        sides: Its factors.
    """
    if isinstance(layer, nn.Linear):
        return ShapedLinear(layer, sides)
    if isinstance(layer, nn.Embedding):
        return ShapedEmbedding(layer, sides)
    if isinstance(layer, nn.RNNBase):
        return ShapedRecurrent(layer, sides)
    assert isinstance(layer, Conv)
    return ShapedConv(layer, sides)


@final
class ShapedLinear(ShapedLayer):
    """y = L (V M (x - m) + s c), with s the scale of the bias c."""

    original: nn.Linear
    mean: Tensor
    scale: Tensor

    def _hold(self, sides: Sides) -> None:
        self.layer, self.before, self.after = self.original, sides.before, sides.after
        self.register_buffer("mean", torch.zeros(0) if sides.mean is None else sides.mean.float())
        self.register_buffer("scale", sides.bias.clone())

    def _replace(self, sides: Sides) -> None:
        self.before.copy_(sides.before)
        self.after.copy_(sides.after)
        self.scale.copy_(sides.bias)
        if sides.mean is not None:
            self.mean.copy_(sides.mean)

    def forward(self, input: Tensor) -> Tensor:
        if not self.mean.numel():
            return self.after(self.layer(self.before(input)))  # type: ignore[no-any-return]
        # The layer adds its bias c as it is, so the input is divided by the scale that multiplies the sum.
        found: Tensor = self.after(self.layer(self.before(input - self.mean) / self.scale) * self.scale)
        return found

    @property
    def weight(self) -> Tensor:
        """W, for modules that read it, such as nn.TransformerEncoderLayer."""
        return self.to_original(self.own())["weight"].to(self.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        return None if self.layer.bias is None else self.to_original(self.own())["bias"].to(self.layer.bias)

    def from_original(self, values: Mapping[str, Tensor]) -> Values:
        weight = values["weight"].double()
        found = {"weight": self.after.solve(self.before.solve_t(weight).T).T}
        if "bias" in values:
            bias = values["bias"].double()
            bias = bias + weight @ self.mean.double() if self.mean.numel() else bias
            found["bias"] = self.after.solve(bias) / self.scale.double()
        return found

    def to_original(self, values: Mapping[str, Tensor]) -> Values:
        weight = self.after.mul(self.before.mul_t(values["weight"]).T).T
        if "bias" not in values:
            return {"weight": weight}
        bias = self.after.mul(values["bias"]) * self.scale.double()
        return {"weight": weight, "bias": bias - weight @ self.mean.double() if self.mean.numel() else bias}


@final
class ShapedConv(ShapedLayer):
    """A convolution between two frozen ones: over its window, or over its channels, and over its outputs.

    Whitened windows are numbers in channels, so a convolution of one position takes the place of the original.
    """

    original: Conv

    def _hold(self, sides: Sides) -> None:
        layer = self.original
        self.before, self.after = sides.before, sides.after
        self._window, self._shape = by_window(layer), layer.weight.shape
        self.layer = _of_one_position(layer) if self._window else layer

    def _replace(self, sides: Sides) -> None:
        self.before.copy_(sides.before)
        self.after.copy_(sides.after)

    def forward(self, input: Tensor) -> Tensor:
        matrix = self.before.matrix
        if self._window:
            x = _convolve(self.original, input, matrix.reshape(len(matrix), *self._shape[1:]))
        else:
            x = _mixed(self.before, input)
        return _mixed(self.after, self.layer(x))

    def from_original(self, values: Mapping[str, Tensor]) -> Values:
        shape = (self._shape[0], -1, *(1 for _ in self._shape[2:])) if self._window else self._shape
        return self._between(values, self.before.solve_t, self.after.solve, shape)

    def to_original(self, values: Mapping[str, Tensor]) -> Values:
        return self._between(values, self.before.mul_t, self.after.mul, self._shape)

    def _between(self, values: Mapping[str, Tensor], before: _Product, after: _Product, shape: Sequence[int]) -> Values:
        """The first product on windows or channels, the second on outputs."""
        weight = values["weight"].reshape(self._shape)
        weight = before(weight.flatten(1)) if self._window else before(weight.movedim(1, -1)).movedim(-1, 1)
        found = {"weight": after(weight.flatten(1).T).T.reshape(shape)}
        return found | ({"bias": after(values["bias"])} if "bias" in values else {})


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

    original: nn.Embedding
    tokens: Tensor

    def _hold(self, sides: Sides) -> None:
        assert sides.tokens is not None
        self.layer, self.after = self.original, sides.after
        self.register_buffer("tokens", sides.tokens[:, None].clone())

    def _replace(self, sides: Sides) -> None:
        assert sides.tokens is not None
        self.after.copy_(sides.after)
        self.tokens.copy_(sides.tokens[:, None])

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.after(self.layer(input) * self.tokens[input])
        return found

    def from_original(self, values: Mapping[str, Tensor]) -> Values:
        return {"weight": self.after.solve(values["weight"].double() / self.tokens.double())}

    def to_original(self, values: Mapping[str, Tensor]) -> Values:
        return {"weight": self.after.mul(values["weight"]) * self.tokens.double()}


@final
class ShapedRecurrent(ShapedLayer):
    """A recurrent layer on M x, whose input weights are V in W = V M. States and gates keep their coordinates."""

    original: nn.RNNBase

    def _hold(self, sides: Sides) -> None:
        self.layer, self.before = self.original, sides.before

    def _replace(self, sides: Sides) -> None:
        self.before.copy_(sides.before)

    def own(self) -> dict[str, nn.Parameter]:
        return input_weights(self.original)

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            return self.layer(PackedSequence(self.before(input.data), *input[1:]), hx)
        return self.layer(self.before(input), hx)

    def flatten_parameters(self) -> None:
        self.layer.flatten_parameters()

    def from_original(self, values: Mapping[str, Tensor]) -> Values:
        return {name: self.before.solve_t(value) for name, value in values.items()}

    def to_original(self, values: Mapping[str, Tensor]) -> Values:
        return {name: self.before.mul_t(value) for name, value in values.items()}
