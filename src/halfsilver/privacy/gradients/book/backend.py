"""The backend: patch the layers, run one pass, and weight what was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from halfsilver._core.tensors import Batch, LossFn, Tensors, batch_rows, map_batch, trainable
from halfsilver._core.views import by_view
from halfsilver.privacy.gradients.base import (
    Adding,
    ClippedSum,
    clip_factors,
    measurable,
    reach,
    require_weighable,
    row_norms,
)
from halfsilver.privacy.gradients.book.example_gradients import ExampleGradients, Materialised
from halfsilver.privacy.gradients.book.kernels import Kernel, kernels_for
from halfsilver.privacy.gradients.book.tape import Tape
from halfsilver.privacy.gradients.book.tune import tuning

# A row is computed directly, in float64, once the rounding bound would raise its squared norm by more than this.
_SHARE_OF_SLACK = 2e-3
# Entries up to which the gradients of several parameters are put together.
_SMALL = 2048

Group = tuple[list[int], ExampleGradients]


@final
class BookKeeping:
    """Norms and sums from layer inputs and output gradients. A module without a kernel uses the slower `AnyModule`.

    With squared norms n_i^2 from `ExampleGradients.norms` and weights w_i = min(1, C / ((1 + margin) n_i)), the result
    is sum_i w_i G_i from `ExampleGradients.weighted_sum`. A row whose terms nearly cancel is multiplied out in float64.

    References:
        - Bu, Wang, Zha and Karypis 2023, Differentially Private Optimization on Large Model at Small Cost,
          arXiv:2210.00038.
    """

    name = "book"

    def __init__(self, model: nn.Module, loss_fn: LossFn, example: Batch) -> None:
        self._model = model
        self._views, self._loss_fn = by_view(loss_fn)
        for p in trainable(model):
            require_weighable(p.dtype, self.name)
        self._kernels = kernels_for(model)

    def tune(self, batch: Batch, adding: Adding) -> None:
        """Choose the fastest way for each layer at the shape of `batch`, which holds made-up rows."""
        with tuning(adding, trainable(self._model)[0].device):
            self.clipped_sum(batch, 1.0, adding=adding)

    def per_example(self, batch: Batch) -> Tensors:
        """Squared norms, what is added to them, and the gradients, or the factors of which they are products."""
        rows, found = batch_rows(batch), self._contributions(batch)
        totals = _totals(_groups(found), rows, trainable(self._model)[0].device, Adding.once(rows))
        return [*totals, *(part for c in found if c is not None for part in c.parts)]

    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        params = trainable(self._model)
        if batch_rows(batch) == 0:
            return ClippedSum.zeros(params, max_grad_norm)
        adding, found = adding or Adding.once(batch_rows(batch)), self._contributions(batch)
        groups, tau = _groups(found), max(adding.margin(p.dtype) for p in params)
        squared, slack = _totals(groups, batch_rows(batch), params[0].device, adding)
        norms = measurable((squared + slack).sqrt())
        weights = clip_factors(norms, max_grad_norm, tau, counted)[: reach(counted)]
        clipped = torch.isfinite(norms) & (norms > max_grad_norm / (1 + tau))  # of others, an upper bound is enough
        cancelling = clipped & (slack > _SHARE_OF_SLACK * squared)
        direct = (cancelling[: len(weights)] & (weights > 0)).nonzero().flatten().tolist()
        weights[direct] = 0.0
        total = ClippedSum(_weighted_sums(groups, params, weights, adding), max_grad_norm)
        for row in direct:
            total.add_(_direct(found, params, row, max_grad_norm, tau))
        return total

    def _contributions(self, batch: Batch) -> list[ExampleGradients | None]:
        params = trainable(self._model)
        tape = Tape(batch_rows(batch), params[0].device)
        batch = map_batch(torch.Tensor.detach, batch)  # data that asks for a gradient would hide the first layer
        for _ in range(self._views):
            with _patched(self._kernels, tape), torch.enable_grad():
                tape.backward(self._loss_fn(self._model, batch), params)
            if self._views > 1:  # one after the other: the memory of a step does not grow with their number
                tape.add_up()
        return tape.contributions(params)


def _groups(found: list[ExampleGradients | None]) -> list[Group]:
    """Contributions with their parameters. Small ones are put together, because each call has a fixed cost."""
    parts = [(i, c) for i, c in enumerate(found) if c is not None]
    small = {i: c.flat for i, c in parts if isinstance(c, Materialised) and c.flat.shape[1] <= _SMALL}
    groups: list[Group] = [([i], c) for i, c in parts if i not in small]
    return [*groups, (list(small), Materialised(torch.cat(list(small.values()), dim=1)))] if small else groups


def _totals(groups: list[Group], rows: int, device: torch.device, adding: Adding) -> tuple[Tensor, Tensor]:
    """Squared norms, and what to add to them: their own rounding, and the share that pays for rounding of the sums."""
    squared = torch.zeros(rows, dtype=torch.float64, device=device)
    slack = torch.zeros_like(squared)
    for _, contribution in groups:
        norms = contribution.norms()
        squared += norms.squared
        slack += norms.slack
        if norms.terms is not None:
            share = adding.share_of_terms(rows * norms.steps)
            slack += share**2 * norms.terms
    return squared, slack


def _weighted_sums(groups: list[Group], params: Tensors, weights: Tensor, adding: Adding) -> Tensors:
    sums: dict[int, Tensor] = {}
    for places, contribution in groups:
        total = contribution.weighted_sum(weights, adding).reshape(-1)
        sizes = [params[i].numel() for i in places]
        sums |= zip(places, torch.split_with_sizes(total, sizes), strict=True)
    return [sums[i].view(p.shape) if i in sums else torch.zeros_like(p) for i, p in enumerate(params)]


def _direct(
    found: list[ExampleGradients | None], params: Tensors, row: int, max_grad_norm: float, tau: float
) -> ClippedSum:
    """One example whose factors cancel, multiplied out in float64: norm and sum read the same numbers."""
    one = slice(row, row + 1)
    gradients = [
        torch.zeros((1, *p.shape), dtype=torch.float64, device=p.device)
        if c is None
        else c.gradients(one, torch.float64)
        for p, c in zip(params, found, strict=True)
    ]
    factors = clip_factors(row_norms(gradients), max_grad_norm, tau)
    return ClippedSum([torch.where(factors > 0, factors * g[0], 0.0) for g in gradients], max_grad_norm)


@contextmanager
def _patched(kernels: Mapping[nn.Module, Kernel], tape: Tape) -> Iterator[None]:
    """Kernels in place of the modules' own forward methods, for this block only; hooks of others still run."""
    before = {module: module.__dict__.get("forward") for module in kernels}
    try:
        for module, kernel in kernels.items():
            module.forward = partial(kernel, module, tape)
        yield
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward
