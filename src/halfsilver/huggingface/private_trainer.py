"""`PrivateTrainer`: private training with the `TrainingArguments` of `transformers`."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn

from halfsilver._core.tensors import LossFn
from halfsilver.errors import ConfigError, require
from halfsilver.huggingface.losses import base_model, causal_loss, counted, loss_of, sequence_loss, token_loss
from halfsilver.mirror import Euclidean, MirrorMap
from halfsilver.mirror.geometry import Geometry
from halfsilver.mirror.rows import PublicRows
from halfsilver.privacy.collated import Collated
from halfsilver.privacy.data import PrivateData
from halfsilver.privacy.gradients import Performance
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.study.arena import rows_at
from halfsilver.study.run import per_example
from halfsilver.trainer import RunResult, StepReport, Trainer

_log = logging.getLogger("halfsilver")
_HALF = "Private gradients are computed in float32 or, with bf16=True, in bfloat16."
# Arguments that cannot hold here, with the values that are allowed and the reason.
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), _HALF),
    "auto_find_batch_size": ((False, None), "The batch size is part of the guarantee."),
    "train_sampling_strategy": (("random",), "Each record is drawn by a coin of its own."),
    "group_by_length": ((False,), "Each record is drawn by a coin of its own."),
    "load_best_model_at_end": ((False,), "A model is kept at the end only. Use average=, or hs.select."),
    "neftune_noise_alpha": ((None,), "It changes the model by a hook."),
    "label_smoothing_factor": ((0.0,), "Write a loss_fn that smooths the labels of each example."),
    "gradient_checkpointing": ((False,), "Set Performance(micro_batch_size=...) to save memory."),
    "deepspeed": ((None,), "Use torchrun with fully_shard, see hs.Trainer."),
    "fsdp": ((None, "", [], False), "Use torchrun with fully_shard, see hs.Trainer."),
    "torch_compile": ((False,), "A compiled model hides its layers from the clipping."),
    "use_liger_kernel": ((False,), "Its layers hide the loss of one example."),
    "resume_from_checkpoint": ((None,), "Leave it out: train() resumes the run in output_dir by itself."),
    "push_to_hub": ((False,), "Publish the model yourself after you have read the statement."),
}


@final
@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The guarantee that is asked for.

    Args:
        epsilon: Above 0.
        delta: In (0, 1), well below 1 / population.
        population: The number of private records, or users, as you declare it. It is never counted.
        unit: "example" or "user" (default: "example"). For "user", give `PrivateData(rows, users=keys)`.
        spare_steps: Further steps to reserve for repeats after a crash (default: one per 50 steps).
    """

    epsilon: float
    delta: float
    population: int
    unit: Literal["example", "user"] = "example"
    spare_steps: int | None = None


@final
class PrivateTrainer:
    """Trains a model of `transformers` with differential privacy, by the arguments of its own `Trainer`.

    These arguments are used: steps or epochs, batch size (per device, times accumulation), learning rate, optimizer,
    weight decay, schedule and warm-up, `max_grad_norm` (the clip norm of one example), `bf16`, evaluation every so many
    steps, and `output_dir`, which is the run folder. Columns that the model does not take are left out. Arguments that
    cannot hold with privacy are refused. `seed` does not fix noise or sampling.

    Guarantee: that of `Trainer`, with the epsilon and delta of `privacy`.

    Args:
        model: The model, also with adapters of PEFT. What requires no gradient stays as it is.
        args: `transformers.TrainingArguments`.
        train_dataset: The private rows: a table of `datasets`, a data set, or `PrivateData`.
        privacy: The guarantee.
        public_dataset: Public rows, for `mirror` and `geometry` (default: none).
        eval_dataset: Public rows to evaluate on (default: none). Give these or `public_dataset`, for the shapes of a
            row, or `PrivateData(rows, example=...)`.
        data_collator: Makes tensors of a row. It is called with one row at a time, so it must pad to a fixed length,
            as with ``padding="max_length"`` (default: columns of numbers are taken as they are).
        loss_fn: A loss per example (default: that of the model's class, see `loss_of`).
        metrics: Further per-example figures of `evaluate`, by name.
        callbacks: Callbacks of `transformers`, which are told of steps, logs and evaluations. What they ask for in
            return, such as an early stop, is ignored.
        mirror: How public rows enter the step (default: not at all).
        geometry: Coordinates from public rows in which noise is added (default: none).
        processing_class: A tokenizer, which is saved with the model (default: none).
        ledger: The ledger of the private data set (default: one in `output_dir`).

    Raises:
        ConfigError: An argument cannot hold with privacy, or is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        *,
        train_dataset: Any,
        privacy: Privacy,
        public_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Any = None,
        loss_fn: LossFn | None = None,
        metrics: Mapping[str, LossFn] | None = None,
        callbacks: Sequence[Any] = (),
        mirror: MirrorMap | None = None,
        geometry: Geometry | None = None,
        processing_class: Any = None,
        ledger: Ledger | str | Path | None = None,
    ) -> None:
        check_arguments(args)
        self.model, self.args, self.processing_class = model, args, processing_class
        self._collate, self._ledger = data_collator, ledger
        self._given = train_dataset if isinstance(train_dataset, PrivateData) else PrivateData(train_dataset)
        self._loss, self._masks = loss_fn or loss_of(model), ""
        self._eval = self._labelled("eval_dataset", eval_dataset)
        self._public = self._labelled("public_dataset", public_dataset)
        self._private = self._rows(train_dataset)
        if not isinstance(train_dataset, PrivateData):
            # The shapes of private records come from a public one.
            alike = self._eval if self._public is None else None
            example = None if alike is None else PublicRows(alike).example()
            self._private = PrivateData(self._private, example=example, workers=args.dataloader_num_workers)
        self.plan = _plan(args, privacy)
        optimizer = _optimizer(model, args)
        self._told = _Told(callbacks, args, self.plan)
        self.trainer = Trainer(
            model,
            self._loss,
            optimizer=optimizer,
            plan=self.plan,
            scheduler=_scheduler(optimizer, args, self.plan.steps),
            mirror=mirror or Euclidean(),
            geometry=geometry,
            metrics=metrics or {},
            callbacks=[self._told],
            performance=Performance(autocast=torch.bfloat16 if args.bf16 else None),
            progress=False if args.disable_tqdm else None,
        )

    def train(self) -> RunResult:
        """Train, or resume the run in `output_dir`, and save the model there in ``model/``.

        Returns:
            How the run ended, with its epsilon. The trained weights are in the model.
        """
        if self._masks:
            _log.warning("%s Nothing would tell if all labels of the private rows were masked.", self._masks)
        self._told.begin(self.model)
        result = self.trainer.fit(
            self._private,
            self._public,
            run_dir=self.args.output_dir,
            ledger=self._ledger,
            test=self._eval,
            test_every=self._every(self.args.eval_strategy, self.args.eval_steps),
        )
        self._told.end(self.model)
        self.save_model()
        return result

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Loss and metrics on public rows, under names that begin with ``eval_``; of a language model, perplexity too.

        They are means over the rows that have a label. ``eval_perplexity_per_token`` weights each row by its tokens
        that count, as published figures do.

        Args:
            eval_dataset: Public rows (default: those that the trainer was given).

        Raises:
            ConfigError: There are no rows, or they are private.
        """
        rows = self._eval if eval_dataset is None else self._labelled("eval_dataset", eval_dataset)
        if rows is None:
            raise ConfigError("Expected eval_dataset, public rows to evaluate on.")
        found = {f"eval_{name}": value for name, value in self.trainer.evaluate(rows).items()}
        if self._loss is causal_loss:
            found["eval_perplexity"] = math.exp(min(found["eval_loss"], 700.0))
            parts = (causal_loss, lambda _, batch: counted(causal_loss, batch).sum(1))
            losses, tokens = (per_example(self.model, part, rows) for part in parts)
            found["eval_perplexity_per_token"] = math.exp(min(float((losses * tokens).sum() / tokens.sum()), 700.0))
        return found

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Save the model, and the tokenizer if there is one, by `save_pretrained`.

        Args:
            output_dir: The folder (default: ``model`` in the run folder).

        Returns:
            The folder.
        """
        folder = Path(output_dir) if output_dir is not None else Path(self.args.output_dir) / "model"
        parts: list[Any] = [self.model, *([] if self.processing_class is None else [self.processing_class])]
        for part in parts:
            part.save_pretrained(str(folder))
        return folder

    def _every(self, strategy: str, steps: float | None) -> int | None:
        """Steps between two evaluations. Below 1, `steps` is a share of all of them, as in `transformers`."""
        if self._eval is None or strategy not in ("steps", "epoch"):
            return None
        if strategy == "epoch" or not steps:
            return max(1, round(1 / self.plan.sampling_rate))
        return max(1, round(steps * self.plan.steps if steps < 1 else steps))

    def _public_rows(self, name: str, rows: Any) -> Any:
        """As the model takes them. Private ones are refused here, before anything is evaluated."""
        if rows is not None and self._given.shares_rows_with(rows):
            raise ConfigError(f"The private data were given as {name}, which must be public. Use other rows.")
        return self._rows(rows)

    def _labelled(self, name: str, given: Any) -> Any:
        """Public rows that have a label: others would count as rows without loss. Notes how labels are masked."""
        rows = self._public_rows(name, given)
        if rows is None or isinstance(rows, PrivateData) or self._loss not in (sequence_loss, token_loss, causal_loss):
            return rows
        mask = torch.cat([counted(self._loss, batch) for batch in PublicRows(rows).batches()])
        used = mask.any(1)
        if not used.any():
            raise ConfigError(f"Expected labels in {name}: no public row has a label other than -100.")
        shares = [1 - float(part.double().mean()) for part in (used, mask)]
        self._masks = f"In {name}, {shares[0]:.0%} of rows have no label, and {shares[1]:.0%} of labels are masked."
        return rows if used.all() else rows_at(rows, used.nonzero().flatten())

    def _rows(self, rows: Any) -> Any:
        if isinstance(rows, PrivateData):
            require(self._collate is None, "data_collator", "given", "to be left out with PrivateData")
            return rows
        if self.args.remove_unused_columns and hasattr(rows, "select_columns"):
            rows = _used(rows, self.model)
        return rows if self._collate is None or rows is None else Collated(rows, self._collate)


def check_arguments(args: Any) -> None:
    """Refuse arguments that cannot hold with privacy.

    Args:
        args: `transformers.TrainingArguments`.

    Raises:
        ConfigError: It is something else, or an argument cannot hold.
    """
    require(hasattr(args, "per_device_train_batch_size"), "args", args, "to be transformers.TrainingArguments")
    for name, (allowed, why) in _FIXED.items():
        value = getattr(args, name, allowed[0])
        require(value in allowed, name, value, f"to be {allowed[0]!r} in private training", why)
    require(
        not getattr(args, "fsdp", None), "fsdp", getattr(args, "fsdp", None), "to be left out", _FIXED["deepspeed"][1]
    )


def _used(table: Any, model: nn.Module) -> Any:
    """The columns that the model takes, and labels, as `transformers` keeps them."""
    takes = inspect.signature(base_model(model).forward).parameters
    if "labels" not in table.column_names and "label" in table.column_names:
        table = table.rename_column("label", "labels")
    return table.select_columns([name for name in table.column_names if name in takes or name == "labels"])


def _plan(args: Any, privacy: Privacy) -> PrivacyPlan:
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    length = {"steps": args.max_steps} if args.max_steps > 0 else {"epochs": args.num_train_epochs}
    return PrivacyPlan.calibrate(
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        population=privacy.population,
        batch_size=batch,
        **length,
        max_grad_norm=args.max_grad_norm,
        unit=privacy.unit,
        spare_steps=privacy.spare_steps,
    )


def _optimizer(model: nn.Module, args: Any) -> torch.optim.Optimizer:
    """As `transformers` makes it: weight decay for matrices, none for biases and norms."""
    from transformers import Trainer as Plain

    kind, options = Plain.get_optimizer_cls_and_kwargs(args)
    learns = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learns if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in learns if p.dim() < 2], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = kind([group for group in groups if group["params"]], **options)
    return made


def _scheduler(optimizer: torch.optim.Optimizer, args: Any, steps: int) -> Any:
    from transformers import get_scheduler

    return get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs or {},
    )


@final
class _Told:
    """Tells callbacks of `transformers` what a step reports: released values and metrics of public rows."""

    def __init__(self, callbacks: Sequence[Any], args: Any, plan: PrivacyPlan) -> None:
        from transformers import TrainerControl, TrainerState

        self._callbacks = [callback() if isinstance(callback, type) else callback for callback in callbacks]
        self._args, self._plan = args, plan
        self._state, self._control = TrainerState(max_steps=plan.steps), TrainerControl()

    def begin(self, model: nn.Module) -> None:
        self._call("on_train_begin", model=model)

    def end(self, model: nn.Module) -> None:
        self._call("on_train_end", model=model)

    def __call__(self, report: StepReport) -> None:
        state = self._state
        state.global_step, state.epoch = report.step, report.step * self._plan.sampling_rate
        self._call("on_step_end")
        if report.step % max(1, int(self._args.logging_steps)) == 0:
            logs = {"learning_rate": report.lr, "grad_norm": report.released_norm, "epoch": state.epoch}
            state.log_history.append({**logs, "step": report.step})
            self._call("on_log", logs=logs)
        if report.metrics:
            metrics = {f"eval_{name}": value for name, value in report.metrics.items()}
            state.log_history.append({**metrics, "step": report.step})
            self._call("on_evaluate", metrics=metrics)

    def _call(self, event: str, **values: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self._args, self._state, self._control, **values)
