"""Linear algebra on lists of tensors, the shape in which gradients travel.

Nothing here flattens or copies the whole list into one vector, so the functions also serve parameters
that are sharded or lie on several devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfsilver._core.distributed import World
from halfsilver._core.sharded import is_sharded, local
from halfsilver._core.warning_filters import warning_filter, warning_filters
from halfsilver.errors import ConfigError

Tensors = list[Tensor]
Batch = Any  # a tensor, or a tuple, list or dict of tensors, with the example on dimension 0
LossFn = Callable[[Any, Batch], Tensor]  # (model, batch) -> one loss per example


def trainable(model: torch.nn.Module) -> Tensors:
    """The parameters that training changes, in the order that every gradient list follows."""
    return [p for p in model.parameters() if p.requires_grad]


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Inner product of two lists, accumulated in float64; of sharded tensors over all shards, the same on all ranks."""
    pairs = list(zip(a, b, strict=True))
    here = sum((_dot(x, y) for x, y in pairs if not is_sharded(x)), 0.0)
    shards = [(x, y) for x, y in pairs if is_sharded(x)]
    if not shards:
        return here
    return here + World.current(shards[0][0].device).total(sum(_dot(local(x), local(y)) for x, y in shards))


def _dot(x: Tensor, y: Tensor) -> float:
    if x is y:  # without a copy in float64: the trainer asks for this at every step
        return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
    return float(torch.sum(x.double() * y.double()))


def norm(a: Sequence[Tensor]) -> float:
    """Euclidean norm of the whole list."""
    return math.sqrt(dot(a, a))


def scale(a: Sequence[Tensor], factor: float) -> Tensors:
    return [x * factor for x in a]


def axpy(factor: float, x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensors:
    """factor * x + y."""
    return [torch.add(v, u, alpha=factor) for u, v in zip(x, y, strict=True)]


def lerp(weight: float, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensors:
    """weight * a + (1 - weight) * b."""
    return [weight * x + (1.0 - weight) * y for x, y in zip(a, b, strict=True)]


def flatten(a: Sequence[Tensor]) -> Tensor:
    """One vector; for the dense maps, which need it."""
    return torch.cat([x.reshape(-1) for x in a]) if a else torch.zeros(0)


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> Tensors:
    """Inverse of `flatten`, in the shapes, dtypes and devices of `like`."""
    parts = torch.split(vector, [x.numel() for x in like])
    return [v.reshape(x.shape).to(device=x.device, dtype=x.dtype) for v, x in zip(parts, like, strict=True)]


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Apply `function` to every tensor of a batch, whatever its nesting."""
    return pytree.tree_map(function, batch)


def take_rows(batch: Batch, rows: int | slice | Tensor) -> Batch:
    """The examples at `rows` of a batch; for a single number, one record without the batch dimension."""
    return map_batch(lambda t: t[rows], batch)


def as_column(value: Any) -> Any:
    """A number, or a list of numbers however deep, as the tensor that it spells; anything else as it is.

    So the rows of Hugging Face's data sets, dicts of such, are read as if they held tensors.
    """
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    return torch.as_tensor(value) if isinstance(first, int | float) else value


def batch_leaves(batch: Batch) -> Tensors:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def batch_rows(batch: Batch) -> int:
    """Number of examples in a batch."""
    leaves = batch_leaves(batch)
    return leaves[0].shape[0] if leaves else 0


def one_loss_each(losses: Any, batch: Batch) -> Tensor:
    """What a loss function returned, if it is one loss per example; a mean would have no per-example gradient."""
    rows = batch_rows(batch)
    if isinstance(losses, Tensor) and losses.shape == (rows,):
        return losses
    got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    raise ConfigError(
        f"Expected loss_fn(model, batch), and so each of metrics, to return one loss per example, shape ({rows},); got "
        f"{got}. "
        'Use reduction="none", and average over any further dimensions yourself.'
    )


def csr_tensor(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse CSR tensor from parts that are known to be valid, without torch's remark that these are in beta."""
    with warning_filters(warning_filter("ignore", "Sparse CSR tensor support is in beta", UserWarning)):
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards each of its modules is in the mode in which it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
