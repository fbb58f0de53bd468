"""Advice: batch, clip norm, optimizer, learning rate and geometry of a run, from public rows alone."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from halfsilver._core.given import as_data
from halfsilver._core.local_training import LocalTraining
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import Batch, LossFn, eval_mode, norm, take_rows, trainable
from halfsilver.errors import ConfigError, require
from halfsilver.mirror import Finish, Geometry, Whitened
from halfsilver.mirror.centre import saved
from halfsilver.mirror.finish import FEWEST_ROWS, Calibrated
from halfsilver.mirror.rows import PublicRows
from halfsilver.mirror.schedules import falling
from halfsilver.mirror.users import PublicUsers, alignment
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients.base import row_norms
from halfsilver.privacy.gradients.vmap import Vmap
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.progress import telling
from halfsilver.study.arena import rows_at
from halfsilver.study.batches import FEWEST_STEPS, SMALLEST_BATCH, BatchOption, best_batch, end_noise
from halfsilver.study.rehearsal import Rehearsed, rehearse, rehearse_noise
from halfsilver.study.run import per_example
from halfsilver.study.stand_ins import Examples, StandIns, Users
from halfsilver.trainer import Trainer

Optimizer = Literal["SGD", "Adam"]

FEWEST_HELD_OUT = 40
FEWEST_USERS = 4  # held out
_FEWEST_STEPS = 500  # of a model with several trained layers, even if they cost noise
_ROWS_AT_ONCE = 32
_MOST_NORMS = 512
_REHEARSED_STEPS = 30
_MOST_REHEARSED = 400  # rows of a rehearsal and as many to score
_MOST_OPERATIONS = 1e11  # of the forward passes of a rehearsal: a large model is rehearsed on fewer rows
_NOISE_STEPS, _NOISE_ROWS, _NOISE_USERS = (
    1000,
    16,
    2,
)  # of a rehearsal of the noise of a whole run; a large model has fewer steps
# What the loss after that rehearsal must fall by for the next lower rate: a factor, or nats of a log-likelihood,
# whose size depends on the number of classes.
_WORTH, _NATS = 1.2, 0.125
_RATE_STEP = math.sqrt(10)
_MOST_RATES = 9
_NO_NOISE = 1e-6  # of the plan's
_ADAM_RATE = 1e-3  # where the search for its learning rate begins
LR_END = 0.1
GEOMETRY = Whitened()  # the one that is tried
FINISH = Finish()  # the one that is advised to models that return logits
_SURE = 2  # standard errors on either side of a forecast
_TIMED_ROWS, _TIMED_STEPS = 128, (1, 4)


@dataclass(frozen=True, kw_only=True)
class StartState:
    """The model before private training, as public rows show it.

    Args:
        public_loss: Mean loss on the public rows, on which it may have been trained.
        held_out_loss: Mean loss on the held-out rows.
        temperature: The temperature that would calibrate it on the held-out rows, or None where the model returns
            something else than logits of classes. Above 1 it is too confident.
        alignment: |mean gradient| / root mean square of the gradient norms, over held-out rows. A clip centre at the
            public gradient would save a share 1 - sqrt(1 - alignment^2) of the clip norm.
    """

    public_loss: float
    held_out_loss: float
    temperature: float | None
    alignment: float


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One rehearsal: what was tried, and the loss after a short run on public rows under the plan's noise.

    Args:
        optimizer: "SGD" or "Adam".
        geometry: A geometry, or None.
        learning_rate: The learning rate.
        loss: The middle between the mean loss of the rows that it trained on and that of the others; infinite if it
            diverged.
    """

    optimizer: Optimizer
    geometry: Geometry | None
    learning_rate: float
    loss: float

    @property
    def kind(self) -> tuple[Optimizer, bool]:
        """The optimizer, and whether it has no geometry."""
        return self.optimizer, self.geometry is None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Where a metric will be at the end of the run, as the rehearsal of the advised setting shows it.

    The rehearsal has few rows. Those that it trained on look too good, and those that it did not look too bad, because
    the run itself has many more. Its end is expected between the two, or at the start if it learns nothing. The run is
    also longer than the rehearsal, which the interval does not know.

    Args:
        start: Mean over the held-out rows before training.
        expected: The middle between the rows that the rehearsal trained on and those that it did not.
        low: The smallest of the three means, less two standard errors.
        high: The largest of the three means, plus two standard errors.
    """

    start: float
    expected: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What `advise` recommends. Printed, it says so in words.

    Args:
        plan: The privacy plan: batch, steps, noise and clip norm.
        optimizer: "SGD" or "Adam".
        learning_rate: Its learning rate, falling along a cosine to a tenth.
        harm: Held-out loss after a rehearsal of the whole run on the public rows, as a multiple of that of the start.
            Where the start knows the public rows, this is what the noise does. For users, as a multiple of that of the
            same run without noise.
        geometry: `Whitened()` or None.
        finish: The last step after training, or None where the model does not return logits of classes.
        batches: All batch sizes that were compared.
        norms: Gradient norms of held-out public rows, or norms of updates of held-out users, ascending.
        start: The state of the start.
        tried: All rehearsals.
        rehearsed_steps: Steps of each.
        forecast: Loss and metrics at the end of the run, by name.
        less_noise: What doubling something would do to the noise at the end of the run, as a factor below 1, by name.
            The batch stays the same share of the records.
        seconds_per_row: Measured time of a private step per record, where the compute was given in minutes.
    """

    plan: PrivacyPlan
    optimizer: Optimizer
    learning_rate: float
    harm: float
    geometry: Geometry | None
    finish: Finish | None
    batches: Sequence[BatchOption]
    norms: Sequence[float]
    start: StartState
    tried: Sequence[Tried]
    rehearsed_steps: int
    forecast: Mapping[str, Forecast]
    less_noise: Mapping[str, float]
    seconds_per_row: float | None = None

    def trainer(self, model: nn.Module, loss_fn: LossFn, **options: Any) -> Trainer:
        """A trainer as advised: the optimizer with a falling rate, and an average of the iterates.

        Args:
            model: The model at the start.
            loss_fn: As for `Trainer`.
            options: Further arguments of `Trainer`, or others in place of the advised ones.
        """
        optimizer = options.pop("optimizer", None) or _optimizer(self.optimizer, model, self.learning_rate)
        steps = self.plan.steps
        advised: dict[str, Any] = {
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: falling(step / steps, LR_END)),
            "average": average_for(steps),
            "geometry": self.geometry,
            "plan": self.plan,
        }
        return Trainer(model, loss_fn, **{**advised, **options})

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values; geometries and the last step as text."""

        def plain(tried: Tried) -> dict[str, Any]:
            loss = tried.loss if math.isfinite(tried.loss) else None
            return {**asdict(replace(tried, geometry=None)), "geometry": _text(tried.geometry), "loss": loss}

        return {
            "plan": self.plan.to_dict(),
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "harm": self.harm,
            "geometry": _text(self.geometry),
            "finish": _text(self.finish),
            "batches": [asdict(option) for option in self.batches],
            "norms": list(self.norms),
            "start": asdict(self.start),
            "tried": [plain(one) for one in self.tried],
            "rehearsed_steps": self.rehearsed_steps,
            "forecast": {name: asdict(one) for name, one in self.forecast.items()},
            "less_noise": dict(self.less_noise),
            "seconds_per_row": self.seconds_per_row,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Advice:
        """What `to_json` returned, such as the advice.json of `halfsilver advise`.

        Args:
            record: The values.

        Raises:
            ConfigError: They are not such, or name a geometry or a last step that advice does not give.
        """
        shapes: dict[str | None, Geometry | None] = {_text(value): value for value in (None, GEOMETRY)}
        ends: dict[str | None, Finish | None] = {_text(value): value for value in (None, FINISH)}

        def tried(one: Mapping[str, Any]) -> Tried:
            loss = math.inf if one["loss"] is None else one["loss"]
            return Tried(**{**one, "geometry": shapes[one["geometry"]], "loss": loss})

        try:
            return cls(
                plan=PrivacyPlan.from_dict(record["plan"]),
                optimizer=record["optimizer"],
                learning_rate=record["learning_rate"],
                harm=record["harm"],
                geometry=shapes[record["geometry"]],
                finish=ends[record["finish"]],
                batches=tuple(BatchOption(**one) for one in record["batches"]),
                norms=tuple(record["norms"]),
                start=StartState(**record["start"]),
                tried=tuple(tried(one) for one in record["tried"]),
                rehearsed_steps=record["rehearsed_steps"],
                forecast={name: Forecast(**one) for name, one in record["forecast"].items()},
                less_noise=dict(record["less_noise"]),
                seconds_per_row=record["seconds_per_row"],
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"Not an advice: {error!r}.") from error

    def __str__(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in in_words(self).items())


def average_for(steps: int) -> float:
    """The decay of the average of the iterates: over the last tenth of the run, and over 100 steps at most.

    >>> average_for(50), average_for(200), average_for(5000)
    (0.8, 0.95, 0.99)
    """
    return min(0.99, 1 - 10 / max(steps, 20))


def in_words(advice: Advice) -> dict[str, str]:
    """Each part of the advice, and why."""
    plan, start = advice.plan, advice.start
    chosen = min(advice.batches, key=lambda b: abs(b.batch_size - plan.expected_batch_size))
    loss = advice.forecast["loss"].expected
    kinds = sorted({t.kind for t in advice.tried} - {(advice.optimizer, advice.geometry is None)})
    others = [min((t for t in advice.tried if t.kind == kind), key=lambda t: t.loss) for kind in kinds]
    ended = [f"{t.optimizer}, {t.geometry or 'no geometry'}: {t.loss:.4g}" for t in others if math.isfinite(t.loss)]
    units = "records" if plan.unit == "example" else "users"
    norms = "gradient norms of held-out public rows" if plan.unit == "example" else "norms of updates of held-out users"
    whole = "A rehearsal" if plan.unit == "example" else "The noise in a rehearsal"
    long = "" if advice.seconds_per_row is None else f" {_minutes(advice)} at the speed measured here."
    return {
        "Batch": f"{plan.expected_batch_size:g} {units}, {plan.steps} steps, noise multiplier "
        f"{plan.noise_multiplier:.3g}.{long} At this epsilon and compute the noise at the end is {chosen.noise:.2f} "
        f"times the least. {_smaller(advice.batches, chosen)}",
        "Clip norm": f"{plan.max_grad_norm:.3g}, "
        + ("the third quartile" if advice.finish is None else "the median (or a tenth of the third quartile)")
        + f" of {norms}.",
        "Learning rate": f"{advice.learning_rate:.3g} for {advice.optimizer}, falling to a tenth. Public loss after "
        f"{advice.rehearsed_steps} steps under this noise: {loss:.4g}, at the start {start.held_out_loss:.4g}. "
        f"{whole} of the whole run on public rows multiplies the held-out loss by {advice.harm:.2f}.",
        "Geometry": f"{'none' if advice.geometry is None else repr(advice.geometry)}. Loss of the other "
        f"kinds of rehearsal at their best: {'; '.join(ended) or 'none'}.",
        "Start": _about_start(start),
        "Forecast": " ".join(_forecast_text(name, one) for name, one in advice.forecast.items()),
        "More": "would bring less noise at the end of the run: "
        + ", ".join(f"{name} {factor:.2f} of it" for name, factor in advice.less_noise.items())
        + ".",
    }


def advise(
    model: nn.Module,
    loss_fn: LossFn,
    public: Any,
    held_out: Any,
    *,
    population: int,
    epsilon: float,
    delta: float,
    epochs: float | None = None,
    minutes: float | None = None,
    metrics: Mapping[str, LossFn] | None = None,
    local: LocalTraining | None = None,
    tell: Callable[[str], None] | None = None,
) -> Advice:
    """Recommend batch, clip norm, optimizer, learning rate and geometry of a private run, from public rows alone.

    At fixed epsilon and compute, the noise at the end of a run goes with sigma / sqrt(batch size). The advice is the
    smallest batch within 5 % of the least noise that leaves 50 steps; a model with several trained layers gets at least
    500, even if they cost noise. The clip norm is the median of gradient norms of held-out public rows (at least a
    tenth of their third quartile) for models that return logits, which a temperature calibrates after the run, and the
    third quartile for others. Optimizer, learning rate, and whether to use a geometry, come from rehearsals: short runs
    on one half of the held-out rows with the noise of the plan. The score is the middle between the loss of these rows
    and that of the other half. The learning rate is the largest within one standard error of the best. It is lowered by
    factors of sqrt(10) while that lowers the held-out loss after the whole run, rehearsed on the public rows, by 1/8
    nat for models that return logits, or by a factor of 1.2 for others. At last, half such a step is tried. A whole run
    learns a few public users by heart, so for users the same run without noise is the measure.

    Guarantee: no private row is read, so advice costs no privacy.

    Args:
        model: The model at the start of private training, pretrained or not. It is not changed.
        loss_fn: ``loss_fn(model, batch)`` returns one loss per example.
        public: The public rows of the run.
        held_out: Public rows of the kind of the private ones, at least 40, on which the start was *not* trained.
        population: The declared number of private records.
        epsilon: The budget of the run.
        delta: At most 1 / population.
        epochs: The compute of the run, in passes over the private records. Give this or `minutes`.
        minutes: The compute of the run in minutes on this machine. The speed of a private step is measured on public
            rows.
        metrics: Further per-example figures by name, for the forecast.
        local: How users train, where the unit is a user. `public` and `held_out` are then lists with the rows of each
            user, `population` counts users, and at least 4 users are held out. The clip norm comes from the norms of
            their updates, and the learning rate is that of the server.
        tell: Called with a word on progress (default: a progress line on a terminal).

    Returns:
        The advice.

    Raises:
        ConfigError: Too few held-out rows or users, or a value is out of its range.

    References:
        Akaike (1974), A New Look at the Statistical Model Identification, doi:10.1109/TAC.1974.1100705: loss of rows
        that a model was fitted to, and of others.

    >>> import torch, halfsilver as hs
    >>> x = torch.randn(300, 3)
    >>> loss_fn = lambda model, batch: (model(batch[0])[:, 0] - batch[1]) ** 2
    >>> public, held_out = (x[:200], x[:200].sum(1)), (x[200:], x[200:].sum(1))
    >>> advice = hs.advise(
    ...     torch.nn.Linear(3, 1), loss_fn, public, held_out, population=4000, epsilon=2, delta=1e-5, epochs=5
    ... )
    >>> advice.plan.steps >= 50, advice.plan.epsilon() <= 2
    (True, True)
    """
    public, held_out = as_data(public), as_data(held_out)
    known, unknown = (_records(data, local) for data in (public, held_out))
    what, fewest = ("rows", FEWEST_HELD_OUT) if local is None else ("users", FEWEST_USERS)
    require(len(unknown) >= fewest, f"number of held-out {what}", len(unknown), f"at least {fewest}")
    require(local is None or minutes is None, "minutes", minutes, "to be left out for users. Give epochs.")
    given = {name: value for name, value in {"epochs": epochs, "minutes": minutes}.items() if value is not None}
    require(len(given) == 1, "epochs and minutes", given or None, "one of the two")
    for name, value in given.items():
        require(value > 0, name, value, "above 0")
    require(population >= SMALLEST_BATCH, "population", population, f"at least {SMALLEST_BATCH}")
    with telling(tell) as say:
        seconds = None
        if epochs is None:
            say("speed of a private step")
            seconds = _seconds_per_row(model, loss_fn, held_out)
            epochs = 60 * (minutes or 0.0) / (seconds * population)
        asked: dict[str, Any] = {"population": population, "epsilon": epsilon, "delta": delta, "epochs": epochs}
        say("batch sizes")
        size, batches = best_batch(**asked, fewest_steps=_fewest_steps(model) if local is None else FEWEST_STEPS)
        plan = PrivacyPlan.calibrate(**asked, batch_size=size, unit="example" if local is None else "user")
        say(f"norms of held-out {what}")
        norms, alignment = _norms(model, loss_fn, unknown)
        temperature = _temperature(model, loss_fn, unknown.rows)
        finish = None if temperature is None else FINISH
        plan = replace(plan, max_grad_norm=float(f"{clip_norm(norms, finish):.3g}"))
        rehearsed = unknown if local is not None else Examples(_some(held_out, model, loss_fn))
        search = _Rehearsals(model, loss_fn, known, rehearsed, plan, metrics or {}, finish, say)
        best = search.best()
        long, harm = search.long(best)
        say("what more would bring")
        more: dict[str, dict[str, Any]] = {
            "twice the epsilon": {"epsilon": 2 * epsilon},
            f"twice the private {what}": {"population": 2 * population, "batch_size": 2 * size},
            "twice the epochs": {"epochs": 2 * epochs},
        }
        asked["batch_size"] = size
        now = end_noise(**asked)
        return Advice(
            plan=plan,
            optimizer=best.optimizer,
            learning_rate=float(f"{search.rate(long):.3g}"),
            harm=harm,
            geometry=best.geometry,
            finish=finish,
            batches=batches,
            norms=sorted(norms.tolist()),
            start=StartState(
                public_loss=_mean(model, loss_fn, known.rows),
                held_out_loss=_mean(model, loss_fn, unknown.rows),
                temperature=temperature,
                alignment=alignment,
            ),
            tried=search.tried(),
            rehearsed_steps=search.steps,
            forecast=_forecasts(
                search.done.get(long, search.done[best]), {"loss": loss_fn, **(metrics or {})}, model, unknown.rows
            ),
            less_noise={name: end_noise(**{**asked, **change}) / now for name, change in more.items()},
            seconds_per_row=seconds,
        )


def _records(data: Any, local: LocalTraining | None) -> Examples | Users:
    return Examples(data) if local is None else Users([as_data(rows) for rows in data], local)


def _norms(model: nn.Module, loss_fn: LossFn, records: Examples | Users) -> tuple[Tensor, float]:
    if isinstance(records, Users):
        return update_norms(model, loss_fn, records)
    return gradient_norms(model, loss_fn, PublicRows(records.rows))


def update_norms(model: nn.Module, loss_fn: LossFn, users: Users) -> tuple[Tensor, float]:
    """As `gradient_norms`, for the updates that public users send.

    Args:
        model: The model, whose modes are kept.
        loss_fn: One loss per example.
        users: Public users, and how they train.
    """
    each = [PublicUsers(model, loss_fn, [rows], users.local).gradient(step=0) for rows in users.users]
    sizes = torch.stack([torch.tensor(norm(update), dtype=torch.float64) for update in each])
    return sizes, alignment(sizes, [torch.stack(tensors).sum(0) for tensors in zip(*each, strict=True)])


def gradient_norms(model: nn.Module, loss_fn: LossFn, rows: PublicRows) -> tuple[Tensor, float]:
    """The gradient norms of at most 512 public rows, and how far the gradients point the same way.

    The second is |mean g| / sqrt(mean |g|^2), whose numerator is a mean over pairs of different rows, so that few rows
    do not look aligned by chance. It is 0 where that mean is negative.

    Args:
        model: The model, whose modes are kept.
        loss_fn: One loss per example.
        rows: Public rows.
    """
    count = min(len(rows), _MOST_NORMS)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]
    device = trainable(model)[0].device
    batches: list[Batch] = [rows.batch(order[i : i + _ROWS_AT_ONCE], device) for i in range(0, count, _ROWS_AT_ONCE)]
    norms: list[Tensor] = []
    with eval_mode(model), own_randomness(0, [device]):
        gradients = Vmap(model, loss_fn, take_rows(batches[0], slice(0, 2)))
        totals = [torch.zeros_like(p) for p in trainable(model)]
        for batch in batches:
            each = gradients.per_example(batch)
            norms.append(row_norms(each))
            totals = [total + one.sum(0) for total, one in zip(totals, each, strict=True)]
    sizes = torch.cat(norms).double()
    return sizes, alignment(sizes, totals)


@dataclass(frozen=True)
class _Point:
    """What a rehearsal tries; the learning rate is that many steps of sqrt(10) away from a usual one."""

    optimizer: Optimizer
    geometry: Geometry | None
    place: float


def _same_kind(one: _Point, other: _Point) -> bool:
    return (one.optimizer, one.geometry) == (other.optimizer, other.geometry)


class _Rehearsals:
    """Rehearsals of one plan. Each is done once, and all have the same noise."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        public: StandIns,
        held_out: StandIns,
        plan: PrivacyPlan,
        metrics: Mapping[str, LossFn],
        finish: Finish | None,
        say: Callable[[str], None],
    ) -> None:
        half = len(held_out) // 2
        # As many records as there are, with the same noise on their mean as the plan has: the same step for less work.
        small = replace(
            plan,
            expected_batch_size=float(half),
            noise_multiplier=plan.noise_multiplier * half / plan.expected_batch_size,
            sampling_rate=min(1.0, half / (plan.expected_batch_size / plan.sampling_rate)),
        )
        self.public, self.held_out, self.finish, self.say = public, held_out, finish, say
        self.steps = min(plan.steps, _REHEARSED_STEPS)
        self._plan_steps = plan.steps
        self._by_user = plan.unit == "user"
        self._noise_records = _NOISE_USERS if self._by_user else _NOISE_ROWS
        affordable = 3 * half * _REHEARSED_STEPS // self._noise_records
        self._noise_steps = min(plan.steps, _NOISE_STEPS, max(affordable, self.steps))
        before = per_example(model, loss_fn, held_out.rows).double().mean()
        self._start = float(before) if finish is None else finish.fit(model, loss_fn, held_out.rows).loss_after
        self.done: dict[_Point, Rehearsed] = {}
        self._usual: dict[Optimizer, float] = {"SGD": 1 / plan.max_grad_norm, "Adam": _ADAM_RATE}
        self._trainers = {
            name: Trainer(
                model,
                loss_fn,
                optimizer=_optimizer(name, model, rate),
                plan=small,
                metrics=metrics,
                progress=False,
            )
            for name, rate in self._usual.items()
        }

    def rate(self, point: _Point) -> float:
        """Its learning rate."""
        return self._usual[point.optimizer] * float(_RATE_STEP**point.place)

    def best(self) -> _Point:
        """SGD at its best rate, unless a geometry, or Adam, is ahead of it by more than one standard error."""
        best = self._lowest("SGD", None, 0)
        try:
            shaped = self._lowest("SGD", GEOMETRY, best.place)
        except ConfigError:  # no layer that can be whitened; anything else was found without a geometry
            self.say("no geometry: the model has no layer that can be whitened")
        else:
            best = shaped if self._ahead(shaped, best) else best
        adam = self._lowest("Adam", None, 0)
        return adam if self._ahead(adam, best) else best

    def long(self, best: _Point) -> tuple[_Point, float]:
        """The rate for the whole run: the largest that learns as well, if the noise of the whole run lets it; its harm.

        A rehearsal is short. Larger rates, which learn more in a long run, look as good in it; and noise that adds up
        over a long run does not show. So take the largest rate within one standard error of the best, rehearse the
        whole run on public rows, and go down while that lowers its loss by much. A little is expected: the start knows
        the public rows, so they show what noise costs and not what is learnt. At last, try half a step.
        """
        point = max((p for p in self.done if _same_kind(p, best) and not self._ahead(best, p)), key=lambda p: p.place)
        highest, harm = point, self._harm(point, stable=point)
        for _ in range(_MOST_RATES):
            lower = replace(point, place=point.place - 1)
            less = self._harm(lower, stable=highest)
            if not self._worth(harm, less, 1.0):
                break
            point, harm = lower, less
        between = replace(point, place=point.place - 0.5)
        less = self._harm(between, stable=highest)
        return (between, less) if self._worth(harm, less, 0.5) else (point, harm)

    def _worth(self, harm: float, less: float, steps: float) -> bool:
        """Whether a rate that is so many steps lower is worth it."""
        if harm == math.inf or self.finish is None:
            return harm == math.inf or harm > _WORTH**steps * less
        return (harm - less) * self._start > _NATS * steps

    def _harm(self, point: _Point, stable: _Point) -> float:
        """Held-out loss after the whole run on public rows, as a multiple of that of the start.

        A few public users are learnt by heart in a whole run, which many private ones are not. So for users the start
        is replaced by the end of the same run without noise.
        """
        after = self._whole_run(point, stable, noise=1.0)
        if not self._by_user or after == math.inf:
            return after / max(self._start, 1e-12)
        return after / max(self._whole_run(point, stable, noise=_NO_NOISE), 1e-12)

    def _whole_run(self, point: _Point, stable: _Point, noise: float) -> float:
        room = 1.0 if point.optimizer == "Adam" else _RATE_STEP * self.rate(stable) / self.rate(point)
        with_noise = "" if noise == 1 else ", without noise"
        self.say(f"the whole run on public rows, at learning rate {self.rate(point):.3g}{with_noise}")
        return rehearse_noise(
            self._trainers[point.optimizer],
            self.public,
            self.held_out.rows,
            geometry=point.geometry,
            lr_factor=_RATE_STEP**point.place,
            steps=self._noise_steps,
            records=self._noise_records,
            pace=max(1.0, min(self._plan_steps / self._noise_steps, room)),
            noise=noise,
            lr_end=LR_END,
            average=average_for(self._noise_steps),
            finish=self.finish,
        )

    def tried(self) -> list[Tried]:
        """All rehearsals."""
        return [
            Tried(optimizer=p.optimizer, geometry=p.geometry, learning_rate=self.rate(p), loss=self._loss(p))
            for p in self.done
        ]

    def _lowest(self, optimizer: Optimizer, geometry: Geometry | None, start: float) -> _Point:
        place = _lowest(lambda place: self._loss(_Point(optimizer, geometry, place)), start)
        return _Point(optimizer, geometry, place)

    def _loss(self, point: _Point) -> float:
        if point not in self.done:
            what = f"{point.optimizer}, {point.geometry or 'no geometry'}, learning rate {self.rate(point):.3g}"
            self.say(f"rehearsal {len(self.done) + 1}: {what}")
            self.done[point] = rehearse(
                self._trainers[point.optimizer],
                self.public.rows,
                self.held_out,
                geometry=point.geometry,
                lr_factor=_RATE_STEP**point.place,
                steps=self.steps,
                lr_end=LR_END,
                finish=self.finish,
            )
        return _middle(self.done[point])[0]

    def _ahead(self, one: _Point, other: _Point) -> bool:
        """Whether its loss is lower by more than one standard error, paired over rows."""
        if math.inf in (self._loss(one), self._loss(other)):
            return self._loss(one) < self._loss(other)
        gain, error = _middle(self.done[other], self.done[one])
        return gain > error


def _middle(one: Rehearsed, other: Rehearsed | None = None) -> tuple[float, float]:
    """The mean of the losses of seen and of unseen rows, or how far it is above that of `other`; its standard error.

    With few rows the first is too low and the second too high, to leading order by the same amount (Akaike 1974). So
    the middle estimates the loss of a run with many rows, and a rate is not turned down for learning few rows by heart.
    """
    means, squares = [], []
    for part in ("seen", "unseen"):
        values = getattr(one, part)["loss"].double()
        values = values if other is None else values - getattr(other, part)["loss"].double()
        means.append(float(values.mean()))
        squares.append(float(values.var()) / len(values))
    middle = sum(means) / 2
    return (middle, math.sqrt(sum(squares)) / 2) if math.isfinite(middle) else (math.inf, math.inf)


def _optimizer(name: Optimizer, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return kind(trainable(model), lr=rate)  # type: ignore[call-arg]


def _fewest_steps(model: nn.Module) -> int:
    matrices = sum(p.dim() > 1 for p in trainable(model))
    return FEWEST_STEPS if matrices <= 1 else _FEWEST_STEPS


def clip_norm(norms: Tensor, finish: Finish | None) -> float:
    """The third quartile of the norms; where a last step corrects what clipping does, their median.

    A low clip norm lets through more of the signal per unit of noise, and makes a classifier too confident, which a
    temperature corrects. The median is 0 where the start is sure and right about most rows, hence the tenth.
    """
    high = float(norms.quantile(0.75))
    return high if finish is None else max(float(norms.median()), high / 10)


def _some(held_out: Any, model: nn.Module, loss_fn: LossFn) -> Any:
    """As many held-out rows as rehearsals use: fewer for a large model, so that their time has a bound.

    The bound counts operations, not seconds, so that advice is the same on a busy machine.
    """
    rows = PublicRows(held_out)
    batch = rows.batch(torch.arange(2), trainable(model)[0].device)
    with eval_mode(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss_fn(model, batch)
    of_a_row = max(1.0, counter.get_total_flops() / 2)
    half = min(_MOST_REHEARSED, int(_MOST_OPERATIONS / (_REHEARSED_STEPS * of_a_row)))
    used = max(FEWEST_HELD_OUT, 2 * half)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:used]
    return held_out if len(rows) <= used else rows_at(held_out, order)


def _forecasts(
    rehearsed: Rehearsed, metrics: Mapping[str, LossFn], model: nn.Module, held_out: Any
) -> dict[str, Forecast]:
    found = {}
    for name, fn in metrics.items():
        start, seen, unseen = per_example(model, fn, held_out), rehearsed.seen[name], rehearsed.unseen[name]
        ends = [
            (float(part.double().mean()), _SURE * float(part.double().std()) / len(part) ** 0.5)
            for part in (start, seen, unseen)
        ]
        every = torch.cat([start, seen, unseen])  # a mean cannot leave the range of its rows
        found[name] = Forecast(
            start=ends[0][0],
            expected=(ends[1][0] + ends[2][0]) / 2,
            low=max(float(every.min()), min(mean - error for mean, error in ends)),
            high=min(float(every.max()), max(mean + error for mean, error in ends)),
        )
    return found


def _seconds_per_row(model: nn.Module, loss_fn: LossFn, rows: Any) -> float:
    """The time of a private step per record, from runs of one and of four steps on repeated public rows."""
    known = PublicRows(rows)
    made_up = PrivateData(rows_at(rows, torch.arange(_TIMED_ROWS) % len(known)), example=known.example())
    seconds = []
    for steps in (*_TIMED_STEPS, *_TIMED_STEPS):  # the first two warm up
        plan = PrivacyPlan(steps=steps, sampling_rate=1.0, expected_batch_size=float(_TIMED_ROWS), noise_multiplier=1.0)
        copied = copy.deepcopy(model)
        trainer = Trainer(
            copied, loss_fn, optimizer=_optimizer("SGD", copied, 1e-6), plan=plan, progress=False, unsafe_seed=0
        )
        with tempfile.TemporaryDirectory(prefix="halfsilver-") as folder:
            started = time.perf_counter()
            trainer.fit(made_up, run_dir=folder, delta=1e-5, check_usable=False)
            seconds.append(time.perf_counter() - started)
    fewer, more = _TIMED_STEPS
    return max(seconds[3] - seconds[2], 1e-3 * seconds[3]) / ((more - fewer) * _TIMED_ROWS)


def _lowest(value: Callable[[float], float], start: float) -> float:
    """The place of the lowest value, by steps downhill from `start`, of which there are at most some."""
    here = start
    for direction in (1, -1):
        for _ in range(_MOST_RATES):
            if not value(here + direction) < value(here):
                break
            here += direction
        if here != start:
            break
    return here


def _mean(model: nn.Module, fn: LossFn, rows: Any) -> float:
    return float(per_example(model, fn, rows).double().mean())


def _temperature(model: nn.Module, loss_fn: LossFn, held_out: Any) -> float | None:
    """The temperature that calibrates the model, or None where its outputs are not logits of classes.

    Logits are told by a loss that stays the same if all of them are raised by 1.
    """
    if len(PublicRows(held_out)) < FEWEST_ROWS:
        return None
    some = rows_at(held_out, torch.arange(FEWEST_ROWS))
    try:
        raised = per_example(Calibrated([model], bias=torch.ones(1)), loss_fn, some)
    except (AttributeError, TypeError, ConfigError, RuntimeError):  # a loss that needs more of a model than its output
        return None
    if not torch.allclose(raised, per_example(model, loss_fn, some), rtol=1e-3, atol=1e-3):
        return None
    return FINISH.fit(model, loss_fn, held_out).temperature


def _smaller(batches: Sequence[BatchOption], chosen: BatchOption) -> str:
    below = [b for b in batches if b.batch_size < chosen.batch_size]
    if not below:
        return "No smaller batch was compared."
    return f"A batch of {below[-1].batch_size} would have {below[-1].noise:.2f} times the least."


def _about_start(start: StartState) -> str:
    parts = [f"loss {start.public_loss:.4g} on public rows, {start.held_out_loss:.4g} on held-out ones."]
    if start.held_out_loss > 1.5 * start.public_loss:
        parts.append("It has learnt its public rows by heart: a better start would help most.")
    if start.temperature is not None and start.temperature > 1.2:
        parts.append(f"It is too confident (temperature {start.temperature:.2f}): finish with hs.Finish().")
    parts.append(
        f"A clip centre at the public gradient would save {100 * saved(start.alignment):.2g} % of the clip norm."
    )
    return " ".join(parts)


def _forecast_text(name: str, one: Forecast) -> str:
    return f"{name} {one.expected:.4g}, between {one.low:.4g} and {one.high:.4g} (start {one.start:.4g})."


def _minutes(advice: Advice) -> str:
    records = advice.plan.steps * advice.plan.expected_batch_size
    return f"About {records * (advice.seconds_per_row or 0.0) / 60:.3g} minutes"


def _text(value: Geometry | Finish | None) -> str | None:
    return None if value is None else repr(value)
