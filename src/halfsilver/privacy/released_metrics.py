"""Metrics of private records, with noise: one pass over all of them, one release, one entry in the ledger."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, final

import torch
from torch import Tensor

from halfsilver._core.distributed import World
from halfsilver._core.random import require_device
from halfsilver._core.tensors import Batch, LossFn, Tensors, batch_leaves, batch_rows, map_batch, one_loss_each
from halfsilver.errors import ConfigError, require
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import OsEntropy, UnsafeSeed
from halfsilver.privacy.gradients import Adding, ClippedSum, Performance
from halfsilver.privacy.gradients.probe import PROBE_ROWS, probe
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.noise import noise_scale
from halfsilver.privacy.plan import PrivacyPlan

# Contributions are multiples of this, rounded down. So sums of up to 2^29 records are exact in float64, and the order
# of the records cannot show in the last bits.
_GRID = 2.0**-24
_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Release:
    """Which metrics of the private records `Trainer.evaluate` releases, and with how much noise.

    Record i contributes, for each metric m with bound b_m, the share s_im = clamp(v_im, 0, b_m) / b_m in [0, 1] of its
    value v_im; with `by`, also a 1 to the count of its class. With M figures per record, metrics and count together,
    the release is

        sum_i s_i / sqrt(M) + N(0, sigma^2 I),

    in the row of the record's class where there are classes. A record is in one class only, so it moves the sum by at
    most sqrt(M) / sqrt(M) = 1 in Euclidean norm, however many classes there are. In units of metric m the noise on the
    sum of one class has the standard deviation sigma b_m sqrt(M). Each further metric adds noise to the others, so
    release only what you need.

    Guarantee: one step of the Gaussian mechanism with noise multiplier sigma on all records, whatever the number of
    metrics and classes. It is entered in the ledger before a record is read, and refused if the budget does not allow
    it. A record that cannot be read, on which a metric fails or is NaN, or that has no valid class contributes zero
    silently. As in training, a metric of a record must depend on that record alone. Batches have one shape, at which
    what the model returns for made-up rows is the same to the bit at all places: a metric that jumps, as an accuracy
    does, has no margin for rounding. ``Performance(micro_batch_size=1)`` evaluates each record alone.

    Args:
        noise_multiplier: Standard deviation sigma of the noise, above 0. A single mean is good to about
            2 sigma / population in units of its bound, with 95 % confidence.
        bounds: The metrics to release, by name, each with the most that a record may contribute, above 0: 1 for an
            accuracy. "loss" is the loss of the trainer. Smaller values are clamped to 0, larger ones to the bound.
        by: A function of a batch that returns one class number per record, as whole numbers from 0 (default: no
            classes). It must depend on each record alone.
        classes: The declared number of classes, at least 1, where `by` is given.
        population: The declared number of records, above 0, by which sums are divided (default: that of the trainer's
            plan). Give it for records that are not those of the plan, such as held-out ones.
        confidence: Of the intervals, in (0, 1). Default: 0.95.

    Raises:
        ConfigError: A value is out of its range, or only one of `by` and `classes` is given.

    References:
        Dwork and Roth (2014), The Algorithmic Foundations of Differential Privacy, Appendix A.

    >>> release = Release(noise_multiplier=20, bounds={"accuracy": 1.0})
    >>> round(release.plan(population=5000).epsilon(1e-5), 2)
    0.16
    """

    noise_multiplier: float
    bounds: Mapping[str, float]
    by: Callable[[Any], Tensor] | None = None
    classes: int | None = None
    population: float | None = None
    confidence: float = 0.95

    def __post_init__(self) -> None:
        require(0 < self.noise_multiplier < math.inf, "noise_multiplier", self.noise_multiplier, "in (0, inf)")
        require(len(self.bounds) > 0, "bounds", dict(self.bounds), "to name at least one metric")
        for name, bound in self.bounds.items():
            require(0 < bound < math.inf, f"bounds[{name!r}]", bound, "in (0, inf)")
        together = "to be given together with by"
        require((self.by is None) == (self.classes is None), "classes", self.classes, together)
        whole = self.classes is None or (type(self.classes) is int and self.classes >= 1)
        require(whole, "classes", self.classes, "to be a whole number >= 1")
        declared = self.population is None or 0 < self.population < math.inf
        require(declared, "population", self.population, "in (0, inf)")
        require(0 < self.confidence < 1, "confidence", self.confidence, "in (0, 1)")

    def plan(self, population: float | None = None, delta: float | None = None) -> PrivacyPlan:
        """What the release costs: one step at sampling rate 1.

        Give it to ``PrivacyPlan.calibrate(after=[...])`` to leave room for the release in the epsilon of a training
        run.

        Args:
            population: The declared number of records, above 0, where the release itself has none.
            delta: The delta at which epsilon is stated (default: none).

        Raises:
            ConfigError: No number of records is declared.
        """
        population = self.population or population
        if population is None:
            raise ConfigError("Expected the declared number of records: plan(population=...).")
        return PrivacyPlan(
            steps=1,
            sampling_rate=1.0,
            expected_batch_size=population,
            noise_multiplier=float(self.noise_multiplier),
            delta=delta,
        )

    @property
    def _figures(self) -> int:
        """Numbers that a record contributes to."""
        return len(self.bounds) + (self.by is not None)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A released number with its interval. Both are safe to publish.

    The interval accounts for the noise, whose scale is known. It says where the figure of *these* records lies, and
    not that of the people they were drawn from.

    Args:
        value: The released number.
        low: The lower end of the interval.
        high: The upper end.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ClassMetrics:
    """What was released of one class.

    Args:
        count: The number of records.
        sums: For each metric, the sum of its clamped values.
        means: For each metric, sum over count, with Fieller's interval within [0, bound]. The value is NaN if the
            released count is not positive.

    References:
        Fieller (1954), Some Problems in Interval Estimation, Journal of the Royal Statistical Society B 16(2).
    """

    count: Estimate
    sums: Mapping[str, Estimate]
    means: Mapping[str, Estimate]


@dataclass(frozen=True, kw_only=True)
class ReleasedMetrics:
    """Released metrics of private records. All of it is safe to publish, at the epsilon of `plan`.

    Args:
        means: For each metric, the sum of its clamped values over the *declared* population. If the declared number is
            too large by a tenth, so much are the means too small.
        classes: One entry per class; empty without `by`.
        confidence: Of each interval.
        plan: The plan of this release, one step, with the delta of the trainer's plan.
        run_id: Its name in the ledger.
    """

    means: Mapping[str, Estimate]
    classes: Sequence[ClassMetrics]
    confidence: float
    plan: PrivacyPlan
    run_id: str


def release_metrics(
    model: torch.nn.Module,
    metrics: Mapping[str, LossFn],
    private: PrivateData,
    release: Release,
    plan: PrivacyPlan,
    *,
    ledger: Ledger | None,
    public_example: Any = None,
    rows: int | None = None,
    unsafe_seed: int | None = None,
    world: World | None = None,
) -> ReleasedMetrics:
    """Release metrics of all private records through the one door there is, `PrivateGradient`.

    Guarantee: as `Release` says. Passes over private records leave the model, its modes and all generators as they
    were, and nothing but the release leaves this function. What a metric or `by` keeps for itself cannot be seen.

    Args:
        model: The model, in the mode in which to evaluate.
        metrics: Functions of model and batch that return one number per example, by name.
        private: The private records.
        release: What to release.
        plan: Of the release; see `Release.plan`.
        ledger: The ledger of the private data set; None on all ranks of `world` but 0.
        public_example: One made-up record that shows the shapes, where the records do not. Default None.
        rows: How many records to read per batch, at least 1. Default None, for 256.
        unsafe_seed: A seed for tests. With a seed nothing is private.
        world: The processes that share the records. Default None, for this one alone.

    Raises:
        BudgetExceeded: The ledger's budget does not allow it. No record is read then.
        ConfigError: A metric is not known, fails on made-up records, or mixes records.
    """
    for name in release.bounds:
        require(name in metrics, "metric", name, f"in {sorted(metrics)}", "Name it in Trainer(metrics=...).")
    chosen = {name: _in_double(metrics[name]) for name in release.bounds}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    require_device(device)
    made_up = map_batch(lambda t: t.to(device), private._schema(public_example).synthetic(PROBE_ROWS))
    for metric in (*chosen.values(), *([_as_metric(release.by)] if release.by else [])):
        probe(model, metric, made_up)
    sums, figures = _Sums(model, (release.classes or 1, release._figures), device), _Figures(model, chosen, release)
    name = f"{'unsafe-' if unsafe_seed is not None else ''}metrics-{secrets.token_hex(8)}"
    run_id = (world or World()).from_lead(lambda: name)
    source = PrivateGradient(
        sums,
        lambda _, batch: figures.clipped_sum(batch, 1.0).tensors[0],  # it shows the ranges of labels
        private,
        plan,
        ledger=ledger,
        run_id=run_id,
        public_example=public_example,
        performance=Performance(backend=figures, micro_batch_size=rows or _ROWS),
        entropy=OsEntropy() if unsafe_seed is None else UnsafeSeed(unsafe_seed),
        world=world,
    )
    try:
        (released,) = source.release()
    finally:  # a refused release leaves no open run behind, which would reserve its step
        if ledger is not None:
            ledger.finish(run_id, updates=source.out.count)
    return _described(released.cpu(), release, plan, run_id)


class _Sums(torch.nn.Module):
    """What is released in place of parameters: one row per class.

    The model is held in a tuple. So its own parameters are not among those that are released, and whatever a private
    pass writes into it is undone all the same, because `ModelState` follows tuples.
    """

    def __init__(self, model: torch.nn.Module, shape: tuple[int, int], device: torch.device) -> None:
        super().__init__()
        self.sums = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64, device=device))
        self.held = (model,)


@final
class _Figures:
    """Sums what each row contributes. No row contributes more than the clip norm, which is 1."""

    name = "metrics"

    def __init__(self, model: torch.nn.Module, metrics: Mapping[str, LossFn], release: Release) -> None:
        self._model, self._metrics, self._release = model, metrics, release

    @torch.no_grad()
    def clipped_sum(
        self, batch: Batch, max_grad_norm: float, counted: Tensor | None = None, adding: Adding | None = None
    ) -> ClippedSum:
        assert max_grad_norm == 1, "the plan of a release has this clip norm"
        given = contributions(self._model, self._metrics, self._release, batch)
        groups = self._groups(batch)
        known = (groups >= 0) & (groups < (self._release.classes or 1))
        known = known if counted is None else known & counted.to(known.device)
        total = given.new_zeros(self._release.classes or 1, given.shape[1])
        total.index_add_(0, groups[known], given[known])
        return ClippedSum([total], max_grad_norm)

    @torch.no_grad()
    def per_example(self, batch: Batch) -> Tensors:
        """What the model returns: in an accuracy of made-up rows, hardly ever does a last bit show."""
        found: Tensors = []
        hook = self._model.register_forward_hook(lambda module, args, out: found.extend(batch_leaves(out)))
        try:
            for metric in self._metrics.values():
                metric(self._model, map_batch(torch.clone, batch))
        finally:
            hook.remove()
        return [t.clone() for t in found if t.dim() and len(t) == batch_rows(batch)]

    def _groups(self, batch: Batch) -> Tensor:
        if self._release.by is None:
            return torch.zeros(batch_rows(batch), dtype=torch.int64, device=batch_leaves(batch)[0].device)
        return _whole_numbers(self._release.by(map_batch(torch.clone, batch)), batch).to(torch.int64)


def contributions(model: torch.nn.Module, metrics: Mapping[str, LossFn], release: Release, batch: Batch) -> Tensor:
    """What each row adds to the sum: a row of the result has Euclidean norm at most 1, whatever the metrics return."""
    columns = [
        metric(model, map_batch(torch.clone, batch)) / release.bounds[name]  # a metric may write into its input
        for name, metric in metrics.items()
    ]
    if release.by is not None:
        columns.append(torch.ones_like(columns[0]))
    shares = torch.stack(columns, dim=1)
    dense = [t.reshape(len(t), -1).isfinite().all(1) for t in batch_leaves(batch) if t.layout == torch.strided]
    usable = torch.stack([~shares.isnan().any(1), *dense]).all(0)
    shares = torch.where(usable[:, None], shares, 0.0).clamp_(0.0, 1.0)
    return shares.div_(math.sqrt(release._figures)).div_(_GRID).floor_().mul_(_GRID)


def _in_double(metric: LossFn) -> LossFn:
    return lambda model, batch: one_loss_each(metric(model, batch), batch).double()


def _as_metric(by: Callable[[Any], Tensor]) -> LossFn:
    return lambda model, batch: _whole_numbers(by(batch), batch).double()


def _whole_numbers(groups: Any, batch: Batch) -> Tensor:
    rows = batch_rows(batch)
    if not isinstance(groups, Tensor) or groups.shape != (rows,) or groups.is_floating_point() or groups.is_complex():
        got = f"{tuple(groups.shape)} {groups.dtype}" if isinstance(groups, Tensor) else type(groups).__name__
        raise ConfigError(f"Expected by(batch) to return one whole number per example, shape ({rows},); got {got}.")
    return groups


def _described(released: Tensor, release: Release, plan: PrivacyPlan, run_id: str) -> ReleasedMetrics:
    """The released numbers in units of their metrics. This is post-processing."""
    root, population = math.sqrt(release._figures), plan.expected_batch_size
    noise = noise_scale(plan.noise_multiplier, root)  # on a sum of shares
    z = NormalDist().inv_cdf((1 + release.confidence) / 2)
    sums = (released * root * population).tolist()

    def estimate(value: float, spread: float) -> Estimate:
        return Estimate(value=value, low=value - z * spread, high=value + z * spread)

    means = {
        name: estimate(
            bound * sum(row[m] for row in sums) / population, bound * noise * math.sqrt(len(sums)) / population
        )
        for m, (name, bound) in enumerate(release.bounds.items())
    }
    classes = [
        ClassMetrics(
            count=estimate(row[-1], noise),
            sums={n: estimate(b * row[m], b * noise) for m, (n, b) in enumerate(release.bounds.items())},
            means={n: _ratio(row[m], row[-1], z * noise, b) for m, (n, b) in enumerate(release.bounds.items())},
        )
        for row in (sums if release.by is not None else [])
    ]
    return ReleasedMetrics(means=means, classes=tuple(classes), confidence=release.confidence, plan=plan, run_id=run_id)


def _ratio(share: float, count: float, reach: float, bound: float) -> Estimate:
    """bound * share / count, where both have the same noise, of which `reach` is z standard deviations.

    For the true ratio r of the sums without noise, share - r count is normal with variance noise^2 (1 + r^2). So the r
    with (share - r count)^2 <= reach^2 (1 + r^2) are an exact confidence set. It is an interval if the count differs
    from zero; otherwise the data exclude nothing that is useful, and the interval is [0, bound].

    References:
        Fieller (1954), Some Problems in Interval Estimation, Journal of the Royal Statistical Society B 16(2).
    """
    value = bound * min(max(share / count, 0.0), 1.0) if count > 0 else math.nan
    a = count**2 - reach**2
    if count <= 0 or a <= 0:
        return Estimate(value=value, low=0.0, high=bound)
    root = reach * math.sqrt(count**2 + share**2 - reach**2)
    low, high = ((share * count + sign * root) / a for sign in (-1, 1))
    return Estimate(value=value, low=bound * min(max(low, 0.0), 1.0), high=bound * min(max(high, 0.0), 1.0))
