"""theta_0 for each seed: trained once on public data, kept on disk, shared by all methods that start warm."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfsilver._core import checkpoint
from halfsilver._core.random import own_randomness
from halfsilver._core.tensors import trainable
from halfsilver.errors import ConfigError
from halfsilver.mirror import pretrain
from halfsilver.privacy.gradients import Performance
from halfsilver.study.problem import Problem, Recipe


def new_model(problem: Problem, seed: int) -> nn.Module:
    """A model with the random weights of `seed`; no global generator is advanced."""
    with own_randomness(seed):
        return problem.make_model()


def make_start(problem: Problem, recipe: Recipe, seed: int, path: Path) -> None:
    """Pretrain the model of `seed` and write its weights to `path`, unless they are there."""
    origin = {"seed": seed, "pretrain": asdict(recipe.pretrain), "autocast": recipe.autocast}
    if path.exists():
        before = checkpoint.read(path)[1]
        for name, value in origin.items():
            if before.get(name) != value:
                raise ConfigError(f"Expected {name} of {path} to be {value!r}, found {before.get(name)!r}. Remove it.")
        return
    started = time.monotonic()
    model = new_model(problem, seed)
    how = _pretrain(model, problem, recipe, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write(path, model.state_dict(), {**origin, **how, "seconds": time.monotonic() - started})


def load_start(model: nn.Module, path: Path) -> dict[str, Any]:
    """Put the weights of `path` into the model; returns how pretraining went."""
    weights, about = checkpoint.read(path)
    model.load_state_dict(weights)
    return about


def _pretrain(model: nn.Module, problem: Problem, recipe: Recipe, seed: int) -> dict[str, Any]:
    how = recipe.pretrain
    result = pretrain(
        model,
        precision(recipe).precise(problem.loss_fn),
        problem.public,
        optimizer=torch.optim.AdamW(trainable(model), lr=how.lr, weight_decay=how.weight_decay),
        epochs=how.epochs,
        patience=how.patience,
        holdout=how.holdout,
        batch_size=how.batch_size,
        seed=seed,
        transform=problem.augment if how.augment else None,
        average=how.average,
        lr_end=how.lr_end,
    )
    # The curve has a line an epoch, whose held-out loss is NaN where nothing is held out.
    curve = [[train, None if test != test else test] for train, test in result.history]
    return {"best_epoch": result.best_epoch, "history": curve}


def precision(recipe: Recipe) -> Performance:
    """How private passes compute. A processor without bfloat16 emulates it, which is slower than float32."""
    wanted = recipe.autocast
    autocast = None if wanted is None or not has_bfloat16() else getattr(torch, wanted)
    return Performance(autocast=autocast, micro_batch_size=recipe.micro_batch_size)


@cache
def has_bfloat16() -> bool:
    """Whether the machine computes in bfloat16."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    told = getattr(torch.cpu, "get_capabilities", None)  # since torch 2.11
    return told is None or any(found for name, found in told().items() if "bf16" in name)
