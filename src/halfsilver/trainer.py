"""The training loop: Algorithm 1 of the paper, with any torch optimizer."""

from __future__ import annotations

import inspect
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfsilver._core import system
from halfsilver._core.averaging import Average, AverageKind, copy_to
from halfsilver._core.distributed import World
from halfsilver._core.random import own_randomness, require_device
from halfsilver._core.sharded import full_on_lead, is_sharded, local, replicated, reshard, unwrapped, whole_model
from halfsilver._core.tensors import LossFn, Tensors, eval_mode, norm, trainable
from halfsilver.errors import BudgetExceeded, ConfigError, PrivateDataError, require
from halfsilver.mirror import Clock, Euclidean, Geometry, MirrorMap, PretrainResult, PublicLoss, Step, pretrain
from halfsilver.mirror.base import as_map, described
from halfsilver.mirror.centre import Centre
from halfsilver.mirror.geometry import Shaped
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.entropy import OsEntropy, UnsafeSeed
from halfsilver.privacy.gradients import Performance
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.mechanism import PrivateGradient
from halfsilver.privacy.metrics import mean_not_private
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.privacy.released_metrics import ClassMetrics as ClassMetrics  # the reference has these three here
from halfsilver.privacy.released_metrics import Estimate as Estimate
from halfsilver.privacy.released_metrics import Release, release_metrics
from halfsilver.privacy.released_metrics import ReleasedMetrics as ReleasedMetrics
from halfsilver.privacy.strategies import Independent
from halfsilver.privacy.users import Engine, UserUpdates
from halfsilver.runs.folder import RunFolder
from halfsilver.runs.progress import progress_bar
from halfsilver.runs.session import Session
from halfsilver.runs.signals import caught_signal, stop
from halfsilver.runs.state import Parts, TrainState, pack, settings_of, unpack
from halfsilver.runs.statement import diverged
from halfsilver.runs.weights import write_weights

_log = logging.getLogger("halfsilver")

Stopped = Literal["finished", "budget", "diverged"]
ReleaseSource = PrivateGradient | UserUpdates

_LOG_LINES = 200
# A kill costs at most a fiftieth of the plan, or what about 30 seconds take, and checkpoints a fiftieth of the time.
_CHECKPOINT_SHARE, _CHECKPOINT_SECONDS = 50, 30.0
_PROBE_ROWS = 64  # public rows on which the model is tried before any private one is read


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a callback is told after each update: released values and public constants only.

    Args:
        step: Number of updates so far, from 1.
        total_steps: Number of updates in the plan.
        lr: Learning rate of the first parameter group in this update.
        released_norm: Euclidean norm of the released (noisy) gradient.
        metrics: Loss and metrics on `test` where this step evaluates, else empty.
    """

    step: int
    total_steps: int
    lr: float
    released_norm: float
    metrics: Mapping[str, float]


Callback = Callable[[StepReport], None]
Tester = Callable[[int], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. The model that `Trainer` was given holds the trained weights.

    Args:
        plan: The plan of the run.
        run_dir: The run folder, which `halfsilver report` and `halfsilver verify` take.
        updates: Number of updates that the weights have had.
        stopped: "finished"; "budget" if the ledger did not grant the remaining steps; or "diverged" if the weights
            became NaN or infinite, where the run ends because further steps would be spent for nothing.
        statement: The privacy statement, as in statement.json.
        history: The lines of metrics.jsonl.
    """

    plan: PrivacyPlan
    run_dir: Path
    updates: int
    stopped: Stopped
    statement: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon of all planned steps of this run alone, by PLD: the number to publish.

        Args:
            delta: In (0, 1) (default: the delta of the statement).
        """
        return self.plan.epsilon(float(self.statement["delta"]) if delta is None else delta)


def _needed_by(stepper: Any) -> list[str]:
    """The arguments without which its `step` cannot be called, such as the closure of LBFGS."""
    if stepper is None:
        return []
    _, *arguments = inspect.signature(type(stepper).step).parameters.values()  # schedulers replace that of the object
    return [
        a.name for a in arguments if a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)
    ]


def _from_opacus(part: Any) -> bool:
    """Opacus's wrappers and optimizers, and parameters that it has hooked; its layers alone are layers as others."""
    return type(part).__module__.startswith(("opacus.grad_sample", "opacus.optimizers")) or hasattr(
        part, "_forward_counter"
    )


@dataclass(eq=False)
class Trainer:
    """Trains a PyTorch model on private data under differential privacy, with help from public data.

    Each step clips the gradient of every sampled private record, sums, adds Gaussian noise, divides by the declared
    batch size, and hands the result to `mirror`, which combines it with the public loss. Any torch optimizer takes the
    step from there. With ``mirror=Euclidean()`` this is DP-SGD (Abadi et al. 2016); with `FirstOrder` it is PDA-DPMD
    (Amid et al. 2022).

    Guarantee: what `fit` leaves in the model and in its run folder is (epsilon, delta)-DP with the figures of the run's
    statement, whenever and however often the process was killed. `pretrain` and `mirror` see public data and released
    gradients only.

    Under ``torchrun``, after ``torch.distributed.init_process_group``, `fit` trains over the processes of the default
    group. Each process gets the same data and computes its own share of the private records. All processes hold the
    same weights, or their shards of them after ``fully_shard``. Rank 0 writes ledger and run folder; callbacks run on
    every rank. ``DistributedDataParallel`` is not needed, and is unwrapped where it is given.

    Args:
        model: The model. Layers that mix or remember records (batch norm in training mode, say) are refused.
        loss_fn: ``loss_fn(model, batch)`` returns one loss per example of the batch.
        optimizer: A torch optimizer that holds exactly the trainable parameters of `model`.
        plan: How often the private data are used, and with how much noise. See `PrivacyPlan.calibrate`.
        mirror: How public data enter the step (default: `Euclidean()`, not at all).
        geometry: Coordinates, made from public rows, in which gradients are clipped and noise is added (default: those
            of the model's own weights). See `Whitened`. The model has its own layers again when `fit` ends.
        centre: Clip the updates of users around that of public users (default: around zero). See
            `halfsilver.federated.Centre`. Needs an engine and `PublicUsers`.
        public_loss_fn: The loss on public rows, where these differ in form from private ones (default: `loss_fn`).
        public_batch_size: Public rows per step, at least 1 (default: all of them). Set it if there are many.
        scheduler: A learning-rate scheduler of `optimizer`; it steps after each update.
        average: None, "uniform", or the decay in (0, 1) of an exponential average of the iterates. If set, `fit` ends
            with the averaged weights in the model. Averages reduce the effect of the noise and cost no privacy.
        metrics: Further per-example figures of `evaluate`, by name; each has the form of `loss_fn`.
        callbacks: Functions that receive a `StepReport` after each update.
        performance: Backend, micro-batches and precision. No value can weaken the guarantee.
        device: Where to train (default: where the model is).
        metrics_not_private: Allow metrics of private rows. They are *not* private, and the statement says so.
        skip_public_copies: Whether a private example that equals a public one, label included, contributes nothing
            (default: yes). Set it to False for rows so short that different people share them. The guarantee holds
            either way.
        unsafe_seed: Fixes noise and sampling for a test. This ends the guarantee, and the statement says so.
        progress: Show a progress bar with time left and epsilon spent (default: on a terminal only).
        checkpoint_seconds: Seconds between two checkpoints, by a rehearsal on made-up rows; a round of an engine counts
            as one second. Default None: a kill costs at most one step or 2 % of the plan, and about 30 seconds, as long
            as checkpoints take at most 2 % of the time. The first is always written after the first block of steps.
        about: What readers of the report should know, such as {"data set": ..., "purpose": ..., "public rows": ...}:
            texts by name. It is kept in the run folder, so it must not tell anything private.
        speed: Deprecated, goes in 0.3. Say `performance`.

    Raises:
        ConfigError: The optimizer holds other parameters than the model, or an argument has the wrong kind.

    References:
        Abadi et al. (2016), Deep Learning with Differential Privacy, arXiv:1607.00133.
        Amid et al. (2022), Public Data-Assisted Mirror Descent for Private Model Training, arXiv:2112.00193.

    >>> import tempfile, torch, halfsilver as hs
    >>> x = torch.randn(400, 3)
    >>> rows = (x, x.sum(1))
    >>> model = torch.nn.Linear(3, 1)
    >>> trainer = hs.Trainer(
    ...     model,
    ...     lambda model, batch: (model(batch[0])[:, 0] - batch[1]) ** 2,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     plan=hs.PrivacyPlan.calibrate(epsilon=2, delta=1e-4, population=400, batch_size=40, epochs=1),
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = trainer.fit(rows, run_dir=folder)
    >>> result.stopped, result.updates, result.epsilon() <= 2
    ('finished', 10, True)
    """

    model: torch.nn.Module
    loss_fn: LossFn
    _: KW_ONLY
    optimizer: Optimizer
    plan: PrivacyPlan
    mirror: MirrorMap = field(default_factory=Euclidean)
    geometry: Geometry | None = None
    centre: Centre | None = None
    public_loss_fn: LossFn | None = None
    public_batch_size: int | None = None
    scheduler: LRScheduler | None = None
    average: AverageKind = None
    metrics: Mapping[str, LossFn] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    performance: Performance = field(default_factory=Performance)
    device: torch.device | str | None = None
    metrics_not_private: bool = False
    skip_public_copies: bool = True
    unsafe_seed: int | None = None
    progress: bool | None = None
    checkpoint_seconds: float | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    speed: Performance | None = None

    def __post_init__(self) -> None:
        if self.speed is not None:
            advice = "Trainer(speed=) is Trainer(performance=) now; the old name goes in version 0.3."
            warnings.warn(advice, DeprecationWarning, stacklevel=3)
            self.performance = self.speed
        self._check_kinds()
        self.mirror = as_map(self.mirror, stacklevel=4)
        self.model = unwrapped(self.model)
        reshard(self.model)
        if self.device is not None:
            require_device(self.device)
            self.model.to(self.device)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        learns = {id(p) for p in trainable(self.model)}
        require(len(learns) > 0, "number of trainable parameters", 0, "at least 1", "Unfreeze some: requires_grad_().")
        if held != learns:
            raise ConfigError(
                "Expected the optimizer to hold exactly the trainable parameters of the model. Make it from "
                "[p for p in model.parameters() if p.requires_grad], after freezing layers."
            )
        require_device(self._device)
        self._settings = settings_of(self.optimizer)  # now, because schedulers change them
        self._state = TrainState(step=0, mirror={}, average=Average(self.average))
        self._shape: Shaped | None = None
        self._fitted, self._public_example = False, None
        self._private: list[PrivateData] = []
        self._shown: dict[str, list[Any]] = {}  # what was read without protection, by where it was given
        self._ledger: Ledger | None = None  # of the latest fit, on rank 0
        self._write_seconds = math.inf  # of a checkpoint
        self._said = True  # whether a statement there is says that metrics of private rows may be computed

    def _check_kinds(self) -> None:
        texts = isinstance(self.about, Mapping) and all(isinstance(t, str) for pair in self.about.items() for t in pair)
        require(texts, "about", self.about, "to be texts by name, such as {'purpose': 'a model of prices'}")
        named = isinstance(self.metrics, Mapping) and all(map(callable, self.metrics.values()))
        require(named, "metrics", self.metrics, "to be functions like loss_fn by name, such as {'error': fn}")
        kinds = {"model": torch.nn.Module, "optimizer": Optimizer, "plan": PrivacyPlan}
        for name, kind in kinds.items():
            value = getattr(self, name)
            require(isinstance(value, kind), name, value, f"to be a {kind.__name__}")
        for part, name in ((self.optimizer, "optimizer"), (self.scheduler, "scheduler")):
            wanted = _needed_by(part)
            hint = f"{type(part).__name__}.step needs {', '.join(wanted)}, which a private step cannot give."
            require(not wanted, name, type(part).__name__, "to take its step without arguments", hint)
        if any(_from_opacus(part) for part in (self.model, self.optimizer, *self.model.parameters())):
            raise ConfigError(
                "Expected a model and an optimizer that have not been through Opacus's make_private, which adds hooks "
                "to the layers. Make new ones; load_state_dict keeps the weights."
            )
        # asked of the type, so that a class in the place of its instance is refused as well
        require(hasattr(type(self.mirror), "direction"), "mirror", self.mirror, "to be a map such as FirstOrder(0.9)")
        if self.scheduler is not None and self.scheduler.optimizer is not self.optimizer:
            raise ConfigError("Expected the scheduler to be made for the optimizer that the Trainer is given.")

    def pretrain(self, public: Any, **options: Any) -> PretrainResult:
        """Train the model on public data alone, with early stopping: the start of the private run.

        Args:
            public: Public rows, as tensors or a data set.
            options: Keyword arguments of `halfsilver.mirror.pretrain`.

        Returns:
            Losses by epoch, and the best one.
        """
        self._require_public("the rows of pretrain", public)
        reshard(self.model)
        self._world.spread(replicated(self.model))
        return pretrain(self.model, self.public_loss_fn or self.loss_fn, public, **options)

    def fit(
        self,
        private: Any,
        public: Any = None,
        *,
        run_dir: str | Path | None = None,
        ledger: Ledger | str | Path | None = None,
        delta: float | None = None,
        test: Any = None,
        test_every: int | None = None,
        check_usable: bool | None = None,
    ) -> RunResult:
        """Train on `private` as the plan says, or resume the run in `run_dir`. A finished run is only loaded.

        An unusable private record contributes zero silently, because an error would reveal that it exists. A column
        that is declared in another kind or shape than the public one is refused. For the rest, see `check_usable`.

        The first Ctrl-C or SIGTERM ends the run a step or about a second later, with a checkpoint. `halfsilver.load`
        puts the weights of a finished run into a model.

        Args:
            private: A data set, tensors or `PrivateData`, which nothing outside `halfsilver.privacy` reads; or an
                `Engine`, behind which users train by themselves.
            public: Public rows as a data set or tensors, a `PublicLoss` of this model, or None where `mirror` needs
                none.
            run_dir: The run folder. It receives checkpoint, metrics, ledger and statement. Default None: a new
                temporary folder, which a log line and `RunResult.run_dir` name. Such a run cannot be resumed, and its
                ledger does not know of others, so give a folder if the data are private in earnest.
            ledger: The ledger of the private data set, where several runs share one (default: in the run folder).
            delta: The delta of the statement, at most 1 / population (default: the plan's; for a plan without one,
                1e-5 or 0.1 / population, whichever is less). A resumed run keeps its own.
            test: Public test rows, evaluated at the end.
            test_every: Also evaluate at the start and after every so many steps.
            check_usable: Before the first step, count with the plan's noise how many records of a batch can be used.
                The count takes one of the plan's `spare_steps` (default: wherever there is one and the count can tell;
                otherwise a log line says what is missing).

        Returns:
            How the run ended. The trained weights are in the model.

        Raises:
            ConfigError: An argument is wrong, or private rows were given where public ones belong.
            BudgetExceeded: The run is new, and the ledger's budget does not allow its plan.
            RunFolderBusy: Another process has this folder, or the run was taken over, or `run_dir` is a copy.
            PrivateDataError: `check_usable` counts fewer than half of the declared records.
        """
        private = private if isinstance(private, PrivateData | Engine) else PrivateData(private)
        self._said = self.metrics_not_private
        self._refuse_private(private, public, test)
        if run_dir is None:
            run_dir = self._world.from_lead(lambda: tempfile.mkdtemp(prefix="halfsilver-"))
            if self._world.leads:
                _log.warning("No run_dir was given. Checkpoint, ledger and statement are in %s.", run_dir)
        reading = closing(private) if isinstance(private, PrivateData) else nullcontext()
        with caught_signal() as came, system.freed_memory_kept(), reading:
            with self._shaped(public) as public:
                result = self._fit(private, public, run_dir, ledger, delta, test, test_every, check_usable, came)
            self._export(result.run_dir)
        return result

    def _export(self, run_dir: Path) -> None:
        """The trained weights under the names of the model, for `load`; with a geometry, the checkpoint has others."""
        tensors = {name: full_on_lead(t) for name, t in self.model.state_dict().items()}
        self._world.from_lead(lambda: write_weights(RunFolder(run_dir), tensors))

    @contextmanager
    def _shaped(self, public: Any) -> Iterator[Any]:
        """The model in the coordinates of the geometry; afterwards in its own, with the weights that it then has.

        Yields the public data, with a loss that calls the model that is trained.
        A resumed run shapes the model anew, because shapes must fit, and then takes the coordinates of its checkpoint.
        """
        if self.geometry is None:
            yield public
            return
        rows = public.rows.source if isinstance(public, PublicLoss) else public
        if rows is None:
            raise ConfigError(f"{self.geometry!r} needs public data, got public=None. Give fit(private, public, ...).")
        backend = self.performance.backend
        require(isinstance(backend, str), "backend", backend, "to be a name with a geometry, which replaces layers")
        if any(is_sharded(p) for p in self.model.parameters()):
            raise ConfigError(
                "Expected parameters that are not sharded yet for a geometry. Call its shape() before fully_shard."
            )
        given = self.model
        shaped = self.geometry.shape(given, self.public_loss_fn or self.loss_fn, rows)
        if isinstance(public, PublicLoss) and public.model is not shaped.model:
            public = public.on(shaped.model)
        self.model, self._shape = shaped.model, shaped
        try:
            yield public
        finally:
            shaped.merge()
            self.model, self._shape = given, None
            self._state.average = Average(self.average)  # in other coordinates; the model has it already

    def _fit(
        self,
        private: PrivateData | Engine,
        public: Any,
        run_dir: str | Path,
        ledger: Ledger | str | Path | None,
        delta: float | None,
        test: Any,
        test_every: int | None,
        check_usable: bool | None,
        came: Callable[[], int],
    ) -> RunResult:
        psi = None if public is None else self._public_loss(public)
        if self.centre is not None:  # refused here, before anything is written
            users = isinstance(private, Engine)
            require(users, "centre", self.centre, "None, unless users train behind an engine")
            self.centre.around(psi)
        reshard(self.model)
        world, config = self._world, self._config()
        asked = [delta, test_every, test is not None, public is not None, sorted(self.metrics)]
        world.require_same(
            "plan, options and arguments", [self.plan.to_dict(), config, asked], "Run the same script on all of them."
        )
        world.spread(replicated(self.model))
        if psi is not None:
            with world.together():
                psi.check()
        opened = Session.open(run_dir, ledger, self.plan, config=config, delta=delta, world=world)
        with opened as session, session.stated():
            self._ledger = session.ledger
            saved = session.load()
            if session.finished and world.leads:
                _log.warning("The run in %s has finished. It is loaded, and nothing is trained.", run_dir)
            source = self._source(session, private, psi)
            self._begin(session, psi, saved)
            known = any("usable_share" in line for line in session.history())  # paid for once
            if check_usable is not False and self._state.step == 0 and not session.finished and not known:
                self._check_usable(session, source, required=check_usable is True)
            tester = self._tester(test, test_every)
            if saved is None and (start := tester(0)):
                session.log({"step": 0, **start})
            stopped = self._loop(session, source, psi, tester, came)
            return self._finish(session, source, stopped, test)

    def _check_usable(self, session: Session, source: ReleaseSource, *, required: bool) -> None:
        plan, fewest, batch = self.plan, 0.5, self.plan.expected_batch_size
        records = source if isinstance(source, PrivateGradient) else None
        if not required and (records is None or plan.noise != Independent() or plan.unit == "user"):
            return
        require(records is not None, "check_usable", True, "to go with records, not with an engine")
        require(plan.noise == Independent(), "noise", plan.noise, "to be Independent() for check_usable=True")
        spread = 32 * (1 - plan.sampling_rate)
        needed = spread + math.hypot(spread, 8 * plan.noise_multiplier)  # 4 standard deviations are half of it
        spare = "Keep one in hand: PrivacyPlan.calibrate(spare_steps=1)."
        larger = "Raise batch_size, or leave check_usable out; PrivateData.inspect_not_private looks without noise."
        try:
            require(plan.spare_steps >= 1, "spare_steps", plan.spare_steps, "at least 1 for check_usable=True", spare)
            require(batch > needed, "expected_batch_size", batch, f"above {needed:.0f} for check_usable=True", larger)
        except ConfigError as error:
            if required:
                raise
            level = logging.INFO if records and records.form_is_known else logging.WARNING
            if session.world.leads:
                _log.log(level, "Nothing will tell if no private record can be used: none is counted. %s", error)
            return
        assert records is not None
        off = 4 * math.sqrt(plan.noise_multiplier**2 + batch * (1 - plan.sampling_rate)) / batch
        share = records.usable_units() / batch
        session.log({"step": 0, "usable_share": share})
        if share + off < fewest:
            raise PrivateDataError(
                f"Of the {batch:g} records that the plan declares for a batch, about {max(share, 0.0):.0%} can be used "
                f"(a noisy count, off by less than {off:.0%}). Either records cannot be read or have other shapes "
                "than the example, or there are fewer than sampling_rate and expected_batch_size say. Whoever may read "
                "the data finds the cause with PrivateData(...).inspect_not_private(example)."
            )

    def _loop(
        self, session: Session, source: ReleaseSource, psi: PublicLoss | None, test: Tester, came: Callable[[], int]
    ) -> Stopped:
        params, state, due = trainable(self.model), self._state, 0.0
        with self._bar(session) as show:
            while state.step < self.plan.steps and not session.finished:
                try:
                    released = source.release()  # g_t + b_t. Everything below is post-processing.
                except BudgetExceeded:
                    if state.step == 0:
                        raise
                    return "budget"
                lr = float(self.optimizer.param_groups[0]["lr"])
                step = Step(params=params, public=psi, clock=self._clock(), lr=lr)
                direction, state.mirror = self.mirror.direction(released, state.mirror, step)
                self._update(params, direction)  # theta_{t+1}
                state.step += 1
                self._report(session, lr, norm(released), test(state.step))
                if not self._is_finite():
                    return "diverged"
                self._renew()
                show(state.step)
                if source.out.between_blocks and state.step < self.plan.steps:
                    signal = int(session.world.largest(came()))  # ranks stop together
                    if signal or state.step >= due:
                        due = state.step + self._checkpoint(session, source, first=not due)
                    if signal:
                        stop(signal, state.step, self.plan.steps)
        if not self._is_finite():
            return "diverged"
        return "finished" if state.step == self.plan.steps else "budget"

    def _renew(self) -> None:
        """Other coordinates, where the geometry wants them at this step: from public rows and released weights."""
        shape, step = self._shape, self._state.step
        if shape is not None and shape.refresh is not None and step % shape.refresh == 0 and step < self.plan.steps:
            shape.renew(self._state.average.tensors, self.optimizer)

    def _is_finite(self) -> bool:
        """Whether the weights are numbers still. They are released values, so what follows from them may be told."""
        bad = sum(not bool(local(p).isfinite().all()) for p in trainable(self.model))
        return self._world.total(float(bad)) == 0

    def _update(self, params: Tensors, direction: Tensors) -> None:
        for p, d in zip(params, direction, strict=True):
            p.grad = d
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        self._state.average.update(params)

    @overload
    def evaluate(self, data: Any) -> dict[str, float]: ...

    @overload
    def evaluate(
        self, data: Any, *, release: Release, ledger: Ledger | str | Path | None = None
    ) -> ReleasedMetrics: ...

    def evaluate(
        self, data: Any, *, release: Release | None = None, ledger: Ledger | str | Path | None = None
    ) -> dict[str, float] | ReleasedMetrics:
        """Mean loss and metrics on `data`, in eval mode, with averaged weights if there are any.

        With `release`, `data` are private, and what is returned is private as well: the metrics get noise, and the
        ledger counts the release in addition to training. Each call spends anew.

        Args:
            data: Public rows. Private ones, and rows that share memory with them, are refused unless `release` is given
                or ``metrics_not_private=True``. With `release`: private rows or `PrivateData`.
            release: Which metrics of private rows to release, and with how much noise. The means are taken over the
                population that it declares (default: that of the trainer's plan).
            ledger: The ledger of the private data set, for `release` (default: that of the latest `fit`).

        Returns:
            "loss" and each of `metrics`, as means over the rows; with `release`, what was released.

        Raises:
            ConfigError: `data` are private, or an argument is wrong.
            BudgetExceeded: The ledger's budget does not allow the release. No private row is read then.
        """
        if release is not None:
            return self._release(data, release, ledger)
        require(ledger is None, "ledger", ledger, "to go with release=")
        allowed = self.metrics_not_private and self._said  # later than `fit`, its statement would not say so
        if not allowed and not isinstance(data, PrivateData):
            self._require_public("the rows of evaluate", data)
        reshard(self.model)
        metrics = {"loss": self.loss_fn, **self.metrics}
        with eval_mode(self.model), self._state.average.in_place_of(trainable(self.model)):
            if not isinstance(data, PrivateData):
                return {name: PublicLoss(self.model, fn, data).value() for name, fn in metrics.items()}
            if not allowed:
                raise ConfigError(
                    "Metrics of private data are not private, so they are off. Evaluate on public data, release them "
                    "with noise by evaluate(private, release=hs.Release(...)), or set metrics_not_private=True, which "
                    "is stamped into the statement."
                )
            whole, example = whole_model(self.model), self._public_example
            return {name: mean_not_private(data, fn, whole, example) for name, fn in metrics.items()}

    def _release(self, data: Any, release: Release, ledger: Ledger | str | Path | None) -> ReleasedMetrics:
        plan, world = self.plan, self._world
        if plan.unit == "user" or isinstance(data, Engine):
            raise ConfigError("Expected unit='example' for released metrics: a user's records would count separately.")
        private = data if isinstance(data, PrivateData) else PrivateData(data)
        self._refuse_private(private, None, None)
        reshard(self.model)
        mine: Ledger | None = None

        def open_ledger() -> None:
            nonlocal mine
            mine = self._ledger if ledger is None else ledger if isinstance(ledger, Ledger) else Ledger.open(ledger)
            if mine is None:
                raise ConfigError("Expected a ledger, since this Trainer has not been fitted: evaluate(..., ledger=).")

        world.from_lead(open_ledger)
        with closing(private), eval_mode(self.model), self._state.average.in_place_of(trainable(self.model)):
            return release_metrics(
                whole_model(self.model),
                {"loss": self.loss_fn, **self.metrics},
                private,
                release,
                release.plan(plan.population, plan.delta),
                ledger=mine,
                public_example=self._public_example,
                rows=self.performance.micro_batch_size,
                unsafe_seed=None if self.unsafe_seed is None else world.own_seed(self.unsafe_seed),
                world=world,
            )

    def state_dict(self) -> Parts:
        """Tensors and JSON of everything that training changes."""
        return pack(self._state, self.model, self.optimizer, self.scheduler, self.mirror)

    def load_state_dict(self, parts: Parts) -> None:
        """Restore what `state_dict` returned.

        Args:
            parts: Tensors and JSON.
        """
        unpack(*parts, self._state, self.model, self.optimizer, self.scheduler)

    def _require_public(self, name: str, data: Any) -> None:
        """Refuse rows of the data that were trained on privately, and remember these for a `fit` to come."""
        sources = data.sources if isinstance(data, PublicLoss) else [data]
        if isinstance(data, PrivateData) or any(p.shares_rows_with(s) for p in self._private for s in sources):
            raise ConfigError(f"The private data were given as {name}, which must be public. Use other rows.")
        known = self._shown.setdefault(name, [])
        known += [source for source in sources if not any(source is other for other in known)]

    def _refuse_private(self, private: PrivateData | Engine, public: Any, test: Any) -> None:
        """Private rows that were, or are to be, read without protection: recognised by the memory that they share."""
        shares = getattr(private, "shares_rows_with", lambda data: False)
        given = {
            "public=": public,
            "test=": None if self.metrics_not_private or isinstance(test, PrivateData) else test,
        }
        shown = [(name, source) for name, sources in self._shown.items() for source in sources]
        shown += [("a part of the model", local(t)) for t in (*self.model.parameters(), *self.model.buffers())]
        for name, data in given.items():
            if isinstance(data, PrivateData):
                raise ConfigError(f"The private data were given as {name}, which must be public. Use other rows.")
            shown += [(name, source) for source in (data.sources if isinstance(data, PublicLoss) else [data])]
        for name, source in shown:
            if source is not None and shares(source):
                raise ConfigError(f"The private data were given as {name}, which must be public. Use other rows.")
        for name, data in given.items():
            if data is not None:
                self._require_public(name, data)
        if isinstance(private, PrivateData):
            self._private.append(private)

    def _public_loss(self, public: Any) -> PublicLoss:
        if isinstance(public, PublicLoss):
            return public
        psi = PublicLoss(self.model, self.public_loss_fn or self.loss_fn, public, batch_size=self.public_batch_size)
        if self.plan.unit == "example":
            psi.rows.warn_if_many(self.plan.population)
        return psi

    @property
    def _device(self) -> torch.device:
        return trainable(self.model)[0].device

    @property
    def _world(self) -> World:
        return World.current(self._device)

    def _save(self, session: Session, source: ReleaseSource | None) -> float:
        """Write a checkpoint. Returns the seconds of the write on rank 0, without the wait for other ranks."""
        session.world.require_replicas(replicated(self.model))
        return session.save(self.state_dict(), source.out.head if source else None)

    def _checkpoint(self, session: Session, source: ReleaseSource, *, first: bool) -> float:
        """Write one. Returns after how many steps the next is due; all ranks take rank 0's number."""
        before = math.inf if first else 2 * self._write_seconds  # one slow write puts off the next ones not for long
        self._write_seconds = min(before, *(self._save(session, source) for _ in range(2 if first else 1)))
        return session.world.from_lead(lambda: self._steps_between(source, self._write_seconds, first))

    def _steps_between(self, source: ReleaseSource, write_seconds: float, first: bool) -> float:
        """Steps from a checkpoint to the next, whole blocks: from public times, never from those of private steps."""
        block, seconds, share = source.block, source.step_seconds, _CHECKPOINT_SHARE
        if self.checkpoint_seconds is not None:
            return self.checkpoint_seconds / (seconds or 1.0)
        most = max(1, self.plan.steps // share)
        if seconds is None:
            return most
        wanted = min(most, _CHECKPOINT_SECONDS / seconds) // block
        steps = block * max(1, int(wanted), math.ceil(share * write_seconds / (seconds * block)))
        if first and steps > most:
            _log.log(
                logging.WARNING if self.plan.steps * seconds > _CHECKPOINT_SECONDS else logging.INFO,
                "A kill costs up to %d of %d steps: one checkpoint takes %.2g s, and all of them 2 %% of the time.",
                min(steps, self.plan.steps), self.plan.steps, write_seconds,
            )  # fmt: skip
        return steps

    def _source(self, session: Session, private: PrivateData | Engine, psi: PublicLoss | None) -> ReleaseSource:
        world, seed = session.world, self.unsafe_seed
        entropy = OsEntropy() if seed is None else UnsafeSeed(world.own_seed(seed))
        alike = psi if self.public_loss_fn is None else None  # public records of the private ones' kind
        run: dict[str, Any] = {"ledger": session.ledger, "run_id": session.run_id, "entropy": entropy, "world": world}
        run["owner"] = session.owner
        with own_randomness(0, [self._device]):  # a public data set may draw
            known = alike and alike.rows.batch(torch.arange(min(_PROBE_ROWS, len(alike.rows))), self._device)
        if isinstance(private, Engine):
            run |= {"public_rows": known, "step": lambda: self._state.step, "folder": session.folder.attendance}
            run |= {"centre": None if self.centre is None else self.centre.around(psi)}
            run["taken_over"] = session.taken_over
            return UserUpdates(self.model, self.loss_fn, private, self.plan, **run)
        if alike is not None:
            self._public_example = alike.rows.example()
        public_rows = psi.rows.batches() if psi and self.skip_public_copies and not session.finished else ()
        run |= {"public_example": self._public_example, "public_rows": public_rows, "probe_rows": known}
        run |= {"performance": self.performance}
        return PrivateGradient(self.model, self.loss_fn, private, self.plan, **run)

    def _begin(self, session: Session, psi: PublicLoss | None, saved: Parts | None) -> None:
        """theta_0 and a fresh state, or those of the checkpoint; either way a checkpoint exists afterwards."""
        params = trainable(self.model)
        self._state = TrainState(
            step=0, mirror=self.mirror.init(params=params, public=psi), average=Average(self.average)
        )
        correlated = self.plan.noise != Independent()
        if correlated and self._shape is not None and self._shape.refresh is not None:
            raise ConfigError(
                "Expected a geometry without refresh: correlated noise of earlier steps does not cancel in new ones."
            )
        if self._state.mirror and self._shape is not None and self._shape.refresh is not None:
            raise ConfigError(
                f"{self.mirror!r} keeps a state in the coordinates of the start. Leave out refresh of the geometry, or "
                "use a map without a state, such as FirstOrder."
            )
        if saved is not None:
            self.load_state_dict(saved)
        elif self._fitted:
            raise ConfigError(
                "This Trainer, its optimizer and scheduler have been through a run. Make new ones for a new run."
            )
        else:
            self._save(session, None)
        self._fitted = True
        session.write_statement()

    def _finish(self, session: Session, source: ReleaseSource, stopped: Stopped, test: Any) -> RunResult:
        if not session.finished:
            if stopped != "finished" and test is not None:
                session.log({"step": self._state.step, **self.evaluate(test)})
            self._save(session, source)
            session.finish(self._state.step)
        if self._state.average.tensors:
            copy_to(trainable(self.model), self._state.average.tensors)
        if stopped == "budget" and session.world.leads:
            _log.warning(
                "The run ended early, after %d of %d steps: the ledger grants no more. Steps that a kill loses are "
                "spent; PrivacyPlan.calibrate(spare_steps=...) reserves some to repeat them.",
                self._state.step, self.plan.steps,
            )  # fmt: skip
        remarks = [diverged(self._state.step, self.plan)] if stopped == "diverged" else []
        return RunResult(
            plan=self.plan,
            run_dir=session.folder.path,
            updates=self._state.step,
            stopped=stopped,
            statement=session.write_statement(remarks),
            history=session.history(),
        )

    def _report(self, session: Session, lr: float, released_norm: float, metrics: Mapping[str, float]) -> None:
        step, total = self._state.step, self.plan.steps
        report = StepReport(step=step, total_steps=total, lr=lr, released_norm=released_norm, metrics=metrics)
        if metrics or step % max(1, total // _LOG_LINES) == 0:
            session.log({"step": step, "lr": lr, "released_norm": released_norm, **metrics})
        with session.world.together():
            for callback in self.callbacks:
                callback(report)

    def _tester(self, test: Any, every: int | None) -> Tester:
        def metrics(step: int) -> dict[str, float]:
            due = step == self.plan.steps or (every is not None and step % every == 0)
            return self.evaluate(test) if due and test is not None else {}

        return metrics

    def _clock(self) -> Clock:
        return Clock(step=self._state.step, total_steps=self.plan.steps, steps_per_epoch=1 / self.plan.sampling_rate)

    def _bar(self, session: Session) -> AbstractContextManager[Callable[[int], None]]:
        shown = self.progress if session.world.leads else False
        return progress_bar(self.plan.steps, self._state.step, session.spent, shown)

    def _config(self) -> dict[str, Any]:
        return {
            "mirror": described(self.mirror),
            "optimizer": type(self.optimizer).__name__,
            "optimizer_settings": self._settings,
            "scheduler": type(self.scheduler).__name__,
            "average": self.average,
            "public_batch_size": self.public_batch_size,
            "unsafe_seed": self.unsafe_seed,
            "metrics_not_private": self.metrics_not_private,
            # Only if it is not the default, so that run folders without it can still be opened.
            **({} if self.skip_public_copies else {"skip_public_copies": False}),
            **({} if self.geometry is None else {"geometry": repr(self.geometry)}),
            **({} if self.centre is None else {"centre": repr(self.centre)}),
            **({"about": dict(self.about)} if self.about else {}),
            **({} if self.performance.trusted is None else {"backend": self.performance.trusted}),
        }
