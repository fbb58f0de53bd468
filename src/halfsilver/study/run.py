"""One run of a study: a method, a setting and a seed, from theta_0 to its result file."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from halfsilver._core import checkpoint, system
from halfsilver._core.tensors import eval_mode, trainable
from halfsilver.errors import ConfigError
from halfsilver.mirror import Clock, MirrorMap, chain, clip_released, cosine
from halfsilver.mirror.pretrain import held_out_rows
from halfsilver.mirror.rows import PublicRows
from halfsilver.mirror.schedules import falling
from halfsilver.privacy.ledger import Ledger
from halfsilver.privacy.plan import PrivacyPlan
from halfsilver.runs.folder import RunFolder, read_json, write_json
from halfsilver.study.arena import Arena, rows_at
from halfsilver.study.calibration import calibration_error
from halfsilver.study.method import Conditions, Method
from halfsilver.study.problem import Problem, Recipe, Setting
from halfsilver.study.records import Result
from halfsilver.study.sides import private_side, public_loss_fn, public_side
from halfsilver.study.start import load_start, new_model, precision
from halfsilver.trainer import RunResult, Trainer

CURVE_POINTS = 20
_ROWS_AT_ONCE = 1000
_CHECKPOINT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to be done, and where its files are."""

    method: Method
    seed: int
    setting: Setting
    folder: Path
    start: Path
    ledger: Path
    delta: float
    unsafe_seed: int | None = None  # fixes noise and sampling, which ends the guarantee and is stamped

    @property
    def result(self) -> Path:
        return self.folder / "result.json"


def run(
    arena: Arena, recipe: Recipe, job: Job, *, curve_points: int = CURVE_POINTS, progress: bool | None = False
) -> None:
    """Train and evaluate, going on where an earlier process stopped; afterwards `job.result` exists."""
    if job.method.start == "random" and recipe.cold_max_grad_norm is not None:
        arena = replace(arena, plan=replace(arena.plan, max_grad_norm=recipe.cold_max_grad_norm))
    if job.result.exists():
        return _require_same(job, arena.plan)
    if _hopeless(job, arena):
        RunFolder(job.folder).clear()  # the ledger keeps what it spent
    started = time.monotonic()
    problem, held_out = without_held_out(arena.problem, recipe, job)
    model = _start(problem, job)
    trainer = make_trainer(model, problem, recipe, job, arena.plan)
    trainer.progress, trainer.unsafe_seed = progress, job.unsafe_seed
    curve_rows = problem.test if problem.curve is None else problem.curve
    outcome = None
    if job.method.trains:
        outcome = trainer.fit(
            private_side(problem, recipe),
            public_side(model, problem, recipe),
            run_dir=job.folder,
            ledger=job.ledger,
            delta=job.delta,
            test=curve_rows if curve_points else None,
            test_every=max(1, arena.plan.steps // max(1, curve_points)),
            check_usable=False,
        )
    final = _score(job, _finished(job, model, problem, held_out), problem)
    lines = outcome.history if outcome else [{"step": 0, **trainer.evaluate(curve_rows)}]
    curve = _curve(lines) if curve_points else []
    result = _public_result(job) if outcome is None else _private_result(job, arena.plan, outcome)
    result = replace(result, final=final, curve=curve, seconds=time.monotonic() - started)
    write_json(job.result, result.to_json())


def _start(problem: Problem, job: Job) -> nn.Module:
    model = new_model(problem, job.seed)
    if job.method.start == "public":
        load_start(model, job.start)
    return model


def without_held_out(problem: Problem, recipe: Recipe, job: Job) -> tuple[Problem, Any]:
    """For a method with a finish, the problem without the public rows that pretraining held out, and these rows."""
    if job.method.finish is None:
        return problem, None
    train, held_out = held_out_rows(len(PublicRows(problem.public)), recipe.pretrain.holdout, job.seed)
    return replace(problem, public=rows_at(problem.public, train)), rows_at(problem.public, held_out)


def _finished(job: Job, model: nn.Module, problem: Problem, held_out: Any) -> nn.Module:
    """The model after the method's last step; what that did goes to a file."""
    if job.method.finish is None:
        return model
    done = job.method.finish.fit(model, problem.loss_fn, held_out, start=_start(problem, job))
    names = ("share", "joined", "temperature", "loss_before", "loss_after", "rows")
    system.make_folder(job.folder.resolve())
    write_json(job.folder / "finish.json", {name: getattr(done, name) for name in names})
    return done.model


def _require_same(job: Job, plan: PrivacyPlan) -> None:
    before = Result.from_json(read_json(job.result))
    same: dict[str, tuple[Any, Any]] = {
        "method": (before.method, job.method.name),
        "seed": (before.seed, job.seed),
        "delta": (before.delta, job.delta),
    }
    if job.method.trains:
        same |= {"setting": (before.setting, job.setting), "plan": (before.plan, plan.to_dict())}
    for name, (was, now) in same.items():
        if was != now:
            raise ConfigError(
                f"Expected {name} of the finished run in {job.folder} to be {now!r}, found {was!r}. Use another folder "
                "for another run."
            )


def _hopeless(job: Job, arena: Arena) -> bool:
    """Whether a run that was killed has lost more steps than its plan has to spare, so that it must begin again.

    Where no row is private, beginning again is better than a run that is short of a few steps. Noise from a seed must
    not be drawn again from its beginning where a run stopped.
    """
    folder = RunFolder(job.folder)
    if not folder.config.exists():
        return False
    if not arena.spends or job.unsafe_seed is not None:
        return True
    run_id, ledger = read_json(folder.config)["run_id"], Ledger.open(job.ledger, create=False)
    spent = ledger.runs[run_id].spent if run_id in ledger.runs else 0
    kept = checkpoint.read(folder.checkpoint)[1]["step"] if folder.checkpoint.exists() else 0
    return bool(spent - kept > arena.plan.spare_steps)


def make_trainer(model: nn.Module, problem: Problem, recipe: Recipe, job: Job, plan: PrivacyPlan) -> Trainer:
    """The methods differ in their mirror, and in where they start."""
    kind: Any = getattr(torch.optim, recipe.optimizer or "SGD")
    momentum = {} if recipe.momentum is None else {"momentum": recipe.momentum}
    optimizer = kind(trainable(model), lr=job.setting.lr, **momentum)
    steps = plan.steps
    return Trainer(
        model,
        problem.loss_fn,
        optimizer=optimizer,
        plan=plan,
        mirror=mirror_of(recipe, job, plan),
        geometry=job.method.geometry_at(Conditions(setting=job.setting, recipe=recipe)),
        centre=job.method.centre,
        public_loss_fn=public_loss_fn(problem, recipe),
        public_batch_size=recipe.public_batch_size,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: falling(step / steps, recipe.lr_end)),
        average=recipe.average,
        metrics=problem.metrics,
        performance=precision(recipe),
        checkpoint_seconds=_CHECKPOINT_SECONDS,
    )


def mirror_of(recipe: Recipe, job: Job, plan: PrivacyPlan) -> MirrorMap:
    """The map of the method at this setting, after the second clip if the recipe has one."""
    mirror = job.method.mirror_at(Conditions(setting=job.setting, recipe=recipe))
    return chain(clip_released(plan.max_grad_norm), mirror) if recipe.clip_released else mirror


def _score(job: Job, model: nn.Module, problem: Problem) -> dict[str, float | None]:
    """The mean of each metric on the test rows; the values of all rows go to a file."""
    metrics = {"loss": problem.loss_fn, **problem.metrics}
    values = {name: per_example(model, fn, problem.test) for name, fn in metrics.items()}
    job.folder.mkdir(parents=True, exist_ok=True)
    # Of public or set-aside rows: what a choice between settings is paired over.
    system.write_atomically(job.folder / "scored.safetensors", save({name: v.float() for name, v in values.items()}))
    final = {name: _mean(v) for name, v in values.items()}
    if problem.confidence is None or "accuracy" not in values:
        return final
    sure = per_example(model, problem.confidence, problem.test)
    return {
        **final,
        "calibration error": calibration_error(sure, values["accuracy"]) if bool(sure.isfinite().all()) else None,
    }


def _public_result(job: Job) -> Result:
    """Of a method without a private step."""
    return Result(method=job.method.name, seed=job.seed, epsilon={"pld": 0.0, "rdp": 0.0}, delta=job.delta)


def _private_result(job: Job, plan: PrivacyPlan, outcome: RunResult) -> Result:
    return Result(
        method=job.method.name,
        seed=job.seed,
        setting=job.setting,
        epsilon=dict(outcome.statement["epsilon_planned"]),
        delta=job.delta,
        noise_multiplier=plan.noise_multiplier,
        steps=outcome.updates,
        plan=plan.to_dict(),
        trace=_trace(job, plan, outcome.history),
        stamps=_stamps(outcome, plan),
    )


def _stamps(result: RunResult, plan: PrivacyPlan) -> list[str]:
    short = [f"cut short: {result.updates} of {plan.steps} steps"] if result.updates < plan.steps else []
    return [*result.statement["not_private_because"], *short]


def _mean(values: Tensor) -> float | None:
    """A run that diverged has no figure; JSON has no NaN."""
    mean = float(values.double().mean())
    return mean if math.isfinite(mean) else None


@torch.no_grad()
def per_example(model: nn.Module, fn: Any, data: Any) -> Tensor:
    """One value for each public row, in eval mode."""
    rows, device = PublicRows(data), next(model.parameters()).device
    pieces = (slice(i, i + _ROWS_AT_ONCE) for i in range(0, len(rows), _ROWS_AT_ONCE))
    with eval_mode(model):
        return torch.cat([fn(model, rows.batch(piece, device)).cpu() for piece in pieces])


def _trace(job: Job, plan: PrivacyPlan, history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Learning rate, alpha and norm of the released gradient over the run."""
    alpha = cosine(end=1.0 if job.setting.alpha_end is None else job.setting.alpha_end)
    lines = [line for line in history if "released_norm" in line]
    return [
        {
            "step": line["step"],
            "lr": line["lr"],
            "alpha": alpha(Clock(step=line["step"] - 1, total_steps=plan.steps)),
            "released_norm": line["released_norm"],
        }
        for line in lines[:: max(1, len(lines) // 50)]
    ]


def _curve(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    left_out = ("lr", "released_norm")
    points = ({k: v for k, v in line.items() if k not in left_out} for line in lines if "loss" in line)
    return [{k: v if math.isfinite(v) else None for k, v in point.items()} for point in points]
