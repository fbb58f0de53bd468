"""A clip norm from private records: a quantile of their gradient norms, released with noise and in the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfsilver._core.tensors import Batch, LossFn, batch_rows, eval_mode, map_batch
from halfsilver.errors import require
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients.base import row_norms
from halfsilver.privacy.gradients.probe import PROBE_ROWS
from halfsilver.privacy.gradients.vmap import Vmap
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.released_metrics import Release, release_metrics

_PER_DECADE = 4  # bins: neighbouring clip norms differ by a factor of 1.8, which training hardly notices
_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class ClipNorm:
    """A released clip norm. All of it is safe to publish, at the epsilon of `plan`.

    Args:
        value: The clip norm, for ``PrivacyPlan.calibrate(max_grad_norm=...)``.
        edges: Upper ends of the bins of gradient norms, ascending.
        counts: Noisy numbers of records per bin.
        plan: The plan of this release, one step, for ``PrivacyPlan.calibrate(after=[...])``.
        run_id: Its name in the ledger.
    """

    value: float
    edges: Sequence[float]
    counts: Sequence[float]
    plan: PrivacyPlan
    run_id: str


def private_clip_norm(
    model: torch.nn.Module,
    loss_fn: LossFn,
    private: Any,
    *,
    population: int,
    noise_multiplier: float,
    ledger: Ledger | str | Path,
    delta: float | None = None,
    quantile: float = 0.75,
    lowest: float = 1e-3,
    highest: float = 1e4,
    public_example: Any = None,
    unsafe_seed: int | None = None,
) -> ClipNorm:
    """Choose a clip norm without public data: a quantile of the gradient norms of the private records at the start.

    Each record is counted in one of several bins of equal width in the logarithm of the norm, and the counts get noise.
    The clip norm is the upper end of the bin in which the noisy counts reach `quantile` of the population. With public
    rows, `advise` finds one for nothing.

    Guarantee: one step of the Gaussian mechanism with this noise multiplier on all records, which is in the ledger
    before a record is read. See `Release`.

    Args:
        model: The model at the start. It is not changed.
        loss_fn: ``loss_fn(model, batch)`` returns one loss per example.
        private: The private rows, or a `PrivateData` handle.
        population: The number of private records that you declare.
        noise_multiplier: Standard deviation of the noise, above 0. The noise of a count has sqrt(2) times as much.
        ledger: The ledger of the private data set, or its path.
        delta: The delta at which the plan states its epsilon (default: none).
        quantile: Share of records whose gradients shall be left as they are, in (0, 1). Default: 0.75.
        lowest: Norms up to this are counted together, above 0. Default: 0.001.
        highest: Norms above this are counted together, above `lowest`. Default: 10,000.
        public_example: One made-up record that shows the shapes, where the records do not.
        unsafe_seed: A seed for tests. With a seed nothing is private.

    Returns:
        The clip norm, the noisy counts, and the plan of the release.

    Raises:
        BudgetExceeded: The ledger's budget does not allow it. No record is read then.
        ConfigError: A value is out of its range.

    References:
        Andrew, Thakkar, McMahan and Ramaswamy (2021), Differentially Private Learning with Adaptive Clipping,
        arXiv:1905.03871, which follows a quantile during training.

    >>> import tempfile
    >>> import torch, halfsilver as hs
    >>> x = torch.randn(2000, 3)
    >>> found = hs.private_clip_norm(
    ...     torch.nn.Linear(3, 1),
    ...     lambda model, batch: (model(batch[0])[:, 0] - batch[1]) ** 2,
    ...     (x, x.sum(1)),
    ...     population=2000,
    ...     noise_multiplier=10,
    ...     ledger=tempfile.mkdtemp() + "/ledger.jsonl",
    ... )
    >>> plan = hs.PrivacyPlan.calibrate(
    ...     epsilon=2,
    ...     delta=1e-5,
    ...     population=2000,
    ...     batch_size=100,
    ...     epochs=2,
    ...     max_grad_norm=found.value,
    ...     after=[found.plan],
    ... )
    >>> 0.1 < plan.max_grad_norm < 100
    True
    """
    require(0 < quantile < 1, "quantile", quantile, "in (0, 1)")
    require(0 < lowest < highest < math.inf, "lowest and highest", (lowest, highest), "0 < lowest < highest")
    bins = math.ceil(_PER_DECADE * math.log10(highest / lowest)) + 2
    edges = [lowest * 10 ** (k / _PER_DECADE) for k in range(bins)]
    rows = private if isinstance(private, PrivateData) else PrivateData(private)
    device = next(model.parameters()).device
    made_up = map_batch(lambda t: t.to(device), rows._schema(public_example).synthetic(PROBE_ROWS))
    with eval_mode(model):
        gradients = Vmap(model, loss_fn, made_up)

        def bin_of(batch: Batch) -> Tensor:
            norms = row_norms(gradients.per_example(batch)).double()
            place = (_PER_DECADE * torch.log10(norms / lowest)).ceil().nan_to_num(posinf=bins, neginf=0)
            return torch.where(norms.isnan(), -1, place.clamp(0, bins - 1)).long()

        release = Release(
            noise_multiplier=noise_multiplier,
            bounds={"record": 1.0},
            by=bin_of,
            classes=bins,
            population=population,
        )
        released = release_metrics(
            model,
            {"record": lambda _, batch: torch.ones(batch_rows(batch), device=device)},
            rows,
            release,
            release.plan(delta=delta),
            ledger=ledger if isinstance(ledger, Ledger) else Ledger.open(ledger),
            public_example=public_example,
            rows=_ROWS,
            unsafe_seed=unsafe_seed,
        )
    counts = [one.count.value for one in released.classes]
    return ClipNorm(
        value=_quantile(edges, counts, quantile * population),
        edges=edges,
        counts=counts,
        plan=released.plan,
        run_id=released.run_id,
    )


def _quantile(edges: Sequence[float], counts: Sequence[float], wanted: float) -> float:
    """The first edge below which there are as many as wanted, or the last one.

    >>> _quantile([1.0, 2.0, 4.0], [5.0, 3.0, 2.0], 7.5)
    2.0
    """
    below = 0.0
    for edge, count in zip(edges, counts, strict=True):
        below += count
        if below >= wanted:
            return float(f"{edge:.3g}")
    return float(f"{edges[-1]:.3g}")
