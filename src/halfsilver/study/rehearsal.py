"""Rehearsal: which geometry to use, found on public rows under the noise of the real plan, before epsilon is spent."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfsilver._core.averaging import AverageKind
from halfsilver._core.given import as_data
from halfsilver.errors import ConfigError, require
from halfsilver.mirror import Finish, Geometry, Whitened
from halfsilver.mirror.rows import PublicRows
from halfsilver.mirror.schedules import falling
from halfsilver.privacy.strategies import INDEPENDENT
from halfsilver.study.run import per_example
from halfsilver.study.stand_ins import Examples, StandIns
from halfsilver.trainer import Trainer

_FEWEST = 40  # held-out rows: half of them stand in for private ones, half are scored
_SHARE = 0.2  # of the plan's steps, at least _STEPS
_STEPS = 20
CANDIDATES: tuple[Geometry, ...] = (Whitened(damping=0.1), Whitened(damping=1.0), Whitened(damping=10.0))
FACTORS = (1 / 3, 1.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One rehearsal.

    Args:
        geometry: What was tried, or None for the coordinates of the weights.
        lr_factor: What the learning rate was multiplied by.
        loss: Mean loss of the scored rows afterwards; infinite if it diverged.
    """

    geometry: Geometry | None
    lr_factor: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class GeometryChoice:
    """The outcome of `choose_geometry`. Printed, it says what was chosen and why.

    Args:
        geometry: The choice: pass it to `Trainer`. None keeps the coordinates of the weights.
        lr_factor: The factor by which to multiply the learning rate, for this choice.
        ahead: By how much the best geometry is ahead of none in held-out loss. Negative if it is behind.
        standard_error: The standard error of `ahead`, paired over the scored rows.
        rows: Number of scored rows.
        tried: All rehearsals.
    """

    geometry: Geometry | None
    lr_factor: float
    ahead: float
    standard_error: float
    rows: int
    tried: Sequence[Rehearsal]

    def __str__(self) -> str:
        best = min((t for t in self.tried if t.geometry is not None), key=lambda t: t.loss)
        plain = min((t for t in self.tried if t.geometry is None), key=lambda t: t.loss)
        sure = f"{self.ahead:+.4f} ahead, paired standard error {self.standard_error:.4f} over {self.rows} rows"
        chosen = "Chosen: no geometry" if self.geometry is None else f"Chosen: {self.geometry!r}"
        return (
            f"{chosen}, learning rate times {self.lr_factor:.3g}. Held-out public loss under the plan's noise: "
            f"{best.loss:.4f} with {best.geometry!r}, {plain.loss:.4f} without a geometry ({sure})."
        )


def choose_geometry(
    trainer: Trainer,
    public: Any,
    held_out: Any,
    *,
    candidates: Sequence[Geometry] = CANDIDATES,
    lr_factors: Sequence[float] = FACTORS,
    steps: int | None = None,
) -> GeometryChoice:
    """Decide on public rows whether a geometry helps, and which one.

    Each candidate, and none, is rehearsed: a copy of the model takes `steps` private steps on one half of the held-out
    rows, with batch, clip norm and noise of the trainer's plan, and is scored on the other half. A geometry is chosen
    only if its loss is lower by more than one standard error, so a shape from unsuitable public rows is turned down.
    The trainer and its model are not changed.

    Guarantee: no private row is read, so the choice costs no privacy.

    Args:
        trainer: The trainer of the run to come, with its model at the start. Its scheduler is left out.
        public: The public rows from which the geometry is made, as for `Trainer.fit`.
        held_out: Public rows of the kind of the private ones, on which the start was *not* trained; at least 40.
        candidates: Geometries to try (default: `Whitened` with damping 0.1, 1 and 10).
        lr_factors: Multiples of the learning rate at which each is tried, each above 0 (default: 1/3, 1 and 3).
        steps: Steps of a rehearsal, at least 1 (default: a fifth of the plan's, at least 20 where there are as many).

    Returns:
        The choice, with everything that was tried.

    Raises:
        ConfigError: Too few held-out rows, no candidate, or a value is out of its range.

    >>> import torch, halfsilver as hs
    >>> x = torch.randn(300, 3)
    >>> rows = (x, x.sum(1))
    >>> model = torch.nn.Linear(3, 1)
    >>> trainer = hs.Trainer(
    ...     model,
    ...     lambda model, batch: (model(batch[0])[:, 0] - batch[1]) ** 2,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     plan=hs.PrivacyPlan.calibrate(epsilon=2, delta=1e-4, population=400, batch_size=40, epochs=1),
    ... )
    >>> public, held_out = [t[:200] for t in rows], [t[200:] for t in rows]
    >>> choice = hs.study.choose_geometry(trainer, tuple(public), tuple(held_out))
    >>> len(choice.tried), choice.rows
    (12, 50)
    """
    public, held_out = as_data(public), as_data(held_out)
    plan, rows = trainer.plan, len(PublicRows(held_out))
    require(rows >= _FEWEST, "number of held-out rows", rows, f"at least {_FEWEST}")
    require(len(candidates) > 0, "candidates", candidates, "one or more geometries")
    require(len(lr_factors) > 0 and min(lr_factors) > 0, "lr_factors", lr_factors, "one or more above 0")
    steps = min(plan.steps, max(_STEPS, round(_SHARE * plan.steps))) if steps is None else steps
    require(steps >= 1, "steps", steps, "at least 1")
    if plan.unit != "example":
        raise ConfigError("Expected a plan for examples. For users, hs.advise(local=...) tries a geometry.")
    losses = {
        (geometry, factor): rehearse(
            trainer, public, Examples(held_out), geometry=geometry, lr_factor=factor, steps=steps
        ).unseen["loss"]
        for geometry in (None, *candidates)
        for factor in lr_factors
    }
    return _choice(losses)


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """How a rehearsal ended: values of each metric for the rows that it trained on, and for those that it did not.

    Where records are users, these are the rows of the users that it trained on, and those of the others.
    """

    seen: Mapping[str, Tensor]
    unseen: Mapping[str, Tensor]


def rehearse(
    trainer: Trainer,
    public: Any,
    held_out: StandIns,
    *,
    geometry: Geometry | None,
    lr_factor: float,
    steps: int,
    lr_end: float = 1.0,
    finish: Finish | None = None,
) -> Rehearsed:
    """A short run on one half of the held-out records under the plan's noise; loss and the trainer's metrics of both.

    The learning rate falls along a cosine to `lr_end` times its first value. With `finish`, the last step is fitted to
    both halves.
    """
    plan, rows = trainer.plan, len(held_out)
    require(plan.noise == INDEPENDENT, "noise", plan.noise, "to be independent for a rehearsal")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    half = rows // 2
    # Repeated until one expected batch can be drawn, so signal and noise of a step are related as in the real run; and
    # until they are more than the public rows, as private rows are.
    # Users take long, so all of them take part in each step, and `public` counts in rows.
    by_user = plan.unit == "user"
    fewest = plan.expected_batch_size if by_user else max(plan.expected_batch_size, len(PublicRows(public)) + 1)
    stand_in = order[:half].repeat(math.ceil(fewest / half))
    rate = min(1.0, plan.expected_batch_size / len(stand_in))
    shorter = replace(plan, steps=steps, spare_steps=0, sampling_rate=rate)
    copied = _copy(trainer, shorter, geometry, lr_factor, lr_end, trainer.average)
    with tempfile.TemporaryDirectory(prefix="halfsilver-") as folder:
        copied.fit(held_out.at(stand_in).private, public, run_dir=folder, check_usable=False)
    model, metrics = copied.model, {"loss": copied.loss_fn, **trainer.metrics}
    if finish is not None and _mean(per_example(model, copied.loss_fn, held_out.rows)) < math.inf:
        model = finish.fit(model, copied.loss_fn, held_out.rows).model
    seen, unseen = (held_out.at(part).rows for part in (order[:half], order[half:]))
    return Rehearsed(
        seen={name: per_example(model, fn, seen) for name, fn in metrics.items()},
        unseen={name: per_example(model, fn, unseen) for name, fn in metrics.items()},
    )


def rehearse_noise(
    trainer: Trainer,
    public: StandIns,
    held_out: Any,
    *,
    geometry: Geometry | None,
    lr_factor: float,
    steps: int,
    records: int,
    pace: float,
    noise: float,
    lr_end: float,
    average: AverageKind,
    finish: Finish | None,
) -> float:
    """What the noise of a long run does to a model: held-out loss after a run on the public records themselves.

    The start has learnt the public records already, so hardly anything but the noise changes it. A step stands for
    `pace` steps of the trainer's plan: the learning rate is as many times larger, and the noise smaller by the square
    root of it. Where steps are small, neither the way nor the spread of the weights changes (Li et al. 2019). Each step
    has an expected number of `records` records. `noise` multiplies the noise.

    References:
        Li et al. (2019), Stochastic Modified Equations and Dynamics of Stochastic Gradient Algorithms,
        arXiv:1811.01558.
    """
    count, plan = len(public), trainer.plan
    # One more than the public ones, as private records are more; all are drawn where a step has as many.
    stand_in = torch.arange(max(count + 1, records)) % count
    shorter = replace(
        plan,
        steps=steps,
        spare_steps=0,
        expected_batch_size=float(records),
        sampling_rate=records / len(stand_in),
        noise_multiplier=noise * plan.noise_multiplier * records / (plan.expected_batch_size * math.sqrt(pace)),
    )
    copied = _copy(trainer, shorter, geometry, lr_factor * pace, lr_end, average)
    with tempfile.TemporaryDirectory(prefix="halfsilver-") as folder:
        copied.fit(public.at(stand_in).private, public.rows, run_dir=folder, check_usable=False)
    losses = per_example(copied.model, copied.loss_fn, held_out)
    if finish is None or _mean(losses) == math.inf:
        return _mean(losses)
    return finish.fit(copied.model, copied.loss_fn, held_out).loss_after


def _copy(
    trainer: Trainer, plan: Any, geometry: Geometry | None, factor: float, lr_end: float, average: AverageKind
) -> Trainer:
    """A trainer with a model and an optimizer of its own. All have the same noise, so differences are due to them."""
    model, optimizer = copy.deepcopy((trainer.model, trainer.optimizer))
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return Trainer(
        model,
        trainer.loss_fn,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: falling(step / plan.steps, lr_end)),
        plan=plan,
        mirror=trainer.mirror,
        geometry=geometry,
        public_loss_fn=trainer.public_loss_fn,
        public_batch_size=trainer.public_batch_size,
        average=average,
        performance=trainer.performance,
        skip_public_copies=False,
        unsafe_seed=0,
        progress=False,
    )


def _choice(losses: dict[tuple[Geometry | None, float], Tensor]) -> GeometryChoice:
    means = {key: _mean(values) for key, values in losses.items()}
    best = min((key for key in means if key[0] is not None), key=lambda key: means[key])
    plain = min((key for key in means if key[0] is None), key=lambda key: means[key])
    difference = losses[plain].double() - losses[best].double()
    ahead, error = float(difference.mean()), float(difference.std() / len(difference) ** 0.5)
    geometry, factor = best if ahead > error or means[best] < means[plain] == math.inf else plain
    return GeometryChoice(
        geometry=geometry,
        lr_factor=factor,
        ahead=ahead,
        standard_error=error,
        rows=len(difference),
        tried=[Rehearsal(geometry=key[0], lr_factor=key[1], loss=mean) for key, mean in means.items()],
    )


def _mean(values: Tensor) -> float:
    mean = float(values.double().mean())
    return mean if math.isfinite(mean) else math.inf
