"""PublicLoss: the mean loss Psi on the public data, and its derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from halfsilver._core.random import own_randomness
from halfsilver._core.sharded import full, shard_of, whole_model
from halfsilver._core.tensors import LossFn, Tensors, eval_mode, flatten, one_loss_each, trainable
from halfsilver.errors import ConfigError, HalfsilverError, require
from halfsilver.mirror.rows import PublicRows, derive_seed, floating

Part = Callable[[Tensor, Tensors], Tensors]  # (share of the loss, parameters) -> terms to be summed
_HESSIAN_ROWS_AT_ONCE = 64


class PublicLoss:
    """The mirror map Psi: the mean of `loss_fn` over public rows, as a function of the parameters.

    Every method is a pure function of (parameters, seed, step): batches and dropout masks come from the
    seed and the step alone, and the pass leaves no trace in the model (gradients, buffers, flags) or in
    any global random generator. Parameters are lists aligned with the trainable parameters of the model;
    None means their current values, and values of another dtype take inputs and buffers with them. Where
    they are sharded, every rank computes the same on the whole model and keeps its shard of the gradient.

    `batch_size` rows are drawn afresh for each `step`; without either of the two, Psi is the mean over the
    whole public set, computed in pieces of `chunk_size` rows.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        dataset: Any,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        chunk_size: int = 1024,
    ) -> None:
        require(batch_size is None or batch_size >= 1, "batch_size", batch_size, "at least 1 or None")
        require(chunk_size >= 1, "chunk_size", chunk_size, "at least 1")
        require(len(trainable(model)) > 0, "number of trainable parameters", 0, "at least 1")
        self.model, self.loss_fn, self.rows = model, loss_fn, PublicRows(dataset)
        self.batch_size, self.seed, self.chunk_size = batch_size, seed, chunk_size
        self.device = None if device is None else torch.device(device)

    @property
    def sources(self) -> list[Any]:
        """The data as they were given, so that private rows among them can be recognised."""
        return [self.rows.source]

    def check(self) -> None:
        """Refuse rows on which the loss fails or is not finite, in eval mode; `ConfigError` says which and why."""
        try:
            with eval_mode(self.model):
                value = self.value()
        except (HalfsilverError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"loss_fn(model, batch) fails on public rows of {self.rows.kind()}: {error!r}. Make their shapes, "
                "dtypes and labels fit the model."
            ) from error
        if not math.isfinite(value):
            bad = self.rows.not_finite()
            raise ConfigError(
                f"The mean loss of the public rows is {value}: "
                + (f"rows {bad[:5]} hold NaN or infinity. Leave them out, or fill them." if bad else
                   "the rows are finite, so look at loss_fn and at the weights that the model starts from.")
            )  # fmt: skip

    def value(self, params: Tensors | None = None, *, step: int | None = None) -> float:
        """Psi(params)."""
        with torch.no_grad():
            return float(self._sum(lambda loss, _: [loss], params, step)[0])

    def gradient(self, params: Tensors | None = None, *, step: int | None = None) -> Tensors:
        """The gradient of Psi, zero for parameters that the public loss does not use."""
        with torch.enable_grad():
            total = self._sum(_gradient, params, step)
        return [shard_of(t, p) for t, p in zip(total, params or trainable(self.model), strict=True)]

    def hvp(self, vectors: Tensors, params: Tensors | None = None) -> Tensors:
        """The Hessian of Psi over the whole public set, times `vectors`."""
        with torch.enable_grad():
            return self._sum(lambda loss, leaves: _hessian_times(loss, leaves, vectors), params, None)

    def hessian(self, params: Tensors | None = None) -> Tensor:
        """The dense Hessian over the whole public set, symmetric and in float64; order as in `flatten`."""
        point = [p.detach().double() for p in (params or trainable(self.model))]
        with torch.enable_grad():
            matrix = self._sum(_hessian, point, None)[0]
        return (matrix + matrix.T) / 2

    def _sum(self, part: Part, params: Tensors | None, step: int | None) -> Tensors:
        whole, live = whole_model(self.model), trainable(self.model)
        current = params is None or all(a is b for a, b in zip(params, live, strict=True))
        values = trainable(whole) if current or params is None else [full(p) for p in params]
        leaves = [p.detach().requires_grad_() for p in values]
        cast = leaves[0].dtype if leaves[0].dtype != live[0].dtype else None
        model = self._stand_in(whole, leaves, cast)
        total: Tensors = []
        with own_randomness(derive_seed(self.seed, step), [p.device for p in leaves]):
            for index, share in self._chunks(step):
                batch = self.rows.batch(index, self.device or leaves[0].device, cast)
                terms = part(one_loss_each(self.loss_fn(model, batch), batch).sum() * share, leaves)
                total = [a + b for a, b in zip(total, terms, strict=True)] if total else terms
        return [t.detach() for t in total]

    def _stand_in(self, model: nn.Module, leaves: Tensors, cast: torch.dtype | None) -> Callable[..., Any]:
        """A callable with the model's forward pass, on `leaves` and on copies of the buffers."""
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        state = dict(zip(names, leaves, strict=True))
        state |= {name: floating(b, cast).clone() for name, b in model.named_buffers()}
        if cast is not None:
            frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
            state |= {name: p.to(cast) for name, p in frozen}
        return lambda *args, **kwargs: functional_call(model, state, args, kwargs)

    def _chunks(self, step: int | None) -> Iterator[tuple[slice | Tensor, float]]:
        """Pieces of the batch of `step`, each with the weight that makes the sum of losses a mean."""
        total = len(self.rows)
        if step is None or self.batch_size is None or self.batch_size >= total:
            for start in range(0, total, self.chunk_size):
                yield slice(start, start + self.chunk_size), 1 / total
            return
        generator = torch.Generator().manual_seed(derive_seed(self.seed, step, "batch"))
        order = torch.randperm(total, generator=generator)[: self.batch_size]
        for index in torch.split(order, self.chunk_size):
            yield index, 1 / self.batch_size


def _gradient(loss: Tensor, leaves: Tensors, create_graph: bool = False) -> Tensors:
    return list(torch.autograd.grad(loss, leaves, create_graph=create_graph, allow_unused=True, materialize_grads=True))


def _hessian_times(loss: Tensor, leaves: Tensors, vectors: Tensors) -> Tensors:
    grads = _gradient(loss, leaves, create_graph=True)
    slope = torch.stack([torch.sum(g * v.to(g)) for g, v in zip(grads, vectors, strict=True)]).sum()
    if not slope.requires_grad:  # a loss that is linear in the parameters
        return [torch.zeros_like(p) for p in leaves]
    return _gradient(slope, leaves)


def _hessian(loss: Tensor, leaves: Tensors) -> Tensors:
    grad = flatten(_gradient(loss, leaves, create_graph=True))
    if not grad.requires_grad:
        return [grad.new_zeros(grad.numel(), grad.numel())]
    numbers = torch.arange(grad.numel(), device=grad.device)
    return [torch.cat([_hessian_rows(grad, leaves, n) for n in torch.split(numbers, _HESSIAN_ROWS_AT_ONCE)])]


def _hessian_rows(grad: Tensor, leaves: Tensors, numbers: Tensor) -> Tensor:
    rows = torch.nn.functional.one_hot(numbers, grad.numel()).to(grad.dtype)
    parts: Sequence[Tensor | None] = torch.autograd.grad(
        grad, leaves, rows, retain_graph=True, is_grads_batched=True, allow_unused=True
    )
    count = len(numbers)
    zeros = (p.new_zeros(count, p.numel()) for p in leaves)
    return torch.cat([z if h is None else h.reshape(count, -1) for h, z in zip(parts, zeros, strict=True)], 1)
