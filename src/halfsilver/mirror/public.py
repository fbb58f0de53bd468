"""PublicLoss: the mean loss Psi on the public data, and its derivatives."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

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
    """The loss on the public data, ``Psi(theta) = mean of loss_fn over public rows``, and its derivatives.

    Every method is a pure function of parameters, seed and step. Batches and dropout masks follow from the seed and the
    step alone, and a pass leaves no trace in the model (gradients, buffers, modes) or in a global random generator.
    Parameters are lists in the order of the trainable parameters of the model, and None means their current values. If
    they have another dtype, inputs and buffers are converted to it. If they are sharded, every rank computes the same
    on the whole model and keeps its shard of the gradient.

    `Trainer.fit` makes one from the public data that it is given. Make your own for `attach_mirror`, or to use other
    settings than the trainer's.

    Args:
        model: The model that is trained, with at least one trainable parameter.
        loss_fn: A function of model and batch that returns one loss for each row.
        dataset: Public rows: a tensor, a tuple or dict of tensors, or a data set with ``__len__`` and ``__getitem__``.
        batch_size: Rows that are drawn anew for each step, at least 1. Default None, all rows in every step. Set it
            where a pass over all public rows would take longer than the private step.
        seed: Determines which rows are drawn, and dropout. Default 0.
        device: Where batches are moved. Default None, the device of the parameters.
        chunk_size: Rows in one pass, at least 1. Default 1024. Lower it if memory runs out; the result is the same up
            to rounding.

    Raises:
        ConfigError: If an argument is out of range, the data set has no rows, or its form is not one of the above.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> public = PublicLoss(model, lambda model, x: model(x).squeeze(1).square(), torch.tensor([[1.0], [3.0]]))
        >>> public.value(), public.gradient()
        (5.0, [tensor([[10.]])])

    References:
        Amid et al., *Public Data-Assisted Mirror Descent for Private Model Training*, ICML 2022, arXiv:2112.00193,
        algorithm 1, line 1
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

    def on(self, model: nn.Module) -> Self:
        """The same loss of another model.

        Args:
            model: The model that it calls.
        """
        other = copy.copy(self)
        other.model = model
        return other

    @property
    def sources(self) -> list[Any]:
        """The data as they were given, so that private rows among them can be recognised."""
        return [self.rows.source]

    def check(self) -> None:
        """Compute the loss of all rows once, in eval mode.

        Raises:
            ConfigError: If the loss fails or is not finite. The message says why, and on which rows.
        """
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
        """Psi at `params`.

        Args:
            params: Values of the trainable parameters. Default None, the current ones.
            step: The step whose batch is used, if there is a `batch_size`. Default None, all rows.

        Returns:
            The mean loss.
        """
        with torch.no_grad():
            return float(self._sum(lambda loss, _: [loss], params, step)[0])

    def gradient(self, params: Tensors | None = None, *, step: int | None = None) -> Tensors:
        """The gradient of Psi at `params`.

        Args:
            params: Values of the trainable parameters. Default None, the current ones.
            step: The step whose batch is used, if there is a `batch_size`. Default None, all rows.

        Returns:
            One tensor for each parameter, zero for those that the public loss does not use.
        """
        with torch.enable_grad():
            total = self._sum(_gradient, params, step)
        return [shard_of(t, p) for t, p in zip(total, params or trainable(self.model), strict=True)]

    def hvp(self, vectors: Tensors, params: Tensors | None = None) -> Tensors:
        """The Hessian of Psi over all public rows, times `vectors`.

        Args:
            vectors: One tensor for each parameter.
            params: Where the Hessian is taken. Default None, at the current parameters.

        Returns:
            One tensor for each parameter.
        """
        with torch.enable_grad():
            return self._sum(lambda loss, leaves: _hessian_times(loss, leaves, vectors), params, None)

    def hessian(self, params: Tensors | None = None) -> Tensor:
        """The Hessian of Psi over all public rows as a matrix.

        Args:
            params: Where the Hessian is taken. Default None, at the current parameters.

        Returns:
            A symmetric matrix in float64, in the order of the flattened parameters.
        """
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
